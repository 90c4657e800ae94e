"""What held a run back, from how the trainer's time was spent. Pure: shares in, a sentence out.

The trainer is what a run is for: it either works, or waits for one thing. So its time is cut into parts without a rest
(``PARTS``), and the largest of them names the bottleneck; what engines and disk did meanwhile says what to change.
Invariants: what ``split_wait`` returns adds up to the wait; the part that is named has the largest share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["training", "publishing", "generation", "reward", "saving", "between"]
"""``generation`` and ``reward``: waiting for the batch's last group to be generated, and to be scored. ``between``:
waiting though the batch was complete, as for an evaluation or for the journal."""
PARTS: tuple[Part, ...] = get_args(Part)

NAMES: Mapping[Part, str] = {
    "training": "training",
    "publishing": "publishing",
    "generation": "waiting for rollouts",
    "reward": "waiting for scores",
    "saving": "checkpoints",
    "between": "waits between steps",
}
TOLD = 0.2
"""The second largest part is told from this share on."""
IDLE = 0.5
"""Engines that were busy for less of the time than this had nothing to do while the trainer waited."""
BOUND_BY_DISK = 0.5
"""A journal that was written for more of the time than this holds commits up."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Shares of the time, 0 to 1: ``trainer`` has every part and sums to 1; the others are independent of it, and None
    where they were not recorded."""

    trainer: Mapping[Part, float]
    engines_busy: float | None
    engines_paused: float | None
    journal_busy: float | None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The part that took most of the trainer's time, the sentence that says so, and what to change."""

    part: Part
    share: float
    sentence: str
    advice: str


def split_wait(
    asked_at: float, taken_at: float, generated_at: float, scored_at: float, saving_s: float = 0.0
) -> dict[Part, float]:
    """The seconds from when the trainer was free to when it had its batch, by what it waited for.

    ``generated_at`` and ``scored_at`` are when the batch's last group had all tokens, and all rewards; ``saving_s`` is
    what a checkpoint took in between.
    """
    taken_at = max(asked_at, taken_at)
    generated_at = min(max(generated_at, asked_at), taken_at)
    scored_at = min(max(scored_at, generated_at), taken_at)
    complete = taken_at - scored_at
    saving = min(saving_s, complete)
    return {
        "generation": generated_at - asked_at,
        "reward": scored_at - generated_at,
        "saving": saving,
        "between": complete - saving,
    }


def bottleneck(activity: Activity, max_staleness: int) -> Bottleneck:
    """Name it. Of equal shares the first in ``PARTS`` counts."""
    part = max(PARTS, key=lambda part: activity.trainer[part])
    share = activity.trainer[part]
    busy = activity.engines_busy
    idle = busy is not None and busy < IDLE
    engines = "" if busy is None else f", and engines were busy {busy:.0%} of it"
    sentence, advice = {
        "training": (
            f"The trainer held the run back: it trained {share:.0%} of the time{engines}.",
            "Give it more: trainer.ranks, trainer.threads_per_rank or a GPU each, and a larger "
            "trainer.tokens_per_microbatch where memory allows it.",
        ),
        "publishing": (
            f"Publishing weights held the run back: {share:.0%} of the trainer's time{engines}.",
            "Set pipeline.weight_update to keep, so that nobody waits for running rollouts, or publish less often with "
            "pipeline.publish_every.",
        ),
        "generation": (
            f"Generation held the run back: the trainer waited for rollouts {share:.0%} of the time{engines}.",
            "Engines often had nothing to generate meanwhile: look at environments and agents "
            "(task.episode.workers, task.episode.concurrency) and at engines that were restarted."
            if idle and max_staleness
            else "Give it more: rollout.engines or GPUs for them, a higher rollout.max_running_rollouts, or a lower "
            "rollout.max_response_tokens if responses run on.",
        ),
        "reward": (
            f"Rewards held the run back: the trainer waited for scores {share:.0%} of the time{engines}.",
            "Raise task.reward_workers, or task.reward_concurrency for rewards that are async functions, or make the "
            "reward faster.",
        ),
        "saving": (
            f"Checkpoints held the run back: saving them took {share:.0%} of the trainer's time{engines}.",
            "Save less often with checkpoints.every, or to a faster disk.",
        ),
        "between": (
            f"Waits between steps held the run back: {share:.0%} of the trainer's time, "
            f"with its batch complete{engines}.",
            "The journal was being written most of the time: put the runs folder on a faster local disk."
            if (activity.journal_busy or 0.0) > BOUND_BY_DISK
            else "Evaluate less often or on fewer prompts (evaluation.every, evaluation.prompts), and without "
            "evaluation.pin.",
        ),
    }[part]
    if max_staleness == 0 and part in ("training", "generation"):
        advice += " With pipeline.max_staleness 0 the two take turns: mode async lets them work at the same time."
    second = max((other for other in PARTS if other != part), key=lambda other: activity.trainer[other])
    if activity.trainer[second] >= TOLD:
        sentence += f" Next came {NAMES[second]}, with {activity.trainer[second]:.0%}."
    return Bottleneck(part, share, sentence, advice)
