"""Every kind of source gives the same prompts from the same rows, lazily or not, and refuses invalid prompts."""

from __future__ import annotations

import csv
import gzip
import json
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.arrow_table import ArrowPrompts
from asyncrl_cli.data.sources import read_source, row_location
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import source_type_of
from asyncrl_cli.spec.inputs import SplitSpec

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]


def as_parquet(rows: Rows, folder: Path) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=2)
    return "rows.parquet"


def as_jsonl(rows: Rows, folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "rows.jsonl"


def as_csv(rows: Rows, folder: Path) -> str:
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "rows.csv"


def as_function(rows: Rows, folder: Path) -> str:
    name = f"rows_{abs(hash(str(folder)))}"
    (folder / f"{name}.py").write_text(
        f"def rows(split, size):\n    assert split == 'train'\n    yield from {rows!r}\n"
    )
    return f"{name}:rows"


def as_json(rows: Rows, folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(rows))
    return "rows.json"


def compressed(write: Callable[[Rows, Path], str]) -> Callable[[Rows, Path], str]:
    def written(rows: Rows, folder: Path) -> str:
        name = write(rows, folder)
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        return f"{name}.gz"

    return written


KINDS: dict[str, Callable[[Rows, Path], str]] = {
    "jsonl": as_jsonl,
    "json": as_json,
    "jsonl.gz": compressed(as_jsonl),
    "csv.gz": compressed(as_csv),
    "parquet": as_parquet,
    "csv": as_csv,
    "function": as_function,
}
kinds = pytest.mark.parametrize("write", KINDS.values(), ids=KINDS.keys())
QUESTIONS: Rows = [
    {"question": "1+1", "answer": "2", "id": "a"},
    {"question": 'a "quoted", long\nquestion', "answer": "é", "id": "b"},
    {"question": "2+3", "answer": "5", "id": "c"},
]


def read(path: str, folder: Path, **keys: Any) -> Sequence[Prompt]:
    return read_source(SplitSpec(path=path, **keys), "train", folder)


@kinds
def test_all_kinds_give_the_same_prompts(write: Callable[[Rows, Path], str], tmp_path: Path) -> None:
    path = write(QUESTIONS, tmp_path)
    assert source_type_of(path) == next(kind for kind, one in KINDS.items() if one is write).partition(".")[0]
    named = read(path, tmp_path, prompt_column="question", uid_column="id")
    assert list(named) == [Prompt(row["id"], row["question"], {"answer": row["answer"]}) for row in QUESTIONS]
    templated = read(path, tmp_path, template="Q: {question}\nA{{}}:", system="Be brief.", size=2)
    assert [prompt.content for prompt in templated] == [
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Q: {row['question']}\nA{{}}:"})
        for row in QUESTIONS[:2]
    ]
    assert [prompt.fields for prompt in templated] == QUESTIONS[:2], "the columns of a template reach the task, too"
    again = read(path, tmp_path, template="Q: {question}\nA{{}}:", system="Be brief.")
    assert [prompt.uid for prompt in again[:2]] == [prompt.uid for prompt in templated]
    assert len({prompt.uid for prompt in again}) == 3


@kinds
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_keys_may_name_paths_into_objects(write: Callable[[Rows, Path], str], as_text: bool, tmp_path: Path) -> None:
    info = [{"question": row["question"], "more": {"id": row["id"]}} for row in QUESTIONS]
    as_text = as_text or write in (as_csv, KINDS["csv.gz"])
    rows = [{"answer": "4", "extra": json.dumps(one) if as_text else one} for one in info]
    path = write(rows, tmp_path)
    named = read(path, tmp_path, prompt_column="extra.question", uid_column="extra.more.id")
    assert [prompt.content for prompt in named] == [row["question"] for row in QUESTIONS]
    assert [prompt.uid for prompt in named] == ["a", "b", "c"]
    assert [prompt.fields for prompt in named] == rows
    templated = read(path, tmp_path, template="Q: {extra.question}", uid_column="extra.more.id")
    assert [prompt.content for prompt in templated] == [f"Q: {row['question']}" for row in QUESTIONS]
    assert [prompt.fields for prompt in templated] == rows
    with pytest.raises(DataError, match=r"no column `extra\.text`.*; the row has answer, extra"):
        list(read(path, tmp_path, prompt_column="extra.text"))
    (tmp_path / "twins").mkdir()
    path = write([rows[0], rows[1], rows[0]], tmp_path / "twins")
    with pytest.raises(DataError, match="the uid 'a' is also the uid of"):
        read(path, tmp_path / "twins", prompt_column="answer", uid_column="extra.more.id")


@kinds
def test_a_uid_changes_with_its_row_and_with_no_other(write: Callable[[Rows, Path], str], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    rows = [{"prompt": text, "answer": text} for text in "aabc"]
    changed = [*rows[:3], {"prompt": "c", "answer": "another"}]
    one = [prompt.uid for prompt in read(write(rows, tmp_path / "one"), tmp_path / "one")]
    two = [prompt.uid for prompt in read(write(changed, tmp_path / "two"), tmp_path / "two")]
    assert len(set(one)) == 4
    assert one[:3] == two[:3]
    assert one[3] != two[3]


columns = st.fixed_dictionaries(
    {"answer": st.text(max_size=5), "level": st.integers(0, 9), "notes": st.lists(st.text())}
)


@given(
    rows=st.lists(st.tuples(st.text(min_size=1, max_size=9), columns), min_size=1, max_size=7), size=st.integers(1, 7)
)
@settings(max_examples=40)
def test_rows_read_on_demand_equal_those_of_a_file_read_completely(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = [{"prompt": text, **others} for text, others in rows]
    eager = read(as_jsonl(table, folder), folder)
    lazy = read(as_parquet(table, folder), folder)
    assert isinstance(lazy, ArrowPrompts)
    assert len(lazy) == len(eager)
    assert [(prompt.content, prompt.fields) for prompt in lazy] == [(p.content, p.fields) for p in eager]
    for index in (0, -1, len(table) // 2):
        assert lazy[index] == list(lazy)[index]
    assert lazy[1:5:2] == list(lazy)[1:5:2]
    with pytest.raises(IndexError):
        lazy[len(table)]
    if size <= len(table):
        assert list(read("rows.parquet", folder, size=size)) == list(lazy)[:size]
    else:
        with pytest.raises(DataError, match=rf"fewer rows \({len(table)}\) than size {size}"):
            read("rows.parquet", folder, size=size)


def test_arrow_values_that_json_does_not_have(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    chat = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "ho", "name": "a"}]
    rows = [{"prompt": chat, "at": at, "price": Decimal("1.50"), "thumb": {"bytes": b"\x00"}, "kind": "x", "uid": 7}]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(4, "kind", table.column("kind").dictionary_encode())
    parquet.write_table(table, tmp_path / "rows.parquet")
    (prompt,) = read("rows.parquet", tmp_path)
    assert prompt == Prompt(
        "7",
        ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "a"}),
        {"at": at.isoformat(), "price": "1.50", "kind": "x"},
    )


def test_a_call_has_its_own_arguments_not_those_of_all_rows(tmp_path: Path) -> None:
    def called(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "find", "arguments": arguments}}

    calls = [called(city="Oslo", content=None), called(day={"of": "May", "on": [1]}), called(day={"at": 3})]
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        for call in calls
    ]
    tools = [{"type": "function", "function": {"name": name, "parameters": {name: "x"}}} for name in ("f", "g")]
    rows = [{"prompt": chat, "tools": tools} for chat in chats]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    calls[0]["function"]["arguments"].pop("content")
    for prompt, call in zip(read("rows.parquet", tmp_path), calls, strict=True):
        assert prompt.content[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
        assert prompt.fields["tools"] == tools


@kinds
def test_messages_as_json_text_are_messages(write: Callable[[Rows, Path], str], tmp_path: Path) -> None:
    chat = [{"name": None, "role": "user", "content": "hi"}]
    texts = [json.dumps(chat), f"\n{json.dumps(chat, indent=1)}", '[{"role"', '["role"]', '{"a": 1}', "[]", "[{}]"]
    found = [prompt.content for prompt in read(write([{"prompt": text} for text in texts], tmp_path), tmp_path)]
    assert found == [tuple(chat), tuple(chat), *texts[2:]]


@pytest.mark.parametrize(
    ("column", "values"), [("image", [None, {"bytes": b"\x00"}]), ("images", [[], [{"bytes": b"\x00"}]])]
)
def test_rows_with_images_that_no_key_names_are_refused(tmp_path: Path, column: str, values: list[Any]) -> None:
    table = pa.Table.from_pylist([{"prompt": "a", column: value} for value in values])
    parquet.write_table(table, tmp_path / "rows.parquet")
    prompts = read("rows.parquet", tmp_path)
    assert prompts[0].fields == {}
    with pytest.raises(DataError, match=f":2: the row has `{column}`"):
        prompts[1]


@pytest.mark.parametrize(
    ("rows", "keys", "place", "message"),
    [
        ([{"text": "a"}], {}, ":1", "no column `prompt`.*the row has text"),
        ([{"text": "a"}], {"template": "{question}"}, ":1", "no column `question`"),
        ([{"a": "x", "b": 1}, {"a": "y", "b": None}], {"template": "{a}{b}"}, ":2", "`b` is null"),
        ([{"prompt": "a"}], {"uid_column": "id"}, ":1", "no column `id`"),
        ([{"prompt": "a"}], {"template": "{uid}: {prompt}"}, ":1", "no column `uid`"),
        ([{"text": "a"}], {"prompt_column": "uid"}, ":1", "no column `uid`"),
        ([{"prompt": "a"}, {"prompt": None}], {}, ":2", "`prompt` is null"),
        ([{"prompt": "a", "uid": None}, {"prompt": "b", "uid": 1.5}], {}, ":2", "`uid` is a number"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": None}], {"uid_column": "id"}, ":2", "`id` is null"),
        ([{"prompt": "a", "uid": "x"}, {"prompt": "b", "uid": "x"}], {}, ":2", "'x' is also the uid of .*parquet:1"),
        ([{"prompt": "a", "x": None}, {"prompt": "b", "x": float("nan")}], {}, ":2", "`x` is NaN or infinite"),
    ],
)
def test_a_row_that_is_wrong_is_named(
    tmp_path: Path, rows: Rows, keys: dict[str, Any], place: str, message: str
) -> None:
    as_parquet(rows, tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        list(read("rows.parquet", tmp_path, **keys))
    assert caught.value.location == f"{tmp_path}/rows.parquet{place}"
    assert caught.value.hint


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    for name, write in (("rows.parquet", as_parquet), ("rows.csv.gz", compressed(as_csv))):
        expected = read(write(QUESTIONS, tmp_path), tmp_path, prompt_column="question", uid_column="id")
        (tmp_path / name).rename(tmp_path / name.upper())
        capitals = read(name.upper(), tmp_path, prompt_column="question", uid_column="id")
        assert list(capitals) == list(expected)


def test_values_of_a_csv_file_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\ufeffprompt,answer\n007,NA\n1e3,\n", encoding="utf-8")
    prompts = read("rows.csv", tmp_path)
    assert [(prompt.content, prompt.fields["answer"]) for prompt in prompts] == [("007", "NA"), ("1e3", "")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def rows(split, size): yield 3", r":1: the row is neither a mapping nor a Prompt but a number"),
        ("def rows(split, size): yield {'prompt': 'a', 'x': {1}}", r":1: the row has a value that is not JSON: a set"),
        ("def rows(split, size): yield {'prompt': None}", ":1: `prompt` is null"),
        ("def rows(split, size): yield {'prompt': 'a', 'uid': 'outside/a'}", ":1: the uid 'outside/a' begins with"),
        ("def rows(split, size): raise OSError('no disk')", r"failed with \(.train., 2\): OSError: no disk"),
        ("def rows(split): yield {}", r"failed with \(.train., 2\): TypeError: rows\(\) takes 1 positional"),
        ("def rows(split, size): return 3", "returned a number"),
        ("import nothing_like_it", "needs 'nothing_like_it', which is not installed"),
        ("other = 1", "has no 'rows'"),
        ("def rows(split, size): yield {'prompt': 'a'}", r"fewer rows \(1\) than size 2"),
        ("def rows(split, size):\n while True: yield {'prompt': 'a', 'uid': 'a'}", "'a' is also the uid of .*:1"),
    ],
)
def test_a_function_that_is_wrong_is_named(tmp_path: Path, body: str, message: str) -> None:
    module = f"wrong_{abs(hash((body, str(tmp_path))))}"
    (tmp_path / f"{module}.py").write_text(body)
    with pytest.raises(DataError, match=message) as caught:
        read(f"{module}:rows", tmp_path, size=2)
    assert module in str(caught.value)


def test_an_endless_function_may_yield_prompts(tmp_path: Path) -> None:
    (tmp_path / "endless_rows.py").write_text(
        "from asyncrl_cli.records.prompt import Prompt\nfrom itertools import count\n"
        "def rows(split, size):\n    return (Prompt(f'{split}/{n}', str(n)) for n in count())\n"
    )
    assert [prompt.uid for prompt in read("endless_rows:rows", tmp_path, size=2)] == ["train/0", "train/1"]


def test_the_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hf:no-user/nothing_at_all: cannot be loaded: .*name a Parquet file"):
        read("hf:no-user/nothing_at_all", tmp_path, split="train")


def test_a_missing_package_or_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("none.parquet", "none.csv"):
        with pytest.raises(DataError, match=f"{path}: cannot be read: .*No such file"):
            read(path, tmp_path)
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"text\.parquet: cannot be read"):
        read("text.parquet", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs Hugging Face datasets.*pip install 'asyncrl\[data\]'"):
        read("hf:a/b", tmp_path, split="train")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("hf:owner/name", "hub"),
        ("my.rows:make", "function"),
        ("./rows:make", None),
        ("rows.JSONL", "jsonl"),
        ("rows.JSONL.gz", "jsonl"),
        ("rows.csv.zst", None),
        ("rows.parquet.gz", None),
    ],
)
def test_a_path_decides_its_kind(path: str, kind: str | None) -> None:
    assert source_type_of(path) == kind


TEXTS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4)


@given(files=st.lists(TEXTS, min_size=2, max_size=4), size=st.none() | st.integers(1, 16), lazily=st.booleans())
@settings(max_examples=40)
def test_several_files_are_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], size: int | None, lazily: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for number, texts in enumerate(files):
        rows = [{"prompt": text, "level": level} for level, text in enumerate(texts)]
        if lazily and number % 2:
            parquet.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet")
        else:
            (folder / f"{number}.json").write_text(json.dumps(rows, indent=number % 2 or None))
    texts = [text for one in files for text in one]
    if size is not None and size > len(texts):
        with pytest.raises(DataError, match=rf"fewer rows \({len(texts)}\) than size {size}"):
            read("*.*", folder, size=size)
        return
    prompts = read("*.*", folder, size=size)
    expected = texts[:size]
    assert [prompt.content for prompt in prompts] == expected
    assert len({prompt.uid for prompt in prompts}) == len(expected)
    assert prompts[-1].content == expected[-1]
    alone = read("0.json", folder)
    assert [prompt.uid for prompt in prompts][: len(files[0])] == [prompt.uid for prompt in alone][:size]


def test_files_of_several_kinds_name_the_place_of_a_row(tmp_path: Path) -> None:
    as_csv([{"prompt": "a", "uid": "x"}], tmp_path)
    (tmp_path / "more.json").write_text('[{"prompt": "b"},\n\n {"prompt":\n "c"}]')
    parquet.write_table(pa.Table.from_pylist([{"prompt": "d"}, {"prompt": "e"}]), tmp_path / "rows.parquet")
    files = ["rows.csv", "more.json", "rows.parquet"]
    prompts = read_source(SplitSpec(path=files), "train", tmp_path)
    found = [row_location("data.train", prompts, row) for row in range(5)]
    places = ["rows.csv:1", "more.json:1", "more.json:2", "rows.parquet:1", "rows.parquet:2"]
    assert found == [str(tmp_path / place) for place in places]
    (tmp_path / "twin.jsonl").write_text('{"prompt": "z", "uid": "x"}')
    with pytest.raises(DataError, match=r"the uid 'x' is also the uid of .*rows\.csv:1") as caught:
        read_source(SplitSpec(path=[*files, "twin.jsonl"]), "train", tmp_path)
    assert caught.value.location == str(tmp_path / "twin.jsonl:1")


def test_equal_rows_of_one_line_have_their_own_uids_and_lines_may_have_the_suffix_json(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("\ufeff " + json.dumps([{"prompt": "a"}, {"prompt": "a"}]))
    assert len({prompt.uid for prompt in read("rows.json", tmp_path)}) == 2
    (tmp_path / "rows.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [prompt.content for prompt in read("rows.json", tmp_path)] == ["a", "b"]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".jsonl.gz"])
def test_a_git_lfs_pointer_is_named(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"rows{suffix}").write_text(POINTER)
    with pytest.raises(DataError, match="is a Git LFS pointer") as refused:
        read(f"rows{suffix}", tmp_path)
    assert refused.value.location == str(tmp_path / f"rows{suffix}") and "git lfs pull" in refused.value.hint


def test_an_image_that_is_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_text(POINTER)
    as_jsonl([{"prompt": "<image>What?", "images": ["cat.png"]}], tmp_path)
    with pytest.raises(DataError, match=r"image 1 .*cat.png.* is a Git LFS pointer.*`git lfs pull`"):
        list(read("rows.jsonl", tmp_path, image_column="images"))


def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    name = compressed(as_jsonl)([{"prompt": str(number)} for number in range(9)], tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-5])
    with pytest.raises(DataError, match=f"{name}: cannot be read: "):
        read(name, tmp_path)


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=3)
FIELDS = st.dictionaries(st.text(max_size=9), VALUES, max_size=4)


@given(rows=st.lists(st.tuples(st.text(min_size=1), FIELDS), min_size=1, max_size=4))
def test_all_json_values_are_kept(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, dict[str, Any]]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    fields = [{key: value for key, value in row.items() if key not in ("uid", "prompt")} for _, row in rows]
    lines = [json.dumps({**row, "prompt": text}) for (text, _), row in zip(rows, fields, strict=True)]
    prompts = read(write(folder, *lines).name, folder)
    assert [(prompt.content, prompt.fields) for prompt in prompts] == list(
        zip([t for t, _ in rows], fields, strict=True)
    )


WRONG_LINES = [
    ("{", "not JSON"),
    ('{"prompt": "\xff"}', "not UTF-8"),
    ("[1]", "a list"),
    ("3", "a number"),
    ('{"question": "a"}', "no column `prompt`.*question"),
    ('{"prompt": ""}', "`prompt` is empty"),
    ('{"prompt": []}', "empty"),
    ('{"prompt": ["hi"]}', "a message has no `role`"),
    ('{"prompt": "a", "uid": 3.5}', "`uid` is a number"),
    ('{"prompt": "a", "uid": "first"}', "is also the uid of .*jsonl:1"),
    ('{"prompt": "a", "answer": NaN}', "`answer` is NaN or infinite"),
    ('{"prompt": "a", "meta": {"scores": [0.5, -Infinity]}}', "`meta` is NaN or infinite, or contains such"),
    (f'{{"prompt": "a", "answer": {"9" * 5000}}}', "Exceeds the limit"),
    (f'{{"prompt": "a", "answer": {"[" * 9000}', "maximum recursion depth"),
    (r'{"prompt": "half \ud83d"}', "prompt '.*: `prompt` is not Unicode"),
    ('{"prompt": [{"role": "user", "content": null}]}', "prompt '.*: message 1 has no content"),
    ('{"prompt": [{"role": "user", "content": 7}]}', "message 1 has content that is not text"),
    ('{"prompt": [{"role": "usr", "content": "a"}]}', "message 1 has the unknown role 'usr'; roles are system"),
    ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "parts that are neither text nor images"),
    (
        '{"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 3}}]}]}',
        "`tool_calls` that are not a list of functions",
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "place", "message"),
    [
        *(("rows.jsonl", f'{{"prompt": "a", "uid": "first"}}\n{line}\n', ":2", says) for line, says in WRONG_LINES),
        ("rows.json", '[{"prompt": "a"},\n {"prompt": "b"}\n {"prompt": "c"}]', ":3", "not JSON: Expecting ','"),
        ("rows.json", '[{"prompt": "a"},\n\n3]', ":2", "not a JSON object but a number"),
        ("rows.json", '[{"prompt": "a"}\n]\nmore', ":3", "not JSON: Extra data"),
        ("rows.json", '{"data": [{"prompt": "a"}]}', ":1", "no column `prompt`.*the row has data"),
        ("rows.json", '[{"prompt": "a"},\n{"prompt": "\xff"}]', ":2", r"not UTF-8 \(byte 12\)"),
        ("rows.csv", "prompt,answer\na,1\nb\n", "", "cannot be read: CSV parse error: .*Expected 2 columns, got 1"),
        ("rows.csv", 'prompt,answer\n"a\nb",1\n,2\n', ":2", "`prompt` is empty"),
        ("rows.csv", "prompt,prompt\n", "", "duplicate or empty column names"),
        ("rows.csv", "", "", "cannot be read: Empty CSV file"),
        ("rows.csv", 'prompt\n"{""role"": ""user"", ""content"": ""hi""}"\n', ":1", "`prompt` is an object"),
        ("rows.csv", 'prompt\n"[{""from"": ""human"", ""value"": ""hi""}]"\n', ":1", "a message has no `role`"),
    ],
)
def test_a_refusal_names_file_and_row(tmp_path: Path, name: str, text: str, place: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message) as caught:
        list(read(name, tmp_path))
    assert caught.value.location == f"{tmp_path / name}{place}"
    assert caught.value.hint


def test_messages_with_tool_calls_and_text_parts_are_prompts(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": {"e": "1+1"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    write(tmp_path, "", json.dumps({"prompt": messages}), "")
    (prompt,) = read("rows.jsonl", tmp_path)
    assert prompt.content == tuple(messages)
    with pytest.raises(DataError, match=r"fewer rows \(1\) than size 2"):
        read("rows.jsonl", tmp_path, size=2)
    with pytest.raises(DataError, match="no rows"):
        read(write(tmp_path, "").name, tmp_path)
