"""The records that the buffer receives and returns: groups of rollouts and their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl_cli.records.generation import Rollout, Segment
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.records.training import TrainingBatch

OnStale = Literal["wait", "requeue", "train"]
"""What happens to a running group that has to be in the next batch to meet its deadline."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of groups by state. The sum of running, finished and taken is the number admitted and not rejected."""

    running: int
    finished: int
    taken: int
    rejected: int
    requeued: int
    late: int


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The spec's numbers that the buffer works by."""

    groups_per_step: int
    """B of the ledger's proof."""
    publish_every: int
    """k of the proof."""
    max_staleness: int
    """S of the proof."""
    on_stale: OnStale
    total_steps: int
    """Steps of the whole run, which bound admission."""
    group_size: int
    reject_uniform: bool
    note_solved: bool = False
    """Whether ``Opening.solved`` is filled. That reads the entire history."""
    ahead: int | None = None
    """Number of batches of finished groups at which admission stops; None: no limit."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Weights of the parts of the reward that ``reject_uniform`` compares; empty: it compares the reward alone."""
    parts_apart: bool = False
    """Whether it compares each part instead of their weighted sum."""
    earlier_results: bool = False
    """Whether batches have ``TrainingGroup.earlier``."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger's state without its settings. ``running`` and ``finished`` groups are pairs of index and version, in
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
    """Counts the run's prompts, from 1. Prompts are admitted in this order, each once."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    loader: Mapping[str, int]
    """The data loader's position after it."""
    images: tuple[PlacedImage, ...] = ()
    """The images in ``prompt_ids``, in their order."""


@dataclass(frozen=True, slots=True)
class Group:
    """A running group, and the records of its rollouts by their index (0, 1, ...). An index in none of ``scored``,
    ``unscored`` and ``prefixes`` has to start from nothing."""

    group_id: int
    version: int
    """The weight version at admission."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    scored: frozenset[int] = frozenset()
    unscored: Mapping[int, Rollout] = field(default_factory=dict)
    """Finished rollouts without a reward. Their texts are empty."""
    prefixes: Mapping[int, Mapping[int, tuple[Segment, ...]]] = field(default_factory=dict)
    """The tokens of unfinished rollouts, by branch: only an episode has others than branch 0."""
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
    """Steps that were reported as trained."""
    checksum: str | None
    """The checksum of the bytes of ``version``, if its publish is recorded."""
    serial: int
    """The newest admitted prompt's; 0 before the first."""
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
    """Step and kind of all evaluations that are done."""
    solved: Mapping[str, int] = field(default_factory=dict)
    """By uid, in how many of its groups in a row, up to the newest, every rollout was right; prompts that failed in
    their newest group are excluded. Empty unless ``BufferSettings.note_solved``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one finished or failed rollout: its reward, or why it has none."""

    rollout_id: str
    score: Scored | RewardFailure


@dataclass(frozen=True, slots=True)
class Settled:
    """The groups that ended with some outcomes."""

    finished: tuple[int, ...]
    rejected: tuple[tuple[int, str], ...]
    """With the reason of each."""
    counts: Counts
    solved: tuple[int, ...]
    """Those with only correct rollouts."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no batch yet. ``overdue``: running groups that alone delay it, to be requeued."""

    reason: str
    overdue: tuple[int, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Taken:
    """The batch of a step. ``journal_s``: seconds that the buffer has spent on the journal's file so far."""

    batch: TrainingBatch
    counts: Counts
    journal_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A trained step: a digest of its batch's tokens, and its metrics."""

    step: int
    digest: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """A published version, and its publish. Times are in seconds, ``gap`` and ``change`` in nats."""

    version: int
    step: int
    """The step that it follows."""
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
    """The time of the trainer's own part."""
    transfer_s: float = 0.0
    """The longest time that a host of engines took to get the version."""
    waited_s: float = 0.0
    """How long the trainer waited before it could write, mostly for engines that loaded the version before."""
    pauses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By the name of each engine that loaded it, begin and end of its pause (unix times)."""
