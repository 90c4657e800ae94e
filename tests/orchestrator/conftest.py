"""Stand-ins for actors die when they are killed."""

from __future__ import annotations

from typing import Any

import pytest
from stand_ins import Actor


@pytest.fixture(autouse=True)
def kill(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    kill = ray.kill

    def kill_any(actor: Any) -> None:
        if isinstance(actor, Actor):
            actor.die()
        else:
            kill(actor)

    monkeypatch.setattr(ray, "kill", kill_any)
