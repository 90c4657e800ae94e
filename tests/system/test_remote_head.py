"""No actor is created while Ray's head is lost: its creation would block the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl_cli.system import remote
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor, not_recorded


@pytest.mark.parametrize("once", [False, True])
async def test_an_actor_is_created_only_after_rays_head_answers(monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    head_lives, created = asyncio.Event(), list[object]()

    async def head_answers() -> bool:
        return head_lives.is_set()

    async def start(actor: Any) -> None:
        """The actor is ready immediately."""

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(remote, "head_answers", head_answers)
    monkeypatch.setattr(remote, "HEAD_LOOK_S", 0.001)

    def make() -> object:
        created.append(object())
        return created[-1]

    actor = SupervisedActor("scorer", "scorer", make, start, RestartBudget(0, not_recorded, print))
    starting = asyncio.create_task(actor.start_once() if once else actor.running())
    await asyncio.sleep(0.05)
    assert not created and not starting.done()
    head_lives.set()
    await asyncio.wait_for(starting, 60.0)
    assert len(created) == 1
