"""The application: its paths, and the keys that open them.

A request ends in bounded time: its body must arrive in time (requests.py), and its generation is bounded by the
session's limits and by the driver, which restarts engines that hang; it is cancelled when its client is gone.
"""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path
from fastapi.responses import Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from asyncrl_cli import __version__
from asyncrl_cli.gateway import errors, openapi
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.messages_paths import add_messages
from asyncrl_cli.gateway.metrics import Watched
from asyncrl_cli.gateway.openai_paths import add_openai
from asyncrl_cli.gateway.responses_paths import add_responses
from asyncrl_cli.gateway.service import Service, SessionOf
from asyncrl_cli.gateway.session import Session
from asyncrl_cli.gateway.sessions import same_key, session_key


def create_app(service: Service) -> FastAPI:
    """The application that serves OpenAI's API, with and without a session in the path."""
    app = FastAPI(
        title="asyncrl gateway",
        version=__version__,
        description="OpenAI-compatible access to a policy, also while it is trained.",
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    openapi.install(app)
    app.add_middleware(Watched, metrics=service.metrics)
    _add_sessions(app, service)
    if service.api_key is not None:
        _add_plain(app, service, service.api_key)

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, str]:
        """Whether the gateway is up. Needs no key."""
        return {"status": "ok"}

    return app


def _add_sessions(app: FastAPI, service: Service) -> None:
    """The paths of sessions, each of which has a key of its own."""
    Id = Annotated[str, Path(description="The session that the call belongs to.")]

    async def check(session_id: Id, bearer: Bearer, header: KeyHeader) -> None:
        _check_key(bearer, header, session_key(service.secret, session_id))

    async def named(session_id: Id) -> Session:
        return service.sessions.get(session_id)

    app.include_router(
        _router(service, named),
        prefix="/sessions/{session_id:path}/v1",
        tags=["sessions"],
        dependencies=[Depends(check)],
    )


def _add_plain(app: FastAPI, service: Service, api_key: str) -> None:
    """The paths of calls that belong to no session, and the server's metrics."""

    async def check(bearer: Bearer, header: KeyHeader) -> None:
        _check_key(bearer, header, api_key)

    async def none() -> None:
        return None

    key = [Depends(check)]
    app.include_router(_router(service, none), prefix="/v1", tags=["OpenAI"], dependencies=key)

    @app.get("/metrics", tags=["operation"], dependencies=key, responses=openapi.METRICS)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


Bearer = Annotated[
    HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False, description="The API key."))
]
KeyHeader = Annotated[
    str | None, Depends(APIKeyHeader(name="x-api-key", auto_error=False, description="The API key, as Anthropic's."))
]


def _check_key(bearer: HTTPAuthorizationCredentials | None, header: str | None, right: str) -> None:
    given = [key for key in (bearer and bearer.credentials, header) if key]
    if not any(same_key(key, right) for key in given):
        what = "wrong API key" if given else "no API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise ApiError(401, what, code="invalid_api_key")


def _router(service: Service, session_of: SessionOf) -> APIRouter:
    """The paths of every API, under one prefix."""
    router = APIRouter()
    add_messages(router, service, session_of)  # first: it takes Anthropic's clients from paths of both
    add_openai(router, service, session_of)
    add_responses(router, service, session_of)
    return router
