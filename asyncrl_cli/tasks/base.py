"""Interfaces of tasks. Your task is a class with the methods of one or more of these protocols; it need not inherit.

- ``Task``: scores single responses;
- ``GroupTask``: scores the responses of a group together;
- ``AgentTask``: plays an episode by calling the model itself;
- ``EnvironmentTask``: makes an environment, which the model plays turn by turn;
- ``PromptTask``, ``CheckingTask``: optional methods for any of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

from asyncrl_cli.records.prompt import Message, Prompt

Split = Literal["train", "eval"]

SPEC_FOLDER = "ASYNCRL_FOLDER"
"""Environment variable with the folder of the spec file, for agents, environments and their commands."""
GIVEN_PYTHONPATH = "ASYNCRL_GIVEN_PYTHONPATH"
"""Environment variable with the run's original ``PYTHONPATH``. A worker's ``PYTHONPATH`` has the run's whole module
path, which other Python interpreters must not use."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward with metrics. Every number must be finite; metrics are averaged over a training step.

    The reward None means that the response cannot be scored: its rollout is masked.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


Reward = float | RewardResult | None
"""The return value of a reward function; ``workers.scoring.checked`` has the exact rules."""


@dataclass(frozen=True, slots=True)
class ScoreLater:
    """An episode's result without a reward: the task's ``reward`` scores the last reply, and ``metrics`` are added."""

    metrics: Mapping[str, float]


def as_result(value: Any) -> RewardResult:
    """Read a user's return value as a reward with metrics, without checking the numbers.

    verl's functions return a dict with a ``score``. Its other numbers are metrics; its texts are skipped.
    """
    if isinstance(value, Mapping) and "score" in value:
        metrics = {key: item for key, item in value.items() if key != "score" and not isinstance(item, str | None)}
        return RewardResult(value["score"], metrics)
    return value if isinstance(value, RewardResult) else RewardResult(value)


LARGEST = 1e15
"""Limit on the size of rewards and metrics: sums of squares over a step must fit in float32, where advantages are."""


def finite(value: object) -> float | None:
    """Convert any library's real number, or one-element array or tensor, to a float of at most ``LARGEST`` in size;
    None for anything else."""
    try:
        # NumPy's booleans, arrays and PyTorch's tensors are not Python's numbers; item() converts them.
        value = value.item() if hasattr(value, "item") else value
        if not hasattr(type(value), "__float__"):  # float() would also parse text
            return None
        converted = float(value)  # type: ignore[arg-type]
    except Exception:  # too large, an array with several elements, a symbol
        return None
    return converted + 0.0 if abs(converted) <= LARGEST else None  # adding 0.0 turns -0.0 into 0.0


@runtime_checkable
class Task(Protocol):
    """A task that scores single responses."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Reward | Awaitable[Reward]:
        """Return the reward of one response: any finite number. Accuracies count 1.0 or more as correct.

        None means that the response cannot be scored: its tokens are not trained on, and the baseline is computed from
        the group's other responses. ``finished`` is False for a response that was truncated at its token limit. The
        method may be async. An exception rejects the response's group, and is reported as the reason.
        """
        ...


class GroupTask(Protocol):
    """A task that scores all responses of a group together, to compare them. asyncrl then never calls a method
    ``reward``."""

    def rewards(self, prompt: Prompt, responses: list[str]) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        """Return one reward for each response, in their order; ``Task.reward`` has the rules.

        The method may be async, and may have a third parameter ``finished``, a list of bools. An evaluation passes the
        samples of one prompt, which may be only one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent reaches the model: an OpenAI-compatible server at a base URL for this rollout only.

    ``model`` is the name for requests; ``rollout_id`` names the rollout in the journal. A conversation may have up to
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

        With None, the task's method ``reward`` scores the text of the model's last reply. ``RewardResult(None)`` masks
        the rollout, and so does a ``reward`` that returns None. An exception ends the episode; it is played again up to
        ``rollout.retries`` times.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a reply of the model."""

    messages: Sequence[Message] = ()
    """Messages for the model (``role`` user, tool or system)."""
    reward: float | None = 0.0
    """A rollout's reward is the sum over its steps; None in any step masks the rollout."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Summed over the steps, by name."""


class Environment(Protocol):
    """The model's environment in one episode. Its methods are called in a thread, one at a time.

    It may have an attribute ``tools``, a list of OpenAI tool definitions, and a method ``close()``, which is called at
    the end of the episode.
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
        """Return ``size`` prompts of a split, the same in every call. The two splits must not share a prompt."""
        ...


@runtime_checkable
class CheckingTask(Protocol):
    """A task that checks prompts before a run starts."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise an exception that says why no response to this prompt could be scored."""
        ...


@runtime_checkable
class TaskMix(Protocol):
    """Several tasks as one. ``members``: the tasks by name, in the spec's order."""

    members: Mapping[str, object]

    def member(self, prompt: Prompt) -> tuple[object, Prompt]:
        """Return the task of one of the mix's prompts, and the prompt in that task's form."""
        ...


class Use(Enum):
    """How a task uses a sandbox."""

    NO = "no"
    OPTIONAL = "optional"
    REQUIRED = "required"


def task_of(task: object, prompt: Prompt) -> tuple[object, Prompt]:
    """Return a prompt's task (a mix's member, or the task itself), and the prompt in that task's form."""
    return task.member(prompt) if isinstance(task, TaskMix) else (task, prompt)


def scores_groups(task: object) -> bool:
    """True for a ``GroupTask``. Other tasks may have an attribute ``rewards`` that is not a method."""
    return callable(getattr(task, "rewards", None))


def is_episodic(task: object) -> bool:
    """True if the task's rollouts are episodes: it is an agent, an environment, or a mix with one of these."""
    if isinstance(task, TaskMix):
        return any(is_episodic(member) for member in task.members.values())
    return isinstance(task, (AgentTask, EnvironmentTask))
