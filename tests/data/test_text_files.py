"""Prompts from JSON Lines, and refusals that name the line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import SplitSpec


def read_jsonl(path: Path, size: int | None = None) -> Sequence[Prompt]:
    return read_source(SplitSpec(path=str(path), size=size), "train", path.parent)


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


def test_text_messages_uids_and_fields(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "2+2=", "answer": 4, "uid": "a"}',
        "",
        '{"prompt": [{"role": "user", "content": "hi"}], "uid": "b"}',
    )
    assert list(read_jsonl(path)) == [
        Prompt("a", "2+2=", {"answer": 4}),
        Prompt("b", ({"role": "user", "content": "hi"},), {}),
    ]
    assert [prompt.uid for prompt in read_jsonl(path, 1)] == ["a"]


def test_rows_without_uid_are_named_by_line_and_content(tmp_path: Path) -> None:
    first = [prompt.uid for prompt in read_jsonl(write(tmp_path, '{"prompt": "a"}', '{"prompt": "a"}'))]
    again = [prompt.uid for prompt in read_jsonl(write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}'))]
    assert len(set(first)) == 2
    assert again[0] == first[0]
    assert again[1] != first[1]


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=3)
FIELDS = st.dictionaries(st.text(max_size=9), VALUES, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@given(rows=st.lists(st.tuples(st.text(min_size=1), FIELDS), min_size=1, max_size=4))
@settings(deadline=None)
def test_all_json_values_are_kept(folder: Path, rows: list[tuple[str, Any]]) -> None:
    fields = [{key: value for key, value in row.items() if key not in ("uid", "prompt")} for _, row in rows]
    lines = [json.dumps({**row, "prompt": text}) for (text, _), row in zip(rows, fields, strict=True)]
    prompts = read_jsonl(write(folder, *lines))
    assert [(prompt.content, prompt.fields) for prompt in prompts] == list(
        zip([t for t, _ in rows], fields, strict=True)
    )


@pytest.mark.parametrize(
    (("line", "message")),
    [
        ("{", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[1]", "a list"),
        ("3", "a number"),
        ('{"question": "a"}', "no column `prompt`.*question"),
        ('{"prompt": ""}', "`prompt` is empty"),
        ('{"prompt": 3}', "a number"),
        ('{"prompt": null}', "null"),
        ('{"prompt": []}', "empty"),
        ('{"prompt": ["hi"]}', "a message has no `role`"),
        ('{"prompt": [{"role": "user"}]}', "message 1 has no content"),
        ('{"prompt": "a", "uid": 3.5}', "`uid` is a number"),
        ('{"prompt": "a", "uid": ""}', "`uid` is empty"),
        ('{"prompt": "a", "uid": "first"}', "is also the uid of line 1"),
        ('{"prompt": "a", "answer": NaN}', "`answer` is NaN or infinite"),
        ('{"prompt": "a", "answer": 1e999}', "`answer` is NaN or infinite"),
        ('{"prompt": "a", "meta": {"scores": [0.5, -Infinity]}}', "`meta` is NaN or infinite, or contains such"),
        (f'{{"prompt": "a", "answer": {"9" * 5000}}}', "an integer has more than 4,300 digits"),
        (f'{{"prompt": "a", "answer": {"[" * 9000}', "nested too deeply"),
    ],
)
def test_a_refusal_names_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write(tmp_path, '{"prompt": "a", "uid": "first"}', line)
    with pytest.raises(DataError, match=message) as caught:
        read_jsonl(path)
    assert caught.value.location == f"{path}:2"
    assert caught.value.hint


def test_a_file_that_is_missing_empty_or_short(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no rows"):
        read_jsonl(write(tmp_path, ""))
    with pytest.raises(DataError, match=r"fewer rows \(1\) than size 2"):
        read_jsonl(write(tmp_path, '{"prompt": "a"}'), 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "half \ud83d"}, "`prompt` is not Unicode"),
        ({"prompt": "a", "answer": "\ude00"}, "`answer` is not Unicode"),
        ({"prompt": "a", "uid": "\ud83d"}, "`uid` is not Unicode"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 1 has no content"),
        ({"prompt": [{"role": "user", "content": 7}]}, "message 1 has content that is not text"),
        ({"prompt": [{"role": "user", "content": "a\ud83d"}]}, "not Unicode"),
        ({"prompt": [{"role": "usr", "content": "a"}]}, "message 1 has the unknown role 'usr'; roles are system"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are neither text nor images"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "message 2 has no"),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 3}}]}]},
            "`tool_calls` that are not a list of functions",
        ),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": {}}]}, "`tool_calls` that are not a list"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused_with_their_line(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, '{"prompt": "sound"}', json.dumps(row))
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert words in str(caught.value)
    assert f"{path}:2: prompt '" in str(caught.value)


def test_messages_with_tool_calls_and_text_parts_are_prompts(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": {"e": "1+1"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    (prompt,) = read_jsonl(write(tmp_path, json.dumps({"prompt": messages})))
    assert prompt.content == tuple(messages)
