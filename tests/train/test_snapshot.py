"""A snapshot keeps the bytes of the moment when it was taken, although training continues before it is written."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl_cli.train import checkpoints
from asyncrl_cli.train.checkpoints import Snapshot, save_file

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


class Scaler:
    """A mutable object in a state, as DeepSpeed's loss scaler is."""

    def __init__(self) -> None:
        self.scale = 1.0


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Any], list[torch.Tensor], Scaler]:
    """A state as an optimizer has it, the memory of its tensors, and an object in it. Tensors share memory."""
    memories = [
        torch.arange(draw(st.integers(0, 40)), dtype=torch.float32).to(draw(st.sampled_from(DTYPES)))
        for _ in range(draw(st.integers(1, 4)))
    ]

    def view() -> torch.Tensor:
        memory = draw(st.sampled_from(memories))
        first = draw(st.integers(0, len(memory)))
        return memory[first : draw(st.integers(first, len(memory)))][:: draw(st.integers(1, 3))]

    parts: st.SearchStrategy[Any] = st.recursive(
        st.builds(view) | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=8,
    )
    scaler = Scaler()
    return {"state": draw(parts), "tied": [memories[0], memories[0]], "scaler": scaler}, memories, scaler


TWO_EMPTY = {"first": torch.empty(0), "second": torch.empty(0), "scaler": Scaler()}


@given(made=states())
@example(made=(TWO_EMPTY, [], Scaler()))
def test_files_have_the_bytes_from_before_the_step(
    made: tuple[dict[str, Any], list[torch.Tensor], Scaler], tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, memories, scaler = made
    folder = tmp_path_factory.mktemp("files")
    expected = save_file(state, folder / "expected.pt")
    snapshot = Snapshot()
    with snapshot.recording(sharers=2):
        snapshot.add(state, folder / "copied.pt")
    for memory in memories:
        memory.add_(1)
    scaler.scale = 2.0
    state["new"] = 1
    assert not (folder / "copied.pt").exists()
    assert snapshot.write() == {folder / "copied.pt": expected}
    assert (folder / "copied.pt").read_bytes() == (folder / "expected.pt").read_bytes()


@pytest.mark.parametrize(("sharers", "available", "copies"), [(2, 2200, False), (2, 2300, True)])
def test_without_memory_for_the_copies_of_all_ranks_on_a_host_the_file_is_written_at_once(
    sharers: int, available: int, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "available_memory", lambda: available)
    snapshot, path = Snapshot(), tmp_path / "shard.pt"
    with snapshot.recording(sharers):
        snapshot.add({"weights": torch.ones(256)}, path)  # 1,024 bytes
    assert path.exists() is not copies
    assert list(snapshot.write()) == [path]


def test_a_full_disk_is_an_error_of_the_write() -> None:
    snapshot = Snapshot()
    with snapshot.recording(sharers=1):
        snapshot.add({"weights": torch.ones(10**6)}, Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as raised:
        snapshot.write()
    assert raised.value.errno == errno.ENOSPC


def test_the_next_snapshot_waits_until_the_last_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def write_slowly(state: Any, path: Path) -> Any:
        begun.set()
        assert may_end.wait(60)
        ended.set()
        return save_file(state, path)

    monkeypatch.setattr(checkpoints, "save_file", write_slowly)
    snapshot = Snapshot()
    with snapshot.recording(sharers=1):
        snapshot.add({}, tmp_path / "1.pt")
    writer = threading.Thread(target=snapshot.write)
    writer.start()
    assert begun.wait(60)
    threading.Timer(0.1, may_end.set).start()
    with snapshot.recording(sharers=1):
        assert ended.is_set()
    writer.join()
