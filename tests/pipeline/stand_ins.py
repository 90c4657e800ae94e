"""An engine without vLLM, for the routing round it: actor methods with ``.remote()``, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.pipeline.dispatcher import Dispatcher
from asyncrl_cli.rollout.records import Delivery, EngineActivity, Rollout, RolloutFailure, RolloutRequest, Sampling
from asyncrl_cli.spec.sections import ExperimentSpec


class _Method:
    """Takes effect when it is called, as Ray keeps the order of calls; the answer is awaited."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Any:
        answer = self._function(*arguments)
        return answer if asyncio.iscoroutine(answer) else _at_once(answer)


async def _at_once(value: Any) -> Any:
    return value


class StandInEngine:
    """Records what it is told; ``deliver`` says what ``collect`` brings."""

    def __init__(self) -> None:
        self.submitted: list[RolloutRequest] = []
        self.cancelled: list[str] = []
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._idle = asyncio.Event()
        self.submit = _Method(self.submitted.extend)
        self.cancel = _Method(self.cancelled.extend)
        self.collect = _Method(self._collect)

    async def _collect(self, timeout_s: float) -> Delivery:
        if self._deliveries.empty():
            self._idle.set()
        return await self._deliveries.get()

    async def deliver(self, *ended: Rollout | RolloutFailure, activity: EngineActivity | None = None) -> None:
        """Have these delivered, and wait until the caller of ``collect`` has dealt with them."""
        rollouts = [entry for entry in ended if isinstance(entry, Rollout)]
        failures = [entry for entry in ended if isinstance(entry, RolloutFailure)]
        self._idle.clear()
        self._deliveries.put_nowait(Delivery(rollouts, failures, activity or EngineActivity()))
        await self._idle.wait()

    @property
    def ids(self) -> list[str]:
        """What was submitted, in order."""
        return [request.rollout_id for request in self.submitted]


def dispatcher_over(engines: list[StandInEngine], retries: int = 0) -> Dispatcher:
    """A dispatcher whose engines are called ``engine-0`` and so on."""
    return Dispatcher([(f"engine-{i}", engine) for i, engine in enumerate(engines)], retries, timeout_s=600.0)


def request(rollout_id: str) -> RolloutRequest:
    return RolloutRequest(rollout_id, (1, 2), Sampling(1.0, 8))


def rollout(
    rollout_id: str, versions: tuple[int, ...] = (0, 0), ids: tuple[int, ...] | None = None, finished: bool = True
) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=(1, 2),
        response_ids=np.array(ids or range(5, 5 + len(versions)), dtype=np.int32),
        logprobs=np.full(len(versions), -0.5, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        text=f"text of {rollout_id}",
        finish_reason="stop" if finished else "length",
    )


def spec(**sections: Any) -> ExperimentSpec:
    """The smallest spec, with sections changed."""
    smallest: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"use": "chain_sum"}, "stop": {"steps": 10}}
    return ExperimentSpec.model_validate(smallest | sections)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", {"answer": i}) for i in range(count)]
