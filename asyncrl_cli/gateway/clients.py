"""The paths for programs outside of the run (`task.use: external`): they open sessions, reward them, or give up.

The driver answers (orchestrator/outside_sessions.py). Here requests get their form and their key: the run's token opens
a session, and a session's own key does everything else.
"""

# No postponed annotations here: FastAPI must evaluate the annotations of nested functions.

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.service import ConnectedCall, Service
from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest, OutsideClients
from asyncrl_cli.gateway.wire import Text, Wire

RETRY_AFTER_S = 1
"""Seconds after which a program should ask again for a session."""
CheckKey = Callable[..., Awaitable[None]]
"""FastAPI dependency that refuses a request with another key."""


class OpenBody(Wire):
    """A program's own prompt, text or chat messages, and further columns of its row; without a prompt the run's next
    prompt is used."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | list[dict[str, Any]] | None = None
    fields: dict[str, Any] = Field(default_factory=dict)


class RewardBody(Wire):
    """A reward; null masks the rollout. ``metrics`` are recorded, and may be parts of the reward
    (`algorithm.reward_parts`)."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(strict=True)] | None
    metrics: dict[str, Annotated[float, Field(strict=True)]] = Field(default_factory=dict)


def clients_router(service: Service, clients: OutsideClients, check_token: CheckKey, check_key: CheckKey) -> APIRouter:
    """The paths. ``check_token`` refuses requests without the run's token, ``check_key`` those without the session's
    key."""
    router = APIRouter()

    @router.post("/sessions", dependencies=[Depends(check_token)])
    async def open_session(request: Request) -> Response:
        async with service.bodies.read(request, OpenBody) as (body, _):
            client_request = ClientRequest(Action.OPEN, prompt=body.prompt, fields=body.fields)
        call = ConnectedCall(request, clients.ask(client_request))
        service.calls.add(call.task)
        call.task.add_done_callback(service.calls.discard)
        return _response(await call.result())

    @router.post("/sessions/{session_id:path}/reward", dependencies=[Depends(check_key)])
    async def reward(request: Request, session_id: str) -> Response:
        async with service.bodies.read(request, RewardBody) as (body, _):
            session = service.sessions.open_session(session_id)
            client_request = ClientRequest(
                Action.REWARD,
                session_id,
                reward=body.reward,
                metrics=body.metrics,
                has_reply=session is None or session.has_reply,
            )
        return _response(await clients.ask(client_request))

    @router.delete("/sessions/{session_id:path}", dependencies=[Depends(check_key)])
    async def give_up(session_id: str) -> Response:
        return _response(await clients.ask(ClientRequest(Action.GIVE_UP, session_id)))

    return router


def _response(answer: ClientAnswer) -> Response:
    if answer.code is None:
        return JSONResponse(dict(answer.body), answer.status)
    error = ApiError(answer.status, answer.body["message"], code=answer.code)
    headers = {"retry-after": str(RETRY_AFTER_S)} if answer.status == 503 else None
    return JSONResponse(error.for_openai(), answer.status, headers)
