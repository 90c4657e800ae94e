"""The FastAPI application: its paths, and the keys for them.

Every request ends in bounded time. Its body has a deadline (bodies.py). Its generation is limited by the session and by
the driver, which restarts hanging engines, and is cancelled when the client disconnects.
"""

# No postponed annotations here: FastAPI must evaluate the annotations of nested functions.

from typing import Annotated
from weakref import WeakKeyDictionary

from fastapi import Depends, FastAPI, Path
from fastapi.responses import Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from asyncrl_cli import __version__
from asyncrl_cli.gateway import errors, openapi
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.metrics import Watched
from asyncrl_cli.gateway.paths import router_of
from asyncrl_cli.gateway.responses_reply import MAX_BYTES_WITHOUT, KeptResponses
from asyncrl_cli.gateway.service import Service
from asyncrl_cli.gateway.session import Session
from asyncrl_cli.gateway.sessions import same_key, session_key

Bearer = Annotated[
    HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False, description="The API key."))
]
KeyHeader = Annotated[
    str | None, Depends(APIKeyHeader(name="x-api-key", auto_error=False, description="The API key, as Anthropic's."))
]
SessionId = Annotated[str, Path(description="The session of the call.")]


def create_app(service: Service) -> FastAPI:
    """Make the application for all APIs, with and without a session in the path."""
    app = FastAPI(
        title="asyncrl gateway",
        version=__version__,
        description="OpenAI-compatible access to a policy, also during its training.",
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    openapi.install(app)
    app.add_middleware(Watched, metrics=service.metrics)

    async def check_session(session_id: SessionId, bearer: Bearer, header: KeyHeader) -> None:
        _check_key(bearer, header, session_key(service.secret, session_id))

    async def named(session_id: SessionId) -> Session:
        return service.sessions.get(session_id)

    kept: WeakKeyDictionary[Session, KeptResponses] = WeakKeyDictionary()
    app.include_router(
        router_of(service, named, lambda session: kept.setdefault(session, KeptResponses())),
        prefix="/sessions/{session_id:path}/v1",
        tags=["sessions"],
        dependencies=[Depends(check_session)],
    )
    if service.api_key is not None:
        _add_plain(app, service, service.api_key)

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, str]:
        """The gateway is up. Needs no key."""
        return {"status": "ok"}

    return app


def _add_plain(app: FastAPI, service: Service, api_key: str) -> None:
    async def check(bearer: Bearer, header: KeyHeader) -> None:
        _check_key(bearer, header, api_key)

    async def none() -> None:
        return None

    key = [Depends(check)]
    kept = KeptResponses(limit=MAX_BYTES_WITHOUT)
    app.include_router(router_of(service, none, lambda _: kept), prefix="/v1", tags=["OpenAI"], dependencies=key)

    @app.get("/metrics", tags=["operation"], dependencies=key, responses=openapi.METRICS)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _check_key(bearer: HTTPAuthorizationCredentials | None, header: str | None, right: str) -> None:
    given = [key for key in (bearer and bearer.credentials, header) if key]
    if not any(same_key(key, right) for key in given):
        problem = "wrong API key" if given else "no API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise ApiError(401, problem, code="invalid_api_key")
