"""Messages between the driver and the gateway's process: in bulk, in order, and each answer to its own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from stand_ins import StandInGateway, remote, rollout, spec, turns
from test_episodes import CHAT, PROMPT, SAMPLING, Model

from asyncrl_cli.gateway.actor import MAX_COLLECTED_TOKENS, GatewaySetup, Outgoing, SessionOpening, Transfer
from asyncrl_cli.gateway.session import CallOptions, SessionLimits
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, GatewayLost, RemoteSession
from asyncrl_cli.records.generation import RolloutFailure, RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout.client import GenerationFailed
from asyncrl_cli.system.supervised_actor import RestartBudget
from tests.gateway.conversation_stand_ins import ask_chat

HELLO: Any = [{"role": "user", "content": PROMPT.content}]


def request(name: str, tokens: int = 1) -> RolloutRequest:
    return RolloutRequest(name, (1,) * tokens, Sampling(1.0, 4))


class HeldGateway(StandInGateway):
    """Accepts messages when the test allows it."""

    def __init__(self) -> None:
        super().__init__(CHAT)
        self.let = asyncio.Event()
        self.let.set()
        self.tells: list[Outgoing] = []

    @remote
    async def tell(self, outgoing: Outgoing) -> None:
        self.tells.append(outgoing)
        await self.let.wait()
        await self.inner.tell(outgoing)


class Harness:
    """A client with its actor."""

    def __init__(self) -> None:
        self.actor = HeldGateway()
        self.model = Model()
        self.segments: list[Segment] = []
        budget = RestartBudget(0, self._record, lambda _: None)
        setup = GatewaySetup(spec(), lambda: CHAT, "policy", b"secret")
        self.client = GatewayClient(setup, lambda: self.actor, self.model.generate, budget)

    async def _record(self, *fault: str) -> None:
        """A session without a journal."""

    def session(self, name: str) -> Any:
        opening = SessionOpening(name, name.partition("~")[0], SAMPLING, SessionLimits(200, 8))
        return self.client.session(opening, self.segments.extend, self.model.generate)


@asynccontextmanager
async def running() -> AsyncIterator[Harness]:
    harness = Harness()
    await harness.client.start()
    keeping = harness.client._keeping
    try:
        yield harness
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_session_opens_when_the_gateway_has_it() -> None:
    async with running() as harness:
        harness.actor.let.clear()
        entered: list[RemoteSession] = []

        async def enter(name: str) -> None:
            async with harness.session(name) as session:
                entered.append(session)
                await asyncio.Event().wait()

        first = asyncio.create_task(enter("1-0"))
        await turns()
        others = [asyncio.create_task(enter(f"1-{place}")) for place in (1, 2)]
        await turns()
        assert len(harness.actor.tells) == 1 and not entered
        harness.actor.let.set()
        await turns()
        harness.actor.let.clear()
        assert [len(outgoing.sessions) for outgoing in harness.actor.tells] == [1, 2], "waiting messages go together"
        assert len(entered) == len(harness.actor.sessions) == 3
        for task in (first, *others):
            task.cancel()


async def test_an_abandoned_session_leaves_nothing_and_its_name_can_be_used_again() -> None:
    async with running() as harness:
        harness.model.held.clear()
        async with harness.session("1-0"):
            call = asyncio.create_task(ask_chat(harness.actor.sessions.get("1-0"), HELLO, None, CallOptions()))
            while not harness.model.asked:
                await asyncio.sleep(0)
        async with harness.session("1-0") as second:
            await asyncio.gather(call, return_exceptions=True)
            assert "has ended" in str(call.exception())
            harness.model.held.set()
            (reply,) = await ask_chat(harness.actor.sessions.get("1-0"), HELLO, None, CallOptions())
            end = await second.finish()
        assert end.rollout is not None and end.last_text == reply.text
        assert [one.rollout_id for one in harness.model.asked] == ["1-0/0", "1-0/0"]
        assert len(harness.actor.sessions) == 0


async def test_an_unexpected_error_fails_only_its_call() -> None:
    async with running() as harness:
        generate = harness.model.generate

        for error, message in (
            (ZeroDivisionError("a bug"), "ZeroDivisionError in the driver"),
            (GenerationFailed("no such token"), "no such token"),
        ):
            harness.model.generate = AsyncMock(side_effect=error)  # type: ignore[method-assign]
            async with harness.session("1-0"):
                with pytest.raises(GenerationFailed, match=message):
                    await ask_chat(harness.actor.sessions.get("1-0"), HELLO, None, CallOptions())
        harness.model.generate = generate  # type: ignore[method-assign]
        async with harness.session("1-1"):
            await ask_chat(harness.actor.sessions.get("1-1"), HELLO, None, CallOptions())


async def test_an_answer_goes_to_its_own_request_if_names_are_equal() -> None:
    transfer = Transfer()
    first = asyncio.create_task(transfer.generate(0, request("1-0/0")))
    (old,) = (await transfer.collect(1)).requests
    first.cancel()
    await turns()
    second = asyncio.create_task(transfer.generate(1, request("1-0/0")))
    await turns()
    incoming = await transfer.collect(1)
    (new,) = incoming.requests
    assert incoming.cancelled == [old] and new != old
    transfer.answer(Outgoing(answers=[(old, rollout("1-0/0", (0,), (7,)))]))
    await turns()
    assert not second.done()
    transfer.answer(Outgoing(answers=[(new, rollout("1-0/0", (0,), (8,)))]))
    assert (await second).ids.tolist() == [8]
    third = asyncio.create_task(transfer.generate(1, request("1-0/1")))
    await turns()
    third.cancel()
    await turns()
    incoming = await transfer.collect(0)
    assert not incoming.requests and not incoming.cancelled, "a request that was never made is not cancelled"
    failed = asyncio.create_task(transfer.generate(1, request("1-0/2")))
    (number,) = (await transfer.collect(1)).requests
    transfer.answer(Outgoing(answers=[(number, RolloutFailure("1-0/2", "no engine"))]))
    with pytest.raises(GenerationFailed, match="no engine"):
        await failed


async def test_no_answer_has_more_requests_than_the_driver_can_read_at_once() -> None:
    transfer = Transfer()
    calls = [
        asyncio.create_task(transfer.generate(0, request(f"1-0/{n}", MAX_COLLECTED_TOKENS // 2))) for n in range(5)
    ]
    await turns()
    counts = [len((await transfer.collect(1)).requests) for _ in range(3)]
    assert counts == [2, 2, 1]
    assert not (await transfer.collect(0)).requests
    for call in calls:
        call.cancel()


async def test_a_call_of_a_session_that_the_driver_no_longer_knows_is_refused() -> None:
    async with running() as harness:
        with pytest.raises(GenerationFailed, match="the session has ended"):
            await harness.actor.inner._transfer.generate(17, request("1-0/0"))
        async with harness.session("1-1"):
            await ask_chat(harness.actor.sessions.get("1-1"), HELLO, None, CallOptions())


async def test_an_error_in_the_link_loses_the_gateway_and_nothing_else() -> None:
    async with running() as harness:
        link = harness.client._link.result()

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("a bug")

        with patch.object(link, "_begin", broken):
            async with harness.session("1-0") as session:
                call = asyncio.create_task(ask_chat(harness.actor.sessions.get("1-0"), HELLO, None, CallOptions()))
                with pytest.raises(GatewayLost, match="ZeroDivisionError"):
                    await session.end
                call.cancel()
