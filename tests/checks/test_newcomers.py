"""Nodes that join during a run are examined once, and a bad node is not used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import newcomers
from asyncrl_cli.checks.hosts.newcomers import Newcomers
from asyncrl_cli.checks.hosts.probe import Host
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.orchestrator.nodes import Node
from tests.orchestrator.stand_ins import Notes, run, spec

SILENT = Finding("connections", Status.FAILURE, "new -> head: head gave no answer", "open the ports")
OPEN = Finding("token", Status.WARNING, "Ray asks for no token on guest", "start Ray with a token")


class Scene:
    """A run on the nodes ``head`` and ``ranks``, while others join. ``found`` has the findings of every examination."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = [self.node("head"), self.node("ranks")]
        self.found: list[Finding] | Exception = []
        self.examined: list[tuple[str, list[tuple[str, float]], int]] = []
        self.notes = Notes()
        monkeypatch.setattr(newcomers, "live_nodes", lambda: tuple(self.nodes))
        monkeypatch.setattr(newcomers, "_driver_node", lambda: "head")
        monkeypatch.setattr(newcomers, "examine", self._examine)
        budget = self.notes.budget()
        self.newcomers = Newcomers(*(spec(), 7, Path("run")), lambda: ("ranks", "ranks"), budget.note, budget.warn)

    def node(self, name: str) -> Node:
        return Node(name, f"10.0.0.{len(name)}", name, {}, {"CPU": 8.0})

    def join(self, name: str) -> None:
        self.nodes.append(self.node(name))

    async def _examine(self, hosts: Sequence[Host], folder: Path, replica_bytes: int, newcomer: str) -> list[Finding]:
        self.examined.append((newcomer, [(host.node_id, host.share) for host in hosts], replica_bytes))
        await asyncio.sleep(0)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_only_a_node_that_has_joined_is_examined_and_only_once(scene: Scene) -> None:
    async def check() -> None:
        usable = scene.newcomers.usable
        assert await usable(["head", "ranks"]) and not scene.examined
        scene.join("guest")
        scene.join("other")
        scene.found = [OPEN]
        assert await asyncio.gather(usable(["guest"]), usable(["guest", "head"])) == [True, True]
        # Examined together with the driver's host and the ranks' hosts, which already have their weights in memory.
        assert scene.examined == [("guest (10.0.0.5)", [("head", 0.0), ("ranks", 0.0), ("guest", 1.0)], 7)]
        assert len(scene.notes.warnings) == 1 and "no token on guest" in scene.notes.warnings[0]
        assert scene.notes == []

    run(check())


def test_a_bad_node_is_named_and_avoided(scene: Scene) -> None:
    async def check() -> None:
        usable = scene.newcomers.usable
        scene.join("guest")
        scene.found = [SILENT]
        assert await asyncio.gather(usable(["guest"]), usable(["head", "guest"])) == [False, False]
        assert (scene.newcomers.avoided, len(scene.examined)) == ({"guest"}, 1)
        ((kind, part, message),) = scene.notes
        assert (kind, part) == ("hosts", "guest (10.0.0.5)")
        assert "does not use this host" in message and "new -> head: head gave no answer" in message
        assert await usable(["ranks"])
        assert not await usable(["guest"]) and len(scene.examined) == 1

    run(check())


@pytest.mark.parametrize("gone", [False, True])
def test_problems_of_the_driver_do_not_exclude_a_host(scene: Scene, gone: bool) -> None:
    async def check() -> None:
        scene.found = ConfigError("No space left on device", location="runs_dir", hint="free some")
        if not gone:
            scene.join("guest")
        assert await scene.newcomers.usable(["guest"])
        assert len(scene.notes.warnings) == (not gone) and not scene.newcomers.avoided

    run(check())
