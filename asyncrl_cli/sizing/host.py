"""A run's memory on its hosts, and its journal on disk."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.rollout.engine_settings import kv_cache_bytes
from asyncrl_cli.sizing.engine import base_numbers, engine_parts, token_bytes
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import NUMBER_BYTES, Part, some
from asyncrl_cli.sizing.trainer import rank_parts
from asyncrl_cli.spec.sections import ExperimentSpec

GIB = 2**30
ENGINE_BYTES = int(1.2 * GIB)
"""A vLLM CPU engine without weights and cache: front end and engine core, measured."""
RANK_BYTES = int(0.6 * GIB)
"""A trainer rank with its imports, without weights."""
OTHER_BYTES = int(1.2 * GIB)
"""Driver, Ray's own processes, scorer and MLflow."""
GPU_PROCESS_BYTES = 4 * GIB
"""Host memory of a process that uses a GPU, with CUDA's libraries and pinned buffers: assumed."""
STORED_BYTES = 16
"""Bytes of a token in Ray's object store, which holds a batch while it is trained."""
JOURNAL_BYTES = 10
"""Bytes of a token in the journal: measured (docs/sizing.md)."""
ROUTED_BYTES = 1024
"""Bytes of a token's experts if the model's config has not been read: more than in any public model (Qwen3-235B-A22B:
94 layers × 8)."""


class HostKind(NamedTuple):
    """``number`` equal hosts, each with ``ranks`` trainer ranks and ``engines`` engines."""

    name: str
    number: int
    ranks: int
    engines: int


def host_kinds(spec: ExperimentSpec) -> tuple[HostKind, ...]:
    """Return a run's hosts: one for everything, or hosts of ranks and hosts of engines if its GPUs need several."""
    trainer, rollout, cluster = spec.trainer, spec.rollout, spec.cluster
    of_ranks = float(trainer.ranks * trainer.gpus_per_rank)
    of_engines = float(rollout.max_engines * rollout.gpus_per_engine)
    if cluster.address is None or of_ranks + of_engines <= cluster.gpus_per_host:
        return (HostKind("host", number=1, ranks=trainer.ranks, engines=rollout.max_engines),)

    def on_one(number: int, gpus: float) -> int:
        return min(number, max(1, int(cluster.gpus_per_host / gpus))) if gpus else number

    ranks = on_one(trainer.ranks, trainer.gpus_per_rank)
    engines = on_one(rollout.max_engines, rollout.gpus_per_engine)
    return (
        HostKind("host of trainer ranks", number=math.ceil(trainer.ranks / ranks), ranks=ranks, engines=0),
        HostKind("host of engines", number=math.ceil(rollout.max_engines / engines), ranks=0, engines=engines),
    )


def host_parts(spec: ExperimentSpec, model: SizedModel, kind: HostKind) -> tuple[Part, ...]:
    """Return the parts of one host. There is no replica while ranks load the model, so the larger of both counts."""
    rank, on_gpu = rank_parts(spec, model), bool(spec.trainer.gpus_per_rank)
    parts: list[Part] = []
    if kind.ranks and not on_gpu:
        parts.append(Part("trainer", kind.ranks * sum(part.bytes for part in rank.device), counted(kind.ranks, "rank")))
    if kind.ranks and rank.host:
        parts.append(Part("offloaded", kind.ranks * sum(part.bytes for part in rank.host), "trainer.offload"))
    if kind.engines and not spec.rollout.gpus_per_engine:
        cache = kv_cache_bytes(spec, token_bytes(spec, model))
        of_engine = sum(part.bytes for part in engine_parts(spec, model))
        number = counted(kind.engines, "engine")
        parts.append(Part("engines", kind.engines * of_engine, number))
        parts.append(Part("key-value caches", kind.engines * cache, number))
    loading = _loading(spec, model, kind) if on_gpu else Part("loading", 0, "")
    share = 1.0 if kind.engines else kind.ranks / spec.trainer.ranks
    stored = "two versions, for engines to load" if kind.engines else "two versions of its ranks' shards"
    replica = Part("weights in shared memory", math.ceil(2 * share * version_bytes(spec, model)), stored)
    parts.append(max(replica, loading, key=lambda part: part.bytes))
    parts.append(Part("processes", _processes(spec, kind), "without weights"))
    parts.append(Part("object store", stored_bytes(spec, model.routed), "two batches of tokens"))
    return some(parts)


def _loading(spec: ExperimentSpec, model: SizedModel, kind: HostKind) -> Part:
    """Host memory of ranks that load the model before it is on their GPUs."""
    number = NUMBER_BYTES[spec.trainer.dtype]
    if spec.trainer.zero_stage < 3:
        return Part("loading", kind.ranks * model.parameters * number, "the whole model, by every rank")
    # A weight is at most as large as its layer, and exists twice while experts become one tensor.
    largest = max(model.embeddings, model.head, *model.layers)
    return Part("loading", 2 * largest * number, "a weight at a time, by rank 0")


def version_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    """Return the bytes of a weight version: just the adapters, or all weights with the adapters merged."""
    numbers = base_numbers(spec, model) if spec.model.published_adapter is None else model.trained
    return numbers * NUMBER_BYTES[spec.rollout.dtype]


def stored_bytes(spec: ExperimentSpec, routed: int = ROUTED_BYTES) -> int:
    """Return the bytes of two batches in Ray's object store. ``routed``: bytes of a token's recorded experts."""
    return 2 * step_tokens(spec) * (STORED_BYTES + routed * spec.algorithm.router_replay)


def step_tokens(spec: ExperimentSpec) -> int:
    """Return the tokens of a step's batch if prompts are as long as possible, and responses half as long."""
    rollout = spec.rollout
    return (
        spec.pipeline.groups_per_step
        * rollout.group_size
        * (rollout.max_prompt_tokens + rollout.max_response_tokens // 2)
    )


def memory_without_weights(spec: ExperimentSpec) -> int:
    """Return the bytes of a CPU run's processes, without weights and caches."""
    return spec.rollout.max_engines * ENGINE_BYTES + spec.trainer.ranks * RANK_BYTES + OTHER_BYTES


def _processes(spec: ExperimentSpec, kind: HostKind) -> int:
    of_rank = GPU_PROCESS_BYTES if spec.trainer.gpus_per_rank else RANK_BYTES
    of_engine = GPU_PROCESS_BYTES if spec.rollout.gpus_per_engine else ENGINE_BYTES
    return kind.ranks * of_rank + kind.engines * of_engine + OTHER_BYTES
