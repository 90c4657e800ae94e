"""Fetching a version from other processes, correct holders or holders that lie, stall or die."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection as PipeConnection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from asyncrl_cli.weights import pull as pull_module
from asyncrl_cli.weights import transfer
from asyncrl_cli.weights.manifest import Endpoint, Pulled, PullFailed, Superseded
from asyncrl_cli.weights.pull import Pull
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.transfer import Connection, HolderFault, WeightServer
from tests.weights.holders import CHUNKS, RANKS, SLOTS, TOKEN, content, hold, manifest, serve

pytestmark = pytest.mark.slow

BAD = {
    "lying": "it sent wrong bytes for chunk",
    "other-version": "it sent wrong bytes for chunk",
    "short": "bytes, expected ",
    "long": "bytes, expected ",
    "cut": "it ended after",
    "error": "it answered with HTTP status 500",
    "refusing": "it refuses the run's token",
    "nothing-after-all": "it does not have the chunk",
    "no-http": "its answer is not HTTP/1.1",
    "endless-head": "its answer is not HTTP/1.1",
    "silent": "it did not answer in time",
    "stalling": "it did not answer in time",
}


class Holders:
    """Holders in processes, which are forked: they need neither imports nor the bytes of the version again."""

    def __init__(self) -> None:
        self.processes: dict[str, tuple[ForkProcess, PipeConnection]] = {}

    def __call__(self, *kinds: str) -> list[Endpoint]:
        fork = multiprocessing.get_context("fork")
        content(1)
        for kind in kinds:
            reports, sent = fork.Pipe(duplex=False)
            process = fork.Process(target=serve, args=(kind, sent), daemon=True)
            process.start()
            sent.close()
            self.processes[kind] = process, reports
        return [Endpoint(kind, self.report(kind)) for kind in kinds]

    def report(self, kind: str) -> str:
        """The holder's next message."""
        return str(self.processes[kind][1].recv())

    def kill(self, kind: str) -> None:
        process, _ = self.processes[kind]
        process.kill()
        process.join()

    def close(self) -> None:
        for kind, (_, reports) in self.processes.items():
            self.kill(kind)
            reports.close()


@pytest.fixture
def holders() -> Iterator[Holders]:
    with closing(Holders()) as holders:
        yield holders


@pytest.fixture
def replica() -> Iterator[Replica]:
    with closing(Replica(SLOTS, RANKS)) as replica:
        yield replica


connect = partial(Connection, token=TOKEN)


def pull(replica: Replica, holders: Sequence[Endpoint], timeout_s: float = 60) -> Pulled:
    return Pull(replica, manifest(1), connect, holders, timeout_s).run()


def failure(replica: Replica, holder: Endpoint, fault: str) -> PullFailed:
    """The error of a pull with this fault. On a busy machine a short pull may end before the fault."""
    for timeout_s in (0.7, 5.0, 60.0):
        with pytest.raises(PullFailed) as caught:
            pull(replica, [holder], timeout_s)
        if fault in caught.value.message:
            break
    return caught.value


def has_version(replica: Replica, path: str, version: int) -> bool:
    memory = Path(path).read_bytes()
    return replica.path(manifest(version)) == path and all(
        memory[slot.offset : slot.offset + slot.nbytes] == content(version)[slot.offset : slot.offset + slot.nbytes]
        for slot in SLOTS
    )


@pytest.mark.parametrize("kinds", [["good"], ["rank-0", "rank-1"], ["rank-1", "good", "rank-0"]])
def test_the_bytes_of_the_version_arrive_once(replica: Replica, holders: Holders, kinds: list[str]) -> None:
    pulled = pull(replica, holders(*kinds))
    assert has_version(replica, pulled.path, 1)
    assert pulled.fetched_bytes == sum(slot.nbytes for slot in SLOTS)
    assert pulled.faults == {}
    again = pull(replica, [])
    assert (again.path, again.fetched_bytes) == (pulled.path, 0)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_holder_is_named_and_a_good_one_is_enough(
    replica: Replica, holders: Holders, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BAD[kind] == "it did not answer in time":
        monkeypatch.setattr(transfer, "SILENCE_S", 0.3)
    bad, good = holders(kind, "good")
    error = failure(replica, bad, BAD[kind])
    assert f"{len(CHUNKS)} of {len(CHUNKS)} chunks of weight version 1 are still missing" in error.message
    assert f"{bad.url} (node {kind[:8]}): " in error.message
    assert BAD[kind] in error.message
    assert TOKEN not in str(error)
    assert not any(replica.available_chunks(1)), "no byte of it is used"
    assert has_version(replica, pull(replica, [bad, good]).path, 1)


def test_without_a_holder_of_a_chunk_the_rest_stays_and_the_next_pull_continues(
    replica: Replica, holders: Holders
) -> None:
    first, second = holders("rank-0", "rank-1")
    count = sum(chunk.rank == 0 for chunk in CHUNKS)
    while sum(held := replica.available_chunks(1)) < count:  # immediately, on an idle machine
        with pytest.raises(PullFailed, match=f"it has {count} chunks|it did not answer in time"):
            pull(replica, [first], timeout_s=1)
    assert [index for index, has in enumerate(held) if has] == [chunk.index for chunk in CHUNKS if chunk.rank == 0]
    pulled = pull(replica, [second])
    assert has_version(replica, pulled.path, 1)
    assert pulled.fetched_bytes == sum(chunk.nbytes for chunk in CHUNKS if chunk.rank == 1)


def test_a_holder_that_is_killed_in_the_middle(replica: Replica, holders: Holders) -> None:
    stalling, good = holders("stalling", "good")
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(pull, replica, [stalling, good])
        assert holders.report("stalling") == "waiting", "half of a chunk has been sent"
        holders.kill("stalling")
        pulled = pulling.result(60)
    assert has_version(replica, pulled.path, 1)
    assert "stalling" in pulled.faults


def test_a_pull_is_superseded_while_it_fetches(replica: Replica, holders: Holders) -> None:
    """Ranks of this host begin versions 2 and 3 during the pull, so there is no memory for version 1."""
    (stalling,) = holders("stalling")
    older = Pull(replica, manifest(1), connect, [stalling], 60)
    with ThreadPoolExecutor(1) as thread:
        running: Future[Pulled] = thread.submit(older.run)
        holders.report("stalling")
        hold(replica, 2)
        hold(replica, 3)
        older.supersede()
        with pytest.raises(Superseded, match="pull of weight version 1 cancelled"):
            running.result(60)
    assert replica.versions() == {2: len(CHUNKS), 3: len(CHUNKS)}
    path = replica.path(manifest(3))
    assert path is not None
    assert has_version(replica, path, 3)


def test_hosts_that_fetch_at_the_same_time_give_to_each_other(holders: Holders) -> None:
    """Each of two hosts fetches from one trainer host, and from the other host as a peer."""
    rank_0, rank_1 = holders("rank-0", "rank-1")
    with closing(Replica(SLOTS, RANKS)) as one, closing(Replica(SLOTS, RANKS)) as other:
        servers = [WeightServer(replica, TOKEN, "127.0.0.1") for replica in (one, other)]
        peers = [Endpoint(f"peer-{index}", server.url) for index, server in enumerate(servers)]
        pulls = [
            Pull(one, manifest(1), connect, [rank_0, peers[1]], 60),
            Pull(other, manifest(1), connect, [rank_1, peers[0]], 60),
        ]
        with ThreadPoolExecutor(2) as threads:
            for replica, pulled in zip((one, other), threads.map(Pull.run, pulls), strict=True):
                assert has_version(replica, pulled.path, 1)
        for server in servers:
            server.close()


class FailingConnection(Connection):
    """A holder in memory that counts requests, and fails."""

    def __init__(self, url: str, asked: list[int], failure: Exception) -> None:
        super().__init__(url, TOKEN)
        self.asked = asked
        self.failure = failure

    def available_chunks(self, version: int, count: int) -> bytes:
        return b"\x01" * count

    def fetch(self, version: int, index: int, digest: str, into: Sequence[memoryview]) -> None:
        self.asked.append(index)
        raise self.failure


def test_a_holder_that_fails_is_asked_again_after_a_delay(replica: Replica) -> None:
    asked: list[int] = []
    failing = partial(FailingConnection, asked=asked, failure=HolderFault("it has a fault"))
    with pytest.raises(PullFailed, match="it has a fault"):
        Pull(replica, manifest(1), failing, [Endpoint("n", "http://x")], 0.9 * pull_module.RETRY_S).run()
    assert 1 <= len(asked) <= pull_module.STREAMS


def test_an_error_on_this_host_ends_the_pull_immediately(replica: Replica) -> None:
    failing = partial(FailingConnection, asked=[], failure=KeyError("a mistake here"))
    with pytest.raises(KeyError, match="a mistake here"):
        Pull(replica, manifest(1), failing, [Endpoint("n", "http://x")], 600).run()
