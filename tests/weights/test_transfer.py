"""The server of weights serves nothing without the token, and only weights with it."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights import transfer
from asyncrl_cli.weights.layout import plan_slots
from asyncrl_cli.weights.manifest import Manifest
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.transfer import Connection, HolderFault, WeightServer

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-the-run"
SLOTS = plan_slots([("w", torch.int8, (1000,))])


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with closing(Replica(SLOTS, 1)) as replica:
        yield replica


@pytest.fixture(scope="module")
def manifest(replica: Replica) -> Manifest:
    descriptor = os.open(replica.begin(7), os.O_RDWR)
    os.pwrite(descriptor, bytes(i % 251 for i in range(1000)), 0)
    os.close(descriptor)
    with ThreadPoolExecutor(1) as threads:
        return Manifest.from_digests(7, SLOTS, 1, [replica.digest(7, {0}, threads)])


@pytest.fixture
def server(replica: Replica) -> Iterator[WeightServer]:
    with closing(WeightServer(replica, TOKEN, "127.0.0.1")) as server:
        yield server


def connected(server: WeightServer, host: str | None = None) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((host or address.hostname, address.port), timeout=120)


def ask(server: WeightServer, request: bytes) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    with connected(server) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def request(path: str, token: str = TOKEN) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"Authorization: Bearer {TOKEN[:-1]}\r\n",
        f"Authorization: Bearer {TOKEN}x\r\n",
        f"Authorization: Bearer {TOKEN.upper()}\r\n",
        f"Authorization: Basic {TOKEN}\r\n",
        f"X-Authorization: Bearer {TOKEN}\r\n",
    ],
)
def test_without_the_token_there_is_one_answer_for_every_path(
    server: WeightServer, manifest: Manifest, header: str
) -> None:
    paths = ("/weights/7", f"/weights/7/chunks/0/{manifest.digests[0]}", "/x")
    answers = [ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode()) for path in paths]
    assert status(answers[0]) == 401
    assert len({re.sub(rb"Date: .*", b"", answer) for answer in answers}) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/weights/7/",
        "/weights/7/chunks/0",
        "/weights/7/chunks/0/{digest}/..",
        "/weights/7/chunks/1/{digest}",
        "/weights/8/chunks/0/{digest}",
        "/weights/7/chunks/0/" + "0" * 64,
        "/../etc/passwd",
        "/weights/7?version=8",
    ],
)
def test_other_paths_are_refused(server: WeightServer, manifest: Manifest, path: str) -> None:
    assert status(ask(server, request(path.format(digest=manifest.digests[0])))) == 404


@given(st.binary(max_size=200), st.sampled_from([b"", b"PUT /weights/7 HTTP/1.1\r\n", b"GET /weights/7 HTTP/1.1\r\n"]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_malformed_requests_get_no_weights_and_end_nothing(server: WeightServer, data: bytes, start: bytes) -> None:
    assert b" 200 OK" not in ask(server, start + data + b"\r\n\r\n")
    assert status(ask(server, request("/weights/7"))) == 200


def test_a_client_that_is_silent_is_not_waited_for(server: WeightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENCE_S", 0.2)
    with connected(server) as connection:
        connection.sendall(b"GET /weights/7 HTTP/1.1\r\n")
        assert connection.recv(100) == b""


def test_connections_are_bounded(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    with closing(WeightServer(replica, TOKEN, "127.0.0.1")) as server, connected(server) as first:
        first.sendall(request("/weights/7"))
        assert first.recv(100)
        with connected(server) as second:
            assert second.recv(100) == b""


def test_the_token_is_logged_nowhere(
    server: WeightServer, manifest: Manifest, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(server, request("/weights/7"))
    ask(server, request("/weights/7", token=TOKEN + "x"))
    ask(server, request("/other"))
    with pytest.raises(HolderFault) as caught:
        Connection(server.url, TOKEN).fetch(7, 3, manifest.digests[0], [memoryview(bytearray(1))])
    output = capfd.readouterr()
    assert TOKEN not in caplog.text + output.out + output.err + repr(caught.value)


def test_an_address_of_another_host_cannot_be_served_on(replica: Replica) -> None:
    with pytest.raises(RunError, match=r"weights cannot be served on 192\.0\.2\.1"):
        WeightServer(replica, TOKEN, "192.0.2.1")


def test_only_the_given_address_is_served(server: WeightServer) -> None:
    with pytest.raises(OSError, match="refused"):
        connected(server, "127.0.0.2")
