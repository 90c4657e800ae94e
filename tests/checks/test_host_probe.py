"""A host measures other hosts over real connections on this machine, and classifies failures."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asyncrl_cli.checks.hosts import probe
from asyncrl_cli.checks.hosts.probe import ANOTHER_HOST, CLOSED, NO_ROUTE, REFUSED, SILENT, Host, HostProbe, HostProblem
from asyncrl_cli.core.errors import ConfigError

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"


def host(name: str, port: int = 0) -> Host:
    return Host(name, name, HERE, port=port)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONNECT_S", 1.0)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def problem_with(serve: Serve) -> HostProblem | None:
    """The result of a connection to a server that does this."""

    async def connect() -> HostProblem | None:
        async with await asyncio.start_server(serve, HERE, 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await HostProbe(host("one"), "secret").connection_problem(host("two", port))

    return asyncio.run(connect())


def test_a_probe_reaches_another_one() -> None:
    async def connect() -> HostProblem | None:
        one, two = HostProbe(host("one"), "secret"), HostProbe(host("two"), "secret")
        return await one.connection_problem(host("two", (await two.open()).port))

    assert asyncio.run(connect()) is None


def test_a_stranger_without_the_secret_gets_nothing() -> None:
    async def ask() -> bytes:
        two = HostProbe(host("two"), "secret")
        port = (await two.open()).port
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(b"guess\n")
        try:
            return await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()

    assert asyncio.run(ask()) == b""


def test_a_host_reports_its_installation() -> None:
    facts = asyncio.run(HostProbe(host("one"), "secret").open())
    assert facts.versions["python"].startswith("3.") and "torch" in facts.versions
    assert len(facts.code) == 64 and facts.memory > 0


def test_an_address_that_the_host_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Ray has the address 192\.0\.2\.1 for this host") as error:
        asyncio.run(HostProbe(Host("one", "one", "192.0.2.1"), "secret").open())
    assert "--node-ip-address" in error.value.hint


def test_a_closed_port_is_refused() -> None:
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        target = host("two", bound.getsockname()[1])
        assert asyncio.run(HostProbe(host("one"), "secret").connection_problem(target)) == REFUSED


def test_a_host_that_answers_nothing_is_silent() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert problem_with(wait) == SILENT


@pytest.mark.parametrize(("answer", "problem"), [(b"three\n", ANOTHER_HOST), (b"", CLOSED)])
def test_another_process_at_the_address_is_not_the_host(answer: bytes, problem: HostProblem) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    assert problem_with(other) == problem


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (TimeoutError(), SILENT),
        (OSError(errno.EHOSTUNREACH, "No route to host"), NO_ROUTE),
        (ConnectionResetError(), CLOSED),
    ],
)
def test_connection_errors_are_classified(
    error: BaseException, problem: HostProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fail)
    assert asyncio.run(HostProbe(host("one"), "secret").connection_problem(host("two", 1))) == problem


def test_a_folder_that_is_shared_is_proved_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with probe.marked_folder(folder) as mark:
        assert probe.answer(mark, "two") == ""
        assert probe.appears(mark / "two")
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    with probe.marked_folder(tmp_path / "runs"):
        (tmp_path / "runs" / "a-run").mkdir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-run"]


def test_equal_paths_on_two_disks_are_not_a_shared_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with probe.marked_folder(here) as mark:
        other = there / mark.name
        assert probe.answer(other, "two", 0.0) == f"has no folder {there}"
        there.mkdir()
        assert probe.answer(other, "two", 0.0) == f"does not see the driver's files in {there}"
        assert not probe.appears(mark / "two", 0.0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"), probe.marked_folder(tmp_path / "file"):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with probe.marked_folder(tmp_path) as mark:
        monkeypatch.setattr(probe, "_write", refuse)
        assert probe.answer(mark, "two") == f"cannot write into {tmp_path}: Read-only file system"
