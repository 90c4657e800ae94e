"""Monitors: objects that are notified of the events of a run.

The console, MLflow, Ray's metrics, notices, TensorBoard and Weights & Biases are monitors. Users can write their own
(``tracking.monitors``). ``reporter`` calls them, and ensures that none of them delays or ends a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.records.groups import Counts

EvaluationKind = str
"""``greedy`` and ``sampled`` of the held-out prompts; ``<set>:greedy`` or ``<set>:sampled`` of a further set. An
evaluation by `asyncrl evaluate` has ``offline`` or ``offline-<set>`` as its set."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that is monitored.

    Args:
        folder: the run's own, where a monitor may keep files.
        steps: at which the run stops.
        spec: the resolved spec as plain values, without secrets.
    """

    run_id: str
    folder: Path
    steps: int
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation. ``oldest`` and ``newest`` are the weight versions that its tokens came from.

    ``accuracy`` is the share of rewarded responses with a reward of at least 1; ``prompts`` counts their prompts.
    ``mean_length`` is in tokens that were sampled. With several ``samples`` per prompt, ``pass_at`` has pass@1 and so
    on up to pass@``samples``. ``metrics`` are means of the task's metrics. ``intervals`` has the 95 % confidence
    intervals of ``accuracy``, ``mean_reward`` and ``pass_at_1`` and so on, as far as they can be computed.
    """

    kind: EvaluationKind
    step: int
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int
    oldest: int
    newest: int
    samples: int = 1
    pass_at: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. ``message`` is a text for users; ``reason`` is why it did not finish, as in its state."""

    phase: Literal["finished", "interrupted", "failed"]
    message: str = ""
    reason: str = ""


class Monitor:
    """Notified of the events of a run. A subclass overrides the methods it needs; the others do nothing.

    The calls come in the order of the events. A monitor that raises is switched off for the rest of the run.
    """

    name = ""
    """The monitor's name in warnings and in the closing lines of a run; if it is empty, the class's name."""

    def started(self, run: RunInfo) -> None:
        """The first call: the run starts, or resumes."""

    def status(self, text: str) -> None:
        """The activity of a run while it starts or ends."""

    def doing(self, text: str, counts: Counts) -> None:
        """The activity of the loop, and the number of groups in the buffer by state."""

    def engines(self, serving: int, wanted: int) -> None:
        """Called after every change of how many engines serve or are wanted."""

    def warn(self, text: str) -> None:
        """Something failed or takes long, and the run continues."""

    def stalled(self, text: str) -> None:
        """A part has been waiting for half of ``pipeline.stall_minutes``. ``warn`` is called, too."""

    def faulted(self, kind: str) -> None:
        """A fault is recorded; its kind is the journal's, such as ``engine``."""

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """A step (counted from 1) is done; ``version`` is the weights' version after it. docs/metrics.md describes the
        metrics."""

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation is done."""

    def finish(self, ending: Ending) -> str | None:
        """The last call: the run has ended. Returns a text about this monitor for the closing lines of the run, or
        an empty one."""
        return None


def evaluation_metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of an evaluation, such as ``eval/greedy_accuracy``, from its fields."""
    numbers = {
        "accuracy": result["accuracy"],
        "tokens_mean": result["mean_length"],
        "reward_mean": result.get("mean_reward"),
        **{f"pass_at_{k}": value for k, value in enumerate(result.get("pass_at", ()), start=1)},
        **result.get("metrics", {}),
    }
    for name, value in numbers.items():
        if value is not None:
            yield f"eval/{result['kind'].replace(':', '/')}_{name}", value
