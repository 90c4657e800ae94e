"""`killed`: the killed actors, which are stand-ins; `run`: the folder of a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins import Actor

from asyncrl_cli.runs.directory import RunDirectory


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import ray
    from ray.actor import ActorHandle

    kill, actors = ray.kill, list[Any]()

    def kill_any(actor: Any) -> None:
        actors.append(actor)
        if isinstance(actor, ActorHandle):
            kill(actor)
        elif isinstance(actor, Actor):
            actor.die()

    monkeypatch.setattr(ray, "kill", kill_any)
    return actors


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "test")
