"""The interfaces of tasks. A task of yours is a class with the methods of one or more of these protocols; it does not
have to derive from them.

- ``Task``: scores single responses;
- ``GroupTask``: scores the responses of a group together;
- ``AgentTask``: plays an episode by calling the model itself;
- ``EnvironmentTask``: makes an environment, which the model plays turn by turn;
- ``PromptTask``, ``CheckingTask``, ``DemonstrationTask``: further methods that any of them may have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

from asyncrl_cli.records.prompt import Message, Prompt

Split = Literal["train", "eval"]

SPEC_FOLDER = "ASYNCRL_FOLDER"
"""Environment variable with the folder of the spec file, for agents, environments and their commands."""
GIVEN_PYTHONPATH = "ASYNCRL_GIVEN_PYTHONPATH"
"""Environment variable with the run's ``PYTHONPATH``. A worker's own one has all of the run's module path, which is for
this Python alone."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward together with metrics. Every number is finite; each metric is averaged over a training step.

    The reward None means that the response cannot be scored: its rollout is masked.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


Reward = float | RewardResult | None
"""The return value of a reward; ``workers.scoring.checked`` has the exact rules."""


@dataclass(frozen=True, slots=True)
class ScoreLater:
    """The result of an episode; the task's ``reward`` scores its last reply. ``metrics`` are added to the reward's."""

    metrics: Mapping[str, float]


def as_result(value: Any) -> RewardResult:
    """Read a user's return value as a reward with metrics, without checking the numbers.

    In a dict with a ``score``, the form of verl's functions, other numbers are metrics. Texts, such as the answer that
    was found, are skipped.
    """
    if isinstance(value, Mapping) and "score" in value:
        metrics = {key: item for key, item in value.items() if key != "score" and not isinstance(item, str | None)}
        return RewardResult(value["score"], metrics)
    return value if isinstance(value, RewardResult) else RewardResult(value)


def finite(value: object) -> float | None:
    """A real number of any library as a finite float: also arrays and tensors of one element; None for others."""
    try:
        # NumPy's booleans, arrays and PyTorch's tensors are numbers only to themselves; their item is Python's.
        value = value.item() if hasattr(value, "item") else value
        if not hasattr(type(value), "__float__"):  # float() would also read text
            return None
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # too large, an array of several elements, a symbol
        return None
    return number + 0.0 if math.isfinite(number) else None  # -0.0 would be shown and stored otherwise


@runtime_checkable
class Task(Protocol):
    """A task that scores single responses."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Reward | Awaitable[Reward]:
        """Return the reward of one response: any finite number. 1.0 or more counts as correct in the accuracies shown.

        None means that the response cannot be scored: its tokens are not trained on, and the baseline is computed from
        the group's other responses. ``finished`` is false for a response that was truncated at its token limit. The
        method may be async. An exception rejects the response's group, with the exception as the reason.
        """
        ...


class GroupTask(Protocol):
    """A task that scores all responses of a group together, to compare them. If it also has ``reward``, that method is
    called only by itself."""

    def rewards(self, prompt: Prompt, responses: list[str]) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        """Return one reward for each response, in their order, as ``Task.reward`` returns one.

        The method may be async, and may have a third parameter ``finished``, a list of bools. An evaluation calls it
        with the samples of one prompt, which may be a single one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent reaches the model: an OpenAI-compatible server, at a base URL that belongs to this rollout alone.

    ``model`` is the name to ask for, ``rollout_id`` names the rollout in the journal. A conversation may have
    ``max_images`` images; with 0 the model sees none.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    rollout_id: str = ""
    max_images: int = 0


@runtime_checkable
class AgentTask(Protocol):
    """A task that calls the model itself, as often as it likes. One instance plays many episodes at the same time."""

    async def run(self, prompt: Prompt, model: ModelAccess) -> float | RewardResult | None:
        """Play one episode and return its reward.

        None: the task's method ``reward`` scores the text of the model's last reply. ``RewardResult(None)`` masks the
        rollout, and so does a ``reward`` that returns None. An exception ends the episode; it is played again up to
        ``rollout.retries`` times.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a reply of the model."""

    messages: Sequence[Message] = ()
    """For the model to read next (``role`` user, tool or system)."""
    reward: float | None = 0.0
    """A rollout's reward is the sum over its steps; None in any of them masks the rollout."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added up over the steps, by name."""


class Environment(Protocol):
    """The model acts on it during one episode. Its methods are called in a thread, one at a time.

    It may have an attribute ``tools``, a list of OpenAI tool definitions, and a method ``close()``, which is called at
    the episode's end.
    """

    def reset(self) -> Sequence[Message]:
        """Return the first messages of the conversation."""
        ...

    def step(self, reply: Message) -> Step:
        """Act on the model's reply, an OpenAI assistant message (with ``tool_calls`` if there are any)."""
        ...


@runtime_checkable
class EnvironmentTask(Protocol):
    """A task that the model plays turn by turn."""

    def environment(self, prompt: Prompt) -> Environment:
        """Return the environment of one episode."""
        ...


@runtime_checkable
class PromptTask(Protocol):
    """A task that makes its own prompts."""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` prompts of a split, the same ones at every call. The two splits must not share a prompt."""
        ...


@runtime_checkable
class CheckingTask(Protocol):
    """A task that checks prompts before a run starts."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise an exception that says why no response to this prompt could be scored."""
        ...


@runtime_checkable
class DemonstrationTask(Protocol):
    """A task that has demonstrations, for a supervised warm start."""

    def demonstration(self, rng: random.Random, clean: bool) -> tuple[str, str] | Sequence[Message] | Prompt:
        """Return a prompt's text and a response without the end token; or a conversation that ends with the response,
        an assistant's message. A conversation with images is a ``Prompt``, which has them. The prompt must not be one
        of the ``eval`` split.

        ``clean`` asks for a faultless response; otherwise it is drawn from the task's mixture of good and bad ones.
        """
        ...


@runtime_checkable
class TaskMix(Protocol):
    """Several tasks as one. ``members`` has them by name, in the order of the spec."""

    members: Mapping[str, object]

    def member(self, prompt: Prompt) -> tuple[object, Prompt]:
        """Return the task that a prompt of the mix belongs to, and the prompt as that task made it."""
        ...


class Use(Enum):
    """Whether a task takes a sandbox."""

    NO = "no"
    OPTIONAL = "optional"
    REQUIRED = "required"


def task_of(task: object, prompt: Prompt) -> tuple[object, Prompt]:
    """The task that a prompt belongs to (a mix's member, or the task itself), and the prompt as that task made it."""
    return task.member(prompt) if isinstance(task, TaskMix) else (task, prompt)


def scores_groups(task: object) -> bool:
    """Whether the task is a ``GroupTask``. A class of single rewards may have an attribute ``rewards``, too."""
    return callable(getattr(task, "rewards", None))


def is_episodic(task: object) -> bool:
    """Whether rollouts of the task are episodes: it is an agent, an environment, or a mix with one of these."""
    if isinstance(task, TaskMix):
        return any(is_episodic(member) for member in task.members.values())
    return isinstance(task, (AgentTask, EnvironmentTask))
