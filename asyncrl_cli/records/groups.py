"""The records that the buffer gets and returns: groups of rollouts and their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl_cli.records.generation import Rollout, Segment
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.spec.algorithm import RUNNING_BASELINE
from asyncrl_cli.spec.sections import ExperimentSpec

OnStale = Literal["wait", "requeue", "train"]
"""The policy for a running group that must be in the next batch to meet its deadline."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of groups by state. Admitted groups that are not rejected are running, finished or taken."""

    running: int
    finished: int
    taken: int
    rejected: int
    requeued: int
    late: int


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The spec's settings that the buffer needs."""

    groups_per_step: int
    """B of the ledger's proof."""
    publish_every: int
    """k of the proof."""
    max_staleness: int
    """S of the proof."""
    on_stale: OnStale
    total_steps: int
    """Steps of the whole run, which limit admission."""
    group_size: int
    reject_uniform: bool
    note_solved: bool = False
    """Fill ``Opening.solved``, which requires a read of the entire history."""
    ahead: int | None = None
    """Number of batches of finished groups at which admission stops; None: no limit."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward's parts that ``reject_uniform`` compares; empty: it compares only the reward."""
    parts_apart: bool = False
    """Compare each part instead of the weighted sum."""
    earlier_results: bool = False
    """Fill ``TrainingGroup.earlier`` in batches."""

    @classmethod
    def from_spec(cls, spec: ExperimentSpec) -> BufferSettings:
        """The settings of a spec."""
        pipeline, algorithm = spec.pipeline, spec.algorithm
        return cls(
            groups_per_step=pipeline.groups_per_step,
            publish_every=pipeline.publish_every,
            max_staleness=pipeline.max_staleness,
            on_stale=pipeline.on_stale,
            total_steps=spec.stop.total,
            group_size=spec.rollout.group_size,
            reject_uniform=algorithm.uniform_groups == "reject",
            note_solved=spec.data.filter is not None,
            ahead=pipeline.ahead,
            reward_parts=algorithm.reward_parts,
            parts_apart=algorithm.parts_apart,
            earlier_results=algorithm.advantage == RUNNING_BASELINE,
        )


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger's state without its settings. ``running`` and ``finished`` have pairs of group index and version in
    admission order; ``rejections`` counts groups by reason."""

    step: int
    version: int
    next_id: int
    running: tuple[tuple[int, int], ...]
    finished: tuple[tuple[int, int], ...]
    rejections: Mapping[str, int]
    requeued: int
    late: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that may be admitted."""

    serial: int
    """Number of the prompt in the run, from 1. Prompts are admitted in this order, each once."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    loader: Mapping[str, int]
    """The data loader's position after the prompt."""
    images: tuple[PlacedImage, ...] = ()
    """The images in ``prompt_ids``, in their order."""


@dataclass(frozen=True, slots=True)
class Group:
    """A running group with the records of its rollouts by index (0, 1, ...). A rollout with an index in none of
    ``scored``, ``unscored`` and ``prefixes`` starts from nothing."""

    group_id: int
    version: int
    """The weight version at admission."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    scored: frozenset[int] = frozenset()
    unscored: Mapping[int, Rollout] = field(default_factory=dict)
    """Finished rollouts without a reward. Their texts are empty."""
    prefixes: Mapping[int, Mapping[int, tuple[Segment, ...]]] = field(default_factory=dict)
    """The tokens of unfinished rollouts, by branch. Only episodes have branches other than 0."""
    images: tuple[PlacedImage, ...] = ()
    """The images in ``prompt_ids``, in their order."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The run's state when the buffer opens."""

    step: int
    """Batches taken so far."""
    version: int
    """Weight versions published so far."""
    trained: int
    """Number of steps reported as trained."""
    checksum: str | None
    """The checksum of ``version``, if its publish is recorded."""
    serial: int
    """The serial of the newest admitted prompt; 0 before the first."""
    loader: Mapping[str, int] | None
    """The data loader's position after that prompt; None before the first."""
    groups: tuple[Group, ...]
    """The running groups, in admission order."""
    waiting: tuple[Prompt, ...]
    """Prompts to be admitted before the loader's next one."""
    evaluated: Mapping[int, float]
    """Greedy held-out accuracy by step."""
    counts: Counts
    evaluations: frozenset[tuple[int, str]] = frozenset()
    """Step and kind of all completed evaluations."""
    solved: Mapping[str, int] = field(default_factory=dict)
    """By uid, the number of the prompt's newest groups in a row in which every rollout was correct, if not 0. Empty
    unless ``BufferSettings.note_solved``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a finished or failed rollout: its reward, or the reason why it has none."""

    rollout_id: str
    score: Scored | RewardFailure


@dataclass(frozen=True, slots=True)
class Settled:
    """The groups that ended in one call."""

    finished: tuple[int, ...]
    rejected: tuple[tuple[int, str], ...]
    """Groups with the reason."""
    counts: Counts
    solved: tuple[int, ...]
    """Groups with only correct rollouts."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no batch yet, for ``reason``. ``overdue``: the running groups that delay it and must be requeued."""

    reason: str
    overdue: tuple[int, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A step's batch. ``journal_s``: seconds that the buffer has spent on the journal's file so far."""

    batch: TrainingBatch
    counts: Counts
    journal_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A trained step: its batch's digest and its metrics."""

    step: int
    digest: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """A published version. Times are in seconds, ``gap`` and ``change`` in nats."""

    version: int
    step: int
    """Number of steps in its weights."""
    checksum: str
    seconds: float
    """The time of the whole publish."""
    stall_s: float
    """The longest pause of an engine."""
    gap: float
    """The largest difference between an engine's log-probs of the probe and the trainer's."""
    change: float
    """The largest difference between the probe's log-probs and the previous version's."""
    write_s: float = 0.0
    """The time until the ranks had written it."""
    transfer_s: float = 0.0
    """The longest time until an engine's host had the version."""
    waited_s: float = 0.0
    """How long the trainer waited before it could write, mostly for engines that loaded the previous version."""
    pauses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each engine's pause (unix times), by the engine's name."""
