"""Groups from admission to their end, with the real buffer and stand-in engines.

Every prompt is trained on exactly once, whichever part dies. Recorded tokens are not generated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Encoder
from stand_ins import Here, StandInEngine, actors, client_over, collecting, kill, prompts, rollout, run, segment, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.data.loader import PromptFilter, PromptLoader
from asyncrl_cli.data.prompt_encoder import Encoded
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.schema import open_for_reading
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.rollout_scheduler import MIN_FAILURES, RolloutScheduler, rollout_seed
from asyncrl_cli.records.generation import RolloutFailure, RolloutRequest, group_and_index
from asyncrl_cli.records.groups import BufferSettings, Counts, Outcome, PublishRecord, TakenBatch, Waiting
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.workers.scoring import Response

pytestmark = pytest.mark.slow

TURNS = 100
"""Iterations of the event loop after which nothing more happens."""
STEPS = 4
"""Steps of a run to its end."""
GROUPS_OF_3: dict[str, Any] = {"rollout": {"group_size": 3}, "pipeline": {"groups_per_step": 1, "max_staleness": 1}}


class Scorer:
    """Scores by ``rule``, by default with the last character of the response. It waits until ``held`` is set."""

    def __init__(self, together: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self.calls: list[int] = []  # the number of responses in each call
        self.rule: Callable[[str], float | RewardFailure | None] = last_digit
        self.held: asyncio.Event = asyncio.Event()
        self.held.set()
        self.together = together

    def sees_group(self, prompt: Prompt) -> bool:
        return self.together

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        if not responses:
            return []
        self.asked += [(prompt.uid, text) for prompt, text, _ in responses]
        self.calls.append(len(responses))
        await self.held.wait()
        texts = [part for _, text, _ in responses for part in ([text] if isinstance(text, str) else text)]
        judged = [self.rule(text) for text in texts]
        return [score if isinstance(score, RewardFailure) else Scored(score) for score in judged]


def last_digit(text: str) -> float:
    return float(text[-1]) if text[-1].isdecimal() else 0.0


class Harness:
    """A scheduler with all other parts."""

    def __init__(
        self, folder: Path, engines: int = 1, together: bool = False, episodes: Any = None, **sections: Any
    ) -> None:
        sections = {"rollout": {"group_size": 2}, "pipeline": {"groups_per_step": 2, "max_staleness": 1}} | sections
        self.spec = spec(**sections)
        self.journal = folder / "journal.db"
        self.client = client_over(engines, slots=self.spec.rollout.max_running_rollouts)
        self.scorer = Scorer(together)
        encoder: Any = Encoder() if episodes is None else NoTokens()
        self.stream = PromptSource(PromptLoader(prompts(1000), 0, shuffle=False), encoder)
        self.spawned: list[asyncio.Task[None]] = []
        self.episodes = episodes
        if episodes is not None:
            episodes.client = self.client
        self.warned: list[str] = []
        if self.spec.data.filter is not None:
            self.stream.filter = PromptFilter(1, 0.0, 0)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open the journal, and continue the run."""
        self.buffer, opening = await Buffer.open(
            self.journal, BufferSettings.from_spec(self.spec), "train", limit_s=600.0
        )
        self.groups = RolloutScheduler(
            self.spec,
            buffer=self.buffer,
            client=self.client,
            scoring=self.scorer,  # type: ignore[arg-type]
            prompts=self.stream,
            spawn=lambda work: self.spawned.append(tasks.create_task(work)),
            episodes=self.episodes,
            warn=self.warned.append,
        )
        self.groups.resume(opening)
        self.spawned.append(tasks.create_task(self.groups.run()))
        await self.settled()

    async def settled(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def engines(self) -> list[StandInEngine]:
        return actors(self.client)

    @property
    def reasons(self) -> list[str]:
        """The reasons of the recently lost groups."""
        return [failure.reason for failure in self.groups.failures.recent]

    @property
    def requests(self) -> list[RolloutRequest]:
        return [request for engine in self.engines for request in engine.submitted]

    @property
    def ids(self) -> list[str]:
        return [request.rollout_id for request in self.requests]

    async def end(self, *results: Any) -> None:
        """Have engines deliver results: names of rollouts, rollouts or failures."""
        for result in results:
            ended = rollout(result) if isinstance(result, str) else result
            for engine, state in zip(self.engines, self.client.engines, strict=True):
                if ended.rollout_id in state.pending:
                    await engine.deliver(ended)
        await self.settled()

    async def finish(self, *group_ids: int) -> None:
        await self.end(*(f"{group_id}-{place}" for group_id in group_ids for place in range(2)))

    async def take(self) -> TakenBatch | Waiting:
        """The next step's batch, or the reason why there is none."""
        return await self.buffer.take(self.table("batches", "count(*)")[0][0], 0.0)

    async def train(self) -> list[int]:
        """Take the next batch and publish; returns its groups, or none if there is no batch."""
        taken = await self.take()
        if isinstance(taken, Waiting):
            return []
        version = taken.batch.step + 1
        await self.buffer.publish(PublishRecord(version, version, "sum", 0.0, 0.0, 0.0, 0.0))
        self.client.room.set()
        await self.settled()
        return [group.group_id for group in taken.batch.groups]

    def table(self, name: str, columns: str) -> list[tuple[Any, ...]]:
        """Rows of a table in the journal."""
        with closing(open_for_reading(self.journal)) as connection:
            return connection.execute(f"SELECT {columns} FROM {name} ORDER BY 1").fetchall()

    def states(self) -> dict[int, str]:
        return dict(self.table("groups", "id, state"))

    async def counts(self) -> Counts:
        return (await self.buffer.record()).counts


class NoTokens:
    """An encoder for a task with episodes as rollouts."""

    sees_images = False

    def encode_with_images(self, prompt: Prompt) -> Encoded:
        return Encoded(())


@asynccontextmanager
async def source(folder: Path, **options: Any) -> AsyncIterator[Harness]:
    """A running scheduler, which is killed at the end."""
    harness = Harness(folder, **options)
    with (
        patch("asyncrl_cli.journal.buffer.LAZY_S", 0.0),
        patch("asyncrl_cli.journal.buffer.Disk", Here),
        patch("asyncrl_cli.orchestrator.rollout_scheduler.ADMIT_S", 0.0),
    ):
        async with asyncio.TaskGroup() as tasks, collecting(harness.client):
            await harness.start(tasks)
            yield harness
            for task in harness.spawned:
                task.cancel()
    kill(harness.buffer)


@contextmanager
def end_of_run() -> Iterator[list[RunError]]:
    """Keeps the error that ends the run."""
    errors: list[RunError] = []
    with pytest.raises(ExceptionGroup) as raised:
        yield errors
    cause: Any = raised.value
    while isinstance(cause, ExceptionGroup):
        (cause,) = cause.exceptions
    assert isinstance(cause, RunError)
    errors.append(cause)


# -- seeds


def test_seed_of_a_rollout_equals_the_seed_in_earlier_releases() -> None:
    assert rollout_seed(7, 12, 3) == 8937335386234627850


@pytest.mark.parametrize("engines", [1, 3])
async def test_a_request_is_the_same_wherever_it_runs(tmp_path: Path, engines: int) -> None:
    rollouts = {"group_size": 2, "sampling": {"stop": [";"]}}
    async with source(tmp_path, engines=engines, seed=7, rollout=rollouts) as harness:
        requests = sorted(harness.requests, key=lambda request: request.rollout_id)
        assert [request.rollout_id for request in requests] == [f"{g}-{i}" for g in range(4) for i in range(2)]
        for request in requests:
            group_id, index = group_and_index(request.rollout_id)
            assert request.prompt_ids == (group_id, group_id)
            assert request.sampling.seed == rollout_seed(7, group_id, index)
            assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 512)
            assert request.sampling.stop == (";",)
            assert request.prefix == ()


# -- filling


async def test_groups_stay_together_and_fill_the_buffers_room(tmp_path: Path) -> None:
    async with source(tmp_path, engines=2) as harness:
        assert [engine.ids for engine in harness.engines] == [
            ["0-0", "0-1", "2-0", "2-1"],
            ["1-0", "1-1", "3-0", "3-1"],
        ]
        harness.client.room.set()
        await harness.settled()
        assert len(harness.ids) == 8
        await harness.finish(1, 0)
        assert len(harness.ids) == 8, "finished groups are not trained yet"
        assert await harness.train() == [0, 1]
        assert harness.ids[-4:] == ["3-0", "3-1", "5-0", "5-1"]


async def test_full_engines_and_those_that_do_not_serve_admit_nothing(tmp_path: Path) -> None:
    small = {"group_size": 2, "max_running_rollouts": 4}
    async with source(tmp_path, engines=2, rollout=small, pipeline={"groups_per_step": 8}) as harness:
        assert sorted(harness.states()) == [0, 1, 2, 3]
        harness.client.engines[0].serving = False
        await harness.finish(0)
        assert sorted(harness.states()) == [0, 1, 2, 3]
        await harness.finish(1)
        assert sorted(harness.states()) == [0, 1, 2, 3], "two groups run, if necessary on the only engine that serves"
        await harness.finish(3)
        assert sorted(harness.states()) == [0, 1, 2, 3, 4]
        assert harness.engines[1].ids[-2:] == ["4-0", "4-1"]


# -- ending


async def test_a_failed_rollout_rejects_its_group(tmp_path: Path) -> None:
    async with source(tmp_path, rollout={"group_size": 3}) as harness:
        await harness.end("0-0", RolloutFailure("0-1", "out of memory"))
        assert harness.states()[0] == "rejected"
        assert harness.engines[0].cancelled == ["0-2"], "the rest of it is not generated"
        assert harness.reasons == ["out of memory"]
        assert harness.ids[-3:] == ["4-0", "4-1", "4-2"], "its room is free again"
        await harness.end(RolloutFailure("1-0", "another"))
        assert harness.reasons == ["out of memory", "another"]
        assert harness.table("groups", "id, reason")[:3] == [(0, "failed"), (1, "failed"), (2, "")]
        assert ("0-1", "out of memory") in harness.table("rollouts", "group_id || '-' || rollout_index, failure")


async def test_a_group_that_a_program_left_is_no_failure(tmp_path: Path) -> None:
    async with source(tmp_path) as harness:
        left = RewardFailure("its program left", counts=False)
        await harness.groups._conclude([], [Outcome("0-0", left)])
        assert harness.states()[0] == "rejected"
        assert harness.reasons == harness.warned == []
        assert not harness.groups.rejected_in_a_row


async def test_rollouts_that_arrive_while_others_are_scored_are_scored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.rollout_scheduler.SETTLE_S", 3600.0)
    async with source(tmp_path) as harness:
        harness.scorer.held.clear()
        for name in ("0-0", "0-1", "1-0"):
            await harness.end(name)
        assert harness.scorer.calls == [1]
        harness.scorer.held.set()
        await harness.settled()
        assert harness.scorer.calls == [1, 2]
        assert harness.states()[0] == "finished"


async def test_a_reward_that_sees_the_group_is_called_once_after_its_last_rollout(tmp_path: Path) -> None:
    async with source(tmp_path, together=True, **GROUPS_OF_3) as harness:
        await harness.end("0-2", "1-0", "0-0")
        assert harness.scorer.asked == []
        ended = harness.table("rollouts", "group_id, rollout_index, finish_reason, scored_at")
        assert ended == [(0, 0, "stop", None), (0, 2, "stop", None), (1, 0, "stop", None)], "their tokens are safe"
        await harness.end("0-1")
        assert harness.scorer.asked == [("p0", tuple(f"text of 0-{index}" for index in range(3)))]
        assert harness.states()[0] == "finished"
        await harness.end(RolloutFailure("1-1", "no"))
        await harness.end("1-2")
        assert harness.states()[1] == "rejected"
        assert len(harness.scorer.asked) == 1, "a group without one of its rollouts is not compared"
        taken = await harness.take()
        assert isinstance(taken, TakenBatch)
        assert taken.batch.groups[0].rewards == (0.0, 1.0, 2.0)


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
async def test_tokens_of_a_group_are_recorded_no_later_than_its_last_reward(
    tmp_path: Path, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rollout is not recorded yet when the second completes the group."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.rollout_scheduler.SCORE_TIMEOUT_S", timeout_s)
    async with source(tmp_path, together=True) as harness:
        record, release = harness.buffer.record, asyncio.Event()

        async def slow(rollouts: Any = (), segments: Any = (), outcomes: Any = ()) -> Any:
            if rollouts and not outcomes:
                await release.wait()
            return await record(rollouts, segments, outcomes)

        harness.buffer.record = slow  # type: ignore[method-assign]
        await harness.end("0-0")
        await harness.end("0-1")
        release.set()
        await harness.settled()
        assert harness.states()[0] == "finished"
        ended = harness.table("rollouts", "rollout_index, finish_reason, tokens")
        assert ended == [(0, "stop", len(rollout("0-0").ids)), (1, "stop", len(rollout("0-1").ids))]


async def test_a_resumed_group_is_scored_together_with_what_was_generated_before(tmp_path: Path) -> None:
    sections = GROUPS_OF_3 | {"rollout": {"group_size": 3, "sampling": {"stop": ["><6"]}}}
    async with source(tmp_path, together=True, **sections) as harness:
        await harness.end("0-2", "1-1", "0-0")
        harness.scorer.held.clear()
        with patch("asyncrl_cli.orchestrator.rollout_scheduler.SCORE_TIMEOUT_S", 0.0):
            await harness.end("1-0", "1-2")
        assert harness.scorer.calls[-1] == 1, "the driver dies while this group is scored"
    async with source(tmp_path, together=True, **sections) as harness:
        assert harness.scorer.asked == [("p1", ("<5",) * 3)], "the rollouts of group 1 are not generated again"
        assert sorted(harness.ids)[0] == "0-1" and not {"0-0", "0-2", "1-0"}.intersection(harness.ids)
        await harness.end("0-1")
        assert harness.scorer.asked[1:] == [("p0", ("<5", "text of 0-1", "<5"))]
        assert (harness.states()[0], harness.states()[1]) == ("finished", "finished")


@pytest.mark.parametrize(("policy", "rejected"), [("reject", True), ("skip", False), ("train", False)])
async def test_equal_rewards_are_replaced_only_by_reject(tmp_path: Path, policy: str, rejected: bool) -> None:
    async with source(tmp_path, algorithm={"uniform_groups": policy}) as harness:
        harness.scorer.rule = lambda text: float(text[-1]) if "1-" in text else 1.0
        await harness.finish(0)
        assert harness.groups.rejected_in_a_row.total() == (1 if rejected else 0)
        await harness.finish(1)
        assert not harness.groups.rejected_in_a_row
        assert harness.states()[0] == ("rejected" if rejected else "finished")
        assert harness.states()[1] == "finished"
        assert len(harness.states()) == (5 if rejected else 4)
        assert harness.groups.failures.too_many() == ""


async def test_failing_rewards_are_shown_when_they_happen_and_end_the_run_at_the_users_line(tmp_path: Path) -> None:
    warnings: list[str] = []
    with end_of_run() as errors:
        async with source(tmp_path, rollout={"group_size": 2, "max_failed_share": 0.5}) as harness:
            harness.scorer.rule = lambda text: RewardFailure("f failed: KeyError: 'solution'", "/my_reward.py:3")
            for group_id in range(MIN_FAILURES):
                warnings[:] = harness.warned
                await harness.end(f"{group_id}-0")
            raise AssertionError("it continues")
    assert errors[0].location == "/my_reward.py:3"
    assert warnings == [
        "group 0 is rejected: /my_reward.py:3: f failed: KeyError: 'solution'",
        "group 1 is rejected: /my_reward.py:3: f failed: KeyError: 'solution' (2 groups so far)",
        "group 3 is rejected: /my_reward.py:3: f failed: KeyError: 'solution' (4 groups so far)",
    ]


async def test_when_everything_is_rejected_the_run_ends(tmp_path: Path) -> None:
    warnings: list[str] = []
    pipeline = {"groups_per_step": 2, "max_rejected_in_a_row": 9}
    with end_of_run() as errors:
        async with source(tmp_path, algorithm={"uniform_groups": "reject"}, pipeline=pipeline) as harness:
            harness.scorer.rule = lambda text: 1.0
            for group_id in range(10):
                warnings[:] = harness.warned
                await harness.finish(group_id)
            raise AssertionError("it continues")
    assert errors[0].location == "algorithm.uniform_groups"
    assert errors[0].message.startswith("the last 9 groups were all rejected")
    assert warnings == ["the last 8 groups are rejected: all rewards of the group are equal"]


async def test_when_everything_fails_the_remedy_is_the_failures_cause(tmp_path: Path) -> None:
    limits = {"rollout": {"group_size": 2, "max_failed_share": 1.0}, "pipeline": {"max_rejected_in_a_row": 3}}
    with end_of_run() as errors:
        async with source(tmp_path, **limits) as harness:
            harness.scorer.rule = lambda text: RewardFailure("f failed: KeyError: 'solution'", "/my_reward.py:3")
            for group_id in range(4):
                await harness.end(f"{group_id}-0")
            raise AssertionError("it continues")
    assert errors[0].location == "/my_reward.py:3"
    assert (errors[0].hint or "").startswith("fix the cause")


async def test_a_group_needs_two_rewards_and_its_masked_rollouts_are_in_the_batch(tmp_path: Path) -> None:
    async with source(tmp_path, **GROUPS_OF_3) as harness:
        harness.scorer.rule = lambda text: None if text.endswith(("0-0", "1-0", "1-2")) else float(text[-1])
        await harness.end("0-0", "0-1", "0-2", "1-0", "1-1", "1-2")
        assert harness.table("groups", "id, state, reason")[:2] == [(0, "finished", ""), (1, "rejected", "unscored")]
        assert harness.warned == [
            "group 1 is rejected: task: its reward returned None for too many responses, so fewer than two have one"
        ]
        assert (await harness.counts()).rejected == 1
        assert len(harness.reasons) == 1, "the group counts as lost"
        taken = await harness.take()
        assert isinstance(taken, TakenBatch)
        assert taken.batch.groups[0].rewards == (None, 1.0, 2.0)


# -- requeue


async def test_overdue_groups_start_again_under_new_numbers(tmp_path: Path) -> None:
    pipeline = {"groups_per_step": 2, "max_staleness": 1, "on_stale": "requeue"}
    async with source(tmp_path, engines=2, seed=7, pipeline=pipeline) as harness:
        await harness.finish(2, 3)
        assert await harness.train() == [2, 3]
        await harness.finish(4, 5)
        waiting = await harness.take()
        assert isinstance(waiting, Waiting)
        assert waiting.overdue == (0, 1)
        await harness.groups.requeue(waiting.overdue)
        await harness.settled()
        assert sorted(name for engine in harness.engines for name in engine.cancelled) == ["0-0", "0-1", "1-0", "1-1"]
        again = [request for request in harness.requests if group_and_index(request.rollout_id)[0] in (6, 7)]
        assert sorted((request.prompt_ids, request.sampling.seed) for request in again) == sorted(
            ((old, old), rollout_seed(7, new, place)) for old, new in ((0, 6), (1, 7)) for place in range(2)
        )
        assert [harness.states()[group_id] for group_id in range(8)] == [
            *("requeued", "requeued", "taken", "taken", "finished", "finished", "running", "running")
        ]
        assert await harness.train() == [4, 5]


# -- what is recorded, and a run that is resumed


async def test_a_resumed_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    sampled_rollouts = {"group_size": 2, "sampling": {"stop": ["><6"]}}
    async with source(tmp_path, rollout=sampled_rollouts) as harness:
        await harness.finish(1)
        await harness.end("0-0")
        harness.scorer.held.clear()
        with patch("asyncrl_cli.orchestrator.rollout_scheduler.SCORE_TIMEOUT_S", 0.0):
            await harness.end("2-0")
        await harness.engines[0].deliver(segments=[segment("2-1", 0, 3), segment("2-1", 3, 1, version=1)])
        await harness.settled()
    async with source(tmp_path, rollout=sampled_rollouts) as harness:
        asked = {request.rollout_id: request for request in harness.requests}
        assert sorted(asked) == ["0-1", "2-1", "3-0", "3-1"]
        assert [(part.start, part.end, part.version) for part in asked["2-1"].prefix] == [(0, 3, 0), (3, 4, 1)]
        assert all(not asked[name].prefix for name in ("0-1", "3-0", "3-1"))
        assert asked["2-1"].sampling.seed == rollout_seed(0, 2, 1), "the same request as at first"
        assert harness.scorer.asked == [("p2", "<5")], "it had no reward yet, and its text is cut at the stop string"
        await harness.end("0-1", "2-1")
        assert await harness.train() == [0, 1]
        assert harness.states() == dict(enumerate(["taken", "taken", "finished", "running", "running", "running"]))
        assert [uid for _, uid in harness.table("groups", "id, uid")] == [f"p{i}" for i in range(6)]


@given(data=st.data(), slots=st.integers(2, 8))
@settings(deadline=None, max_examples=40)
def test_every_prompt_is_trained_on_once_in_order_and_no_step_waits_without_end(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, slots: int
) -> None:
    async def disturb(harness: Harness) -> None:
        event = data.draw(st.sampled_from(["grow", "fail", "nothing"]))
        pending = harness.client.engines[0].pending
        chosen = data.draw(st.sampled_from(sorted(pending))) if pending else ""
        if event == "grow" and chosen:
            start = pending[chosen].tokens.end
            await harness.engines[0].deliver(segments=[segment(chosen, start, 2)])
        elif event == "fail" and chosen:
            await harness.end(RolloutFailure(chosen, "no"))

    async def check(harness: Harness) -> None:
        trained: list[int] = []
        for _ in range(200):
            if data.draw(st.integers(0, 2)) == 0:
                await disturb(harness)
            pending = sorted(harness.client.engines[0].pending)
            if pending:
                await harness.end(*pending[: data.draw(st.integers(1, len(pending)))])
            groups = await harness.train()
            trained += groups
            if len(trained) == STEPS * 2:
                break
        assert len(trained) == len(set(trained)) == STEPS * 2
        uids = [uid for _, uid in harness.table("groups", "id, uid")]
        assert uids == [f"p{i}" for i in range(len(uids))]
        assert len(harness.ids) == len(set(harness.ids)), "nothing is generated twice"

    async def play() -> None:
        rollouts = {"group_size": 2, "max_running_rollouts": slots, "max_failed_share": 1.0}
        async with source(tmp_path_factory.mktemp("run"), rollout=rollouts, stop={"steps": STEPS}) as harness:
            await check(harness)

    run(play())


async def test_solved_prompts_are_excluded_immediately_and_after_a_resume(tmp_path: Path) -> None:
    async with source(tmp_path, data={"filter": {}}) as harness:
        prompt_filter = harness.stream.filter
        assert prompt_filter is not None
        harness.scorer.rule = lambda text: 0.5 if "3-" in text else 1.0
        await harness.finish(0, 3)
        await harness.end(RolloutFailure("1-0", "no"))
        assert prompt_filter.excludes("p0", 0)
        assert not prompt_filter.excludes("p3", 0), "p3 is not solved"
        assert not prompt_filter.excludes("p1", 0), "p1 has failed"
    async with source(tmp_path, data={"filter": {}}) as harness:
        assert harness.stream.filter is not None
        assert harness.stream.filter.excludes("p0", 0)
        assert harness.stream.filter.filtered == 1, "exactly what is in the journal"
