"""The summary of a run: short values by name, in groups. Every run has the same names, so that runs can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import count_range, number
from asyncrl_cli.inspect.report.curves import mean
from asyncrl_cli.inspect.report.evidence import Activity
from asyncrl_cli.inspect.report.findings import leading_series, with_interval
from asyncrl_cli.inspect.report.recorded_files import GPU, GPU_MEMORY, MEMORY, PROCESSOR, EvaluationFile, MachineSample
from asyncrl_cli.inspect.resolved import engine_counts, value_at
from asyncrl_cli.journal.history import History
from asyncrl_cli.journal.step_timeline import StepSpan
from asyncrl_cli.runs.directory import RunDirectory

UNKNOWN = "–"

Facts = Mapping[str, Mapping[str, str]]
"""Groups of values by their names."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What the facts are read from."""

    run: RunDirectory
    phase: str
    past: History
    spans: Sequence[StepSpan]
    spent: Activity | None
    spec: Mapping[str, Any]
    files: Sequence[EvaluationFile]
    machine: Sequence[MachineSample]


def facts(of: Sources) -> Facts:
    """All facts, by group and name."""
    return {
        "Run": _run(of),
        "Setup": _setup(of.spec),
        "Held-out": _held_out(of),
        "Speed": _speed(of),
        "Training, last tenth of the steps": _late(of),
    }


def clock(seconds: float) -> str:
    """A length of time to the second: ``43 s``, ``5 min 9 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def _run(of: Sources) -> dict[str, str]:
    work, manifest = of.past.work, of.run.manifest
    began = _unix(manifest.get("started")) or (of.past.starts[0].at if of.past.starts else None)
    end = max([of.run.state.updated, *(span.reported_at for span in of.spans[-1:])])
    wall = clock(end - began) if began and end > began else UNKNOWN
    started = str(manifest.get("started", UNKNOWN)).replace("T", " ").replace("+00:00", " UTC")
    again = len([start for start in of.past.starts if start.process == "resume"])
    return {
        "phase": of.phase,
        "steps trained": f"{work.steps:,} of {of.past.progress.settings.total_steps:,}",
        "started": f"{started} on {manifest.get('host', UNKNOWN)}",
        "wall time": wall + (f", stops before {counted(again, 'resume')} included" if again else ""),
        "of that, training steps": clock(work.seconds),
        "machine": f"{manifest.get('cpus', UNKNOWN)} CPU cores",
        "code": f"asyncrl {manifest.get('asyncrl', UNKNOWN)}, Python {manifest.get('python', UNKNOWN)}",
    }


def _setup(spec: Mapping[str, Any]) -> dict[str, str]:
    def at(path: str) -> str:
        value = value_at(spec, path)
        return UNKNOWN if value is None else number(value) if isinstance(value, float) else str(value)

    mix = value_at(spec, "task.mix")
    entries = [entry for entry in mix if isinstance(entry, Mapping)] if isinstance(mix, list) else []
    tasks = [str(entry.get("use")) for entry in entries] or [at("task.use")]
    kind = at("trainer.schedule.kind")
    engine = _devices(spec, "rollout.gpus_per_engine", "rollout.threads_per_engine")
    rank = _devices(spec, "trainer.gpus_per_rank", "trainer.threads_per_rank")
    return {
        "model": _model(spec),
        "task": ", ".join(tasks),
        "algorithm": f"{at('algorithm.preset')}, correction {at('algorithm.correction.preset')}",
        "batch": f"{at('pipeline.groups_per_step')} groups × {at('rollout.group_size')} rollouts a step, "
        f"{counted(at('trainer.minibatches'), 'minibatch')}, {counted(at('trainer.epochs'), 'epoch')}",
        "learning rate": f"{at('trainer.optimizer.learning_rate')}, {kind}",
        "pipeline": f"{at('pipeline.mode')}, staleness at most {at('pipeline.max_staleness')} "
        f"({at('pipeline.on_stale')}), a version every {counted(at('pipeline.publish_every'), 'step')}",
        "engines": f"{count_range(*engine_counts(spec))}, each with {engine}",
        "trainer ranks": f"{at('trainer.ranks')}, each with {rank}",
        "training in": f"{at('trainer.dtype')}, ZeRO stage {at('trainer.zero_stage')}",
    }


def _model(spec: Mapping[str, Any]) -> str:
    path = value_at(spec, "model.path")
    lora = value_at(spec, "model.lora.rank")
    adapters = f", LoRA of rank {lora}" if lora else ""
    if path:
        return f"{path}{adapters}"
    shape = [
        f"{value} {name}"
        for name, key in (("layers", "num_hidden_layers"), ("wide", "hidden_size"))
        if (value := value_at(spec, f"model.init.config.{key}")) is not None
    ]
    kind = value_at(spec, "model.init.architecture")
    return f"{kind} from random weights{''.join(f', {one}' for one in shape)}{adapters}" if kind else UNKNOWN


def _devices(spec: Mapping[str, Any], gpus: str, threads: str) -> str:
    count = value_at(spec, gpus)
    return counted(f"{count:g}", "GPU") if count else counted(str(value_at(spec, threads) or UNKNOWN), "CPU thread")


def _held_out(of: Sources) -> dict[str, str]:
    series = leading_series(of.past.evaluations) or list(of.past.evaluations[-1:])
    best = max(series, key=lambda one: one.accuracy, default=None)
    several = [one for one in of.files if one.kind == "sampled" and len(one.pass_at) > 1]
    found = {
        f"{name} accuracy": f"{with_interval(one)}, step {one.after_step}, {one.kind}" if one else UNKNOWN
        for name, one in (
            ("first", series[0] if series else None),
            ("last", series[-1] if series else None),
            ("best", best),
        )
    }
    last = several[-1].pass_at if several else ()
    found["pass@k, last"] = ", ".join(f"pass@{k} {last[k - 1]:.3f}" for k in (1, len(last))) if last else UNKNOWN
    return found


def _late(of: Sources) -> dict[str, str]:
    return {
        name: UNKNOWN if value is None else f"{value:{form}}"
        for name, metric, form in (
            ("reward", "reward/mean", ".3f"),
            ("response length (tokens)", "response/tokens_mean", ",.1f"),
            ("truncated responses", "response/truncated_ratio", ".1%"),
            ("tokens clipped below", "train/clip_low_fraction", ".1%"),
            ("tokens clipped above", "train/clip_high_fraction", ".1%"),
            ("importance weight", "correction/importance_mean", ".3f"),
            ("KL to the sampling policy", "correction/kl_behaviour", ".2g"),
            ("KL to the reference", "train/kl_reference", ".2g"),
        )
        for value in (_tail(of.spans, metric),)
    }


def _tail(spans: Sequence[StepSpan], metric: str) -> float | None:
    return mean(span.metrics.get(metric, math.nan) for span in spans[-max(1, len(spans) // 10) :])


def _speed(of: Sources) -> dict[str, str]:
    work = of.past.work
    steps = sorted(span.metrics["time/step_s"] for span in of.spans if "time/step_s" in span.metrics)
    longest = f", slowest tenth from {steps[len(steps) * 9 // 10]:.2f} s" if len(steps) >= 10 else ""
    rate = f", {work.generated_tokens / work.seconds:,.0f}/s" if work.seconds else ""
    busy = of.spent.engines_busy if of.spent else None
    return {
        "step time": f"median {median(steps):.2f} s{longest}" if steps else UNKNOWN,
        "tokens trained": f"{work.trained_tokens:,}",
        "tokens generated": f"{work.generated_tokens:,}{rate}",
        "trainer": f"training {of.spent.trainer['training']:.0%} of its time" if of.spent else UNKNOWN,
        "engines": UNKNOWN
        if of.spent is None or busy is None
        else f"with requests {busy:.0%} of the time, paused {of.spent.engines_paused or 0.0:.0%}",
        "processor": _measured(of.machine, PROCESSOR, "{:.0%}"),
        "memory": _measured(of.machine, MEMORY, "{:,.1f} GB"),
        "GPUs": _measured(of.machine, GPU, "{:.0%}"),
        "GPU memory": _measured(of.machine, GPU_MEMORY, "{:,.1f} GB"),
    }


def _measured(machine: Sequence[MachineSample], title: str, form: str) -> str:
    values = [sample.values[title] for sample in machine if title in sample.values]
    return (
        f"mean {form.format(math.fsum(values) / len(values))}, peak {form.format(max(values))}" if values else UNKNOWN
    )


def _unix(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
