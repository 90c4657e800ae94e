"""The parts of the engine that can be tested without vLLM: memory, environment, and how answers are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.rollout.engine import _segments
from asyncrl_cli.rollout.engine_settings import (
    BLOCK_SIZE,
    CACHE_ARGUMENT,
    cache_bytes_per_token,
    engine_arguments,
    engine_environment,
    gpu_args,
    kv_cache_bytes,
    merged,
    with_cache,
)
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import USABLE
from tests.orchestrator.stand_ins import request, spec


def rollout_spec(**rollout: Any) -> ExperimentSpec:
    return spec(rollout=rollout)


def cache_bytes(of: ExperimentSpec, hf_config: SimpleNamespace) -> int:
    return kv_cache_bytes(of, cache_bytes_per_token(of, hf_config))


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64} | changes))


@given(
    prompt=st.integers(1, 300),
    response=st.integers(1, 300),
    running=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    heads=st.integers(1, 4),
)
def test_the_cache_holds_whole_blocks_and_at_least_one_longest_sequence(
    prompt: int, response: int, running: int, dtype: str, heads: int
) -> None:
    sizes = {"max_prompt_tokens": prompt, "max_response_tokens": response, "max_running_rollouts": running}
    size = cache_bytes(rollout_spec(**sizes, dtype=dtype), config(num_key_value_heads=heads, head_dim=8))
    per_token = 2 * 3 * heads * 8 * {"float32": 4, "bfloat16": 2}[dtype]
    assert size % (BLOCK_SIZE * per_token) == 0
    tokens = size // per_token
    assert tokens >= prompt + response
    assert tokens >= running * (prompt + response) / 2


def test_the_cache_holds_a_sequence_of_the_models_length() -> None:
    """vLLM needs this to start, although no rollout is that long."""
    base = rollout_spec(max_running_rollouts=1)
    long = base.model_copy(update={"model": base.model.model_copy(update={"max_length": 100_000})})
    per_token = cache_bytes_per_token(long, config())
    assert kv_cache_bytes(long, per_token) >= 100_000 * per_token


def test_a_float32_engine_on_a_gpu_does_not_round_products_to_tf32() -> None:
    assert engine_environment(rollout_spec(gpus_per_engine=1))["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in engine_environment(rollout_spec(gpus_per_engine=1, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("arguments", "disabled"), [({}, "1"), ({"enforce_eager": True}, "1"), ({"enforce_eager": False}, "0")]
)
def test_a_cpu_engine_may_compile_its_model_where_the_spec_says_so(arguments: dict[str, Any], disabled: str) -> None:
    assert engine_environment(rollout_spec(engine_args=arguments))["TORCHDYNAMO_DISABLE"] == disabled


def test_an_engine_gets_its_share_of_a_gpu() -> None:
    whole = gpu_args(rollout_spec(gpus_per_engine=2))
    assert (whole["tensor_parallel_size"], whole["distributed_executor_backend"]) == (2, "mp")
    assert (whole["gpu_memory_utilization"], whole["enable_sleep_mode"]) == (USABLE, False)
    for mode, sleeps in (("sync", True), ("one_step_off", False), ("async", False)):
        pipeline = {"mode": mode}
        shared = spec(rollout={"gpus_per_engine": 0.25}, trainer={"gpus_per_rank": 0.75}, pipeline=pipeline)
        assert gpu_args(shared) == {
            "tensor_parallel_size": 1,
            "distributed_executor_backend": "uni",
            "gpu_memory_utilization": 0.25 * USABLE,
            "max_num_batched_tokens": 2048,
            "enable_sleep_mode": sleeps,
            "hf_overrides": {"head_dtype": "float32"},
        }
    known = engine_arguments()
    assert known is None or gpu_args(shared).keys() <= known


def test_an_engine_that_starts_again_gets_the_cache_of_its_first_start() -> None:
    again = with_cache(rollout_spec(gpus_per_engine=0.4, engine_args={"seed": 1}), 5 * 2**30)
    assert merged(gpu_args(again), again.rollout.engine_args)["kv_cache_memory_bytes"] == 5 * 2**30
    assert again.rollout.engine_args["seed"] == 1
    known = engine_arguments()
    assert known is None or CACHE_ARGUMENT in known


def test_arguments_of_the_spec_count_more_and_mappings_are_merged() -> None:
    args = {"seed": 1, "hf_overrides": {"head_dtype": "float32", "rope_theta": 1.0}}
    own = {"max_num_seqs": 2, "hf_overrides": {"rope_theta": 2.0}}
    assert merged(args, own) == {
        "seed": 1,
        "max_num_seqs": 2,
        "hf_overrides": {"head_dtype": "float32", "rope_theta": 2.0},
    }
    assert merged(args, {"hf_overrides": None, "seed": 3}) == {"seed": 3, "hf_overrides": None}


def answer(tokens: int, spans: list[tuple[int, int, int]] | None) -> Any:
    versions = spans and [SimpleNamespace(start=start, end=end, version=str(version)) for start, end, version in spans]
    flat = SimpleNamespace(logprobs=[-float(token) for token in range(tokens)])
    return SimpleNamespace(token_ids=list(range(tokens)), weight_versions=versions, logprobs=flat)


@pytest.mark.parametrize("spans", [None, [], [(1, 5, 1)]])
def test_a_token_without_a_version_is_an_error(spans: list[tuple[int, int, int]] | None) -> None:
    with pytest.raises(RuntimeError, match="no weight version is known"):
        _segments(request("7-0"), answer(5, spans))


def test_a_token_without_a_logprob_is_an_error() -> None:
    output = answer(5, [(0, 5, 1)])
    output.logprobs.logprobs.append(-1.0)
    with pytest.raises(RuntimeError, match="5 tokens of rollout 7-0 have 6 log-probs"):
        _segments(request("7-0"), output)
