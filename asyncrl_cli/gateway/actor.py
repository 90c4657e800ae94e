"""The gateway's Ray actor, and its messages to and from the driver: token ids, in bulk (decision 0016).

Network, rendering, tokenizing and sessions run here, apart from the driver. The actor has no state that the journal
lacks: when it dies, episodes are played again from the tokens that it had reported.

The gateway requests generations and reports the sessions' tokens. The driver opens and closes sessions, and answers
requests. In each direction one call at a time (``tell``, ``collect``) carries everything that is pending, which keeps
the order of events.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.session import Session, SessionLimits, SessionRecord
from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest, OutsideClients, Sessions
from asyncrl_cli.records.generation import Rollout, RolloutFailure, RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout.client import GenerationFailed
from asyncrl_cli.rollout.open_requests import OnSegments
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import redirect_output

MAX_COLLECTED_TOKENS = 200_000
"""After so many prompt tokens, ``collect`` leaves further requests to its next call, because the driver's event loop
stands still while it reads an answer."""


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """A session to open. ``name`` is in its URL and may be reused once the session has ended. ``session_number`` is
    unique; ``GatewayClient`` sets it. ``session.Session`` describes the other fields."""

    name: str
    rollout_id: str
    sampling: Sampling
    limits: SessionLimits
    session_number: int = -1
    priority: int = 0
    recorded: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """A session's result: its rollout (None if nothing was sampled), the text of its last reply, the first limit that
    refused a call, and the end of each reply (``Session.replies``)."""

    session_number: int
    rollout: Rollout | None = None
    last_text: str = ""
    failure: str = ""
    replies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A request for tokens, of a session or of a call without one (None)."""

    session: int | None
    request: RolloutRequest


Answer = Rollout | RolloutFailure | ClientAnswer


@dataclass(slots=True)
class Outgoing:
    """From the driver: sessions to open or (by number) to end, in order; new tokens of generations, and answers, by the
    request's number."""

    sessions: list[SessionOpening | int] = field(default_factory=list)
    segments: list[tuple[int, list[Segment]]] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)


@dataclass(slots=True)
class Incoming:
    """To the driver: segments to record by session, the numbers of cancelled requests, new requests by number, and
    ended sessions. A request's number is unique. Its id is not, because an episode that is played again reuses it.

    The driver must handle them in this order: tokens before the end of their session, and a cancelled request before a
    new one that reuses its id.
    """

    segments: list[tuple[int, list[Segment]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    requests: dict[int, Generation | ClientRequest] = field(default_factory=dict)
    ends: list[SessionEnd] = field(default_factory=list)


class Transfer:
    def __init__(self) -> None:
        self._request_numbers = count()
        self._open: dict[int, tuple[asyncio.Future[Any], OnSegments | None]] = {}
        self._incoming = Incoming()
        self._has_incoming = asyncio.Event()

    async def generate(
        self, session: int | None, request: RolloutRequest, on_segments: OnSegments | None = None
    ) -> Rollout:
        """Ask the driver for a generation, like ``GenerationClient.generate``. Raises ``GenerationFailed``."""
        generated: Rollout | RolloutFailure = await self._answered(Generation(session, request), on_segments)
        if isinstance(generated, RolloutFailure):
            raise GenerationFailed(generated.reason)
        return generated

    async def ask(self, request: ClientRequest) -> ClientAnswer:
        """Have the driver answer an outside client. A cancelled call tells the driver that the client is gone."""
        answer: ClientAnswer = await self._answered(request)
        return answer

    async def _answered(self, request: Generation | ClientRequest, on_segments: OnSegments | None = None) -> Any:
        request_number = next(self._request_numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[request_number] = (answer, on_segments)
        self._incoming.requests[request_number] = request
        self._has_incoming.set()
        try:
            return await answer
        finally:
            # Without an answer the call was cancelled. The driver must know only if it has the request already.
            if (
                self._open.pop(request_number, None) is not None
                and self._incoming.requests.pop(request_number, None) is None
            ):
                self._incoming.cancelled.append(request_number)
                self._has_incoming.set()

    async def until_recorded(self, session_name: str) -> None:
        """Return when the driver has the session's reported tokens on disk. Raises ``ApiError`` if the run stops."""
        answer = await self.ask(ClientRequest(Action.COMMIT, session_name))
        if answer.code is not None:
            raise ApiError(answer.status, answer.body["message"], code=answer.code)

    def record(self, session: int, segments: list[Segment]) -> None:
        self._incoming.segments.append((session, segments))
        self._has_incoming.set()

    def report_end(self, end: SessionEnd) -> None:
        """Report a session's result to the driver, after everything else about it."""
        self._incoming.ends.append(end)
        self._has_incoming.set()

    def answer(self, outgoing: Outgoing) -> None:
        for request_number, segments in outgoing.segments:
            if request_number in self._open and (on_segments := self._open[request_number][1]) is not None:
                on_segments(segments)
        for request_number, answer in outgoing.answers:
            if (entry := self._open.pop(request_number, None)) is not None and not entry[0].done():
                entry[0].set_result(answer)

    async def collect(self, timeout_s: float) -> Incoming:
        """Return everything since the last call; wait up to ``timeout_s`` if there is nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_incoming.wait()
        incoming, self._incoming = self._incoming, Incoming()
        tokens, collected_requests = 0, {}
        while incoming.requests and tokens < MAX_COLLECTED_TOKENS:
            request_number = next(iter(incoming.requests))
            request = collected_requests[request_number] = incoming.requests.pop(request_number)
            tokens += len(request.request.prompt_ids) if isinstance(request, Generation) else 0
        self._incoming.requests, incoming.requests = incoming.requests, collected_requests
        if not self._incoming.requests:
            self._has_incoming.clear()
        return incoming


@dataclass(frozen=True, slots=True)
class GatewaySetup:
    """Settings of a gateway.

    Args:
        spec: has the address and the length of contexts.
        chat: loads the model's chat format.
        model: the model's name for clients.
        secret: session keys are derived from it.
        api_key: the key for `/v1`, for calls without a session; without a key there is no `/v1`.
        client_token: the token with which programs outside of the run open sessions; without one they cannot.
    """

    spec: ExperimentSpec
    chat: Callable[[], ChatFormat]
    model: str
    secret: bytes = field(repr=False)
    api_key: str | None = field(default=None, repr=False)
    client_token: str | None = field(default=None, repr=False)


class GatewayActor:
    """The public methods are Ray calls."""

    def __init__(self, log_dir: str) -> None:
        redirect_output(log_dir, "gateway")
        self._transfer = Transfer()
        self._sessions = Sessions()
        self._sessions_by_number: dict[int, tuple[str, Session]] = {}

    async def start(self, setup: GatewaySetup, port: int) -> tuple[int, str]:
        """Start to serve at ``port`` (0: a free one); returns the process id and the server's URL.

        Raises ``UserError`` if the address is not available, or the tool parser does not fit the model.
        """
        from asyncrl_cli.gateway.bodies import Bodies
        from asyncrl_cli.gateway.connections import ConnectionLimits, raise_descriptor_limit
        from asyncrl_cli.gateway.server import Gateway, listen
        from asyncrl_cli.gateway.service import Service

        limits = ConnectionLimits(max_connections=raise_descriptor_limit())
        self._chat = await asyncio.to_thread(setup.chat)
        spec = setup.spec.rollout.gateway
        service = Service(
            sessions=self._sessions,
            secret=setup.secret,
            new_session=one_call_sessions(setup.spec, self._chat, self._transfer),
            api_key=setup.api_key,
            chat=self._chat,
            model=setup.model,
            bodies=Bodies(spec.max_body_mb * 2**20, limits.body_s),
            clients=None if setup.client_token is None else OutsideClients(setup.client_token, self._transfer.ask),
        )
        self._server = Gateway(service, listen(spec.host, port), limits)
        await self._server.start()
        return os.getpid(), self._server.url

    async def tell(self, outgoing: Outgoing) -> None:
        for change in outgoing.sessions:
            if isinstance(change, SessionOpening):
                self._open(change)
            else:
                self._end(change)
        self._transfer.answer(outgoing)

    async def collect(self, timeout_s: float) -> Incoming:
        """As ``Transfer.collect``."""
        return await self._transfer.collect(timeout_s)

    async def stop(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()

    def _open(self, opening: SessionOpening) -> None:
        session = Session(
            opening.rollout_id,
            chat=self._chat,
            generate=partial(self._transfer.generate, opening.session_number),
            sampling=opening.sampling,
            limits=opening.limits,
            fixed_sampling=True,
            priority=opening.priority,
            record=SessionRecord(
                opening.recorded,
                on_segments=partial(self._transfer.record, opening.session_number),
                continues=opening.continues,
                until_recorded=partial(self._transfer.until_recorded, opening.name) if opening.continues else None,
            ),
        )
        self._sessions.open(session, opening.name)
        self._sessions_by_number[opening.session_number] = (opening.name, session)

    def _end(self, session_number: int) -> None:
        name, session = self._sessions_by_number.pop(session_number)
        self._sessions.close(name)
        end = SessionEnd(
            session_number,
            rollout=session.rollout(),
            last_text=session.last_text,
            failure=session.failure,
            replies=session.replies(),
        )
        # In the loop's next turn, after the cancellations of its calls: the driver must learn of these before the
        # session's end.
        asyncio.get_running_loop().call_soon(self._transfer.report_end, end)


def one_call_sessions(spec: ExperimentSpec, chat: ChatFormat, transfer: Transfer) -> Callable[[], Session]:
    """Return a factory of sessions for calls outside of rollouts, which choose their own sampling."""
    max_length, call_numbers = spec.model.max_length, count()
    limits = SessionLimits(max_length=max_length, max_call_tokens=max_length)
    sampling = Sampling(temperature=1.0, max_tokens=max_length)

    def make() -> Session:
        call_number = next(call_numbers)
        return Session(
            f"serve-{call_number}",
            chat=chat,
            generate=partial(transfer.generate, None),
            sampling=sampling,
            limits=limits,
            fixed_sampling=False,
            priority=call_number,
        )

    return make
