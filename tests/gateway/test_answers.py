"""What OpenAI's own client receives: formats, streams, choices, log-probs, tools and sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_stand_ins import MODEL, Engine, chat_format, in_time, served

from asyncrl_cli.records.generation import RolloutRequest
from tests.gateway.conversation_stand_ins import end_of

HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Computes.",
            "strict": True,
            "parameters": {"type": "object", "properties": {"e": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>{"name": "calc", "arguments": {"e": "1+1"}}</tool_call>'


def test_the_model_is_listed_and_found() -> None:
    async def test() -> None:
        async with served() as there:
            client = there.client()
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).owned_by == "asyncrl"

    in_time(test)


def test_a_chat_and_its_stream_have_the_same_content() -> None:
    async def test() -> None:
        async with served() as there:
            create: Any = there.client().chat.completions.create
            asked = {"model": MODEL, "messages": HELLO, "seed": 5, "logprobs": True, "top_logprobs": 3}
            ids = {"return_token_ids": True}
            full = await create(**asked, extra_body=ids)
            (choice,) = full.choices
            assert choice.message.content == "hello (5)"
            assert choice.message.role == "assistant" and choice.finish_reason == "stop"
            tokens = choice.logprobs.content
            assert [token.token for token in tokens] == [*"hello (5)", ""], "the last is the end token"
            assert {token.logprob for token in tokens} == {-0.5}
            assert [top.token for top in tokens[0].top_logprobs] == ["h"], "only the sampled token's is known"
            chat = chat_format()
            assert full.prompt_token_ids == chat.render(HELLO)
            assert choice.token_ids == [*chat.encode("hello (5)"), end_of(chat)]
            usage = (len(full.prompt_token_ids), len(tokens), len(full.prompt_token_ids) + len(tokens))
            assert (
                full.usage.prompt_tokens,
                full.usage.completion_tokens,
                full.usage.total_tokens,
            ) == usage

            stream = await create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=ids)
            *chunks, last = [chunk async for chunk in stream]
            assert last.choices == [] and last.usage == full.usage
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content or "" for delta in deltas) == "hello (5)"
            assert sum(bool(delta.content) for delta in deltas) > 2, "it is streamed in pieces"
            assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
            assert chunks[-1].choices[0].logprobs.model_dump() == choice.logprobs.model_dump()
            assert chunks[-1].choices[0].token_ids == choice.token_ids

    in_time(test)


def test_choices_are_separate() -> None:
    async def test() -> None:
        async with served() as there:
            create: Any = there.client().chat.completions.create
            asked = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 5}
            full = await create(**asked)
            texts = [choice.message.content for choice in full.choices]
            assert texts == ["hello (5)", "hello (6)", "hello (7)"], "each has its own seed"
            streamed = ["", "", ""]
            async for chunk in await create(**asked, stream=True):
                streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert streamed == texts

    in_time(test)


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_of_one_or_many_prompts(as_ids: bool) -> None:
    async def test() -> None:
        async with served(Engine(lambda prompt, _: prompt.upper() + "!")) as there:
            create: Any = there.client().completions.create
            encode = chat_format().encode
            prompts: Any = [encode(text) if as_ids else text for text in ("one", "two")]
            one = await create(model=MODEL, prompt=prompts[0], logprobs=1, extra_body={"return_token_ids": True})
            assert one.choices[0].text == "ONE!"
            logprobs = one.choices[0].logprobs
            assert logprobs.tokens == [*"ONE!", ""]
            assert logprobs.text_offset == [0, 1, 2, 3, 4]
            assert logprobs.token_logprobs == [-0.5] * 5
            assert one.choices[0].prompt_token_ids == encode("one")
            many = await create(model=MODEL, prompt=prompts, n=2)
            assert [(choice.index, choice.text) for choice in many.choices] == [
                *((0, "ONE!"), (1, "ONE!"), (2, "TWO!"), (3, "TWO!"))
            ]
            assert many.usage.prompt_tokens == 6, "each prompt counts once"
            streamed = dict.fromkeys(range(4), "")
            async for chunk in await create(model=MODEL, prompt=prompts, n=2, stream=True):
                streamed[chunk.choices[0].index] += chunk.choices[0].text
            assert list(streamed.values()) == ["ONE!", "ONE!", "TWO!", "TWO!"]

    in_time(test)


def test_limits_and_stop_strings() -> None:
    async def test() -> None:
        async with served(Engine(lambda *_: "one, two, three" * 3)) as there:
            completions, chats = there.client().completions, there.client().chat.completions
            cut = await completions.create(model=MODEL, prompt="x")
            assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("one, two, threeo", "length")
            stopped = await completions.create(model=MODEL, prompt="x", stop=["two", "three"])
            assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one, ", "stop")
            newer = await chats.create(model=MODEL, messages=HELLO, max_completion_tokens=3, max_tokens=5)
            assert newer.choices[0].message.content == "one"
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await chats.create(model=MODEL, messages=HELLO, stop=", two", stream=True)
            ]
            assert "".join(pieces) == "one", "nothing of a stop string is sent"

    in_time(test)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(stream: bool) -> None:
    def script(prompt: str, _: RolloutRequest) -> str:
        return "so: 2" if "t:2" in prompt else "let me see " + CALL if prompt.startswith("[calc]") else "no tools"

    async def ask(client: Any, messages: list[Any], **more: Any) -> tuple[str, list[Any], str]:
        asked = {"model": MODEL, "messages": messages, "tools": TOOLS} | more
        if not stream:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            return choice.message.content, choice.message.tool_calls or [], choice.finish_reason
        text, calls, finish = "", [], ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta
            assert not (calls and delta.content), "content comes before the calls"
            text, calls = text + (delta.content or ""), calls + (delta.tool_calls or [])
            finish = chunk.choices[0].finish_reason or finish
        return text, calls, finish

    async def test() -> None:
        async with served(Engine(script)) as there:
            there.session("7-0")
            client = there.client("7-0")
            text, (call,), finish = await ask(client, HELLO)
            assert (text.strip(), finish) == ("let me see", "tool_calls")
            assert (call.type, call.function.name) == ("function", "calc")
            assert json.loads(call.function.arguments) == {"e": "1+1"}
            reply = {"role": "assistant", "content": text, "tool_calls": [call.model_dump()]}
            answer = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            text, calls, finish = await ask(client, [*HELLO, reply, answer], tool_choice="required")
            assert (text, calls, finish) == ("so: 2", [], "stop")
            first, second = there.engine.asked
            assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids, "the conversation continues"
            assert (await ask(there.client(), HELLO, tool_choice="none"))[0] == "no tools"

    in_time(test)


@pytest.mark.parametrize("sent_back", ["reasoning_content", "reasoning", None])
def test_reasoning_comes_before_content_and_calls_and_may_be_sent_back(sent_back: str | None) -> None:
    def script(prompt: str, _: RolloutRequest) -> str:
        return "<think>easy</think>2" if "t:2" in prompt else f"<think>think of\n{{1}}</think>let me see {CALL}"

    async def test() -> None:
        async with served(Engine(script, chat=chat_format("qwen3"))) as there:
            rollout = there.session("7-0")
            create: Any = there.client("7-0").chat.completions.create
            asked = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
            deltas = [chunk.choices[0].delta.model_dump() async for chunk in await create(**asked, stream=True)]
            kinds = [name for delta in deltas for name in ("reasoning", "content", "tool_calls") if delta.get(name)]
            assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)
            assert kinds.count("reasoning") > 5 and kinds.count("content") > 1 and kinds.count("tool_calls") == 1
            for name in ("reasoning", "reasoning_content"):
                assert "".join(delta.get(name) or "" for delta in deltas) == "think of\n{1}"
            assert "".join(delta["content"] or "" for delta in deltas) == "let me see "

            (choice,) = (await create(**asked)).choices
            reply = choice.message.model_dump(exclude_none=True)
            assert reply["reasoning"] == reply.pop("reasoning_content") == "think of\n{1}"
            reasoning = reply.pop("reasoning")
            assert (reply["content"], choice.finish_reason) == ("let me see ", "tool_calls")
            if sent_back:
                reply[sent_back] = reasoning
            answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}
            (last,) = (await create(**asked | {"messages": [*HELLO, reply, answer]})).choices
            assert (last.message.content, last.message.reasoning) == ("2", "easy")
            _, second, third = there.engine.asked
            assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids
            assert rollout.last_text == "<think>easy</think>2", "a reward function receives the whole text"

    in_time(test)


def test_a_call_belongs_to_the_session_that_it_names() -> None:
    async def test() -> None:
        async with served() as there:
            by_path, other = there.session("7-0"), there.session("eval:3/1 ü")
            await there.client("7-0").chat.completions.create(model=MODEL, messages=HELLO)
            await there.client("eval:3/1 ü").chat.completions.create(model=MODEL, messages=HELLO)
            await there.client("7-0").completions.create(model=MODEL, prompt="x", temperature=0.1, top_p=0.5)
            assert (by_path.calls, other.calls) == (2, 1)
            assert not there.opened
            assert {request.sampling.temperature for request in there.engine.asked} == {1.0}, "the session's own"

            await there.client().completions.create(model=MODEL, prompt="x", temperature=0.1)
            assert there.engine.asked[-1].sampling.temperature == 0.1
            (own,) = there.opened
            with pytest.raises(Exception, match="has ended"):
                await own.complete("y", None)  # type: ignore[arg-type]

    in_time(test)


def test_further_keys_of_agents_are_accepted() -> None:
    harmless = {
        "frequency_penalty": 0,
        "logit_bias": None,
        "metadata": {"run": "7"},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "store": False,
        "top_p": 1.0,
        "user": "me",
    }
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": []},
        {"role": "user", "content": parts},
    ]

    async def test() -> None:
        async with served() as there:
            answer = await there.post("/v1/chat/completions", {"messages": messages, **harmless})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"].startswith("hello")
            assert chat_format().decode(there.engine.asked[0].prompt_ids).startswith("s:Be kind.\na:\nu:hello")

    in_time(test)
