"""The driver's client of the gateway actor, which requests generations (decision 0016).

The driver always has one ``collect`` call pending at the actor, and sends its messages in ``tell`` calls, one at a time
(``gateway/actor.py``). If the actor dies or does not answer, its generations are cancelled, its sessions end with
``GatewayLost``, and another actor replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.gateway.actor import GatewaySetup, Generation, Incoming, Outgoing, SessionEnd, SessionOpening
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.session import Generate
from asyncrl_cli.gateway.sessions import ClientAnswer, ClientRequest, new_secret, session_key, session_url
from asyncrl_cli.records.generation import Rollout, RolloutFailure, RolloutRequest, Segment
from asyncrl_cli.rollout.client import GenerationFailed
from asyncrl_cli.rollout.open_requests import OnSegments
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import START_TIMEOUT_S, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.tasks.base import ModelAccess

log = logging.getLogger(__name__)

GATEWAY = "gateway"
"""The name of the actor and of its log file."""
POLL_S = 5.0
"""Seconds after which ``collect`` returns an empty answer, so the driver can tell an idle actor from a hanging one."""
ANSWER_S = 60.0
"""Further seconds that the actor may take to answer."""
STOP_S = 8.0
"""Seconds that the actor may take to stop."""


AnswerClient = Callable[[ClientRequest], Awaitable[ClientAnswer]]
"""Answers a program outside of the run."""


class GatewayLost(Exception):
    """The gateway's process is lost; the text is the cause."""


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved: there may be no waiter


class RemoteSession:
    """One session in the gateway's process."""

    def __init__(
        self, link: _Link, session_id: int, access: ModelAccess, *, on_segments: OnSegments, generate: Generate
    ) -> None:
        self._link = link
        self.session_id = session_id
        self.access = access
        self.on_segments = on_segments
        self.generate = generate
        self.calls: set[asyncio.Task[None]] = set()
        self.closing = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
        """The session's result when it is closed, or ``GatewayLost`` when the gateway is lost."""

    async def finish(self) -> SessionEnd:
        """End the session; returns its result. Raises ``GatewayLost``."""
        self._link.close(self)
        return await asyncio.shield(self.end)


class _Link:
    """The communication with one gateway actor."""

    def __init__(self, actor: Any, url: str, generate: Generate, answer: AnswerClient | None) -> None:
        self.actor, self.url = actor, url
        self._generate = generate
        self._answer_client = answer
        self._cause = ""
        self._session_ids = count()
        self._sessions: dict[int, RemoteSession] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._outgoing = Outgoing()
        self._ordered = asyncio.Event()

    async def run(self) -> RunError:
        """Exchange messages with the actor until it is lost; returns the cause."""
        lost: list[RunError] = []
        try:
            async with self._group:
                self._group.create_task(self._collect())
                self._group.create_task(self._send())
        except* RunError as errors:
            lost += [error for error in errors.exceptions if isinstance(error, RunError)]
        except* UserError:
            raise
        except* Exception as errors:  # a bug costs the gateway's actor, not the run
            log.error("the gateway's link failed", exc_info=errors)
            lost.append(RunError(f"{type(errors.exceptions[0]).__name__} in the driver"))
        return lost[0]

    def lose(self, cause: str) -> None:
        """End all sessions because the actor is lost, and refuse new ones."""
        self._cause = cause
        for session in self._sessions.values():
            _fail(session.opened, GatewayLost(cause))
            _fail(session.end, GatewayLost(cause))

    def open(
        self, opening: SessionOpening, access: ModelAccess, on_segments: OnSegments, generate: Generate
    ) -> RemoteSession:
        """Request a session; ``session.opened`` is done when it is open. Raises ``GatewayLost``."""
        if self._cause:
            raise GatewayLost(self._cause)
        session_id = next(self._session_ids)
        session = self._sessions[session_id] = RemoteSession(
            self, session_id, access, on_segments=on_segments, generate=generate
        )
        self._next_outgoing().sessions.append(replace(opening, session_number=session_id))
        return session

    def close(self, session: RemoteSession) -> None:
        """End a session and its calls; ``session.end`` gets its result."""
        if not session.closing:
            session.closing = True
            for call in session.calls:
                call.cancel()
            self._next_outgoing().sessions.append(session.session_id)

    def _next_outgoing(self) -> Outgoing:
        self._ordered.set()
        return self._outgoing

    async def _send(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            outgoing, self._outgoing = self._outgoing, Outgoing()
            await wait_for(self.actor.tell.remote(outgoing), GATEWAY, ANSWER_S)
            for change in outgoing.sessions:
                if isinstance(change, SessionOpening) and change.session_number in self._sessions:
                    self._sessions[change.session_number].opened.set_result(None)

    async def _collect(self) -> None:
        while True:
            incoming: Incoming = await wait_for(self.actor.collect.remote(POLL_S), GATEWAY, POLL_S + ANSWER_S)
            for session_number, segments in incoming.segments:
                if (session := self._sessions.get(session_number)) is not None:
                    session.on_segments(segments)
            if cancelled := [
                self._calls[request_number] for request_number in incoming.cancelled if request_number in self._calls
            ]:
                for call in cancelled:
                    call.cancel()
                await asyncio.wait(cancelled)  # the requests below may use the same ids again
            for request_number, request in incoming.requests.items():
                self._begin(request_number, request)
            for end in incoming.ends:
                self._sessions.pop(end.session_number).end.set_result(end)

    def _begin(self, request_number: int, request: Generation | ClientRequest) -> None:
        session = None
        if isinstance(request, ClientRequest):
            answering = self._answer_outside(request_number, request)
        else:
            session = None if request.session is None else self._sessions.get(request.session)
            if request.session is not None and (session is None or session.closing):
                failure = RolloutFailure(request.request.rollout_id, "the session has ended")
                self._next_outgoing().answers.append((request_number, failure))
                return
            answering = self._answer(
                request_number, request.request, self._generate if session is None else session.generate
            )
        call = self._calls[request_number] = self._group.create_task(answering)
        call.add_done_callback(lambda _: self._calls.pop(request_number))
        if session is not None:
            session.calls.add(call)
            call.add_done_callback(session.calls.discard)

    async def _answer_outside(self, request_number: int, request: ClientRequest) -> None:
        assert self._answer_client is not None, "the gateway has the paths for outside clients"
        try:
            answer = await self._answer_client(request)
        except Exception as error:  # such as a failed commit, which ends the run by another way
            log.error("a request of an outside client failed", exc_info=error)
            answer = ClientAnswer(500, {"message": f"{type(error).__name__} in the driver"}, "internal_error")
        self._next_outgoing().answers.append((request_number, answer))

    async def _answer(self, request_number: int, request: RolloutRequest, generate: Generate) -> None:
        def grown(segments: list[Segment]) -> None:
            self._next_outgoing().segments.append((request_number, segments))

        result: Rollout | RolloutFailure
        try:
            result = await generate(request, grown)
        except GenerationFailed as error:
            result = RolloutFailure(request.rollout_id, str(error))
        except Exception as error:  # a bug fails this call, not the run
            log.error("a generation failed", exc_info=error)
            result = RolloutFailure(request.rollout_id, f"{type(error).__name__} in the driver")
        self._next_outgoing().answers.append((request_number, result))


def chat_format(spec: ExperimentSpec, model_folder: str) -> ChatFormat:
    """The chat format of the model in a folder. Raises ``UserError`` for an invalid parser or chat template."""
    from asyncrl_cli.data.tokenizer import load_tokenizer
    from asyncrl_cli.rollout.response_text import end_tokens

    tokenizer = load_tokenizer(model_folder, spec.model.chat_template)
    return ChatFormat(
        tokenizer,
        spec.rollout.tool_parser,
        spec.rollout.reasoning_parser,
        end_tokens=end_tokens(model_folder, tokenizer),
        template=ChatTemplate.from_spec(spec, tokenizer),
        shows_special=spec.task.special_tokens == "shown",
        images=ImageTokens(model_folder, spec.model.max_images, spec.data.image_max_pixels),
        renders_history=spec.rollout.history == "template",
    )


def setup_of(spec: ExperimentSpec, model_folder: str, model: str, api_key: str | None = None) -> GatewaySetup:
    """A gateway's setup for the model in a folder, with new secrets. ``model``: the name that clients use."""
    return GatewaySetup(
        spec, chat=partial(chat_format, spec, model_folder), model=model, secret=new_secret(), api_key=api_key
    )


class GatewayClient:
    """The gateway of a run."""

    def __init__(
        self,
        setup: GatewaySetup,
        make_actor: Callable[[], Any],
        generate: Generate,
        budget: RestartBudget,
        answer: AnswerClient | None = None,
        port: int = 0,
    ) -> None:
        """``generate`` answers calls that belong to no session, ``answer`` the requests of outside clients. ``port``:
        the port that clients know from an earlier driver; 0: the spec's."""
        self._setup = setup
        self._generate = generate
        self._actor = SupervisedActor("gateway", name=GATEWAY, make=make_actor, start=self._connect, budget=budget)
        self._port = setup.spec.rollout.gateway.port or port
        self._answer = answer
        self._link: asyncio.Future[_Link] = asyncio.get_running_loop().create_future()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the gateway, and replace it whenever it is lost; returns its URL. Raises ``UserError``."""
        await self._actor.running()
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(lambda task: task.cancelled() or task.exception())  # sessions raise its error
        return self._link.result().url

    async def wait_until_lost(self) -> None:
        """Wait forever; raises the error after which the gateway cannot be replaced."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def _connect(self, actor: Any) -> None:
        pid, url = await wait_for(actor.start.remote(self._setup, self._port), GATEWAY, START_TIMEOUT_S)
        self._actor.pid = pid if self._setup.spec.cluster.address is None else None
        if (
            self._setup.api_key is not None or self._answer is not None
        ):  # clients know the address, so it must not change
            self._port = int(url.rpartition(":")[2])
        self._link.set_result(_Link(actor, url, self._generate, self._answer))

    async def _keep(self) -> None:
        """Answer the gateway's requests, and replace it whenever it is lost. Ends only with an error, which open
        sessions and later calls of ``session`` raise, too."""
        link = self._link.result()
        try:
            while True:
                lost = await link.run()
                self._link = asyncio.get_running_loop().create_future()
                link.lose(lost.message)
                await self._actor.lose(link.actor, lost.message)
                await self._actor.running()
                link = self._link.result()
        except Exception as error:
            link.lose(str(error))
            if self._link.done():
                self._link = asyncio.get_running_loop().create_future()
            _fail(self._link, error)
            raise

    @asynccontextmanager
    async def session(
        self, opening: SessionOpening, on_segments: OnSegments, generate: Generate
    ) -> AsyncIterator[RemoteSession]:
        """Open a session for the block. ``on_segments`` gets its tokens, ``generate`` answers its calls.

        Raises ``GatewayLost``, and ``UserError`` if the gateway cannot be replaced any more.
        """
        link = await asyncio.shield(self._link)
        access = ModelAccess(
            session_url(link.url, opening.name),
            api_key=session_key(self._setup.secret, opening.name),
            model=self._setup.model,
            rollout_id=opening.rollout_id,
            max_images=self._setup.spec.model.max_images,
        )
        session = link.open(opening, access, on_segments, generate)
        try:
            await asyncio.shield(session.opened)
            yield session
        finally:
            link.close(session)

    async def stop(self) -> None:
        """End every request, in bounded time; the actor ends with the cluster."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._link.done() and self._link.exception() is None:
            with suppress(RunError):
                await wait_for(self._link.result().actor.stop.remote(), GATEWAY, STOP_S)
