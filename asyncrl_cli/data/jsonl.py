"""Prompts from a JSON Lines file: one JSON object a line.

``prompt`` is text or a list of chat messages; ``uid`` is optional; all other keys become the prompt's fields.
A row without ``uid`` is named by its line number and a hash of its text, so an edited file cannot pass for
the one a run was started with.

Invariant: uids within a file are distinct, and every refusal names file and line.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from asyncrl_cli.data.errors import DataError
from asyncrl_cli.data.prompts import Message, Prompt


def read_jsonl(path: Path, size: int | None = None) -> list[Prompt]:
    """The prompts of the first ``size`` rows of ``path`` (all of them by default); blank lines are no rows.

    Raises ``DataError`` if the file cannot be read, has fewer rows than ``size``, or has a row that is no prompt.
    """
    prompts: list[Prompt] = []
    lines_of: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if len(prompts) == size:
                    break
                if not line.strip():
                    continue
                prompt = _prompt(line, path, number)
                if prompt.uid in lines_of:
                    _refuse(
                        path,
                        number,
                        f"uid {prompt.uid!r} stands in line {lines_of[prompt.uid]} too",
                        "make uids distinct",
                    )
                lines_of[prompt.uid] = number
                prompts.append(prompt)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}", mend="correct the path in the spec"
        ) from error
    if not prompts:
        raise DataError(f"{path} has no rows", mend='write one JSON object a line, such as {"prompt": "2+2="}')
    if size is not None and len(prompts) < size:
        raise DataError(
            f"{path} has {len(prompts)} rows, {size} are asked for", mend="lower the split's size, or leave it out"
        )
    return prompts


def _prompt(line: bytes, path: Path, number: int) -> Prompt:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        _refuse(path, number, f"is not UTF-8 (byte {error.start})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        _refuse(path, number, f"is not JSON: {error.msg} at column {error.colno}", "write one JSON object a line")
    if not isinstance(row, dict):
        _refuse(path, number, f"is not a JSON object but {_kind(row)}", 'write rows as {"prompt": …}')
    if "prompt" not in row:
        _refuse(path, number, "has no `prompt`", f"add it; the row's keys are {', '.join(row) or 'none'}")
    fields = {key: value for key, value in row.items() if key not in ("prompt", "uid")}
    uid = row.get("uid")
    if uid is None:
        uid = f"line{number}-{hashlib.blake2b(line.strip(), digest_size=6).hexdigest()}"
    elif not isinstance(uid, str) or not uid:
        _refuse(path, number, f"has a `uid` that is {_kind(uid)}", "make it a text that is not empty, or leave it out")
    return Prompt(uid, _content(row["prompt"], path, number), fields)


def _content(value: Any, path: Path, number: int) -> str | tuple[Message, ...]:
    mend = 'make it text, or a list of messages such as {"role": "user", "content": "…"}'
    if isinstance(value, str):
        if not value:
            _refuse(path, number, "has an empty `prompt`", mend)
        return value
    if not isinstance(value, list) or not value:
        _refuse(path, number, f"has a `prompt` that is {_kind(value)}", mend)
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            _refuse(path, number, "has a message without `role` and `content`", mend)
    return tuple(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (str, list, dict)) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names[type(value)]


def _refuse(path: Path, number: int, fault: str, mend: str) -> NoReturn:
    raise DataError(f"the row {fault}", place=f"{path}:{number}", mend=mend)
