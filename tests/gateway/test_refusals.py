"""Invalid input: the answer is always an error in OpenAI's format with the right status, and the server continues."""

from __future__ import annotations

import socket
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest
from gateway_stand_ins import MAX_LENGTH, MODEL, Engine, chat_format, key_of, served

from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.gateway.server import GatewayError, listen
from asyncrl_cli.gateway.wire import NO_EFFECT, SAMPLING

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def key_header(session: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(session)}"}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **changes}


def text(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **changes}


WRONG: list[tuple[str, Any, int, str | None, str | None]] = [
    (CHAT, {"model": MODEL}, 400, "messages", "invalid_value"),
    (CHAT, chat(messages="hello"), 400, "messages", "invalid_value"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages.0.content", "invalid_value"),
    (CHAT, chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs", "invalid_value"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function", "invalid_value"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": ""}}]), 400, "tools.0.function.name", None),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 3}}]), 400, None, None),
    (CHAT, chat(tools={"name": "f"}), 400, "tools", None),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), 400, None, "invalid_value"),
    (CHAT, chat(temperature="1"), 400, "temperature", "invalid_value"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(n=0), 400, "n", "invalid_value"),
    (CHAT, chat(n=True), 400, "n", "invalid_value"),
    (CHAT, chat(seed=2**63), 400, "seed", "invalid_value"),
    (CHAT, chat(stop=""), 400, "stop", "invalid_value"),
    (CHAT, chat(top_logprobs=2), 400, None, "invalid_value"),
    (CHAT, chat(stream="yes"), 400, "stream", "invalid_value"),
    (TEXT, text(prompt="x" * 15_000_000), 400, None, "context_length_exceeded"),
    (TEXT, text(prompt=[1] * 5_000_000), 400, None, "context_length_exceeded"),
    (TEXT, text(prompt=""), 400, None, "invalid_value"),
    (TEXT, text(prompt=[]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[[]]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["x", 1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["x" * MAX_LENGTH, "y"]), 400, None, "context_length_exceeded"),
    (TEXT, text(prompt=["x"] * 1024, n=2), 400, None, "invalid_value"),
    (TEXT, text(best_of=3), 400, "best_of", "unsupported_parameter"),
    (TEXT, text(suffix="."), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(echo=1), 400, "echo", "unsupported_parameter"),
    ("/sessions/9-9" + CHAT, chat(), 404, None, "session_not_found"),
    ("/sessions/8-0" + CHAT, chat(), 410, None, "session_ended"),
]
"""Path, body, and status, param and code of the error (None: any), in addition to those in golden/errors.json."""

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONVERSATIONS = (CHAT, RESPONSES, MESSAGES)
SYSTEM, USER, REPLY = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))


def asked(path: str, *messages: Any, **changes: Any) -> dict[str, Any]:
    """The smallest request of each API; Responses' messages are called ``input``."""
    if path == TEXT:
        return text(**changes)
    given = list(messages or HELLO)
    return ({"input": given} if path == RESPONSES else {"messages": given, "max_tokens": 9}) | changes


REFUSED: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "chat_template": "{{ messages }}",
    "container": "c",
    "conversation": "conv_1",
    "documents": [{"text": "x"}],
    "echo": True,
    "enable_thinking": False,
    "guided_json": {"type": "object"},
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "key_of_next_year": 0,
    "logit_bias": {"1": 2},
    "min_tokens": 2,
    "moderation": {"model": "m"},
    "prompt_logprobs": 1,
    "response_format": {"type": "json_object"},
    "skip_special_tokens": False,
    "stop_token_ids": [1],
    "structured_outputs": {"regex": "a"},
    "thinking_token_budget": 5,
    "truncate_prompt_tokens": 5,
    "truncation": "auto",
    "use_beam_search": True,
    "vllm_xargs": {"x": 1},
}
ACCEPTED: dict[str, Any] = {
    "add_generation_prompt": True,
    "cache_salt": "x",
    "client_metadata": {"x": "y"},
    "continue_final_message": False,
    "metadata": {"run": "7"},
    "n": 1,
    "parallel_tool_calls": False,
    "prompt_cache_key": "x",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "skip_special_tokens": True,
    "stop": [],
    "suffix": None,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "top_p": 1.0,
    "user": "me",
}


@pytest.mark.parametrize("session", [None, "7-0"])
@pytest.mark.parametrize("path", [*CONVERSATIONS, TEXT])
async def test_every_key_is_honoured_without_effect_or_refused_by_name(path: str, session: str | None) -> None:
    async with served() as there:
        there.session("7-0")
        answer = await there.post(path, asked(path, **ACCEPTED), session)
        assert answer.status_code == 200, answer.text
        for key, value in REFUSED.items():
            answer = await there.post(path, asked(path, **{key: value}), session)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"].startswith(f"{key} is not supported"), answer.text
            assert path == MESSAGES or (error["param"], error["code"]) == (key, "unsupported_parameter")
        # Programs send sampling settings by habit: the run's own count in its sessions.
        answer = await there.post(path, asked(path, temperature=0.1, top_p=0.5, top_k=3), session)
        assert answer.status_code == (400 if session is None else 200), answer.text
        assert there.engine.asked[-1].sampling.temperature == 1.0
        typo = await there.post(path, asked(path, temprature=0.1), session)
        assert "did you mean `temperature`?" in typo.text


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_rules_of_conversations_are_the_same_in_every_api(path: str) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with served() as there:
        session = there.session("7-0")

        async def prompt_of(*messages: Any) -> str:
            answer = await there.post(path, asked(path, *messages, **{limit: 32_000}), "7-0")
            assert answer.status_code == 200, answer.text
            return str(chat_format().decode(there.engine.asked[-1].prompt_ids))

        merged = await prompt_of(SYSTEM, SYSTEM, USER, REPLY, SYSTEM, USER, REPLY, SYSTEM)
        assert merged == "s:s\n\ns\nu:u\na:a\nu:s\n\nu\na:a\nu:s\na:"
        request = there.engine.asked[-1]
        assert request.sampling.max_tokens == MAX_LENGTH - len(request.prompt_ids), "what is left of the context"
        long = await there.post(path, asked(path, USER | {"content": "x" * MAX_LENGTH}), "7-0")
        assert (long.status_code, "maximum context length" in long.text) == (400, True)
        prefilled = await there.post(path, asked(path, USER, REPLY), "7-0")
        if path == MESSAGES:  # as in Anthropic's API
            assert chat_format().decode(there.engine.asked[-1].prompt_ids) == "u:u\na:a"
        else:
            assert prefilled.status_code == 400
            assert "the last message must not be the assistant's" in prefilled.text
        for model in ("gpt-4o", "claude-of-this-year", MODEL):
            assert (await there.post(path, asked(path, model=model), "7-0")).status_code == 200
        assert (await there.post(path, asked(path, model="gpt-4o"))).status_code == 404
        assert (await there.http.get("/sessions/7-0/v1/models/gpt-4o", headers=key_header("7-0"))).status_code == 200
        assert session.failure.startswith("This model's maximum context length")


async def test_an_assistant_message_at_the_end_is_continued_as_by_vllm() -> None:
    both = {"continue_final_message": True, "add_generation_prompt": False}
    async with served() as there:
        there.session("7-0")
        answer = await there.post(CHAT, asked(CHAT, USER, REPLY, **both), "7-0")
        assert answer.status_code == 200, answer.text
        assert chat_format().decode(there.engine.asked[-1].prompt_ids) == "u:u\na:a"
        for key, value in both.items():
            alone = await there.post(CHAT, asked(CHAT, USER, REPLY, **{key: value}), "7-0")
            assert (alone.status_code, "need each other" in alone.text) == (400, True)
            other = await there.post(RESPONSES, asked(RESPONSES, USER, REPLY, **{key: value}), "7-0")
            assert other.json()["error"]["message"].startswith(f"{key} is not supported")
        users = await there.post(CHAT, asked(CHAT, USER, **both), "7-0")
        assert (users.status_code, "to continue an assistant message at the end" in users.text) == (400, True)


SOUND = {"type": "input_audio", "data": "x"}
RESULTS: dict[str, Any] = {
    CHAT: {"role": "tool", "tool_call_id": "1", "content": [SOUND]},
    RESPONSES: {"type": "function_call_output", "call_id": "1", "output": [SOUND]},
    MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [SOUND]}]},
}


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_a_sound_in_a_tools_result_is_refused_with_the_reason(path: str) -> None:
    async with served() as there:
        answer = await there.post(path, asked(path, USER, RESULTS[path]))
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "'input_audio'" in message and "expected tags: '" in message and "; or: " not in message


@pytest.mark.parametrize("key", ["audio", "function_call", "refusal"])
async def test_content_of_a_message_that_the_policy_would_not_see_is_refused(key: str) -> None:
    async with served() as there:
        answer = await there.post(CHAT, asked(CHAT, REPLY | {key: {"name": "f"}}, USER))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"messages.0.{key}")


def test_the_documentation_lists_keys_without_effect_and_sampling_settings() -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    assert not [key for key in NO_EFFECT | SAMPLING.keys() if f"`{key}`" not in page]


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def call(**function: Any) -> dict[str, Any]:
    named = {"name": "f", "arguments": "{}"} | function
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": named}]}


MUCH = "x" * 1_500_000
FLOODS: list[tuple[dict[str, Any], str | None, str]] = [
    (chat(messages=[{"role": "user", "content": MUCH}]), None, "context_length_exceeded"),
    (chat(messages=[{"role": "user", "content": "x", "name": MUCH}]), None, "context_length_exceeded"),
    (chat(messages=[{"role": "tool", "content": "x", "tool_call_id": MUCH}]), None, "context_length_exceeded"),
    (chat(messages=[call(arguments=MUCH), *HELLO]), None, "context_length_exceeded"),
    (chat(messages=[call(arguments="[" * 1_500_000), *HELLO]), None, "context_length_exceeded"),
    (chat(messages=[call(name=MUCH), *HELLO]), None, "context_length_exceeded"),
    (chat(messages=[{"role": "user", "content": ""}] * 100_000), "messages", "invalid_value"),
    (chat(messages=[call() | {"tool_calls": call()["tool_calls"] * 150_000}]), None, "invalid_value"),
    (chat(messages=[{"role": "user", "content": ""}] * 4096), None, "context_length_exceeded"),
    (chat(tools=[tool(f"f{n}") for n in range(50_000)]), "tools", "invalid_value"),
    (chat(tools=[tool(description=MUCH)]), None, "context_length_exceeded"),
    (chat(tools=[tool(parameters={MUCH: 1})]), None, "context_length_exceeded"),
    (chat(tools=[tool(strict=[MUCH])]), None, "context_length_exceeded"),
]
"""Requests that would take seconds and gigabytes to render; code and param of the error."""


async def test_nothing_is_rendered_without_a_bound() -> None:
    rendered: list[int] = []
    original = ChatTemplate.text

    def counted(self: Any, messages: Any, tools: Any, reply: bool = False) -> str:
        rendered.append(len(messages))
        return original(self, messages, tools, reply)

    async with served(max_body_mb=16) as there:
        there.session("7-0")
        with patch.object(ChatTemplate, "text", counted):
            for body, param, code in FLOODS:
                answer = await there.post(CHAT, body, "7-0")
                error = answer.json()["error"]
                case = f"{str(body)[:100]}: {answer.text[:300]}"
                assert (answer.status_code, error["code"]) == (400, code), case
                assert param in (None, error["param"]), case
            assert not rendered
            assert (await there.post(CHAT, chat(), "7-0")).status_code == 200, "it continues"
            assert rendered == [1]
    async with served() as there:
        assert (await there.post(TEXT, text(prompt=2 * MUCH))).status_code == 413, "by default"


async def test_invalid_requests_get_the_right_error() -> None:
    async with served(max_body_mb=16) as there:
        there.session("8-0")
        there.sessions.close("8-0")
        for (path, body, status, param, code), stream in product(WRONG, (False, True)):
            session = path.split("/")[2] if path.startswith("/sessions") else None
            answer = await there.post(path, {"stream": stream, **body}, headers=key_header(session))
            case = f"{path} {str(body)[:100]}: {answer.text}"
            assert answer.status_code == status, case
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, case
            assert error["type"] == "invalid_request_error" and error["message"], case
            assert code in (None, error["code"]), case
            assert param in (None, error["param"]), case
        assert not there.engine.asked


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
]


async def test_bodies_that_are_no_requests_get_an_error() -> None:
    async with served() as there:
        for body in NO_REQUESTS:
            answer = await there.post(TEXT, content=body)
            assert answer.status_code == 400, body[:50]
            assert answer.json()["error"]["code"] == "invalid_value", body[:50]


async def test_keys_methods_sizes_and_sessions_by_header() -> None:
    async with served(max_body_mb=1) as there:
        for key in ({"authorization": ""}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eDp5"}):
            refused = await there.http.get("/v1/models", headers=key)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await there.http.get("/health", headers=key)).json() == {"status": "ok"}
        with pytest.raises(openai.AuthenticationError):
            await there.client(api_key="wrong").chat.completions.create(model=MODEL, messages=HELLO)  # type: ignore[arg-type]
        wrong_method = await there.http.get(CHAT)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
        assert wrong_method.json()["error"]["code"] == "method_not_allowed"
        too_large = await there.post(TEXT, content=b"x" * (2**20 + 1))
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "request_too_large")
        with pytest.raises(openai.NotFoundError, match="there is no session"):
            await there.client("9-9").models.list()
        assert (await there.post(TEXT, text())).status_code == 200, "it continues"


async def test_a_bug_is_an_internal_error_without_its_message() -> None:
    async with served(Engine(fails=ZeroDivisionError("a bug"))) as there:
        answer = await there.post(CHAT, chat())
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "a bug" not in answer.text


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GatewayError, match=rf"rollout\.gateway\.port: .*127\.0\.0\.1:{port}.*in use"):
            listen("127.0.0.1", port)
    with pytest.raises(GatewayError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)
