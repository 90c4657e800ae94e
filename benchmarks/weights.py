"""The cost of a publish: the trainer's wait, digests, the engine's pause and update, and a transfer to another host.

    python benchmarks/weights.py [--sizes 1 340 2000] [--rounds N] [--hosts] [--lora merged|adapter]

A rank writes its shard (all weights: one rank, ZeRO-0, float32) into the replica, the digests are computed, and a real
vLLM engine loads the version and proves it: `stall` is its pause, `update` is from the request to the proof. `--hosts`
adds a transfer between two hosts made of namespaces (root only), without a rate limit. Every time is the median of the
rounds in seconds, with its ratio to a copy of the same bytes by one thread in the same rounds. Sizes are
in MB. The necessary memory is about six times the largest size. `--lora`: the rank trains adapters of rank 16, and
publishes them merged into the weights, or only the adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import QUICKSTART, UNTRAINED, header, row

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

BYTES = 4
"""Bytes of a weight in float32."""
LAYER_NUMBERS = 16
"""The number of weights of a layer, in units of the squared hidden size."""
COPY_BYTES = 256_000_000
"""Larger copies are made in parts, to need less memory; this is larger than any cache."""
LIMIT_S = 600


def spec_of(megabytes: float, folder: Path, lora: str | None = None) -> ExperimentSpec:
    """The quickstart with a model of about this size."""
    layers = 4 if megabytes < 100 else 8
    hidden = max(64, round((megabytes * 1e6 / BYTES / LAYER_NUMBERS / layers) ** 0.5 / 64) * 64)
    config = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
    }
    changes = [f"model.init.config.{name}={value}" for name, value in config.items()]
    if lora is not None:
        changes.append(f"model.lora={{rank: 16, serve: {lora}}}")
    return load_spec(QUICKSTART, [*UNTRAINED, f"runs_dir={folder}", *changes]).spec


def memcpy(nbytes: int) -> float:
    """Seconds that one thread takes to copy this many bytes into allocated pages."""
    source, target = (np.ones(min(nbytes, COPY_BYTES), np.uint8) for _ in range(2))
    parts = [slice(0, min(COPY_BYTES, nbytes - start)) for start in range(0, nbytes, COPY_BYTES)]
    started = time.perf_counter()
    for part in parts:
        np.copyto(target[part], source[part])
    return time.perf_counter() - started


async def one_host(spec: ExperimentSpec, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of each phase on one host, and bytes."""
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.data.tokenizer import load_tokenizer
    from asyncrl_cli.rollout.engine import Engine
    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.train.model.lora import add_adapters
    from asyncrl_cli.train.model.probe import probe_ids
    from asyncrl_cli.train.shards import adapter_layout, adapter_shards, engine_layout, shards, write_shard
    from asyncrl_cli.weights.layout import size_of
    from asyncrl_cli.weights.manifest import Manifest
    from asyncrl_cli.weights.mapped import Copies, MappedReplica
    from asyncrl_cli.weights.replica import Replica

    assert spec.model.init is not None
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if spec.model.lora is not None:
        add_adapters(model, spec.model.lora, spec.seed)
    layout, own_shards = engine_layout, shards
    if spec.model.published_adapter is not None:
        layout, own_shards = adapter_layout, adapter_shards
    slots = layout(model, next(model.parameters()).dtype)
    replica, mapped, threads = Replica(slots, ranks=1), MappedReplica(slots), ThreadPoolExecutor(os.cpu_count())
    engine = Engine(spec, str(folder))
    probe = probe_ids((), load_tokenizer(str(folder), None), model.config.vocab_size, 24)
    found: dict[str, list[float]] = {name: [] for name in ("copy", "write", "digest", "stall", "update")}
    try:
        manifest: Manifest | None = None
        for version in range(rounds + 2):
            found["copy"].append(memcpy(size_of(slots)))
            path = replica.begin(version, manifest)
            started = time.perf_counter()
            with mapped.open(path, version) as tensors:
                for name, begin, own in own_shards(model, 0, 1, 0):
                    write_shard(tensors[name], begin, own, Copies())
            found["write"].append(time.perf_counter() - started)
            started = time.perf_counter()
            manifest = Manifest.from_digests(version, slots, 1, [replica.digest(version, [0], threads)])
            found["digest"].append(time.perf_counter() - started)
            started = time.perf_counter()
            found["stall"].append(await engine.update_weights(version, path, slots, "keep"))
            await engine.attest(tuple(probe), 0.0)
            found["update"].append(time.perf_counter() - started)
    finally:
        engine.shutdown()
    # The first two rounds map and use each of the two buffers for the first time.
    return {name: median(times[2:]) for name, times in found.items()} | {"bytes": float(size_of(slots))}


def two_hosts(megabytes: int, rounds: int) -> float:
    """Seconds that a host takes to fetch and check a version from another one."""
    from tests.cluster.hosts import Network, until
    from tests.cluster.test_weights_between_hosts import _lines

    def printed(command: Any, key: str) -> Any:
        until(lambda: any(key in line for line in _lines(command)), f"{key} of {command.argv}", LIMIT_S)
        return next(line[key] for line in _lines(command) if key in line)

    mebibytes, times = str(max(1, round(megabytes * 1e6 / 2**20))), list[float]()
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder)) as network:
        words = (sys.executable, "-m", "tests.cluster.weights_host")
        holder = network.host("holder")
        url = printed(holder.start(*words, "serve", holder.address, mebibytes, f"{folder}/manifest"), "url")
        for number in range(rounds):
            host = network.host(f"puller{number}")
            arguments = ("pull", host.address, mebibytes, f"{folder}/manifest", str(LIMIT_S), "1", url)
            times.append(printed(host.start(*words, *arguments), "seconds"))
            host.kill()
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 340, 2000], help="MB of weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", action="store_true", help="a transfer between two hosts, too (root only)")
    parser.add_argument("--lora", choices=("merged", "adapter"), help="publish adapters, merged or alone")
    options = parser.parse_args()
    names = ("write", "digest", "stall", "update", *(("transfer",) if options.hosts else ()))
    print(header("MB", "copy s", *(f"{name} s (copies)" for name in names)), flush=True)
    for megabytes in options.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            spec = spec_of(megabytes, Path(temporary), options.lora)
            from asyncrl_cli.rollout.engine_settings import engine_environment

            os.environ.update(engine_environment(spec))
            found = asyncio.run(one_host(spec, Path(temporary) / "model", options.rounds))
        if options.hosts:
            found["transfer"] = two_hosts(megabytes, min(3, options.rounds))
        cells = [f"{found[name]:.4f} ({found[name] / found['copy']:.1f})" for name in names]
        print(row(f"{found['bytes'] / 1e6:.0f}", f"{found['copy']:.4f}", *cells), flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
