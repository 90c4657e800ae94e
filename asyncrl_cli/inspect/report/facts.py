"""A run's summary: short values by name, in groups. Every run has the same names, so runs can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import count_range, duration, number
from asyncrl_cli.inspect.report.curves import mean
from asyncrl_cli.inspect.report.evidence import Activity
from asyncrl_cli.inspect.report.findings import leading_series, with_interval
from asyncrl_cli.inspect.report.samples import GPU, GPU_MEMORY, MEMORY, PROCESSOR, EvaluationFile, MachineSample
from asyncrl_cli.inspect.resolved import engine_counts, value_at
from asyncrl_cli.journal.events import Evaluation
from asyncrl_cli.journal.history import History, Work
from asyncrl_cli.journal.step_timeline import StepSpan
from asyncrl_cli.runs.directory import RunDirectory

UNKNOWN = "–"
LATE = (
    ("reward", "reward/mean", ".3f"),
    ("response length (tokens)", "response/tokens_mean", ",.1f"),
    ("truncated responses", "response/truncated_ratio", ".1%"),
    ("tokens clipped below", "train/clip_low_fraction", ".1%"),
    ("tokens clipped above", "train/clip_high_fraction", ".1%"),
    ("importance weight", "correction/importance_mean", ".3f"),
    ("KL to the sampling policy", "correction/kl_behaviour", ".2g"),
    ("KL to the reference", "train/kl_reference", ".2g"),
)
"""Names, metrics and formats of measurements in the last steps."""
LOAD = (
    ("processor", PROCESSOR, "{:.0%}"),
    ("memory", MEMORY, "{:,.1f} GB"),
    ("GPUs", GPU, "{:.0%}"),
    ("GPU memory", GPU_MEMORY, "{:,.1f} GB"),
)
"""Names, titles of samples and formats of the machine's load."""

Facts = Mapping[str, Mapping[str, str]]
"""Groups of values by their names."""


def facts(
    *,
    run: RunDirectory,
    phase: str,
    past: History,
    spans: Sequence[StepSpan],
    spent: Activity | None,
    spec: Mapping[str, Any],
    files: Sequence[EvaluationFile],
    machine: Sequence[MachineSample],
) -> Facts:
    return {
        "Run": _run(run, phase=phase, past=past, spans=spans),
        "Setup": _setup(spec),
        "Held-out": _held_out(past.evaluations, files),
        "Speed": _speed(past.work, spans, spent) | _load(machine),
        "Training, last tenth of the steps": _late(spans),
    }


def _run(run: RunDirectory, phase: str, past: History, spans: Sequence[StepSpan]) -> dict[str, str]:
    manifest = run.manifest
    try:
        began = datetime.fromisoformat(str(manifest.get("started"))).timestamp()
    except ValueError:
        began = past.starts[0].at if past.starts else math.inf
    end = max([run.state.updated, *(span.reported_at for span in spans[-1:])])
    wall = duration(end - began) if end > began else UNKNOWN
    started = str(manifest.get("started", UNKNOWN)).replace("T", " ").replace("+00:00", " UTC")
    again = len([start for start in past.starts if start.process == "resume"])
    return {
        "phase": phase,
        "steps trained": f"{past.work.steps:,} of {past.progress.settings.total_steps:,}",
        "started": f"{started} on {manifest.get('host', UNKNOWN)}",
        "wall time": wall + (f", stops before {counted(again, 'resume')} included" if again else ""),
        "of that, training steps": duration(past.work.seconds),
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


def _held_out(evaluations: Sequence[Evaluation], files: Sequence[EvaluationFile]) -> dict[str, str]:
    series = leading_series(evaluations) or list(evaluations[-1:])
    found = dict.fromkeys(("first accuracy", "last accuracy", "best accuracy"), UNKNOWN)
    if series:
        chosen = (series[0], series[-1], max(series, key=lambda one: one.accuracy))
        found = {
            name: f"{with_interval(one)}, step {one.after_step}, {one.kind}"
            for name, one in zip(found, chosen, strict=True)
        }
    several = [one.pass_at for one in files if one.kind == "sampled" and len(one.pass_at) > 1]
    last = several[-1] if several else ()
    found["pass@k, last"] = ", ".join(f"pass@{k} {last[k - 1]:.3f}" for k in (1, len(last))) if last else UNKNOWN
    return found


def _late(spans: Sequence[StepSpan]) -> dict[str, str]:
    last = spans[-max(1, len(spans) // 10) :]
    found = {}
    for name, metric, form in LATE:
        value = mean(span.metrics.get(metric, math.nan) for span in last)
        found[name] = UNKNOWN if value is None else f"{value:{form}}"
    return found


def _speed(work: Work, spans: Sequence[StepSpan], spent: Activity | None) -> dict[str, str]:
    steps = sorted(span.metrics["time/step_s"] for span in spans if "time/step_s" in span.metrics)
    longest = f", slowest tenth from {steps[len(steps) * 9 // 10]:.2f} s" if len(steps) >= 10 else ""
    rate = f", {work.generated_tokens / work.seconds:,.0f}/s" if work.seconds else ""
    busy = spent.engines_busy if spent else None
    return {
        "step time": f"median {median(steps):.2f} s{longest}" if steps else UNKNOWN,
        "tokens trained": f"{work.trained_tokens:,}",
        "tokens generated": f"{work.generated_tokens:,}{rate}",
        "trainer": f"training {spent.trainer['training']:.0%} of its time" if spent else UNKNOWN,
        "engines": UNKNOWN
        if spent is None or busy is None
        else f"with requests {busy:.0%} of the time, paused {spent.engines_paused or 0.0:.0%}",
    }


def _load(machine: Sequence[MachineSample]) -> dict[str, str]:
    found = {}
    for name, title, form in LOAD:
        values = [sample.values[title] for sample in machine if title in sample.values]
        found[name] = UNKNOWN
        if values:
            mean_load = math.fsum(values) / len(values)
            found[name] = f"mean {form.format(mean_load)}, peak {form.format(max(values))}"
    return found
