"""The sum of an estimate for all kinds of sizes: it never grows when memory is sharded, offloaded or saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.sizing.engine import engine_uses
from asyncrl_cli.sizing.estimate import estimate, excesses
from asyncrl_cli.sizing.host import HostKind, host_kinds, host_uses, version_bytes
from asyncrl_cli.sizing.memory_use import GB, NUMBER_BYTES
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.trainer import gathered_numbers, largest_microbatch, rank_uses
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.spec.sections import ExperimentSpec

pytestmark = pytest.mark.slow

SPEC = ExperimentSpec.model_validate(
    {"model": {"path": "model"}, "task": {"use": "chain_sum"}, "trainer": {"zero_stage": 3}, "stop": {"steps": 2}}
)


def model(width: int = 1024, layers: int = 8, tied: bool = False, share: float = 1.0) -> SizedModel:
    """A transformer with activations of 100 widths for each token and layer; 2 widths when recomputed."""
    vocabulary, of_layer = 32_000, 12 * width * width
    head = 0 if tied else vocabulary * width
    parameters = vocabulary * width + layers * of_layer + head

    def activations(rows: int, length: int, positions: int, recompute: bool) -> int:
        return rows * length * layers * width * (2 if recompute else 100)

    return SizedModel(
        name="Model",
        parameters=parameters,
        trained=int(share * parameters),
        embeddings=vocabulary * width,
        layers=(of_layer,) * layers,
        experts=(of_layer // 3 * 2,) * layers,
        head=head,
        cache_numbers=2 * layers * width,
        kv_heads=4,
        hidden=width,
        vocabulary=vocabulary,
        activations=activations,
    )


def with_changes(spec: ExperimentSpec, changes: dict[str, Any]) -> ExperimentSpec:
    """The spec with values by key, not validated again."""
    for key, value in changes.items():
        section, name = key.split(".")
        spec = spec.model_copy(update={section: getattr(spec, section).model_copy(update={name: value})})
    return spec


def sized(**values: Any) -> ExperimentSpec:
    """A spec with values by key, `__` for a dot."""
    return with_changes(SPEC, {key.replace("__", "."): value for key, value in values.items()})


def total(changed: ExperimentSpec, found: SizedModel) -> int:
    return sum(part.bytes for part in rank_uses(changed, found).device)


MODELS = st.builds(
    model, st.sampled_from([64, 1024, 8192]), st.integers(1, 100), st.booleans(), st.sampled_from([1.0, 0.01])
)


@given(MODELS, st.integers(1, 512), st.integers(0, 3), st.sampled_from(["float32", "bfloat16"]))
def test_states_shrink_with_zero_ranks_and_adapters(found: SizedModel, ranks: int, stage: int, dtype: str) -> None:
    def states(stage: int, ranks: int = ranks, found: SizedModel = found) -> int:
        changed = sized(trainer__zero_stage=stage, trainer__ranks=ranks, trainer__dtype=dtype)
        kept = {"weights", "gradients", "float32 weights", "optimizer"}
        return sum(part.bytes for part in rank_uses(changed, found).device if part.name in kept)

    if 1 <= stage < 3 and dtype == "float32":
        assert states(stage + 1) <= states(stage)
    if stage:
        assert states(stage, 2 * ranks) <= states(stage)
    assert states(stage, found=replace(found, trained=found.trained // 2)) <= states(stage)
    # Weights, gradients and ZeRO's copy with 4 bytes each, and Adam's moments with 8 bytes.
    if stage == 3 and ranks == 1:
        assert states(3) == (
            4 * found.parameters + 16 * found.trained
            if dtype == "float32"
            else 2 * found.parameters + 16 * found.trained
        )


@given(
    MODELS,
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.integers(1_000, 100_000),
    st.sampled_from(["varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"]),
)
def test_ranks_that_share_sequences_have_a_part_of_their_activations(
    found: SizedModel, size: int, packs: bool, tokens: int, attention: str
) -> None:
    def activations(size: int) -> int:
        changed = sized(
            trainer__ranks=4,
            trainer__sequence_parallel=size,
            trainer__packing=packs,
            trainer__attention=attention,
            trainer__tokens_per_microbatch=tokens,
            trainer__share_prefixes=False,
        )
        return next(part.bytes for part in rank_uses(changed, found).device if part.name == "activations")

    apart = sized(trainer__packing=packs, trainer__tokens_per_microbatch=tokens, trainer__share_prefixes=False)
    rows, length, _ = largest_microbatch(apart)
    of_a_position = found.activations(rows, 1, rows, False)
    assert activations(size) == -(-length // size) * of_a_position
    assert activations(1) == length * of_a_position


@given(MODELS, st.integers(1, 64), st.integers(0, 3))
def test_gathered_layers_are_never_more_than_the_model(found: SizedModel, ranks: int, stage: int) -> None:
    trainer = sized(trainer__ranks=ranks, trainer__zero_stage=stage).trainer
    gathered = gathered_numbers(found, trainer)
    assert 0 <= gathered <= found.parameters
    assert bool(gathered) == (ranks > 1 and stage == 3)


@given(MODELS, st.integers(1, 4), st.integers(1, 4))
def test_a_rank_gathers_its_own_share_of_divided_experts(found: SizedModel, size: int, sharing: int) -> None:
    trainer = sized(trainer__ranks=size * sharing).trainer
    divided = gathered_numbers(found, trainer.model_copy(update={"expert_parallel": size}))
    own = [experts // size * (sharing > 1) for experts in found.experts]
    layers = tuple(
        every - experts + mine for every, experts, mine in zip(found.layers, found.experts, own, strict=True)
    )
    elsewhere = sum(found.layers) - sum(layers)
    assert divided == gathered_numbers(replace(found, layers=layers, parameters=found.parameters - elsewhere), trainer)


@given(MODELS, st.integers(1, 3), st.sampled_from(["optimizer", "all"]))
def test_offload_moves_states_to_the_host_and_loses_none(found: SizedModel, stage: int, offload: str) -> None:
    on_gpu = {"trainer__gpus_per_rank": 1, "trainer__ranks": 4, "trainer__zero_stage": stage}
    models = {"algorithm__advantage": "gae", "algorithm__kl_coef": 0.1}  # with a critic and a reference
    plain, moved = (rank_uses(sized(**on_gpu, **models, trainer__offload=kind), found) for kind in ("none", offload))
    names = {"float32 weights", "optimizer", "critic"} | ({"weights", "reference model"} if offload == "all" else set())
    assert not plain.host and {use.name for use in moved.host} == names
    assert sum(part.bytes for part in plain.device) == sum(part.bytes for part in moved.device + moved.host)


@given(st.integers(1, 40_000), st.integers(1, 4000), st.integers(50, 4000), st.booleans())
def test_the_largest_microbatch_is_one_that_the_plan_can_make(tokens: int, prompt: int, most: int, packs: bool) -> None:
    changed = sized(
        trainer__tokens_per_microbatch=tokens,
        trainer__packing=packs,
        rollout__max_prompt_tokens=prompt,
        rollout__max_response_tokens=most,
        model__max_length=prompt + most,
    )
    rows, length, positions = largest_microbatch(changed)
    assert rows * length <= max(tokens, prompt + most)
    assert 0 < positions < rows * length or prompt + most == 1
    assert rows * length > max(tokens, prompt + most) - rows


@pytest.mark.parametrize(
    ("needed", "capacity", "says"), [(70, 80, None), (75, 80, "tight"), (87, 80, "tight"), (90, 80, "refused")]
)
def test_a_gpu_that_is_too_small_is_refused(needed: int, capacity: int, says: str | None) -> None:
    found = replace(model(), activations=lambda *_: 0)
    changed = sized(trainer__gpus_per_rank=1)
    rest = total(changed, found) + 2 * GB
    found = replace(found, activations=lambda *_: needed * GB - rest)
    problems = [
        p for p in excesses(changed, estimate(changed, found, capacity * GB, None)) if p.device.role == "trainer"
    ]
    assert [problem.is_refused for problem in problems] == ([] if says is None else [says == "refused"])


def test_a_gpu_engine_has_the_rest_of_its_share_for_its_cache() -> None:
    changed, found = sized(rollout__gpus_per_engine=1, rollout__dtype="bfloat16"), model(2048, 24)
    result = estimate(changed, found, 40 * GB, None)
    (gpu,) = (device for device in result.devices if device.role == "engine")
    assert gpu.total == pytest.approx(0.92 * 40 * GB, rel=1e-9)
    assert result.cache is not None and result.cache.tokens == pytest.approx(
        result.cache.bytes / (2 * 24 * 2048 * 2), abs=32
    )
    (problem,) = excesses(changed, estimate(changed, found, 3 * GB, None))
    assert problem.is_refused and "less than its weights" in problem.message


def test_a_gpu_that_an_engine_and_a_rank_share_is_divided() -> None:
    changed = sized(rollout__gpus_per_engine=0.5, trainer__gpus_per_rank=0.4)
    of_rank, of_engine = estimate(changed, model(), 100 * GB, None).devices[:2]
    assert of_rank.capacity == pytest.approx(0.92 * 40 * GB) and of_engine.total == pytest.approx(0.92 * 50 * GB)
    sleeping, _, both, _ = estimate(with_changes(changed, {"pipeline.mode": "sync"}), model(), 100 * GB, None).devices
    assert sleeping.capacity == pytest.approx(0.92 * 100 * GB) and both.capacity == 100 * GB


def test_an_engine_that_wakes_up_has_room_next_to_its_ranks_states() -> None:
    """Like a model with 0.6 billion weights on 16 GB: 8.4 GB of states, 7.4 GB for the engine, and two contexts."""
    found = model(2048, 9)
    changed = sized(
        trainer__zero_stage=2,
        trainer__gpus_per_rank=0.5,
        trainer__dtype="bfloat16",
        trainer__gradient_checkpointing=True,
        rollout__gpus_per_engine=0.5,
        rollout__dtype="bfloat16",
        pipeline__mode="sync",
    )

    def again(spec: ExperimentSpec) -> Any:
        return estimate(spec, found, 16 * GB, None)

    (both,) = (device for device in again(changed).devices if device.role == "both")
    assert both.total == pytest.approx(14 * found.parameters + 0.46 * 16 * GB + 1.2 * GB)
    (problem,) = (problem for problem in excesses(changed, again(changed)) if problem.device.role == "both")
    assert problem.is_refused and problem.device == both
    beside = with_changes(changed, {"pipeline.mode": "async"})
    assert "both" not in {device.role for device in again(beside).devices}


def test_hosts_follow_from_the_gpus_of_a_cluster() -> None:
    values = {"trainer__gpus_per_rank": 1, "rollout__gpus_per_engine": 2}
    one = sized(**values, trainer__ranks=4, rollout__engines=2)
    assert host_kinds(one) == (HostKind("host", 1, 4, 2),)
    many = sized(**values, trainer__ranks=16, rollout__engines=8, cluster__address="auto")
    assert host_kinds(many) == (HostKind("host of trainer ranks", 2, 8, 0), HostKind("host of engines", 2, 0, 4))


def test_a_host_keeps_two_versions_of_the_weights_or_of_its_ranks_shards() -> None:
    def kept(ranks: int, engines: int) -> int:
        parts = host_uses(changed, found, HostKind("host", 1, ranks, engines))
        return next(part.bytes for part in parts if part.name == "weights in shared memory")

    changed, found = sized(trainer__ranks=4, rollout__gpus_per_engine=1, rollout__dtype="bfloat16"), model(4096)
    assert kept(0, 4) == kept(2, 1) == 2 * version_bytes(changed, found) == 4 * found.parameters
    assert kept(2, 0) == 2 * found.parameters, "no engine loads there"


@given(st.integers(1, 512), st.booleans())
def test_with_adapters_alone_a_version_is_small_and_engines_have_slots_for_them(rank: int, on_gpu: bool) -> None:
    found = model(4096, share=0.01)
    merged, alone = (
        sized(model__lora=LoraSpec(rank=rank, serve=serve), rollout__gpus_per_engine=int(on_gpu))
        for serve in get_args(LoraSpec.model_fields["serve"].annotation)
    )
    number = NUMBER_BYTES[alone.rollout.dtype]
    assert version_bytes(alone, found) == number * found.trained
    assert version_bytes(alone, found) + version_bytes(merged, found) == number * found.parameters
    parts = {part.name: part.bytes for part in engine_uses(alone, found)}
    assert parts["weights"] == version_bytes(merged, found)
    assert parts["adapters"] >= version_bytes(alone, found)
    assert parts.get("next version", parts["adapters"]) == parts["adapters"]
    assert "adapters" not in {part.name for part in engine_uses(merged, found)}
