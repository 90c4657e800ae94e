"""A run's summary: short values by name, in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import duration
from asyncrl_cli.inspect.report.answers import leading_series, with_interval
from asyncrl_cli.inspect.report.held_out import EvaluationFile, several_samples
from asyncrl_cli.journal.history import EvaluationRecord, History, StepSpan
from asyncrl_cli.runs.directory import RunDirectory

UNKNOWN = "–"
Facts = Mapping[str, Mapping[str, str]]
"""Groups of values by their names."""


def facts(run: RunDirectory, history: History, spans: Sequence[StepSpan], files: Sequence[EvaluationFile]) -> Facts:
    return {
        "Run": _run(run, history, spans),
        "Held-out": _held_out(history.evaluations, files),
        "Speed": _speed(history, spans),
    }


def _run(run: RunDirectory, history: History, spans: Sequence[StepSpan]) -> dict[str, str]:
    manifest = run.manifest
    try:
        started_at = datetime.fromisoformat(str(manifest.get("started"))).timestamp()
    except ValueError:
        started_at = history.starts[0].at if history.starts else math.inf
    run_end = max([run.state.updated, *(span.reported_at for span in spans[-1:])])
    wall_time = duration(run_end - started_at) if run_end > started_at else UNKNOWN
    started = str(manifest.get("started", UNKNOWN)).replace("T", " ").replace("+00:00", " UTC")
    resumes = sum(start.process == "resume" for start in history.starts)
    return {
        "phase": run.status,
        "steps trained": f"{history.work.steps:,} of {history.progress.settings.total_steps:,}",
        "started": f"{started} on {manifest.get('host', UNKNOWN)}",
        "wall time": wall_time + (f", stops before {counted(resumes, 'resume')} included" if resumes else ""),
        "of that, training steps": duration(history.work.seconds),
        "code": f"asyncrl {manifest.get('asyncrl', UNKNOWN)}, Python {manifest.get('python', UNKNOWN)}",
    }


def _held_out(evaluations: Sequence[EvaluationRecord], files: Sequence[EvaluationFile]) -> dict[str, str]:
    series = leading_series(evaluations) or list(evaluations[-1:])
    accuracies = dict.fromkeys(("first accuracy", "last accuracy", "best accuracy"), UNKNOWN)
    if series:
        selected_evaluations = (series[0], series[-1], max(series, key=lambda evaluation: evaluation.accuracy))
        for name, evaluation in zip(accuracies, selected_evaluations, strict=True):
            accuracies[name] = f"{with_interval(evaluation)}, step {evaluation.after_step}, {evaluation.kind}"
    pass_at = UNKNOWN
    for file in several_samples(files)[-1:]:
        pass_at = f"pass@1 {file.pass_at[0]:.3f}, pass@{len(file.pass_at)} {file.pass_at[-1]:.3f}"
    return accuracies | {"pass@k, last": pass_at}


def _speed(history: History, spans: Sequence[StepSpan]) -> dict[str, str]:
    totals = history.work
    step_times = sorted(span.metrics["time/step_s"] for span in spans if "time/step_s" in span.metrics)
    slowest = f", slowest tenth from {step_times[len(step_times) * 9 // 10]:.2f} s" if len(step_times) >= 10 else ""
    rate = f", {totals.generated_tokens / totals.seconds:,.0f}/s" if totals.seconds else ""
    engines = UNKNOWN
    if totals.shares:
        busy, paused = totals.shares["share/engines_busy"], totals.shares["share/engines_paused"]
        engines = f"with requests {busy:.0%} of the time, paused {paused:.0%}"
    return {
        "step time": f"median {median(step_times):.2f} s{slowest}" if step_times else UNKNOWN,
        "tokens trained": f"{totals.trained_tokens:,}",
        "tokens generated": f"{totals.generated_tokens:,}{rate}",
        "engines": engines,
    }
