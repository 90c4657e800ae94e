"""The start's choice of a micro-batch and of running rollouts: it fits, and more memory never makes it worse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_memory_use import MODELS, SPEC, model, sized

from asyncrl_cli.checks.finding import Warned
from asyncrl_cli.checks.memory import resolve_microbatch, resolve_rollouts
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sizing.engine import MAX_ROLLOUTS, choose_running_rollouts, gpu_cache
from asyncrl_cli.sizing.estimate import WARNING_SHARE, rank_gpu
from asyncrl_cli.sizing.memory_use import GB
from asyncrl_cli.sizing.microbatch import MAX_TOKENS, Microbatch, cautious_microbatch, choose_microbatch
from asyncrl_cli.sizing.model import SizedModel, size_model, without_weights
from asyncrl_cli.spec.sections import ExperimentSpec, RolloutSpec, TrainerSpec
from asyncrl_cli.train.deepspeed_engine import deepspeed_settings, largest_layer

pytestmark = pytest.mark.slow

SPECS = st.builds(
    lambda ranks, size, stage, response, tokens, recompute: sized(
        model__max_length=2**17,
        rollout__max_response_tokens=response,
        trainer__gpus_per_rank=1,
        trainer__dtype="bfloat16",
        trainer__packing=True,
        trainer__share_prefixes=False,
        trainer__ranks=ranks * size,
        trainer__sequence_parallel=size,
        trainer__zero_stage=stage,
        trainer__tokens_per_microbatch=tokens,
        trainer__gradient_checkpointing=recompute,
    ),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.integers(1, 100_000),
    st.sampled_from(["auto", "auto", 5000]),
    st.sampled_from(["auto", "auto", True, False]),
)


def fits(spec: ExperimentSpec, sized_model: SizedModel, gpu_bytes: int, microbatch: Microbatch) -> bool:
    device = rank_gpu(microbatch.applied(spec), sized_model, gpu_bytes)
    assert device.capacity is not None
    return device.total <= WARNING_SHARE * device.capacity


@given(SPECS, MODELS, st.integers(1, 300), st.integers(1, 300))
def test_choice_fits_and_more_memory_never_gives_fewer_tokens(
    spec: ExperimentSpec, sized_model: SizedModel, size: int, other_size: int
) -> None:
    smaller_gpu, larger_gpu = (GB * gigabytes for gigabytes in sorted((size, other_size)))
    smaller, larger = (choose_microbatch(spec, sized_model, gpu) for gpu in (smaller_gpu, larger_gpu))
    assert larger.tokens >= smaller.tokens and larger.recompute <= smaller.recompute
    trainer, longest_row = spec.trainer, spec.rollout.longest_rollout
    if trainer.tokens_per_microbatch == "auto":
        assert longest_row <= smaller.tokens <= max(longest_row, MAX_TOKENS * trainer.sequence_parallel)
        assert smaller.tokens.bit_count() == 1 or smaller.tokens == longest_row
        smallest_choice = Microbatch(longest_row, trainer.gradient_checkpointing in ("auto", True))
        assert fits(spec, sized_model, smaller_gpu, smaller) or smaller == smallest_choice
    else:
        assert smaller.tokens == trainer.tokens_per_microbatch
    if trainer.gradient_checkpointing != "auto":
        assert smaller.recompute == trainer.gradient_checkpointing
    elif smaller.recompute:
        assert not fits(spec, sized_model, smaller_gpu, Microbatch(smaller.tokens, False)) or smaller.tokens < 2**13


@given(
    MODELS,
    st.sampled_from([0.4, 1, 4]),
    st.integers(1, 100_000),
    st.integers(1, 600),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_running_rollouts_fill_the_cache_and_more_memory_never_gives_fewer(
    sized_model: SizedModel, gpus: float, response: int, group_size: int, size: int, other_size: int
) -> None:
    spec = sized(
        model__max_length=2**17,
        rollout__gpus_per_engine=gpus,
        rollout__max_response_tokens=response,
        rollout__group_size=group_size,
        rollout__max_running_rollouts="auto",
    )
    smaller_gpu, larger_gpu = (GB * gigabytes for gigabytes in sorted((size, other_size)))
    smaller, larger = (choose_running_rollouts(spec, sized_model, gpu) for gpu in (smaller_gpu, larger_gpu))
    assert smaller is not None and larger is not None and group_size <= smaller <= larger
    resolved = resolve_rollouts(spec, sized_model, smaller_gpu)[0]
    cache = gpu_cache(resolved, sized_model, smaller_gpu)
    assert cache is not None and resolved.rollout.running_rollouts == smaller <= max(MAX_ROLLOUTS, group_size)
    assert smaller <= max(cache.average_rollouts, group_size)


def test_cpu_engines_run_256_rollouts_and_gpu_engines_of_unknown_memory_as_many_with_a_warning() -> None:
    assert RolloutSpec().max_running_rollouts == 256 and RolloutSpec(gpus_per_engine=1).max_running_rollouts == "auto"
    on_cpu = sized(rollout__max_running_rollouts="auto")
    assert resolve_rollouts(on_cpu, model()) == (sized(), "up to 256 rollouts at a time in each engine")
    on_gpu = sized(rollout__max_running_rollouts="auto", rollout__gpus_per_engine=1, rollout__group_size=300)
    unknown_cache = SizedModel(**_fields(model()) | {"cache_numbers": None})
    resolved, result = resolve_rollouts(on_gpu, unknown_cache, 80 * GB)
    assert resolved.rollout.max_running_rollouts == 300
    assert isinstance(result, Warned) and "cluster.gpu_memory_gb" in result.hint
    fixed = sized(rollout__max_running_rollouts=7, rollout__gpus_per_engine=1)
    assert resolve_rollouts(fixed, model(), 80 * GB)[0] == fixed


GPU = {"trainer__gpus_per_rank": 1, "trainer__dtype": "bfloat16", "trainer__packing": True}
AUTO = GPU | {"trainer__tokens_per_microbatch": "auto", "trainer__gradient_checkpointing": "auto"}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [({"ranks": 1}, 2**13), ({"ranks": 8}, 2**14), ({"ranks": 16}, 2**15), ({"ranks": 16, "zero_stage": 2}, 2**13)],
)
def test_micro_batches_hide_the_gathers_of_layers(changes: dict[str, int], tokens: int) -> None:
    trainer = {f"trainer__{key}": value for key, value in ({"zero_stage": 3} | changes).items()}
    spec, sized_model = sized(**AUTO, **trainer, cluster__address="auto"), model(1024, 24)
    just_recomputed = max(size for size in range(10, 500) if choose_microbatch(spec, sized_model, size * GB).recompute)
    assert choose_microbatch(spec, sized_model, just_recomputed * GB) == (tokens, True)


def test_unknown_memory_or_model_code_gives_cautious_values_and_a_warning() -> None:
    spec, sized_model = sized(**AUTO, cluster__gpu_memory_gb=80.0), model()

    def untraceable(*_: object) -> int:
        raise RuntimeError("needs the values\nof its tensors")

    resolved, result = resolve_microbatch(spec, SizedModel(**_fields(sized_model) | {"activations": untraceable}))
    assert (resolved.trainer.tokens_per_microbatch, resolved.trainer.gradient_checkpointing) == (2**13, True)
    assert isinstance(result, Warned) and "needs the values of its tensors" in result.text
    assert choose_microbatch(spec, sized_model, None) == cautious_microbatch(spec) == (2**13, True)
    long = sized(**AUTO, rollout__max_response_tokens=20_000, model__max_length=2**17)
    assert cautious_microbatch(long).tokens == long.rollout.longest_rollout


def test_defaults_are_auto_on_gpus_and_the_numbers_of_before_on_cpus() -> None:
    cpu, gpu = TrainerSpec(), TrainerSpec(gpus_per_rank=1)
    assert (cpu.microbatch_tokens, cpu.recomputes) == (8192, False)
    assert gpu.tokens_per_microbatch == gpu.gradient_checkpointing == "auto"
    with pytest.raises(ConfigError, match="only the start"):
        _ = gpu.microbatch_tokens
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        _ = gpu.recomputes
    on_cpu = sized(trainer__tokens_per_microbatch="auto", trainer__gradient_checkpointing="auto")
    assert choose_microbatch(on_cpu, model(), None) == (8192, False)


@pytest.mark.parametrize(("size", "ranks"), [(1, 4), (2, 4), (4, 4)])
def test_gpu_ranks_gather_a_whole_layer_ahead_without_the_experts_of_other_ranks(size: int, ranks: int) -> None:
    from transformers import AutoConfig

    widths = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 99}
    config = AutoConfig.for_model("qwen3_moe", **widths, num_experts=8, moe_intermediate_size=32, decoder_sparse_step=1)
    experts = 8 * 3 * 64 * 32
    trainer = TrainerSpec(ranks=ranks, gpus_per_rank=1, expert_parallel=size, gradient_checkpointing=True)
    layer = max(size_model(SPEC, config).layers)
    expected = layer - experts + (experts // size if size < ranks else 0)
    assert largest_layer(without_weights(config, SPEC.model), trainer) == expected
    zero = deepspeed_settings(trainer, largest_layer=10**8)["zero_optimization"]
    assert zero["prefetch_bucket_size"] == 11 * 10**7 and not zero["memory_efficient_linear"]
    on_cpu = deepspeed_settings(TrainerSpec(ranks=ranks), largest_layer=10**8)["zero_optimization"]
    assert "prefetch_bucket_size" not in on_cpu and on_cpu["memory_efficient_linear"]


def _fields(sized_model: SizedModel) -> dict[str, object]:
    return {name: getattr(sized_model, name) for name in SizedModel.__slots__}
