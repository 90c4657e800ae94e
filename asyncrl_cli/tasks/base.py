"""What a task is: prompts, a reward, and (for a warm start) demonstrations."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from asyncrl_cli.records.prompt import Message, Prompt

Split = Literal["train", "eval"]

SPEC_FOLDER = "ASYNCRL_FOLDER"
"""Environment variable with the folder of the spec file, for agents, environments and their commands."""


@runtime_checkable
class Task(Protocol):
    """A task that scores single responses."""

    def reward(
        self, prompt: Prompt, response: str, finished: bool
    ) -> float | RewardResult | Awaitable[float | RewardResult]:
        """The reward of one response (any finite float; 1.0 counts as correct in the accuracies shown).

        ``finished`` is false when the response was cut at its token limit. It may be an async method.
        """
        ...


@runtime_checkable
class PromptTask(Protocol):
    """A task that makes its own prompts."""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """``size`` prompts of a split, the same ones at every call. The splits share no prompt."""
        ...


@runtime_checkable
class CheckingTask(Protocol):
    """A task that looks at prompts before anything starts."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise an error that says why no response to this prompt could be scored."""
        ...


@runtime_checkable
class DemonstrationTask(Protocol):
    """A task that can show how it is done, for a supervised warm start."""

    def demonstration(self, rng: random.Random, clean: bool) -> tuple[str, str] | Sequence[Message]:
        """A prompt's text (never one of the ``eval`` split) and a response, without the end token; or a conversation
        whose last message, the assistant's, is the response.

        ``clean`` asks for a faultless, careful one; otherwise it is drawn from the task's mixture.
        """
        ...


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward with whatever else is worth a metric: each of ``metrics`` (finite floats) is averaged over a step."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent reaches the policy: an OpenAI-compatible server, under a base URL of this rollout's own.

    ``rollout_id`` names the rollout in the journal.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    rollout_id: str = ""


@runtime_checkable
class AgentTask(Protocol):
    """A task that calls the policy itself, as often and as it likes. One instance plays many episodes at a time."""

    async def run(self, prompt: Prompt, model: ModelAccess) -> float | RewardResult | None:
        """Play one episode; returns its reward. None leaves it to ``reward``, on the last reply's text, which the
        task must have then."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers: messages for the policy (``role`` user, tool or system), the reward of the reply
    before, and whether the episode is over. The rewards of all steps add up to the rollout's."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The other side of one episode. May have ``tools``, a list of OpenAI tool definitions, and ``close()``."""

    def reset(self) -> Sequence[Message]:
        """The conversation's first messages."""
        ...

    def step(self, reply: Message) -> Step:
        """What the policy's reply leads to; ``reply`` is an OpenAI assistant message, with ``tool_calls`` if any."""
        ...


@runtime_checkable
class EnvironmentTask(Protocol):
    """A task that the policy plays turn by turn."""

    def environment(self, prompt: Prompt) -> Environment:
        """The environment of one episode."""
        ...


@runtime_checkable
class TaskMix(Protocol):
    """Several tasks under one roof. ``members`` has them by name, in the order of the spec."""

    members: Mapping[str, object]

    def member(self, prompt: Prompt) -> tuple[object, Prompt]:
        """The task that a prompt of the mix belongs to, and the prompt as that task made it."""
        ...


def task_of(task: object, prompt: Prompt) -> tuple[object, Prompt]:
    """The task that a prompt belongs to, and the prompt as that task knows it: a mix's member, or the task itself."""
    return task.member(prompt) if isinstance(task, TaskMix) else (task, prompt)


def is_episodic(task: object) -> bool:
    """Whether rollouts of the task are episodes: it calls the policy itself, or the policy plays its environment.

    A mix with one such member is.
    """
    if isinstance(task, TaskMix):
        return any(is_episodic(member) for member in task.members.values())
    return isinstance(task, (AgentTask, EnvironmentTask))
