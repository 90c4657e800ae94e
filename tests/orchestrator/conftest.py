"""Stand-ins for actors die when they are killed; `run` is the folder of a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins import Actor

from asyncrl_cli.runs.directory import RunDirectory


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


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "test")
