"""The Ray actor that is the gateway: network, rendering, tokenizing and sessions, apart from the driver.

Only token ids cross to the driver (``crossing``). The actor keeps nothing that the journal does not have: when it dies,
episodes are played again from the tokens that it had told.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.crossing import Crossing, News, Orders, SessionEnd, SessionOpening
from asyncrl_cli.gateway.session import Limits, Session
from asyncrl_cli.gateway.sessions import Sessions
from asyncrl_cli.records.generation import Sampling
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import redirect_output

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewaySetup:
    """What a gateway serves.

    Args:
        spec: where it listens, and how long its contexts are.
        chat: reads the model's chat format.
        model: the name that clients use.
        secret: what session keys are derived from.
        api_key: opens `/v1`, to calls without a session; None where there is no `/v1`.
    """

    spec: ExperimentSpec
    chat: Callable[[], ChatFormat]
    model: str
    secret: bytes = field(repr=False)
    api_key: str | None = field(default=None, repr=False)


class GatewayActor:
    """Every method is a Ray call."""

    def __init__(self, log_dir: str) -> None:
        redirect_output(log_dir, "gateway")
        self._crossing = Crossing()
        self._sessions = Sessions()
        self._by_number: dict[int, tuple[str, Session]] = {}

    async def start(self, setup: GatewaySetup, port: int) -> tuple[int, str]:
        """Serve from now on, at ``port`` (0: a free one); returns the process id and the server's URL.

        Raises ``UserError``: the address cannot be had, or the tool parser does not fit the model.
        """
        from asyncrl_cli.gateway.connections import ConnectionLimits, raise_descriptor_limit
        from asyncrl_cli.gateway.server import start_gateway

        asyncio.get_running_loop().set_exception_handler(_FullOnce())
        limits = ConnectionLimits(most=raise_descriptor_limit())
        self._chat = await asyncio.to_thread(setup.chat)
        self._server = await start_gateway(
            setup.spec.rollout.gateway.model_copy(update={"port": port}),
            self._chat,
            self._sessions,
            one_call_sessions(setup.spec, self._chat, self._crossing),
            setup.model,
            secret=setup.secret,
            api_key=setup.api_key,
            limits=limits,
        )
        return os.getpid(), self._server.url

    async def tell(self, orders: Orders) -> None:
        """Take what the driver has to tell."""
        for change in orders.sessions:
            if isinstance(change, SessionOpening):
                self._open(change)
            else:
                self._end(change)
        self._crossing.answer(orders)

    async def collect(self, timeout_s: float) -> News:
        """What there is to tell the driver; waits up to ``timeout_s`` for it."""
        return await self._crossing.collect(timeout_s)

    async def stop(self) -> None:
        """End every request."""
        if hasattr(self, "_server"):
            await self._server.stop()

    def _open(self, opening: SessionOpening) -> None:
        session = Session(
            opening.rollout_id,
            self._chat,
            partial(self._crossing.generate, opening.number),
            opening.sampling,
            opening.limits,
            fixed_sampling=True,
            priority=opening.priority,
            recorded=opening.recorded,
            on_segments=partial(self._crossing.record, opening.number),
        )
        self._sessions.open(session, opening.name)
        self._by_number[opening.number] = (opening.name, session)

    def _end(self, number: int) -> None:
        name, session = self._by_number.pop(number)
        self._sessions.close(name)
        end = SessionEnd(number, session.rollout(), session.last_text, session.failure)
        # After the cancellations of its calls, which happen in the loop's next turn.
        asyncio.get_running_loop().call_soon(self._crossing.ended, end)


def one_call_sessions(spec: ExperimentSpec, chat: ChatFormat, crossing: Crossing) -> Callable[[], Session]:
    """Makes the sessions of calls that belong to no rollout, sampled as they ask."""
    longest, numbers = spec.model.max_length, count()
    limits = Limits(max_length=longest, max_call_tokens=longest)
    sampling = Sampling(temperature=1.0, max_tokens=longest)

    def make() -> Session:
        number = next(numbers)
        generate = partial(crossing.generate, None)
        return Session(f"serve-{number}", chat, generate, sampling, limits, fixed_sampling=False, priority=number)

    return make


class _FullOnce:
    """An event loop's handler of errors that says once that there are no descriptors left: asyncio reports every
    connection that it cannot accept, thousands a second."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != "socket.accept() out of system resource":
            loop.default_exception_handler(context)
        elif not self._said:
            self._said = True
            log.error("no file descriptors are left for connections: %s", context.get("exception"))
