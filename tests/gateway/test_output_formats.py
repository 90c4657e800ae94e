"""How the gateway reads output formats: all request forms have one internal form, and training refuses formats."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import openai
import pytest
from gateway_stand_ins import MODEL, Engine, in_time, served
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.protocol import ChatRequest, CompletionRequest
from asyncrl_cli.gateway.structured import MOST_BYTES, output_format
from asyncrl_cli.records.generation import OutputFormat, OutputKind
from asyncrl_cli.rollout.client import GenerationFailed

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f"}}


def of_openai(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def request(body: dict[str, Any]) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": HELLO, **body}))


def same(key: str, kind: OutputKind, value: Any) -> OutputFormat:
    return OutputFormat(kind, value if kind in ("regex", "grammar") else json.dumps(value), key)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
schemas = st.dictionaries(texts, st.integers() | texts | st.lists(texts), max_size=4)
choices = st.lists(texts.filter(bool), min_size=1, max_size=4)
formats: st.SearchStrategy[tuple[dict[str, Any], OutputFormat]] = st.one_of(
    schemas.map(lambda one: ({"response_format": of_openai(one)}, same("response_format", "json", one))),
    schemas.map(lambda one: ({"guided_json": one}, same("guided_json", "json", one))),
    schemas.map(lambda one: ({"guided_json": json.dumps(one)}, same("guided_json", "json", one))),
    schemas.map(lambda one: ({"structured_outputs": {"json": one}}, same("structured_outputs.json", "json", one))),
    choices.map(lambda one: ({"guided_choice": one}, same("guided_choice", "choice", one))),
    choices.map(
        lambda one: ({"structured_outputs": {"choice": one}}, same("structured_outputs.choice", "choice", one))
    ),
    texts.map(lambda one: ({"guided_regex": one}, same("guided_regex", "regex", one))),
    texts.map(lambda one: ({"structured_outputs": {"regex": one}}, same("structured_outputs.regex", "regex", one))),
    texts.map(lambda one: ({"guided_grammar": one}, same("guided_grammar", "grammar", one))),
    texts.map(
        lambda one: ({"structured_outputs": {"grammar": one}}, same("structured_outputs.grammar", "grammar", one))
    ),
)
"""Request forms, and their internal form."""


@given(formats)
def test_every_way_to_ask_has_one_form_inside(asked: tuple[dict[str, Any], OutputFormat]) -> None:
    body, expected = asked
    assert output_format(request(body)) == expected
    text = CompletionRequest.model_validate_json(json.dumps({"prompt": "x", **body}))
    assert output_format(text) == expected


@given(formats, formats)
def test_two_formats_are_refused(
    one: tuple[dict[str, Any], OutputFormat], other: tuple[dict[str, Any], OutputFormat]
) -> None:
    body = one[0] | other[0]
    if len(body) == 2:
        with pytest.raises(ApiError, match="only one output format") as refused:
            output_format(request(body))
        assert (refused.value.status, refused.value.param in (one[1].key, other[1].key)) == (400, True)


@given(formats)
def test_a_format_beside_tools_is_refused(asked: tuple[dict[str, Any], OutputFormat]) -> None:
    with pytest.raises(ApiError, match="together with tools") as refused:
        output_format(request(asked[0]), with_tools=True)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", asked[1].key)


def test_keys_that_ask_for_nothing_are_ignored() -> None:
    for body in ({}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": None}):
        assert output_format(request(body), with_tools=True) is None
    for body in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        found = output_format(request(body))
        assert found is not None and json.loads(found.source) == {"type": "object"}


def test_sources_have_a_limit() -> None:
    at = {"guided_regex": "regex", "guided_grammar": "grammar"}
    for key, kind in at.items():
        most = MOST_BYTES[kind]  # type: ignore[index]
        assert output_format(request({key: "a" * most})) is not None
        with pytest.raises(ApiError, match=f"at most {most}"):
            output_format(request({key: "ä" * (most // 2 + 1)}))
    with pytest.raises(ApiError, match=r"response_format: it has \d+ bytes"):
        output_format(request({"response_format": of_openai({"description": "x" * MOST_BYTES["json"]})}))


FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": of_openai(SCHEMA, strict=True)}, "response_format"),
    ({"response_format": of_openai(SCHEMA)}, "response_format"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"guided_choice": ["a"]}, "guided_choice"),
]


def test_sessions_of_training_refuse_formats_with_the_reason() -> None:
    async def test() -> None:
        async with served() as there:
            session = there.session("7-0")
            for (body, key), (path, prompt), stream in product(
                FORMATS,
                ((CHAT, {"messages": HELLO}), (CHAT, {"messages": HELLO, "tools": [TOOL]}), (TEXT, {"prompt": "x"})),
                (False, True),
            ):
                answer = await there.post(path, {**prompt, **body, "stream": stream}, "7-0")
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", key)
                assert "log-probs would not be those of the policy" in error["message"]
            assert not there.engine.asked and not session.calls
            text = await there.post(CHAT, {"messages": HELLO, "response_format": {"type": "text"}}, "7-0")
            assert text.status_code == 200
            assert there.engine.asked[0].sampling.output_format is None

    in_time(test)


def test_other_sessions_pass_the_format_on_for_every_choice() -> None:
    async def test() -> None:
        async with served() as there:
            client = there.client()
            asked: Any = of_openai(SCHEMA)
            await client.chat.completions.create(model=MODEL, messages=HELLO, response_format=asked, n=3)
            await client.completions.create(model=MODEL, prompt=["x", "y"], extra_body={"guided_json": SCHEMA})
            found = [one.sampling.output_format for one in there.engine.asked]
            assert [one and (one.kind, json.loads(one.source)) for one in found] == [("json", SCHEMA)] * 5
            # Tools that the model does not see are allowed.
            hidden = {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "response_format": asked}
            assert (await there.post(CHAT, hidden)).status_code == 200
            refused = await there.post(CHAT, hidden | {"tool_choice": "auto"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")

    in_time(test)


def test_what_the_engine_refuses_is_the_clients_error() -> None:
    async def test() -> None:
        async with served(Engine(fails=GenerationFailed("it is not closed", refused="guided_regex"))) as there:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as refused:
                    await there.client().completions.create(
                        model=MODEL, prompt="x", stream=stream, extra_body={"guided_regex": "("}
                    )
                assert (refused.value.code, refused.value.param) == ("invalid_value", "guided_regex")
                assert "guided_regex: it is not closed" in str(refused.value)

    in_time(test)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": of_openai([])}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": False}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "false"}, "guided_json"),
    ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs.json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice.0"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ({"guided_json": {"properties": {"a": {"pattern": "a" * 600}}, "items": [{"pattern": "b" * 600}]}}, "guided_json"),
    ({"guided_json": {"not": {"patternProperties": {"a" * 1025: True}}}}, "guided_json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


def test_formats_that_are_none() -> None:
    async def test() -> None:
        async with served() as there:
            for body, param in WRONG:
                answer = await there.post(CHAT, {"messages": HELLO, **body})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert not there.engine.asked

    in_time(test)


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FLAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"input": "hello", "text": {"format": FLAT}}, "text.format"),
    (MESSAGES, {"messages": HELLO, "max_tokens": 9, "output_config": {"format": FLAT}}, "output_config.format"),
]


@pytest.mark.parametrize(("path", "body", "key"), OTHERS)
def test_the_other_apis_ask_for_the_same_formats(path: str, body: dict[str, Any], key: str) -> None:
    async def test() -> None:
        async with served() as there:
            answer = await there.post(path, body)
            assert answer.status_code == 200, answer.text
            assert there.engine.asked[0].sampling.output_format == same(key, "json", SCHEMA)
            tool = {"name": "f", "type": "function"} if path == RESPONSES else {"name": "f", "input_schema": {}}
            there.session("7-0")
            for more, session, reason in (
                ({"tools": [tool]}, None, "together with tools"),
                ({}, "7-0", "distribution"),
            ):
                refused = await there.post(path, body | more, session)
                assert (refused.status_code, key in refused.text, reason in refused.text) == (400, True, True)
            assert len(there.engine.asked) == 1

    in_time(test)


def test_responses_are_parsed_by_openais_client() -> None:
    class Find(BaseModel):
        q: str

    async def test() -> None:
        async with served(Engine(lambda *_: '{"q": "x"}')) as there, there.client() as client:
            parsed = await client.responses.parse(model=MODEL, input="go", text_format=Find)
            assert parsed.output_parsed == Find(q="x")
            asked = there.engine.asked[0].sampling.output_format
            assert asked is not None
            assert json.loads(asked.source)["properties"]["q"]["type"] == "string"

    in_time(test)
