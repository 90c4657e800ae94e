"""Several tasks in one run, each with its share of the prompts.

    a (weight 2), b (weight 1):   a/0  b/0  a/1  a/2  b/1  a/3  ...

Invariant: the weights and ``i`` alone determine the task and the prompt of row ``i``, and in every stretch of rows each
task has its share, up to a few rows (``interleave``). A prompt's uid begins with the name of its task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.data.chat_template import chat_of
from asyncrl_cli.records.prompt import Prompt, with_data_urls
from asyncrl_cli.spec.inputs import SplitSpec, TaskSpec
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, ScoreLater, Split, Task, is_episodic
from asyncrl_cli.tasks.mcp_tools import McpServers
from asyncrl_cli.tasks.play import ask, play
from asyncrl_cli.tasks.prompts import LazyPrompts, load_prompts
from asyncrl_cli.tasks.tools import ToolEnvironment


def task_name(prompt: Prompt) -> str:
    """The name of the mix's task to which a prompt belongs."""
    return prompt.uid.partition("/")[0]


def reward_limit_s(spec: TaskSpec, prompt: Prompt) -> float:
    """Time limit in seconds for the reward of a response to ``prompt``."""
    member_limit_s = {member.name: member.reward_timeout_s for member in spec.mix}.get(task_name(prompt))
    return spec.reward_timeout_s if member_limit_s is None else member_limit_s


def interleave(weights: Sequence[float], rows: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For each of ``rows`` rows: the index of its task, and the number of earlier rows of the same task.

    Row ``k`` of a task with share ``s`` has position ``(k + 1/2) / s``, and rows are sorted by position (Sainte-Laguë's
    method of allocating seats). More rows extend the sequence without changing its beginning.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(np.asarray(weights, dtype=np.float64))
    counts = np.floor(shares * rows).astype(np.int64) + len(shares) + 1
    tasks = np.repeat(np.arange(len(shares), dtype=np.int32), counts)
    rows_before = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    order = np.lexsort((tasks, (rows_before + 0.5) / shares[tasks]))[:rows]
    return tasks[order], rows_before[order]


class MixedPrompts(LazyPrompts):
    """The rows of a mix. ``strata``: the index of each row's task. A shuffle that keeps it keeps the shares."""

    def __init__(
        self, names: Sequence[str], prompts: Sequence[Sequence[Prompt]], strata: Any, rows_before: Any
    ) -> None:
        self.strata: Sequence[int] = strata.tolist()

        def row(index: int) -> Prompt:
            task = int(strata[index])
            prompt = prompts[task][int(rows_before[index]) % len(prompts[task])]
            return replace(prompt, uid=f"{names[task]}/{prompt.uid}")

        super().__init__(len(strata), row)


class MixTask:
    """The task of ``task.mix``."""

    def __init__(self, tasks: Mapping[str, Any], spec: TaskSpec, base: Path = Path()) -> None:
        """``base``: the folder for relative paths in the members' settings."""
        episodic = any(is_episodic(task) for task in tasks.values())
        self.tasks = tasks
        """The tasks by name, in the spec's order."""
        self.members: Mapping[str, Any] = {
            name: task if is_episodic(task) or not episodic else OneCall(task) for name, task in tasks.items()
        }
        """The tasks for rollouts: if one of them plays episodes, all do."""
        self._spec = spec
        self._base = base

    def member(self, prompt: Prompt) -> tuple[Any, Prompt]:
        """Return a prompt's task, and the prompt in that task's form."""
        name, _, uid = prompt.uid.partition("/")
        return self.members[name], replace(prompt, uid=uid)

    def scored_by(self, prompt: Prompt) -> tuple[Any, Prompt]:
        """Return the task that scores responses to a prompt, and the prompt in that task's form."""
        return self.tasks[task_name(prompt)], self.member(prompt)[1]

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows. A task with too few training prompts repeats them. Held-out prompts are not repeated:
        the split ends before the first repetition."""
        members = self._spec.mix
        strata, rows_before = interleave([member.weight for member in members], size)
        row_counts = Counter(strata.tolist())
        member_prompts: list[Sequence[Prompt]] = []
        for index, member in enumerate(members):
            source = (member.train if split == "train" else member.eval) or SplitSpec()
            if source.path is None and source.size is None:
                source = source.model_copy(update={"size": max(1, row_counts[index])})
            location = f"task.mix.{index}.{split}"
            member_prompts.append(load_prompts(split, source, self.tasks[member.name], self._base, location))
        if split == "eval":
            lengths = np.array([len(prompts) for prompts in member_prompts])
            again = np.flatnonzero(rows_before >= lengths[strata])
            end = int(again[0]) if len(again) else size
            strata, rows_before = strata[:end], rows_before[:end]
        names = [member.name for member in members]
        return MixedPrompts(names, member_prompts, strata=strata, rows_before=rows_before)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Any:
        task, its_prompt = self.scored_by(prompt)
        return task.reward(its_prompt, response, finished)


class OneCall:
    """Plays a task of single responses as an episode: one call of the policy or, with MCP servers, calls until a reply
    uses no tool. The task scores the last reply."""

    def __init__(self, task: Task, servers: McpServers | None = None) -> None:
        self.task = task
        self._servers = servers
        for name in ("prompts", "check_prompt"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    async def run(self, prompt: Prompt, model: ModelAccess) -> Any:
        import aiohttp

        messages, tools, variables = chat_of(prompt)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            if self._servers is None:
                shown_messages = with_data_urls(messages, prompt.images)
                await ask(http, model, shown_messages, tools=tools or (), variables=variables)
                return None
            if tools:
                raise ValueError("the row has tools of its own, which the MCP servers of task.tools do not have")
            row = replace(prompt, content=messages)
            # The reward tells whether a reply without a call of a tool has ended the episode, or a limit has.
            environment = ToolEnvironment(row, (), judge=lambda *_: 1.0, servers=self._servers)
            result, _ = await play(environment, model, http, variables=variables, images=prompt.images)
            return ScoreLater(result.metrics) if result.reward else RewardResult(0.0, result.metrics)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Any:
        return self.task.reward(prompt, response, finished)
