"""Episodes in the driver: tokens kept between attempts, retries, and results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from stand_ins import StandInGateway, spec
from stand_ins import turns as turns_of_the_loop

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.actor import GatewaySetup
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.session import CallOptions, Session
from asyncrl_cli.gateway.sessions import Sessions, session_key
from asyncrl_cli.orchestrator.episodes import Episodes
from asyncrl_cli.orchestrator.gateway_client import GatewayClient
from asyncrl_cli.records.generation import CONTEXT, Rollout, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored, Turn
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.rollout.continuation import split_by_version
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.train.packing import training_rows
from asyncrl_cli.workers.messages import Played, Retry
from asyncrl_cli.workers.scoring import Response
from tests.gateway.conversation_stand_ins import ask_chat, end_of

CHAT = ChatFormat(character_tokenizer(4096))
PROMPT = Prompt("row/1", "begin")
SAMPLING = Sampling(temperature=1.0, max_tokens=8, seed=5)
SECRET = b"secret"
FINE = Played(Scored(1.0, {"turns": 2.0}))

Agent = Callable[[Session], Awaitable[Played]]


class Model:
    """A model that replies with letters that depend on the seed. It waits for ``held``."""

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []
        self.held = asyncio.Event()
        self.held.set()

    async def generate(self, request: RolloutRequest, on_segments: Any = None) -> Rollout:
        self.asked.append(request)
        assert request.sampling.seed is not None
        letters = [97 + (request.sampling.seed // 7**place) % 26 for place in range(4)]
        full = np.array([*CHAT.encode("".join(map(chr, letters))), end_of(CHAT)], np.int32)
        ids = full[: request.sampling.max_tokens]
        logprobs = np.full(len(ids), -1.0, np.float32)
        done = TokenSequence.join(request.prefix)
        assert done.ids.tolist() == ids[: len(done.ids)].tolist()
        if on_segments is not None:
            on_segments(split_by_version(request.rollout_id, 0, ids[:2], logprobs[:2], [(3, 0)]))
        await self.held.wait()
        text = CHAT.decode(ids.tolist())
        return Rollout(
            *(ids, logprobs, np.full(len(ids), 3, np.int32)),
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            text=text,
            finish_reason="stop" if len(ids) == len(full) else "length",
        )


class Harness:
    """Episodes with attempts that use these agents, one after another."""

    continues_programs = False

    def __init__(self, *agents: Agent, retries: int = 2, **limits: Any) -> None:
        self.agents = list(agents)
        self.room = asyncio.Event()
        self.model = Model()
        self.played: list[tuple[str, bool]] = []
        self.judged: list[Response] = []
        self.segments: list[Segment] = []
        self.actors: list[StandInGateway] = []
        self.faults: list[str] = []
        anyone: Any = self
        setup = GatewaySetup(spec(), lambda: CHAT, "policy", SECRET)
        restarts = RestartBudget(limits.pop("max_restarts", 2), self._record, lambda _: None)
        self.gateway = GatewayClient(setup, self._gateway_actor, self.generate, restarts)
        max_length = limits.pop("max_length", 200)
        of = spec(
            model={"path": "org/model", "max_length": max_length},
            rollout={"retries": retries, "max_prompt_tokens": 1, "max_response_tokens": 1},
            task={"use": "chain_sum", "episode": {**limits}},
        )
        self.episodes = Episodes(of, of.task, client=anyone, gateway=self.gateway, workers=anyone, scoring=anyone)

    def _gateway_actor(self) -> StandInGateway:
        self.actors.append(StandInGateway(CHAT))
        return self.actors[-1]

    async def _record(self, kind: str, part: str, message: str) -> None:
        self.faults.append(f"{part}: {message}")

    @property
    def sessions(self) -> Sessions:
        return self.actors[-1].sessions

    def generate(self, *arguments: Any) -> Awaitable[Rollout]:
        return self.model.generate(*arguments)

    @asynccontextmanager
    async def slot(self, isolated: bool) -> AsyncIterator[Any]:
        yield self

    async def play_at(self, name: str) -> Played:
        return await self.agents.pop(0)(self.sessions.get(name))

    async def play(self, name: str, prompt: Prompt, access: ModelAccess, isolated: bool) -> Played:
        url = f"http://host:7/sessions/{quote(name, safe='')}/v1"
        assert access == ModelAccess(url, session_key(SECRET, name), "policy", "12-3")
        self.played.append((name, isolated))
        return await self.play_at(name)

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        self.judged += responses
        return [Scored(0.5)]

    async def run(self, **options: Any) -> tuple[Rollout | None, Scored | RewardFailure]:
        await self.gateway.start()
        keeping = self.gateway._keeping
        try:
            return await self.episodes.play("12-3", PROMPT, SAMPLING, 12, record=self.segments.extend, **options)
        finally:
            await turns_of_the_loop()
            keeping.cancel()


def turns(count: int, then: Played = FINE) -> Agent:
    """An agent that makes this many calls."""

    async def agent(session: Session) -> Played:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        for turn in range(count):
            (reply,) = await ask_chat(session, messages, None, CallOptions())
            messages += [reply.message, {"role": "user", "content": f"turn {turn}"}]
        return then

    return agent


def failed(reason: str, retry: Retry) -> Played:
    return Played(RewardFailure(reason), retry)


async def test_an_episode_is_one_rollout_with_its_score() -> None:
    harness = Harness(turns(2))
    rollout, score = await harness.run()
    assert score == FINE.score
    assert rollout is not None and rollout.rollout_id == "12-3" and rollout.prompt_ids == ()
    assert rollout.versions.tolist() == [CONTEXT] * 5 + [3] * 5 + [CONTEXT] * 6 + [3] * 5
    assert np.array_equal(TokenSequence.join(harness.segments).ids, rollout.ids), "everything is recorded"
    assert [request.rollout_id for request in harness.model.asked] == ["12-3/0", "12-3/1"]
    assert {request.priority for request in harness.model.asked} == {12}
    assert {request.sampling.max_tokens for request in harness.model.asked} == {8}
    assert len(harness.sessions) == harness.episodes.resting == 0


async def test_turns_get_the_place_of_their_reply_also_after_a_restart() -> None:
    steps = Played(Scored(1.0, turns=(Turn(0.25), Turn(0.75))))
    harness = Harness(turns(1, failed("lost", Retry.RESUME)), turns(2, steps))
    rollout, score = await harness.run()
    assert rollout is not None
    ends = np.flatnonzero(np.diff(rollout.sampled.astype(int), append=0) == -1) + 1
    assert isinstance(score, Scored)
    assert score.turns == (Turn(0.25, 0, ends[0]), Turn(0.75, 0, ends[1]))
    _, score = await Harness(turns(1, steps)).run()
    assert isinstance(score, RewardFailure) and "took 2 steps after 1 replies" in score.reason


@pytest.mark.parametrize(("retry", "isolated"), [(Retry.RESUME, False), (Retry.ISOLATED, True)])
async def test_generated_tokens_are_kept_when_the_process_is_lost(retry: Retry, isolated: bool) -> None:
    expected, _ = await Harness(turns(3)).run()
    harness = Harness(turns(2, failed("lost", retry)), turns(3), retries=0)
    rollout, score = await harness.run()
    assert score == FINE.score
    assert rollout is not None and expected is not None
    assert np.array_equal(rollout.ids, expected.ids)
    assert [request.rollout_id for request in harness.model.asked] == ["12-3/0", "12-3/1", "12-3/2"], "all distinct"
    assert harness.played == [("12-3", False), ("12-3~1", isolated)]


async def test_an_unfinished_reply_continues() -> None:
    async def lost(session: Session) -> Played:
        harness.model.held.clear()
        talking = asyncio.ensure_future(turns(1)(session))
        while not harness.model.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        harness.model.held.set()
        return failed("lost", Retry.RESUME)

    harness = Harness(lost, turns(1))
    rollout, _ = await harness.run()
    assert rollout is not None
    first, second = harness.model.asked
    assert (first.generated, second.generated) == (0, 2)


async def test_a_failed_agent_restarts_with_other_random_numbers() -> None:
    harness = Harness(*(turns(1, failed(f"reason {attempt}", Retry.RESTART)) for attempt in range(3)), retries=2)
    _, score = await harness.run()
    assert score == RewardFailure("reason 2"), "the last reason is kept"
    assert len({request.sampling.seed for request in harness.model.asked}) == 3
    assert [request.generated for request in harness.model.asked] == [0, 0, 0]
    assert [name for name, _ in harness.played] == ["12-3", "12-3~1", "12-3~2"]


async def test_tokens_that_an_earlier_driver_recorded_are_not_generated_again() -> None:
    before = Harness(turns(2))
    expected, _ = await before.run()
    again = Harness(turns(3))
    rollout, _ = await again.run(recorded={0: tuple(before.segments)})
    assert rollout is not None and expected is not None
    assert np.array_equal(rollout.ids[: len(expected.ids)], expected.ids)
    assert [request.rollout_id for request in again.model.asked] == ["12-3/2"]


async def test_branches_are_kept_too() -> None:
    async def other_histories(session: Session) -> Played:
        for text in ("one", "two", "three"):
            await ask_chat(session, [{"role": "user", "content": text}], None, CallOptions())
        return FINE

    async def lost(session: Session) -> Played:
        await other_histories(session)
        return failed("lost", Retry.RESUME)

    harness = Harness(lost, other_histories)
    rollout, _ = await harness.run()
    assert rollout is not None
    assert [one.rollout_id for one in rollout.sequences] == ["12-3", "12-3.1", "12-3.2"]
    assert len(harness.model.asked) == 3, "no token is sampled again"


async def test_without_a_reply_there_is_no_rollout() -> None:
    async def too_long(session: Session) -> Played:
        with pytest.raises(ApiError):
            await ask_chat(session, [{"role": "user", "content": "x" * 300}], None, CallOptions())
        return FINE

    rollout, score = await Harness(turns(0)).run()
    assert rollout is None
    assert score == RewardFailure("the episode of prompt 'row/1' got no reply from the model")
    _, score = await Harness(too_long).run()
    assert isinstance(score, RewardFailure) and "maximum context length is 200 tokens" in score.reason


async def test_without_a_score_the_last_reply_is_judged() -> None:
    harness = Harness(turns(2, Played(None)))
    rollout, score = await harness.run()
    assert score == Scored(0.5)
    assert rollout is not None
    assert harness.judged == [(PROMPT, CHAT.decode(rollout.ids[-5:].tolist()), True)]


@pytest.mark.parametrize("last", ["stop", "length"])
async def test_last_reply_of_any_branch_decides_whether_a_rollout_is_truncated(last: str) -> None:
    async def agent(session: Session) -> Played:
        for text, is_last in (("one", False), ("two", True)):
            limit = 3 if is_last == (last == "length") else None
            await ask_chat(session, [{"role": "user", "content": text}], None, CallOptions(max_tokens=limit))
        return Played(None)

    harness = Harness(agent)
    rollout, _ = await harness.run()
    assert rollout is not None and len(rollout.sequences) == 2
    ((_, text, finished),) = harness.judged
    assert (text, finished) == (rollout.branches[0].text.removeprefix("two"), last == "stop")
    batch = TrainingBatch(0, 3, (TrainingGroup(12, "row/1", 3, (rollout,), (0.5,)),))
    (rows,) = training_rows(batch, np.zeros(1, bool), spec(algorithm={"mask_truncated": True}))
    assert len(rows) == (2 if last == "stop" else 0)


async def test_a_cancelled_episode_leaves_no_session() -> None:
    async def waits(session: Session) -> Played:
        harness.model.held.clear()
        return await turns(1)(session)

    harness = Harness(waits)
    running = asyncio.ensure_future(harness.run())
    while not harness.model.asked:
        await asyncio.sleep(0)
    assert harness.episodes.resting == 0, "it has a running request"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(harness.sessions) == 0
    with pytest.raises(ApiError, match="has ended"):
        harness.sessions.get("12-3")


async def test_a_gateway_that_dies_is_replaced_and_its_episodes_continue() -> None:
    expected, _ = await Harness(turns(3)).run()

    async def killed(session: Session) -> Played:
        await turns(2)(session)
        await turns_of_the_loop(20)  # the driver knows of the death
        harness.actors[-1].die()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def fails_with_it(session: Session) -> Played:
        await turns(2)(session)
        harness.actors[-1].die()
        return failed("no connection", Retry.RESTART)

    harness = Harness(killed, fails_with_it, turns(3), retries=0)
    rollout, score = await harness.run()
    assert score == FINE.score
    assert rollout is not None and expected is not None
    assert np.array_equal(rollout.ids, expected.ids)
    assert np.array_equal(rollout.logprobs, expected.logprobs) and np.array_equal(rollout.versions, expected.versions)
    assert [request.rollout_id for request in harness.model.asked] == ["12-3/0", "12-3/1", "12-3/2"], "all distinct"
    assert [name for name, _ in harness.played] == ["12-3", "12-3~1", "12-3~2"]
    assert harness.faults == ["gateway: the process died"] * 2
