"""A host measures other hosts over real connections on this machine, and classifies failures."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asyncrl_cli.checks.hosts import probe, shared_folder
from asyncrl_cli.checks.hosts.probe import Failure, Host, HostProbe, failure_of
from asyncrl_cli.core.errors import ConfigError

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"


def host(name: str, port: int = 0) -> Host:
    return Host(name, name, HERE, port=port)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONNECT_S", 1.0)
    monkeypatch.setattr(probe, "SAMPLE_S", 1.0)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def measured(serve: Serve) -> float | Failure:
    """The result of a probe of a server that does this."""

    async def measure() -> float | Failure:
        async with await asyncio.start_server(serve, HERE, 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await HostProbe(host("one"), "secret").measure(host("two", port))

    return asyncio.run(measure())


def test_two_probes_measure_each_other() -> None:
    async def measure() -> tuple[Failure | None, float | Failure]:
        one, two = HostProbe(host("one"), "secret"), HostProbe(host("two"), "secret")
        port = (await two.open()).port
        target = host("two", port)
        return await one.reach(target), await one.measure(target)

    failure, speed = asyncio.run(measure())
    assert failure is None and isinstance(speed, float) and speed > 1e6


def test_a_stranger_without_the_secret_gets_nothing() -> None:
    async def ask() -> bytes:
        two = HostProbe(host("two"), "secret")
        port = (await two.open()).port
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(b"guess\nd")
        try:
            return await asyncio.wait_for(reader.read(), 10)
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
        assert asyncio.run(HostProbe(host("one"), "secret").measure(target)) == "refused"
        assert asyncio.run(HostProbe(host("one"), "secret").reach(target)) == "refused"


def test_a_host_that_answers_nothing_is_silent() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert measured(wait) == "silent"


def test_another_process_at_the_address_is_not_the_host() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"three\n")
        writer.close()

    assert measured(other) == "another host"


def test_a_link_that_loses_large_packets_is_stalled() -> None:
    """Connections and small messages pass, as with an MTU that is too large."""

    async def small(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"two\n")
        await reader.read()
        writer.close()

    assert measured(small) == "stalled"


def test_a_slow_link_has_the_speed_of_the_bytes_that_came() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"two\n")
        writer.write(bytes(200_000))
        await reader.read()
        writer.close()

    speed = measured(slow)
    assert isinstance(speed, float) and speed <= 200_000


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (TimeoutError(), "silent"),
        (ConnectionRefusedError(), "refused"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route"),
        (ConnectionResetError(), "closed"),
        (asyncio.IncompleteReadError(b"", 1), "closed"),
    ],
)
def test_connection_errors_are_classified(error: BaseException, failure: str) -> None:
    assert failure_of(error) == failure


def test_a_folder_that_is_shared_is_proved_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with shared_folder.marked(folder) as mark:
        assert shared_folder.answer(mark, "two") == ""
        assert shared_folder.missing_answer(mark, "two") == ""
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    with shared_folder.marked(tmp_path / "runs"):
        (tmp_path / "runs" / "a-run").mkdir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-run"]


def test_equal_paths_on_two_disks_are_not_a_shared_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with shared_folder.marked(here) as mark:
        other = there / mark.name
        assert shared_folder.answer(other, "two", 0.0) == f"has no folder {there}"
        there.mkdir()
        assert shared_folder.answer(other, "two", 0.0) == f"does not see the driver's files in {there}"
        assert shared_folder.missing_answer(mark, "two", 0.0).startswith("writes into another folder")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"), shared_folder.marked(tmp_path / "file"):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with shared_folder.marked(tmp_path) as mark:
        monkeypatch.setattr(shared_folder, "_write", refuse)
        assert shared_folder.answer(mark, "two") == f"cannot write into {tmp_path}: Read-only file system"
