"""What limited the speed of a run, from how the trainer's time was spent. Pure: shares and settings in, sentences out.

The trainer's time is divided completely into ``PARTS``: it trains, or waits for exactly one thing. Training is what the
run is for, so only the waits are ranked. Waits for a batch count together against other waits, as one remedy often
shortens all of them; the largest of them is named. Training itself is named when next to nothing but training and
publishing is left. What engines, journal and settings say, and an estimate of other staleness bounds, lead to the
advice. Advice that does not apply to the run is omitted.

Invariant: what ``split_wait`` returns adds up to the wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from asyncrl_cli.inspect.resolved import engine_counts, value_at
from asyncrl_cli.plan.prediction import Prediction

Part = Literal["training", "publishing", "generation", "due", "reward", "saving", "between"]
"""Waits: ``generation``: fewer groups had finished than a batch needs. ``due``: enough had finished, but groups that
would have missed their deadline had not (the staleness bound). ``reward``: the batch's last group was generated and not
scored. ``between``: the batch was complete, and the loop was held up by something else, such as an evaluation."""
PARTS: tuple[Part, ...] = get_args(Part)

NAMES: Mapping[Part, str] = {
    "training": "training",
    "publishing": "publishing weights",
    "generation": "waiting for enough finished groups",
    "due": "waiting for groups that were due",
    "reward": "waiting for rewards",
    "saving": "saving checkpoints",
    "between": "other waits",
}
FOR_BATCHES: tuple[Part, ...] = ("generation", "due", "reward")
OTHER_WAITS: tuple[Part, ...] = ("publishing", "saving", "between")
FEW_STEPS = 10
"""With fewer steps, the noise of the training reward cannot be estimated, and most of the time is the run's start."""
TRAINER_BOUND = 0.85
"""Training and publishing together: from this share of the time on, nothing else can have mattered much."""
PUBLISHING_MINOR = 0.25
"""Up to this part of the above, publishing is not a separate cause."""
IDLE = 0.5
"""Engines that had requests for less of the time than this were idle while the trainer waited."""
BOUND_BY_DISK = 0.5
"""A journal that was written for more of the time than this delays commits."""
WORTH_IT = 0.05
"""A larger bound is suggested when it may save this share of the run's time."""
WASTED = 0.1
"""From this many per trained group on, groups that were generated but not trained are mentioned."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Shares of the time, 0 to 1: ``trainer`` has every part and sums to 1; the others are independent of it, and None
    where they were not recorded."""

    trainer: Mapping[Part, float]
    engines_busy: float | None
    engines_paused: float | None
    journal_busy: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step's time under a larger staleness bound, divided by that under the run's own."""

    max_staleness: int
    relative: float


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the advice depends on.

    Args:
        spec: the resolved spec; empty when it is not known.
        max_staleness: the bound.
        episodic: whether rollouts are episodes of an environment or an agent.
        steps: trained steps.
        rejected, requeued: groups that were generated but not trained, per trained group.
        most_rollouts: the most rollouts that ran at once.
        prediction: what the simulator says of the run; None when it does not reproduce it.
    """

    spec: Mapping[str, Any]
    max_staleness: int
    episodic: bool
    steps: int
    most_rollouts: int
    rejected: float = 0.0
    requeued: float = 0.0
    prediction: Prediction | None = None

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """For larger bounds, ascending."""
        if self.prediction is None:
            return ()
        bounds = self.prediction.bounds
        own = bounds[self.max_staleness]
        return tuple(Estimate(at, step_s / own) for at, step_s in bounds.items() if at > self.max_staleness)


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The part that is named, its share of the trainer's time, the sentence that says so, all parts, and what to
    change."""

    part: Part
    share: float
    sentence: str
    breakdown: str
    advice: str


def split_wait(
    asked_at: float,
    taken_at: float,
    enough_at: float,
    generated_at: float,
    scored_at: float,
    saving_s: float = 0.0,
) -> dict[Part, float]:
    """The seconds from when the trainer was free to when it had its batch, by what it waited for.

    ``enough_at`` is when as many groups had finished as a batch has; ``generated_at`` and ``scored_at`` are when the
    batch's last group had all tokens, and all rewards; ``saving_s`` is what a checkpoint took in between.
    """
    taken_at = max(asked_at, taken_at)
    generated_at = min(max(generated_at, asked_at), taken_at)
    enough_at = min(max(enough_at, asked_at), generated_at)
    scored_at = min(max(scored_at, generated_at), taken_at)
    complete = taken_at - scored_at
    saving = min(saving_s, complete)
    return {
        "generation": enough_at - asked_at,
        "due": generated_at - enough_at,
        "reward": scored_at - generated_at,
        "saving": saving,
        "between": complete - saving,
    }


def bottleneck(activity: Activity, run: Circumstances) -> Bottleneck:
    """What limited the run's speed, and what to change."""
    part = _part(activity.trainer)
    share = activity.trainer[part]
    advice = " ".join(_advice(part, activity, run))
    sentence = _sentence(part, activity.trainer, run)
    if run.steps < FEW_STEPS:
        sentence += f" Only {run.steps} step(s) are trained, so this is mostly the start of the run."
    return Bottleneck(part, share, sentence, _breakdown(activity.trainer), advice)


def helpful(run: Circumstances) -> Estimate | None:
    """The smallest larger bound that may save nearly as much as any; None when none is worth it."""
    best = min((estimate.relative for estimate in run.estimates), default=1.0)
    if 1.0 - best < WORTH_IT:
        return None
    return next(estimate for estimate in run.estimates if 1.0 - estimate.relative >= 0.8 * (1.0 - best))


def _part(spent: Mapping[Part, float]) -> Part:
    work = spent["training"] + spent["publishing"]
    if work >= TRAINER_BOUND and spent["publishing"] <= PUBLISHING_MINOR * work:
        return "training"
    other = max(OTHER_WAITS, key=lambda part: spent[part])
    if spent[other] > _for_batches(spent):
        return other
    return max(FOR_BATCHES, key=lambda part: spent[part])


def _for_batches(spent: Mapping[Part, float]) -> float:
    return sum(spent[part] for part in FOR_BATCHES)


def _sentence(part: Part, spent: Mapping[Part, float], run: Circumstances) -> str:
    share = f"{spent[part]:.0%}"
    of_time = f"{share} of the trainer's time"
    waited = (
        f"the trainer waited for batches {_for_batches(spent):.0%} of its time, and the largest part of that ({share})"
    )
    return {
        "training": f"The trainer limited the speed: training took {of_time}.",
        "publishing": f"Publishing weights limited the speed: it took {of_time}.",
        "generation": f"Generation limited the speed: {waited} because fewer groups had finished than a batch needs.",
        "due": f"The staleness bound limited the speed: {waited} for groups that were due under "
        f"max_staleness {run.max_staleness}, although enough others had finished.",
        "reward": f"Rewards limited the speed: {waited} for generated rollouts to be scored.",
        "saving": f"Checkpoints limited the speed: saving them took {of_time}.",
        "between": f"Waits between steps limited the speed: for {of_time}, the next batch was complete but the loop "
        "was busy with something else.",
    }[part]


def _breakdown(spent: Mapping[Part, float]) -> str:
    parts = sorted((part for part in PARTS if spent[part] >= 0.005), key=lambda part: -spent[part])
    return f"The trainer's time: {', '.join(f'{NAMES[part]} {spent[part]:.0%}' for part in parts)}."


def _advice(part: Part, activity: Activity, run: Circumstances) -> list[str]:
    match part:
        case "training":
            own = ["Give the trainer more: trainer.ranks, or trainer.tokens_per_microbatch where memory allows it."]
        case "publishing":
            keeps = value_at(run.spec, "pipeline.weight_update") == "keep"
            own = ["Publish less often (pipeline.publish_every)."]
            if not keeps:
                own.append("With pipeline.weight_update: keep, publishing does not wait for running rollouts.")
        case "due":
            own = ["If engines are saturated, a larger bound gains little: more of them (rollout.engines) or shorter "
                   "rollouts (rollout.max_response_tokens) help instead."]  # fmt: skip
        case "generation":
            own = [*_not_trained(run), *_faster_engines(activity, run)]
        case "reward":
            own = ["Make the reward faster, or score more rollouts at once: task.reward_workers, or for async rewards "
                   "task.reward_concurrency."]  # fmt: skip
        case "saving":
            own = ["Save less often (checkpoints.every), or to a faster disk."]
        case "between":
            own = _less_between(activity, run)
    if run.max_staleness == 0 and part in ("training", "generation", "due"):
        own.append("With max_staleness 0, generation and training take turns; a larger bound lets them overlap.")
    if part == "due":
        return [*_quoted(run), *own]
    return [*own, *_quoted(run)] if part == "generation" else own  # no bound shortens the other waits


def _quoted(run: Circumstances) -> list[str]:
    found = helpful(run)
    if found is None:
        if not run.estimates:
            return []
        most = run.estimates[-1].max_staleness
        return [f"A larger staleness bound would not have helped: simulated up to {most}, it saves less than 5%."]
    return [
        f"With pipeline.max_staleness {found.max_staleness}, a step would have taken {found.relative:.0%} of its time. "
        f"This is an estimate; see `asyncrl staleness --what-if {found.max_staleness}`."
    ]


def _not_trained(run: Circumstances) -> Iterator[str]:
    if run.rejected >= WASTED:
        yield (
            f"For each trained group, {run.rejected:.2f} were rejected (`asyncrl inspect buffer` has the reasons): "
            "prompts whose rollouts are not all correct or all wrong waste less (data.curriculum, data.filter)."
        )
    if run.requeued >= WASTED:
        yield (
            f"For each trained group, {run.requeued:.2f} were cancelled and started again (on_stale: requeue): a "
            "larger max_staleness avoids that."
        )


def _faster_engines(activity: Activity, run: Circumstances) -> list[str]:
    busy = activity.engines_busy
    if busy is not None and busy < IDLE and run.max_staleness:
        idle = f"Engines had no request for {1 - busy:.0%} of the time:"
        if run.episodic:
            return [f"{idle} look at environments and agents (task.episode.workers, task.episode.concurrency)."]
        return [f"{idle} look for faults, and for groups that were rejected."]
    slots = value_at(run.spec, "rollout.max_running_rollouts")
    _, engines = engine_counts(run.spec)
    own = ["Add engines (rollout.engines) or give them more devices; lower rollout.max_response_tokens if responses "
           "are too long."]  # fmt: skip
    if isinstance(slots, int) and run.most_rollouts >= slots * engines:
        own.append(f"All {slots * engines} slots were in use: raise rollout.max_running_rollouts if memory allows it.")
    return own


def _less_between(activity: Activity, run: Circumstances) -> list[str]:
    if (activity.journal_busy or 0.0) > BOUND_BY_DISK:
        return ["The journal was being written most of the time: put the runs folder on a faster local disk."]
    if not value_at(run.spec, "evaluation.every"):
        return ["The timeline (`asyncrl timeline`) shows what ran between two steps."]
    unfixed = " and switch evaluation.fix_version off" if value_at(run.spec, "evaluation.fix_version") else ""
    return [f"Evaluate less often or on fewer prompts (evaluation.every, evaluation.prompts){unfixed}."]
