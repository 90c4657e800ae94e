"""Output formats on real engines with OpenAI's client: what random weights generate has the requested format."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from ..conftest import Runs
from ..faults.parts import processes_of_part
from ..served import Server, serving
from .test_serve import TINY

pytestmark = pytest.mark.stack

HELLO: Any = [{"role": "user", "content": "hello"}]


class Visit(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=30)
    note: str = Field(max_length=8)


DEEP: dict[str, Any] = reduce(lambda inner, _: {"properties": {"a": inner}}, range(50), {})
SCHEMA = Visit.model_json_schema()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = Runs(tmp_path_factory.mktemp("formats"))
    model = {"init": TINY, "warm_start": None, "max_length": 2048}
    with serving(runs, runs.write_spec(model=model, rollout={"retries": 3})) as server:
        yield server
        assert server.end(signal.SIGINT) == 130


def asked(server: Server, **changes: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": HELLO, "max_tokens": 400, **changes}


def schema(strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "visit", "schema": SCHEMA, "strict": strict}}


def test_a_schema_holds_for_every_choice_and_for_streams(server: Server) -> None:
    chat = server.client().chat.completions
    for strict, temperature in ((True, 1.0), (False, 2.0), (True, 0.0)):
        sampling = {"temperature": temperature, "seed": 5, "response_format": schema(strict)}
        answer = chat.create(**asked(server, n=4, **sampling))
        texts = [choice.message.content or "" for choice in answer.choices]
        for text in texts:
            Visit.model_validate_json(text)
        assert len(answer.choices) == 4
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in chat.create(**asked(server, stream=True, **sampling))
            if chunk.choices
        ]
        assert "".join(pieces) == texts[0]
    assert len(set(texts)) == 1, "greedy"

    parsed = chat.parse(**asked(server, response_format=Visit, seed=1)).choices[0].message.parsed
    assert isinstance(parsed, Visit)
    cut = chat.create(**asked(server, response_format=schema(True), max_tokens=5)).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", (cut.message.content or "")[:5])


def test_the_other_formats_on_both_paths(server: Server) -> None:
    client = server.client()

    def texts(**body: Any) -> list[str]:
        chat = client.chat.completions.create(**asked(server, extra_body=body, n=3, seed=2))
        plain = client.completions.create(
            model=server.model, prompt="spell: ", max_tokens=400, n=3, seed=2, extra_body=body
        )
        assert {choice.finish_reason for choice in (*chat.choices, *plain.choices)} == {"stop"}
        return [choice.message.content or "" for choice in chat.choices] + [choice.text for choice in plain.choices]

    odd = ['a "b"', "c\\d", "e\nf", "]|*", "g"]
    for key in ("guided_choice", "choice"):
        value: Any = {key: odd} if key != "choice" else {"structured_outputs": {"choice": odd}}
        assert set(texts(**value)) <= set(odd)
    for value in ({"guided_regex": r"\d{4}-[a-f]{2,5}"}, {"structured_outputs": {"regex": r"\d{4}-[a-f]{2,5}"}}):
        assert all(re.fullmatch(r"\d{4}-[a-f]{2,5}", text) for text in texts(**value))
    grammar = 'root ::= "<" ("x" | "yy"){2,4} ">"'
    for value in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        assert all(re.fullmatch(r"<(x|yy){2,4}>", text) for text in texts(**value))
    for value in (
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        for text in texts(**value):
            Visit.model_validate_json(text)
    # Special tokens, which have no text, cannot be used to evade a format.
    assert all(re.fullmatch(r"[^q]{30}", text, re.DOTALL) for text in texts(guided_regex="[^q]{30}"))


def test_objects_of_any_kind(server: Server) -> None:
    """With random weights a reply may not end before the limit of tokens. Every reply that ends is an object."""
    for body in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ):
        answer = server.client().chat.completions.create(**asked(server, n=16, max_tokens=1000, seed=1, **body))
        ended = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
        assert ended
        assert all(isinstance(json.loads(text), dict) for text in ended)


def test_log_probs_are_of_the_distribution_that_the_format_leaves(server: Server) -> None:
    body: Any = {"guided_regex": "a[xy]"}
    (choice,) = (
        server.client()
        .completions.create(
            model=server.model, prompt="spell: ", max_tokens=9, logprobs=0, extra_body=body | {"return_token_ids": True}
        )
        .choices
    )
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    first, second, end = choice.logprobs.token_logprobs
    assert first == end == 0.0 > second  # "a" and the end token are the only possible tokens


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"guided_regex": "a(b"}, "guided_regex", "parenthesis is not closed"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "Lookahead is not supported"),
        ({"guided_grammar": 'a ::= "b"'}, "guided_grammar", 'root rule with name "root" is not found'),
        ({"guided_regex": "a\0"}, "guided_regex", "NUL"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json", "nest"),
        ({"guided_json": {"type": "strin"}}, "guided_json", 'Unsupported type "strin"'),
        ({"guided_json": {"type": "integer", "multipleOf": 3}}, "guided_json", "not supported by xgrammar"),
        ({"guided_json": {"$ref": "#/$defs/a"}}, "guided_json", "Cannot find field"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json", "Invalid range"),
        (
            {"guided_json": {"anyOf": [{"type": "string", "pattern": f"a{{{count}}}"} for count in (200, 400)]}},
            "guided_json",
            "the engine cannot compile it",
        ),
    ],
)
def test_formats_that_mean_nothing(server: Server, body: Any, param: str, reason: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as refused:
            server.client().chat.completions.create(**asked(server, stream=stream, extra_body=body))
        assert (refused.value.code, refused.value.param) == ("invalid_value", param)
        assert "/project/" not in str(refused.value)


def test_a_reply_continues_in_its_format_when_its_engine_dies(server: Server) -> None:
    """This test is the last one, because its engine restarts."""
    chat = server.client().chat.completions
    pattern = "([a-z]{9} ){150}!"
    body = asked(server, max_tokens=1800, seed=7, extra_body={"guided_regex": pattern})
    whole = chat.create(**body).choices[0].message.content or ""
    assert re.fullmatch(pattern, whole)
    text, killed = "", False
    for chunk in chat.create(**body, stream=True):
        text += chunk.choices[0].delta.content or ""
        if len(text) > 100 and not killed:
            assert len(text) < 1200, "too late"
            killed = True
            (core,) = processes_of_part(server.mark, "core")
            os.kill(core, signal.SIGKILL)
    assert killed
    assert text == whole
    assert [core] != processes_of_part(server.mark, "core")
