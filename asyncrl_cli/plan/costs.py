"""The costs of engines, trainer and publishes in seconds. docs/planning.md has the formulas and their sources.

Constants are measured (plan/from_journal.py). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt


@dataclass(frozen=True, slots=True)
class EngineCost:
    """An engine. A decode iteration of n sequences with C tokens of context takes
    ``fixed_s + per_sequence_s·n + per_context_token_s·C``."""

    fixed_s: float
    per_sequence_s: float
    per_context_token_s: float = 0.0
    beside_trainer: float = 0.0  # relative slowdown of an iteration while the trainer trains on the same processors


def seconds_of(base_s: float, growth_s: float, iterations: float) -> float:
    """Return the seconds of iterations if the first takes ``base_s``, and each next one ``growth_s`` more."""
    return iterations * (base_s + growth_s * iterations / 2)


def iterations_in(base_s: float, growth_s: float, seconds: float) -> float:
    """Return the inverse of ``seconds_of``."""
    return 2 * seconds / (base_s + sqrt(base_s * base_s + 2 * growth_s * seconds)) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """A training step: ``per_step_s + per_token_s · tokens in the loss``."""

    per_step_s: float
    per_token_s: float
    trained_share: float = 1.0  # share of a batch's tokens that are in the loss
    beside_engines: float = 0.0  # relative slowdown of a step while engines generate on the same processors

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a step while engines are idle. ``tokens``: of all rollouts, including prompts."""
        return self.per_step_s + self.per_token_s * tokens * self.trained_share

    def faster(self, factor: float) -> TrainerCost:
        """Return a trainer that is ``factor`` times as fast."""
        return replace(self, per_step_s=self.per_step_s / factor, per_token_s=self.per_token_s / factor)


@dataclass(frozen=True, slots=True)
class PublishCost:
    """A publish keeps the trainer busy for ``held_s``. All engines serve the version ``deliver_s`` later, and generate
    nothing in the last ``stall_s`` of this time."""

    held_s: float = 0.0
    deliver_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a run that are neither generation, training nor a publish."""

    start_s: float = 0.0  # from a group's admission to the start of its requests
    settle_s: float = 0.0  # from the delivery of a group's last rollout until it counts as finished (rewards, journal)
    step_s: float = 0.0  # from a step's end until the trainer asks for the next batch
    deliver_s: float = 0.0  # from a rollout's last token until the driver has it (engines deliver in bulk)


@dataclass(frozen=True, slots=True)
class Costs:
    """All measurements of a run, except its lengths."""

    engine: EngineCost
    trainer: TrainerCost
    publish: PublishCost = PublishCost()
    overheads: Overheads = Overheads()
