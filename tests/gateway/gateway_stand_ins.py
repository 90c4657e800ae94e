"""A gateway over real HTTP and real sessions; only the tokens come from a script instead of an engine.

The tokenizer is the project's own, with a chat template that marks roles and shows tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import numpy as np
import openai

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.bodies import Bodies
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.connections import ConnectionLimits
from asyncrl_cli.gateway.server import Gateway, listen
from asyncrl_cli.gateway.service import Service
from asyncrl_cli.gateway.session import Session, SessionLimits
from asyncrl_cli.gateway.sessions import OutsideClients, Sessions, session_key, session_url
from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling, Segment
from asyncrl_cli.spec.sections import GatewaySpec
from tests.gateway.conversation_stand_ins import end_of

MODEL = "tiny"
SECRET = b"of this gateway"
KEY = session_key(SECRET, "0")
"""The key for calls without a session, and, for clients that have only one key, for the session "0"."""
MAX_LENGTH = 2048
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{{ 'a:' if add_generation_prompt else '' }}"
)


@cache
def chat_format(reasoning_parser: str | None = None) -> ChatFormat:
    tokenizer = character_tokenizer(MAX_LENGTH)
    tokenizer.chat_template = TEMPLATE
    return ChatFormat(tokenizer, "hermes", reasoning_parser)


Script = Callable[[str, RolloutRequest], str]
"""Maps a prompt's text to the model's reply."""


def echo(prompt: str, request: RolloutRequest) -> str:
    """A reply that repeats the last message, with the seed."""
    return prompt.removesuffix("a:").strip().rpartition(":")[2] + f" ({request.sampling.seed})"


@dataclass
class Engine:
    """Replies with the text of its script, token by token, with log-prob -0.5 each, under version 3.

    ``held`` stops every reply after its first half, until it is set.
    """

    script: Script = echo
    held: asyncio.Event | None = None
    asked: list[RolloutRequest] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    fails: Exception | None = None
    chat: ChatFormat = field(default_factory=chat_format)

    async def generate(self, request: RolloutRequest, on_segments: Any = None) -> Rollout:
        self.asked.append(request)
        self.running += 1
        try:
            return await self._generate(request, on_segments)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: RolloutRequest, on_segments: Any) -> Rollout:
        if self.fails is not None:
            raise self.fails
        chat = self.chat
        text = self.script(chat.decode(request.prompt_ids), request)
        ids = [*chat.encode(text), end_of(chat)]
        for stop in request.sampling.stop:
            if stop in text:
                ids = ids[: min(len(ids), text.index(stop) + len(stop))]
        finish = "length" if len(ids) > request.sampling.max_tokens else "stop"
        ids = ids[: request.sampling.max_tokens]
        for at, token in enumerate(ids[: len(ids) // 2]):
            await asyncio.sleep(0)
            if on_segments is not None:
                on_segments(
                    [Segment(request.rollout_id, at, 3, np.array([token], np.int32), np.full(1, -0.5, np.float32))]
                )
        if self.held is not None:
            await self.held.wait()
        return Rollout(
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.full(len(ids), 3, np.int32),
            text=chat.decode(ids),
            finish_reason=finish,  # type: ignore[arg-type]
        )


@dataclass
class Served:
    """A running gateway with its engine."""

    gateway: Gateway
    engine: Engine
    sessions: Sessions
    http: httpx.AsyncClient
    opened: list[Session]

    def session(self, name: str = "7-0", **changes: Any) -> Session:
        """Open a session as in training."""
        session = new_session(name, self.engine, fixed_sampling=True, **changes)
        self.sessions.open(session)
        return session

    def client(self, session: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's own client, without retries."""
        base_url = session_url(self.gateway.url, session) if session else f"{self.gateway.url}/v1"
        return openai.AsyncOpenAI(**({"base_url": base_url, "api_key": key_of(session), "max_retries": 0} | options))

    async def post(self, path: str, body: Any = None, session: str | None = None, **options: Any) -> httpx.Response:
        """Send a request with the right key."""
        options["headers"] = {"Authorization": f"Bearer {key_of(session)}"} | options.get("headers", {})
        path = path if session is None else f"/sessions/{session}{path}"
        return await self.http.post(path, **({"json": body} if body is not None else {}), **options)


def key_of(session: str | None) -> str:
    """The key of a session, or of calls without one."""
    return KEY if session is None else session_key(SECRET, session)


def new_session(name: str, engine: Engine, fixed_sampling: bool = False, **limits: Any) -> Session:
    return Session(
        name,
        engine.chat,
        engine.generate,
        Sampling(temperature=1.0, max_tokens=MAX_LENGTH, seed=11 if fixed_sampling else None),
        SessionLimits(**({"max_length": MAX_LENGTH, "max_call_tokens": MAX_LENGTH} | limits)),
        fixed_sampling=fixed_sampling,
    )


@asynccontextmanager
async def served(
    engine: Engine | None = None,
    limits: ConnectionLimits | None = None,
    plain: bool = True,
    clients: OutsideClients | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A gateway on a free port for the duration of the block; ``plain``: calls without a session are allowed."""
    engine = engine or Engine()
    sessions = Sessions()
    opened: list[Session] = []

    def for_one_call() -> Session:
        opened.append(new_session(f"call-{len(opened)}", engine))
        return opened[-1]

    spec, limits = GatewaySpec(**settings), limits or ConnectionLimits()
    service = Service(
        sessions=sessions,
        secret=SECRET,
        new_session=for_one_call,
        api_key=KEY if plain else None,
        chat=engine.chat,
        model=MODEL,
        bodies=Bodies(spec.max_body_mb * 2**20, limits.body_s),
        clients=clients,
    )
    gateway = Gateway(service, listen(spec.host, spec.port), limits)
    await gateway.start()
    headers = {"Authorization": f"Bearer {KEY}"}
    most = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120, limits=most) as http:
            yield Served(gateway, engine, sessions, http, opened)
    finally:
        await gateway.stop()


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Return when the condition is true; fail if it is not true in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
