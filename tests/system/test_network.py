"""Processes of a run reach the gateway although the environment names a proxy."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.system.network import LOOPBACK, PROXIES, WITHOUT_PROXY, bypass_proxies, proxies_in_force

CLIENTS: dict[str, Callable[[str], object]] = {
    "httpx": httpx.get,
    "requests": requests.get,
    "urllib": lambda url: urllib.request.build_opener().open(url),  # urlopen keeps the proxies of its first call
}


@pytest.fixture
def url() -> Iterator[str]:
    """A server on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "all_proxy"])
@pytest.mark.parametrize("exceptions", ["", "example.com", "*"])
def test_clients_reach_loopback_directly_whatever_proxy_is_set(
    url: str, client: str, variable: str, exceptions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*PROXIES, *WITHOUT_PROXY):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("no_proxy", exceptions)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing listens there
    if exceptions != "*" and (client != "urllib" or variable != "all_proxy"):  # urllib has no proxy for all schemes
        with pytest.raises((httpx.HTTPError, OSError)):
            CLIENTS[client](url)
    bypass_proxies("gateway.example")
    CLIENTS[client](url)
    assert proxies_in_force() == [variable]


@given(
    upper=st.lists(st.sampled_from(["a.example", ".b", "10.0.0.0/8", "localhost", ""])),
    lower=st.lists(st.sampled_from(["c", "::1"])),
)
def test_the_users_exceptions_are_kept_and_a_second_call_changes_nothing(upper: list[str], lower: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", " , ".join(upper))
        patch.setenv("no_proxy", ",".join(lower))
        bypass_proxies("host")
        exceptions = os.environ["NO_PROXY"]
        assert set(exceptions.split(",")) == {*filter(None, upper), *lower, *LOOPBACK, "host"}
        bypass_proxies()
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == exceptions
