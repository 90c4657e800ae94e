"""The parts of the report that train. Each returns figures, or raises an error."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from common import metrics

from asyncrl_cli.orchestrator.probe_check import TOLERANCE
from gpu_report.copies import copy_speeds
from gpu_report.peak import gpu_memory
from gpu_report.runs import Bench, checksums, probe_gaps
from gpu_report.specs import exact_spec, quickstart_spec, timed_spec

SKIPPED_STEPS = 2
"""Number of steps at the start that are not timed, because caches warm up and graphs are captured."""


def quickstart(bench: Bench) -> dict[str, Any]:
    """The quickstart in bfloat16: its final accuracy, and its times."""
    spec = quickstart_spec("bfloat16")
    if bench.device == "cpu":
        spec["stop"]["steps"] = 4
        spec["data"]["eval"]["size"] = 64
    run = bench.once("quickstart", lambda: bench.train("quickstart", spec))
    rows = metrics(run)
    state = json.loads((run / "state.json").read_text())
    started = datetime.fromisoformat(json.loads((run / "manifest.json").read_text())["started"])
    return {
        "steps": len(rows),
        "seconds from the start to step 1": round(rows[0]["time"] - started.timestamp(), 1),
        "seconds": round(rows[-1]["time"] - rows[0]["time"], 1),
        "step s": _median(rows, "time/step_s"),
        "rewards": [round(rows[0]["reward/mean"], 3), round(rows[-1]["reward/mean"], 3)],
        "accuracy before": state["accuracy_before"],
        "accuracy after": state["accuracy"],
        "log-prob gap mean (nats)": _median(rows, "correction/logprob_gap_mean"),
    }


def exactness(bench: Bench) -> dict[str, Any]:
    """Compare the weights of `async` at staleness 0 with `sync` in float32: they must be equal."""
    try:
        runs = [_exact(bench, "sync"), _exact(bench, "async")]
    except RuntimeError as error:
        folders = (bench.out / "runs").glob("exact-*")
        gaps = [gap for folder in folders for gap in probe_gaps(folder)]
        if not gaps:
            raise
        raise RuntimeError(
            f"engines were refused: their log-probs of the probe are up to {max(gaps):.3g} nats from the trainer's; "
            f"allowed are {TOLERANCE['float32']:g}"
        ) from error
    sync_weights, async_weights = (checksums(run) for run in runs)
    if len(set(sync_weights.values())) < len(sync_weights):
        raise RuntimeError("versions of a run have the same weights: nothing was trained, so nothing is shown")
    differing = [version for version in sync_weights if sync_weights[version] != async_weights.get(version)]
    sync_rows, async_rows = (metrics(run) for run in runs)
    return {
        "versions": len(sync_weights),
        "equal to the bit": not differing,
        "first version that differs": differing[0] if differing else None,
        "largest difference of the loss": max(
            abs(sync_row.get("train/loss", 0.0) - async_row.get("train/loss", 0.0))
            for sync_row, async_row in zip(sync_rows, async_rows, strict=False)
        ),
        "log-prob gap max (nats)": max((row.get("engine/logprob_gap_max", 0.0) for row in sync_rows), default=None),
    }


def publish(bench: Bench) -> dict[str, Any]:
    """The times of a publish and its parts, the pause of engines, and the bandwidth of a publish and of its copies."""
    run = _timed(bench, "async")
    # A publish that ends during the next step is in that step's row (decision 0038).
    all_publishes = [row for row in metrics(run) if "publish/seconds" in row]
    rows = all_publishes[SKIPPED_STEPS:]
    size = _weight_bytes(run)
    seconds, write = _median(rows, "publish/seconds"), _median(rows, "publish/write_s")
    return {
        "weights MB": round(size / 1e6, 1),
        "seconds": seconds,
        "trainer writes and probes s": write,
        "digests, fetch, loading and proof s": round(seconds - write, 5),
        "engines stall s": _median(rows, "publish/stall_s"),
        "seconds of the first": [row["publish/seconds"] for row in all_publishes[:SKIPPED_STEPS]],
        "GB/s": size / 1e9 / seconds,
        "GB/s while engines stall": size / 1e9 / max(_median(rows, "publish/stall_s"), 1e-9),
        "probe gap max (nats)": max(row["publish/probe_gap"] for row in rows),
        "copies": copy_speeds(bench.device),
    }


def trainer(bench: Bench) -> dict[str, Any]:
    """The trainer's speed, and the fraction of the devices' peak that its updates reach (MFU, docs/metrics.md)."""
    return _trainer_figures(bench, _timed(bench, "sync"))


def _trainer_figures(bench: Bench, run: Path) -> dict[str, Any]:
    rows = metrics(run)[SKIPPED_STEPS:]
    settings = yaml.safe_load((run / "spec.yaml").read_text())["trainer"]
    ranks = settings["ranks"]
    rate = sum(row["tokens/trained"] for row in rows) / sum(row["time/train_s"] for row in rows)
    used = sum(row["train/tflop"] for row in rows) / sum(row["time/update_s"] for row in rows) / ranks
    matmul = matmul_flops(bench.device) / 1e12
    return {
        "parameters": _parameters(run),
        "tokens/s": round(rate),
        "TFLOP/s of a rank": round(used, 3),
        "MFU of updates": _median(rows, "mfu/update") if "mfu/update" in rows[0] else None,
        "MFU of whole steps": _median(rows, "mfu/end_to_end") if "mfu/end_to_end" in rows[0] else None,
        "settings": {key: settings[key] for key in ("tokens_per_microbatch", "gradient_checkpointing")},
        "share of a matrix product's speed": round(used / matmul, 3),
        "TFLOP/s of a matrix product": round(matmul, 3),
    }


def engine(bench: Bench) -> dict[str, Any]:
    """Tokens per second of the engines while they generate without simultaneous training (`sync`)."""
    return _engine_figures(_timed(bench, "sync"))


def _engine_figures(run: Path) -> dict[str, Any]:
    rows = metrics(run)[SKIPPED_STEPS:]
    busy = sum(row["share/engines_busy"] * row["time/step_s"] for row in rows)
    rate = sum(row["tokens/generated"] for row in rows) / busy
    requests = _median(rows, "engines/requests_mean")
    engines = yaml.safe_load((run / "spec.yaml").read_text())["rollout"].get("engines", 1)
    return {
        "tokens/s of all engines": round(rate),
        "mean concurrency of an engine": requests,
        "ms of a decode step": round(1000 * requests * engines / rate, 2),
        "mean response": _median(rows, "response/tokens_mean"),
        "engines": engines,
    }


def ratio(bench: Bench) -> dict[str, Any]:
    """Trained tokens per second in `async` and in `sync`, with the same work on the same devices."""
    rates: dict[str, float] = {}
    shares: dict[str, Any] = {}
    for mode in ("sync", "async"):
        rows = metrics(_timed(bench, mode))
        seconds = rows[-1]["time"] - rows[SKIPPED_STEPS]["time"]
        rates[mode] = sum(row["tokens/trained"] for row in rows[SKIPPED_STEPS + 1 :]) / seconds
        if "mfu/end_to_end" in rows[0]:
            shares[f"{mode} MFU of whole steps"] = _median(rows[SKIPPED_STEPS:], "mfu/end_to_end")
    return {f"{mode} tokens/s": round(rate) for mode, rate in rates.items()} | {
        "async/sync": round(rates["async"] / rates["sync"], 2),
        **shares,
    }


def own_model(bench: Bench) -> dict[str, Any]:
    """The speed of trainer and engines with the model of `--model`, and how far their log-probs differ."""
    spec = timed_spec(bench.device, "sync")
    spec["model"] = {"path": str(bench.model), "max_length": spec["model"]["max_length"]}
    spec["stop"]["steps"] = SKIPPED_STEPS + 4
    run = bench.once("model", lambda: bench.train("model", spec))
    rows = metrics(run)[SKIPPED_STEPS:]
    return {
        "trainer": _trainer_figures(bench, run),
        "engines": _engine_figures(run),
        "probe gap max (nats)": max(row["publish/probe_gap"] for row in rows if "publish/probe_gap" in row),
        "log-prob gap mean (nats)": _median(rows, "engine/logprob_gap_mean"),
    }


def kill(bench: Bench) -> dict[str, Any]:
    """Kill a small run's driver: its other processes end, and the GPUs still answer."""
    before = gpu_memory() if bench.device == "cuda" else {}
    run = _killed(bench)
    figures: dict[str, Any] = {"killed at step": len(metrics(run))}
    figures |= json.loads((run.parent / "kill.json").read_text())
    if bench.device == "cuda":
        after = gpu_memory()
        if not after:
            raise RuntimeError(f"nvidia-smi does not answer after the kill: {figures}")
        figures["GPU memory left, GB"] = sum(after.values()) / 1e9 - sum(before.values()) / 1e9
    if figures["processes left"]:
        raise RuntimeError(f"processes of the run are still alive: {figures}")
    return figures


def _killed(bench: Bench) -> Path:
    """A run in bfloat16 on GPUs, so it works even if float32 engines do not."""
    spec = exact_spec("async", _resume_dtype(bench))
    return bench.once("killed", lambda: bench.train("killed", spec, kill_after=spec["stop"]["steps"] // 2))


def _resume_dtype(bench: Bench) -> str:
    return "bfloat16" if bench.device == "cuda" else "float32"


def resume(bench: Bench) -> dict[str, Any]:
    """Resume the killed run, and replay it: its recorded batches must give the weights it published.

    In bfloat16 engines sample other tokens in every run. In float32 the resumed run must end with the weights of an
    uninterrupted run.
    """
    run, dtype = _killed(bench), _resume_dtype(bench)
    steps = exact_spec("async", dtype)["stop"]["steps"]
    location = (run.name, "--runs-dir", str(run.parent))
    bench.cli("resume", *location)
    if len(metrics(run)) != steps:
        raise RuntimeError(f"{len(metrics(run))} steps are reported after the resume, not {steps}")
    replayed = [json.loads(line) for line in bench.cli("replay", *location, "--json").splitlines()]
    figures: dict[str, Any] = {
        "steps": steps,
        "replayed versions that are equal": sum(version["equal"] is True for version in replayed),
    }
    if dtype == "float32":
        undisturbed, resumed = checksums(_exact(bench, "async", dtype)), checksums(run)
        figures |= {
            "equal to the bit": resumed == undisturbed,
            "versions that differ": [
                version for version in undisturbed if resumed.get(version) != undisturbed[version]
            ],
        }
    return figures


def memory(bench: Bench) -> dict[str, Any]:
    """The peak memory of the timed run, and the estimate for its spec."""
    run = _timed(bench, "async")
    peaks = {name: size / 1e9 for name, size in json.loads((run.parent / "peak.json").read_text()).items()}
    if not peaks:
        raise RuntimeError("nothing was measured: nvidia-smi gave no answer")
    arguments = ("validate-spec", str(run.parent / "spec.yaml"), "--memory", "--json")
    estimate = json.loads(bench.cli(*arguments))["memory"]
    estimated = {
        f"{device['count']} × {device['name']}": sum(use["bytes"] for use in device["parts"]) / 1e9
        for device in estimate["devices"]
    }
    return {"measured peak GB": peaks, "estimated GB": estimated}


def matmul_flops(device: str) -> float:
    """Operations per second of a matrix product in the dtype of timed runs: the practical peak of the device."""
    import torch

    size: int
    size, rounds = (8192, 20) if device == "cuda" else (1024, 5)
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return float(2 * size**3 / best)


def _exact(bench: Bench, mode: str, dtype: str = "float32") -> Path:
    name = f"exact-{mode}" if dtype == "float32" else f"undisturbed-{mode}"
    return bench.once(name, lambda: bench.train(name, exact_spec(mode, dtype)))


def _timed(bench: Bench, mode: str) -> Path:
    name = f"timed-{mode}"
    return bench.once(name, lambda: bench.train(name, timed_spec(bench.device, mode)))


def _weights(run: Path) -> dict[str, Any]:
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for path in (run / "model").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def _parameters(run: Path) -> int:
    from math import prod

    return sum(prod(tensor.get_shape()) for tensor in _weights(run).values())


def _weight_bytes(run: Path) -> int:
    item = {"bfloat16": 2, "float32": 4}[yaml.safe_load((run / "spec.yaml").read_text())["rollout"]["dtype"]]
    return item * _parameters(run)


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return float(round(median(row[name] for row in rows if name in row), 5))
