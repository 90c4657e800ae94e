"""The gateway's metrics for Prometheus."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl_cli.gateway.errors import CLIENT_GONE, error_response

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters in a separate registry: two gateways in one process do not share them."""

    def __init__(self) -> None:
        prefix = "asyncrl_gateway"
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        self.requests = counter(f"{prefix}_requests", "Requests answered.", ["path", "status"])
        self.errors = counter(f"{prefix}_errors", "Requests answered with an error.", ["status"])
        self.prompt_tokens = counter(f"{prefix}_prompt_tokens", "Tokens of the prompts of answered requests.")
        self.generated_tokens = counter(f"{prefix}_generated_tokens", "Tokens generated for answered requests.")
        self.in_flight = Gauge(f"{prefix}_in_flight", "Requests being answered.", registry=registry)
        description = "From a request's arrival to the end of its answer."
        self.seconds = Histogram(
            f"{prefix}_request_seconds", description, ["path"], buckets=BUCKETS_S, registry=registry
        )

    def used(self, prompt_tokens: int, generated_tokens: int) -> None:
        self.prompt_tokens.inc(prompt_tokens)
        self.generated_tokens.inc(generated_tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Watched:
    """Middleware that counts requests and answers unexpected exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = CLIENT_GONE, time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, watched_send)
            except Exception as error:
                answer = error_response(scope, error)
                if status != CLIENT_GONE:  # an answer has begun
                    raise
                await answer(scope, receive, watched_send)
            finally:
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(path, status).inc()
                if status >= 400:
                    self._metrics.errors.labels(status).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
