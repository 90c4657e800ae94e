"""The FastAPI application: its paths, and the keys for them.

Every request ends in bounded time. Its body has a deadline (bodies.py). Its generation is limited by the session and by
the driver, which restarts hanging engines, and is cancelled when the client disconnects.
"""

# No postponed annotations here: FastAPI must evaluate the annotations of nested functions.

from typing import Annotated
from weakref import WeakKeyDictionary

from fastapi import Depends, FastAPI
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from asyncrl_cli.gateway import errors
from asyncrl_cli.gateway.clients import clients_router
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.paths import router_of
from asyncrl_cli.gateway.responses_reply import MAX_BYTES_WITHOUT, KeptResponses
from asyncrl_cli.gateway.service import Service
from asyncrl_cli.gateway.session import Session
from asyncrl_cli.gateway.sessions import same_key, session_key

Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
KeyHeader = Annotated[str | None, Depends(APIKeyHeader(name="x-api-key", auto_error=False))]


def create_app(service: Service) -> FastAPI:
    """Make the application for all APIs, with and without a session in the path."""
    app = FastAPI(openapi_url=None)
    errors.install(app)

    async def check_session(session_id: str, bearer: Bearer, header: KeyHeader) -> None:
        _check_key(bearer, header, session_key(service.secret, session_id))

    async def session_by_name(session_id: str) -> Session:
        if service.clients is None:
            return service.sessions.get(session_id)
        return await service.sessions.when_open(session_id)

    responses_by_session: WeakKeyDictionary[Session, KeptResponses] = WeakKeyDictionary()
    app.include_router(
        router_of(service, session_by_name, lambda session: responses_by_session.setdefault(session, KeptResponses())),
        prefix="/sessions/{session_id:path}/v1",
        dependencies=[Depends(check_session)],
    )
    if (api_key := service.api_key) is not None:

        async def check_api_key(bearer: Bearer, header: KeyHeader) -> None:
            _check_key(bearer, header, api_key)

        async def no_session() -> None:
            return None

        without_session = KeptResponses(limit=MAX_BYTES_WITHOUT)
        app.include_router(
            router_of(service, no_session, lambda _: without_session),
            prefix="/v1",
            dependencies=[Depends(check_api_key)],
        )

    if (clients := service.clients) is not None:

        async def check_token(bearer: Bearer, header: KeyHeader) -> None:
            _check_key(bearer, header, clients.token)

        app.include_router(clients_router(service, clients, check_token, check_session))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The gateway is up. Needs no key."""
        return {"status": "ok"}

    return app


def _check_key(bearer: HTTPAuthorizationCredentials | None, header: str | None, expected_key: str) -> None:
    keys = [key for key in (bearer and bearer.credentials, header) if key]
    if not any(same_key(key, expected_key) for key in keys):
        problem = "wrong API key" if keys else "no API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise ApiError(401, problem, code="invalid_api_key")
