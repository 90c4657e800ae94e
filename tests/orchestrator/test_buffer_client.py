"""Calls to the buffer survive its death: each is answered once, by an actor that has opened the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from stand_ins import BufferActors, Notes, StandInBuffer, prompts, run, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.orchestrator.buffer_client import BufferClient
from asyncrl_cli.records.groups import Candidate, Opening
from asyncrl_cli.system.remote import ActorDied
from asyncrl_cli.system.supervised_actor import RestartBudget

SPEC = spec(pipeline={"groups_per_step": 4, "max_staleness": 0})
CANDIDATES = [
    Candidate(serial, prompt, (1, 2), {"epoch": 0, "position": serial}) for serial, prompt in enumerate(prompts(9), 1)
]


class Harness:
    """A client of an open buffer, and what it reports."""

    def __init__(self, path: Path, max_restarts: int) -> None:
        self.notes = Notes()
        self.actors = BufferActors(path / "journal.db", SPEC)
        self.client = self.actors.client(self.notes, max_restarts)
        self.reopened: list[Opening] = []
        self.client.on_reopen = self.reopened.append


Test = Callable[[Harness], Awaitable[None]]


def play(path: Path, test: Test, max_restarts: int = 10) -> None:
    async def opened() -> None:
        harness = Harness(path, max_restarts)
        await harness.client.open("train", "", None)
        try:
            await test(harness)
        finally:
            harness.actors.last.die()

    run(opened())


async def admit(client: BufferClient, first: int, count: int) -> list[int]:
    """Offer prompts; returns the indices of the groups admitted."""
    admitted = await client.admit(CANDIDATES[first : first + count])
    return [admission.group_id for admission in admitted.admissions]


def test_answers_are_passed_on(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert await admit(harness.client, 0, 3) == [0, 1, 2]
        assert await admit(harness.client, 0, 9) == [3]
        assert (len(harness.actors.made), harness.reopened, harness.notes) == (1, [], [])

    play(tmp_path, test)


@pytest.mark.parametrize("does_it_first", [False, True], ids=["before the work", "after the work"])
def test_a_call_that_died_is_made_again_after_the_driver_heard_of_the_opening(
    tmp_path: Path, does_it_first: bool
) -> None:
    async def test(harness: Harness) -> None:
        await admit(harness.client, 0, 1)
        first = harness.actors.last
        first.dies_at, first.does_it_first = "admit", does_it_first
        admitted = asyncio.create_task(admit(harness.client, 1, 2))
        heard: list[int] = []
        harness.client.on_reopen = lambda opening: heard.extend(
            group.admission.group_id for group in opening.groups if not admitted.done()
        )
        # Groups whose answer was lost are in the opening; the others are in the answer.
        assert (await admitted, heard) == (([], [0, 1, 2]) if does_it_first else ([1, 2], [0]))
        assert await admit(harness.client, 3, 9) == [3]
        assert harness.notes == [("buffer", "buffer", "the process died")]
        assert len(harness.actors.made) == 2

    play(tmp_path, test)


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_buffer_that_dies_while_the_run_starts_is_made_again_a_few_times(tmp_path: Path, deaths: int) -> None:
    async def check() -> None:
        actors = BufferActors(tmp_path / "journal.db", SPEC)

        def make() -> StandInBuffer:
            actor = actors()
            if len(actors.made) <= deaths:
                actor.dies_at, actor.does_it_first = "open", True
            return actor

        client = BufferClient(make, 600.0, Notes().budget())
        if deaths == 3:
            with pytest.raises(ActorDied):
                await client.open("train", "", None)
        else:
            assert (await client.open("train", "", None)).serial == 0
            assert await admit(client, 0, 1) == [0]
            assert len(actors.made) == deaths + 1
        actors.last.die()

    run(check())


def test_calls_wait_until_the_journal_is_open(tmp_path: Path) -> None:
    async def check() -> None:
        actors = BufferActors(tmp_path / "journal.db", SPEC)
        client = actors.client()
        early = asyncio.create_task(admit(client, 0, 1))
        await asyncio.sleep(0)
        await client.open("train", "", None)
        assert await early == [0]
        actors.last.die()

    run(check())


def test_callers_that_lose_the_same_buffer_replace_it_once(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        harness.actors.last.dies_at = "admit"
        admitting = [admit(harness.client, index, 1) for index in range(3)]
        answers = await asyncio.gather(*admitting, harness.client.fallback(0), harness.client.fallback(0))
        assert answers[:3] == [[0], [1], [2]]
        assert len(harness.actors.made) == 2
        assert len(harness.reopened) == len(harness.notes) == 1

    play(tmp_path, test)


def test_a_buffer_that_dies_while_it_opens_is_replaced_like_any_other(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        make, broken = harness.client._buffer._make, 2

        def make_broken() -> object:
            nonlocal broken
            actor = make()
            if broken:
                broken -= 1
                actor.dies_at, actor.does_it_first = "open", True
            return actor

        harness.client._buffer._make = make_broken
        harness.actors.last.dies_at = "admit"
        assert await admit(harness.client, 0, 2) == [0, 1]
        assert len(harness.actors.made) == 4
        assert len(harness.notes) == 3
        assert [opening.serial for opening in harness.reopened] == [0], "only for the actor that opened"

    play(tmp_path, test)


def test_too_many_deaths_end_the_run(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        for _ in range(2):
            harness.actors.last.die()
            await harness.client.fallback(0)
        harness.actors.last.die()
        with pytest.raises(RunError, match=r"restarted 2 times in 6 hours, .* the first cause: buffer: the proc"):
            await harness.client.fallback(0)
        assert len(harness.notes) == 3

    play(tmp_path, test, max_restarts=2)


def test_a_buffer_that_never_comes_up_again_ends_the_run_though_it_records_the_restarts(tmp_path: Path) -> None:
    async def check() -> None:
        actors = BufferActors(tmp_path / "journal.db", SPEC)

        def make() -> StandInBuffer:
            actor = actors()
            if len(actors.made) > 1:
                actor.dies_at = "open"
            return actor

        async def record(kind: str, part: str, message: str) -> None:
            await client.failed(kind, part, message)

        client = BufferClient(make, 600.0, RestartBudget(3, record, lambda text: None))
        await client.open("train", "", None)
        actors.last.die()
        with pytest.raises(RunError, match="restarted 3 times in 6 hours"):
            await client.admit(CANDIDATES[:1])

    with patch("asyncrl_cli.system.supervised_actor.LAST_RECORD_S", 0.05):
        run(check())


def test_a_fault_of_the_journal_is_not_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(harness: Harness) -> None:
        def full(*_: object) -> None:
            raise JournalError("the journal failed: database or disk is full")

        monkeypatch.setattr("asyncrl_cli.journal.writer.Journal.commit", full)
        for _ in range(2):
            with pytest.raises(JournalError, match="disk is full"):
                await admit(harness.client, 0, 1)
        assert len(harness.actors.made) == 1

    play(tmp_path, test)


def test_a_journal_that_cannot_be_opened_again_ends_the_run(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        await admit(harness.client, 0, 1)
        harness.actors.last.die()
        journal = tmp_path / "journal.db"
        whole = journal.read_bytes()
        journal.write_bytes(b"no database " * 2000)
        with pytest.raises(JournalError, match="not a database"):
            await admit(harness.client, 1, 1)
        journal.write_bytes(whole)

    play(tmp_path, test)
