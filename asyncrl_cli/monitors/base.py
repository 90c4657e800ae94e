"""Monitors: objects that are notified of a run's events.

The console, MLflow, Ray's metrics, TensorBoard and Weights & Biases are monitors. Users can write more
(``tracking.monitors``). ``reporter`` calls them, and ensures that no monitor delays or ends a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.records.groups import Counts

FINISH_S: Mapping[str, float] = {"finished": 30.0, "failed": 10.0, "interrupted": 2.0}
"""Seconds that a run waits at its end for all monitors, by the run's phase."""

EvaluationKind = str
"""``greedy`` or ``sampled`` for the held-out prompts; ``<set>:greedy`` or ``<set>:sampled`` for another set. In
evaluations by `asyncrl evaluate` the set is ``offline`` or ``offline-<set>``."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that is monitored. A monitor may write files to its ``folder``."""

    run_id: str
    folder: Path
    steps: int  # the run stops at this step
    spec: Mapping[str, Any]  # the resolved spec as plain values, without secrets


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation. Weight versions ``oldest`` to ``newest`` sampled its tokens.

    ``accuracy`` is the share of rewarded responses with a reward of at least 1; ``prompts`` counts their prompts.
    ``mean_length`` counts sampled tokens. With several ``samples`` per prompt, ``pass_at`` has pass@1 up to
    pass@``samples``. ``metrics`` has means of the task's metrics. ``intervals`` has 95 % confidence intervals for
    ``accuracy``, ``mean_reward``, ``pass_at_1`` and so on, if they can be computed.
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
    """How a run ended. ``message`` is for users; ``reason`` says why it did not finish, as in its state."""

    phase: Literal["finished", "interrupted", "failed"]
    message: str = ""
    reason: str = ""


class Monitor:
    """Base class of monitors. A subclass overrides the methods it needs. Calls come in the order of events. A monitor
    that raises is switched off for the rest of the run."""

    name = ""  # shown in warnings and in a run's closing lines; the class's name if empty

    def started(self, run: RunInfo) -> None:
        """The first call: the run starts, or resumes."""

    def status(self, text: str, counts: Counts | None = None) -> None:
        """The run's activity; from the loop also the number of groups in the buffer by state."""

    def engines(self, serving: int, wanted_engines: int) -> None:
        """The number of serving or wanted engines has changed."""

    def warn(self, text: str) -> None:
        """Something failed or takes long; the run continues."""

    def faulted(self, fault_kind: str) -> None:
        """A fault is recorded; its kind is the journal's, such as ``engine``."""

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """A step (counted from 1) is done; ``version`` is the weight version after it. docs/metrics.md describes
        ``metrics``."""

    def health(self, finding: HealthFinding) -> None:
        """A finding has begun, or ended if it has a last step. ``warn`` is called, too."""

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation is done."""

    def finish(self, ending: Ending) -> str | None:
        """The last call: the run has ended. Returns a text for the run's closing lines, if any."""
        return None


def evaluation_metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield an evaluation's metrics, such as ``eval/greedy_accuracy``, from its fields."""
    prefix = f"eval/{result['kind'].replace(':', '/')}"
    metrics = {
        f"{prefix}_accuracy": result["accuracy"],
        f"{prefix}_tokens_mean": result["mean_length"],
        f"{prefix}_reward_mean": result.get("mean_reward"),
        **{f"{prefix}_pass_at_{k}": value for k, value in enumerate(result.get("pass_at", ()), start=1)},
        **{f"{prefix}/task/{name}": value for name, value in result.get("metrics", {}).items()},
    }
    for name, value in metrics.items():
        if value is not None:
            yield name, value
