"""A run's memory on its hosts, and its journal on disk."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.rollout.engine_settings import kv_cache_bytes
from asyncrl_cli.sizing.engine import base_numbers, engine_uses, token_bytes
from asyncrl_cli.sizing.memory_use import NUMBER_BYTES, MemoryUse, nonzero_uses
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.trainer import rank_uses
from asyncrl_cli.spec.sections import ExperimentSpec

GIB = 2**30
ENGINE_BYTES = int(1.2 * GIB)
"""A vLLM CPU engine without weights and cache: front end and engine core, measured."""
RANK_BYTES = int(0.6 * GIB)
"""A trainer rank with its imports, without weights."""
DRIVER_BYTES = int(1.2 * GIB)
"""Driver, Ray's own processes, scorer and MLflow."""
OBJECT_STORE_BYTES = 512 * 2**20
"""The smallest object store of a local run. It holds batches of tokens, never weights."""
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
    """``host_count`` equal hosts, each with ``ranks`` trainer ranks and ``engines`` engines."""

    name: str
    host_count: int
    ranks: int
    engines: int


def host_kinds(spec: ExperimentSpec) -> tuple[HostKind, ...]:
    """Return a run's hosts: one for everything, or hosts of ranks and hosts of engines if its GPUs need several."""
    trainer, rollout, cluster = spec.trainer, spec.rollout, spec.cluster
    rank_gpus = float(trainer.ranks * trainer.gpus_per_rank)
    engine_gpus = float(rollout.max_engines * rollout.gpus_per_engine)
    if cluster.address is None or rank_gpus + engine_gpus <= cluster.gpus_per_host:
        return (HostKind("host", host_count=1, ranks=trainer.ranks, engines=rollout.max_engines),)

    def count_per_host(count: int, gpus: float) -> int:
        return min(count, max(1, int(cluster.gpus_per_host / gpus))) if gpus else count

    ranks = count_per_host(trainer.ranks, trainer.gpus_per_rank)
    engines = count_per_host(rollout.max_engines, rollout.gpus_per_engine)
    return (
        HostKind("host of trainer ranks", host_count=math.ceil(trainer.ranks / ranks), ranks=ranks, engines=0),
        HostKind("host of engines", host_count=math.ceil(rollout.max_engines / engines), ranks=0, engines=engines),
    )


def host_uses(spec: ExperimentSpec, model: SizedModel, host_kind: HostKind) -> tuple[MemoryUse, ...]:
    """Return the parts of one host. There is no replica while ranks load the model, so the larger of both counts."""
    rank, ranks_on_gpus = rank_uses(spec, model), bool(spec.trainer.gpus_per_rank)
    uses: list[MemoryUse] = []
    if host_kind.ranks and not ranks_on_gpus:
        uses.append(
            MemoryUse(
                "trainer", host_kind.ranks * sum(use.bytes for use in rank.device), counted(host_kind.ranks, "rank")
            )
        )
    if host_kind.ranks and rank.host:
        uses.append(MemoryUse("offloaded", host_kind.ranks * sum(use.bytes for use in rank.host), "trainer.offload"))
    if host_kind.engines and not spec.rollout.gpus_per_engine:
        cache = kv_cache_bytes(spec, token_bytes(spec, model))
        engine_bytes = sum(use.bytes for use in engine_uses(spec, model))
        engine_text = counted(host_kind.engines, "engine")
        uses.append(MemoryUse("engines", host_kind.engines * engine_bytes, engine_text))
        uses.append(MemoryUse("key-value caches", host_kind.engines * cache, engine_text))
    loading = _loading(spec, model, host_kind) if ranks_on_gpus else MemoryUse("loading", 0, "")
    share = 1.0 if host_kind.engines else host_kind.ranks / spec.trainer.ranks
    versions_text = "two versions, for engines to load" if host_kind.engines else "two versions of its ranks' shards"
    replica = MemoryUse("weights in shared memory", math.ceil(2 * share * version_bytes(spec, model)), versions_text)
    uses.append(max(replica, loading, key=lambda use: use.bytes))
    uses.append(MemoryUse("processes", _processes(spec, host_kind), "without weights"))
    uses.append(MemoryUse("object store", stored_bytes(spec, model.routed), "two batches of tokens"))
    return nonzero_uses(uses)


def _loading(spec: ExperimentSpec, model: SizedModel, host_kind: HostKind) -> MemoryUse:
    """Host memory of ranks that load the model before it is on their GPUs."""
    dtype_bytes = NUMBER_BYTES[spec.trainer.dtype]
    if spec.trainer.zero_stage < 3:
        return MemoryUse("loading", host_kind.ranks * model.parameters * dtype_bytes, "the whole model, by every rank")
    # A weight is at most as large as its layer, and exists twice while experts become one tensor.
    largest_weight = max(model.embeddings, model.head, *model.layers)
    return MemoryUse("loading", 2 * largest_weight * dtype_bytes, "a weight at a time, by rank 0")


def version_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    """Return the bytes of a weight version: just the adapters, or all weights with the adapters merged."""
    weight_count = base_numbers(spec, model) if spec.model.published_adapter is None else model.trained
    return weight_count * NUMBER_BYTES[spec.rollout.dtype]


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
    return spec.rollout.max_engines * ENGINE_BYTES + spec.trainer.ranks * RANK_BYTES + DRIVER_BYTES


def _processes(spec: ExperimentSpec, host_kind: HostKind) -> int:
    rank_bytes = GPU_PROCESS_BYTES if spec.trainer.gpus_per_rank else RANK_BYTES
    engine_bytes = GPU_PROCESS_BYTES if spec.rollout.gpus_per_engine else ENGINE_BYTES
    return host_kind.ranks * rank_bytes + host_kind.engines * engine_bytes + DRIVER_BYTES
