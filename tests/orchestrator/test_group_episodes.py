"""Groups of episodes are played instead of requested, recorded while they run, scored, and abandoned as a group."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import rollout, segment, spec
from test_rollout_scheduler import Harness, source

from asyncrl_cli.gateway.actor import SessionEnd, SessionOpening
from asyncrl_cli.gateway.sessions import Action, ClientRequest
from asyncrl_cli.orchestrator import episodes as played_episodes
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.orchestrator.rollout_scheduler import rollout_seed
from asyncrl_cli.records.generation import CONTEXT, Rollout, RolloutRequest, Sampling, Segment
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.workers.messages import Played


class Episodes:
    """Plays episodes until the test ends them."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[Prompt, Sampling, int, Any]] = {}
        self.open: dict[str, asyncio.Future[Any]] = {}
        self.record: dict[str, Callable[[list[Segment]], None]] = {}
        self.cancelled: list[str] = []

    def conclude(self, rollout_id: str) -> None:
        pass

    @property
    def resting(self) -> int:
        return len(self.open)

    async def play(
        self, rollout_id: str, prompt: Prompt, sampling: Sampling, priority: int, recorded: Any, record: Any
    ) -> Any:
        self.asked[rollout_id] = prompt, sampling, priority, recorded
        self.record[rollout_id] = record
        self.open[rollout_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[rollout_id]
        except asyncio.CancelledError:
            self.cancelled.append(rollout_id)
            raise
        finally:
            del self.open[rollout_id]


def episode(rollout_id: str) -> Rollout:
    versions = np.array([CONTEXT, CONTEXT, 0, 0], np.int32)
    logprobs = np.where(versions == CONTEXT, 0, -0.5).astype(np.float32)
    return Rollout(
        *(np.arange(5, 9, dtype=np.int32), logprobs, versions),
        rollout_id=rollout_id,
        prompt_ids=(),
        text="text",
        finish_reason="stop",
    )


@asynccontextmanager
async def source_of_episodes(folder: Path, **sections: Any) -> AsyncIterator[tuple[Harness, Episodes]]:
    episodes = Episodes()
    async with source(folder, episodes=episodes, **sections) as harness:
        yield harness, episodes


async def end(harness: Harness, episodes: Episodes, rollout_id: str, score: Scored | RewardFailure) -> None:
    episodes.open[rollout_id].set_result((episode(rollout_id), score))
    await harness.settled()


async def test_each_rollout_of_a_group_is_an_episode(tmp_path: Path) -> None:
    async with source_of_episodes(tmp_path, seed=7) as (harness, episodes):
        assert sorted(episodes.asked) == [f"{group}-{place}" for group in range(4) for place in range(2)]
        assert harness.requests == []
        prompt, sampling, priority, recorded = episodes.asked["2-1"]
        assert (prompt.uid, sampling.seed, priority, recorded) == ("p2", rollout_seed(7, 2, 1), 2, {})
        for place in range(2):
            await end(harness, episodes, f"1-{place}", Scored(float(place), {"turns": 2.0}))
            await end(harness, episodes, f"0-{place}", Scored(float(place)))
        assert await harness.train() == [0, 1]
        assert harness.table("rollouts", "rollout_index, reward, metrics, tokens")[-1] == (1, 1.0, '{"turns": 2.0}', 2)
        assert {"4-0", "5-1"} <= set(episodes.open), "their room is used again"


async def test_resting_episodes_keep_their_slots(tmp_path: Path) -> None:
    async with source_of_episodes(
        tmp_path, rollout={"group_size": 2, "max_running_rollouts": 5}, pipeline={"groups_per_step": 8}
    ) as (harness, episodes):
        assert sorted(episodes.open) == ["0-0", "0-1", "1-0", "1-1"]
        harness.client.room.set()
        await harness.settled()
        assert len(episodes.asked) == 4
        for place in range(2):
            await end(harness, episodes, f"0-{place}", Scored(1.0))
        assert sorted(episodes.open) == ["1-0", "1-1", "2-0", "2-1"]


class Agents:
    """The gateway and the workers of episodes that call the model once, and end with the result in ``results``."""

    continues_programs = False

    def __init__(self) -> None:
        self.results: defaultdict[str, asyncio.Future[Played]] = defaultdict(asyncio.Future)
        self.silent: set[str] = set()  # episodes that call no model

    @asynccontextmanager
    async def slot(self, isolated: bool) -> AsyncIterator[Any]:
        yield self

    @asynccontextmanager
    async def session(self, opening: SessionOpening, on_segments: Any, generate: Any) -> AsyncIterator[Any]:
        async def finish() -> SessionEnd:
            if opening.rollout_id in self.silent:
                return SessionEnd(0)
            return SessionEnd(0, episode(opening.rollout_id), "text", "", ((0, 4),))

        request = RolloutRequest(f"{opening.rollout_id}/0", (1, 2), opening.sampling)
        call = asyncio.create_task(generate(request, None))
        access = SimpleNamespace(base_url="", api_key="", model="", call=call)
        try:
            yield SimpleNamespace(access=access, end=asyncio.Future(), finish=finish)
        finally:
            call.cancel()

    async def play(self, name: str, prompt: Prompt, access: Any, isolated: bool) -> Played:
        await asyncio.shield(access.call)
        return await self.results[name]

    def conclude(self, rollout_id: str) -> None:
        pass


@pytest.mark.parametrize("ending", ["evaluation", "rejection"])
async def test_last_episodes_to_end_free_their_slots_for_a_group(tmp_path: Path, ending: str) -> None:
    agents: Any = Agents()
    small = spec()
    episodes = played_episodes.Episodes(
        small, small.task, client=agents, gateway=agents, workers=agents, scoring=agents
    )
    rollouts = {"group_size": 2, "max_running_rollouts": 2, "retries": 0}
    async with source(tmp_path, episodes=episodes, rollout=rollouts) as harness:
        if ending == "rejection":  # while the other episode's call runs
            agents.results["0-0"].set_result(Played(RewardFailure("it never returned")))
            await harness.end(rollout("0-0/0"))
        else:
            evaluated = asyncio.create_task(episodes.play("eval:0:greedy:0", Prompt("e", ""), Sampling(0.0, 8)))
            for place in range(2):
                agents.results[f"0-{place}"].set_result(Played(Scored(float(place))))
                await harness.end(rollout(f"0-{place}/0"))
            await harness.end(rollout("eval:0:greedy:0/0"))
            assert harness.ids[3:] == [], "the evaluation's episode has a slot until it is judged"
            agents.results["eval:0:greedy:0"].set_result(Played(Scored(1.0)))
            await harness.settled()
            await evaluated
        assert {"1-0/0", "1-1/0"} <= set(harness.ids)


async def test_a_reward_is_refused_if_the_journal_lacks_it_because_its_group_was_just_rejected(tmp_path: Path) -> None:
    agents: Any = Agents()
    external = spec(rollout={"group_size": 2}, data={"train": {"path": __file__}})
    sessions = OutsideSessions(external, agents)
    episodes = played_episodes.Episodes(
        external, external.task, client=agents, gateway=agents, workers=sessions, scoring=agents
    )
    async with source(tmp_path, episodes=episodes) as harness:
        sessions.buffer = harness.buffer
        first, second = [str((await sessions.answer(ClientRequest(Action.OPEN))).body["session"]) for _ in range(2)]
        record, release = harness.buffer.record, asyncio.Event()

        async def record_slowly(*records: Any, **outcomes: Any) -> Any:
            settled = await record(*records, **outcomes)
            await release.wait()
            return settled

        harness.buffer.record = record_slowly  # type: ignore[method-assign]
        agents.silent.add(first)
        await sessions.answer(ClientRequest(Action.GIVE_UP, first))
        await harness.settled()
        rewarding = asyncio.create_task(sessions.answer(ClientRequest(Action.REWARD, second, reward=1.0)))
        await harness.settled()
        release.set()
        answer = await rewarding
        assert (answer.status, answer.code) == (410, "session_ended")
        assert harness.states()[0] == "rejected"


async def test_a_failed_episode_rejects_its_group(tmp_path: Path) -> None:
    async with source_of_episodes(tmp_path, rollout={"group_size": 3}) as (harness, episodes):
        await end(harness, episodes, "0-0", Scored(1.0))
        await end(harness, episodes, "0-1", RewardFailure("it never returned"))
        assert episodes.cancelled == ["0-2"]
        assert harness.states()[0] == "rejected"
        assert harness.reasons == ["it never returned"]
        assert "4-0" in episodes.open, "its room is free again"


async def test_turns_are_recorded_and_played_again_after_a_resume(tmp_path: Path) -> None:
    async with source_of_episodes(tmp_path) as (harness, episodes):
        for part in (segment("2-1", 0, 3, CONTEXT), segment("2-1", 3, 2), segment("2-1.1", 0, 1, CONTEXT)):
            episodes.record["2-1"]([part])
        await end(harness, episodes, "2-0", Scored(1.0))
        assert len(harness.table("segments", "group_id")) == 3 + 2
    async with source_of_episodes(tmp_path) as (harness, episodes):
        assert "2-0" not in episodes.asked
        recorded = episodes.asked["2-1"][-1]
        starts = {number: [(part.start, part.version) for part in parts] for number, parts in recorded.items()}
        assert starts == {0: [(0, CONTEXT), (3, 0)], 1: [(0, CONTEXT)]}
        assert episodes.asked["3-0"][-1] == {}
