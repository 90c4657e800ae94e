"""The Ray actor that scores responses, apart from engines, trainer and driver.

It runs nothing of the user's itself, so it always answers; a reward that hangs or ends its process costs a
``RewardProcess``, which its pool replaces. Plain and async rewards of a mix have a pool each, so that neither holds
the other up.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.tasks.mix import task_name
from asyncrl_cli.workers.reward_pool import RewardPool
from asyncrl_cli.workers.reward_process import RewardProcess
from asyncrl_cli.workers.scoring import Response, RewardFailure, Scored


class Scorer:
    """Scores as many responses at a time as its processes take; others wait their turn."""

    def __init__(self, spec: TaskSpec, search_path: str, log_dir: str) -> None:
        redirect_output(log_dir, "scorer")
        self._spec = spec
        self._search_path = Path(search_path)
        self._pools: dict[bool, RewardPool] = {}
        self._awaiting: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Load the task in all processes. Raises ``TaskError``."""
        first = await RewardProcess.start(self._spec, self._search_path)
        loaded = first.loaded
        self._awaiting = loaded.awaiting
        for together in sorted({name in loaded.awaiting for name in loaded.names}):
            own = first if together == loaded.together else None
            self._pools[together] = RewardPool(self._spec, self._search_path, together, own)
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        """What every response scores, in order. Raises ``TaskError`` when the task can no longer be loaded."""
        return list(await asyncio.gather(*map(self._score, responses)))

    async def ping(self) -> None:
        """Answer, which shows that the actor is at work."""

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()

    async def _score(self, response: Response) -> Scored | RewardFailure:
        name = task_name(response[0]) if self._spec.mix else ""
        return await self._pools[name in self._awaiting].score(response)
