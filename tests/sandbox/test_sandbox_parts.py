"""Paths remain in the work folder, output has a limit, and messages and values arrive unchanged."""

from __future__ import annotations

import copy
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.sandbox import wire, work_files
from asyncrl_cli.sandbox.exchange import Codec, update
from asyncrl_cli.sandbox.supervisor import Output

pytestmark = pytest.mark.slow

NAMES = st.sampled_from(["a", "b", "..", ".", "", "link", "out", "file", "\0", "ä b"])
PATHS = st.lists(NAMES, max_size=6).map("/".join) | st.text(max_size=12)


@given(PATHS)
def test_a_path_that_is_taken_is_below_the_folder(path: str) -> None:
    try:
        parts = work_files.path_names(path)
    except OSError:
        assert path.startswith("/") or "\0" in path or ".." in path.split("/") or not path.strip("./")
        return
    joined = os.path.normpath(os.path.join("/sandbox/folder", path))
    assert joined == "/".join(("/sandbox/folder", *parts))


@given(PATHS, st.binary(max_size=20))
def test_files_are_written_in_the_folder_or_nowhere(path: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as outer:
        root, outside = Path(outer, "root"), Path(outer, "outside")
        (root / "b").mkdir(parents=True)
        outside.mkdir()
        (outside / "file").write_bytes(b"outside")
        (root / "out").symlink_to(outside)
        (root / "b" / "link").symlink_to(outside / "file")
        (root / "link").symlink_to("b")
        try:
            work_files.write(str(root), path, data)
        except (OSError, UnicodeError):
            pass
        else:
            assert work_files.read(str(root), path) == data
            target = root.joinpath(*work_files.path_names(path))
            assert target.resolve() == target
            assert target.read_bytes() == data
        assert [(one.name, one.read_bytes()) for one in outside.iterdir()] == [("file", b"outside")]
        assert {one.name for one in Path(outer).iterdir()} == {"root", "outside"}


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 40))
def test_output_is_kept_whole_or_says_how_many_bytes_are_omitted(pieces: list[bytes], kept: int) -> None:
    output, whole = Output(kept), b"".join(pieces)
    for piece in pieces:
        output.add(piece)
    shown = output.text().decode()
    if len(whole) <= 2 * kept:
        assert shown == whole.decode(errors="replace")
    else:
        middle = b"\n[%d bytes omitted]\n" % (len(whole) - 2 * kept)
        assert shown == (whole[:kept] + middle + whole[-kept:]).decode(errors="replace")


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_messages_arrive_as_they_were_sent(fields: list[bytes]) -> None:
    stream = io.BytesIO(wire.packed(fields) * 2)
    assert [wire.received(stream.read), wire.received(stream.read)] == [fields, fields]


def test_messages_without_bound_are_refused() -> None:
    with pytest.raises(wire.WireError):
        wire.received(io.BytesIO(b"\xff" * 4).read)
    with pytest.raises(wire.WireError):
        wire.received(io.BytesIO(b"\0\0\0\x08" + b"\xff" * 8).read)
    with pytest.raises(wire.WireError):
        wire.packed([b""] * (wire.MAX_FIELDS + 1))


@given(st.binary(max_size=40))
def test_bytes_without_a_message_are_refused(data: bytes) -> None:
    try:
        fields = wire.unpacked(data)
    except wire.WireError:
        return
    assert wire.packed(fields)[wire.HEAD :] == data


# -- values of judged code

CODEC = Codec()
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.decimals(allow_nan=False)
HASHABLE = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4), max_leaves=20
)
KINDS = (
    "list",
    "dict",
    "set",
    "bytes",
    "int",
    "new",
    "type",
    "named",
    "array",
    "raised",
    "builtins.slice",
    "ValueError",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@given(VALUES)
def test_values_arrive_as_they_were(value: Any) -> None:
    arrived = CODEC.decode(json.loads(json.dumps(CODEC.encode(value))))
    assert (arrived, type(arrived)) == (value, type(value))


@given(JSON)
def test_invalid_values_are_refused(data: Any) -> None:
    try:
        value = CODEC.decode(data)
    except Exception:
        return
    CODEC.encode(value)  # it is made of plain values only: anything else would raise


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_a_list_is_updated_in_place(old: list[Any], new: list[Any]) -> None:
    held = copy.deepcopy(old)
    assert update(held, copy.deepcopy(new)) is held
    assert held == new
