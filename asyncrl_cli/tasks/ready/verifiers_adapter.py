"""The ready task ``verifiers``: environments of the ``verifiers`` package (0.4 or newer).

An environment is a taskset and the agents that play it. It brings its own programs and judges its own episodes; asyncrl
only gives it the policy's endpoint, and runs it as an agent.

``verifiers`` pins older versions of packages than vLLM needs, so it is not in an extra and must be installed
separately.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Split
from asyncrl_cli.tasks.prompts import is_held_out

KEY = "ASYNCRL_POLICY_KEY"
"""Prefix of the environment variables that pass the policy's keys to verifiers; each episode has a variable."""
_KEY_COUNTER = count()
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""The default agent for a plain taskset: a chat loop on this machine."""


class EpisodeFailed(Exception):
    """verifiers could not play or judge an episode; the message says why."""


class VerifiersEnvironment:
    """The task ``verifiers``."""

    def __init__(self, taskset: dict[str, Any], held_out: bool = True, **env: Any) -> None:
        """``taskset`` and ``env``: the keys below ``[env]`` in a config of verifiers, such as ``taskset: {id: gsm8k}``,
        ``agent`` and ``max_turns``. The default ``agent`` is a chat loop on this machine.

        ``held_out`` keeps one task in ten for the eval split; otherwise both splits have all tasks.

        Raises ``TaskError`` if verifiers is not installed, or does not take the options.
        """
        try:
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise TaskError(
                f"the task verifiers needs the package verifiers, 0.4 or newer: {error}",
                location="task.use",
                hint="pip install verifiers (it needs older packages than vLLM's CPU build; see docs/tasks.md)",
            ) from error
        if "id" not in env:
            env.setdefault("agent", LOCAL)
        try:
            self._env = loaders.load_environment(loaders.resolve_env_config({"taskset": taskset, **env}))
        except Exception as error:
            raise TaskError(
                f"verifiers does not take these options: {error}",
                location="task.options",
                hint="they are the keys below [env] in verifiers' own config",
            ) from error
        self._name = str(taskset.get("id", "verifiers"))
        self._held_out = held_out
        self._tasks: list[Any] = []
        self._stream = iter(self._env.taskset)
        self._serving: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Up to ``size`` of the taskset's tasks in the split."""

        def rows() -> Iterator[Prompt]:
            index = 0
            while (task := self._task(index)) is not None:
                if not self._held_out or is_held_out(task.key) == (split == "eval"):
                    data = task.data
                    # Only for readers of the journal: the environment itself asks the policy.
                    question = data.prompt_text or data.name or data.id or "?"
                    yield Prompt(f"{self._name}/{task.key}", question, {"index": index})
                index += 1

        return list(islice(rows(), size))

    async def run(self, prompt: Prompt, model: ModelAccess) -> RewardResult:
        """Play one episode; the reward is the sum of its agents' rewards. Raises ``EpisodeFailed``."""
        v1 = importlib.import_module("verifiers.v1")
        await self._serve()
        with key_variable(model.api_key) as name:
            client = v1.EvalClientConfig(base_url=model.base_url, api_key_var=name)
            context = v1.ModelContext(model=model.model, client=client)
            episode = await self._env.run_episode(self._task(prompt.fields["index"]), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "it was not ok")
        metrics: dict[str, float] = {}
        for trace in episode.traces:
            metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return RewardResult(float(sum(trace.reward for trace in episode.traces)), metrics)

    def _task(self, index: int) -> Any:
        """The taskset's task ``index``; None after the last."""
        self._tasks.extend(islice(self._stream, max(0, index + 1 - len(self._tasks))))
        return self._tasks[index] if index < len(self._tasks) else None

    async def _serve(self) -> None:
        """Start the environment's servers at the first episode; they run until the process ends."""

        async def serve() -> None:
            async with self._env.serving():
                self._ready.set()
                await asyncio.Event().wait()

        if self._serving is None:
            # In an empty context, or it would belong to this episode and be cancelled with it.
            self._serving = asyncio.get_running_loop().create_task(serve(), context=contextvars.Context())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ready.cancel()
            self._serving.result()


@contextmanager
def key_variable(api_key: str) -> Iterator[str]:
    """Set an environment variable with an episode's key; no other episode of this process uses the variable."""
    name = f"{KEY}_{next(_KEY_COUNTER)}"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]
