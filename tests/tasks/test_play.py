"""Environments with a scripted server: requests, sums of rewards, and ends of episodes."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Message, Prompt, with_data_urls
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Step
from asyncrl_cli.tasks.mix import OneCall
from asyncrl_cli.tasks.play import LIMITS, LOOP, EpisodeEnded, play, try_environment
from asyncrl_cli.tasks.tools import Tool, ToolEnvironment, ToolTask

REFUSED = {"error": {"message": "too long", "type": "invalid_request_error", "param": None}}


BEGUN = {"role": "assistant", "content": "It is "}
ROW = Prompt("row", ({"role": "user", "content": "begin"}, BEGUN), {"chat_template_kwargs": {"quiet": True}})
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def reply_with(content: str | None, *calls: tuple[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def playing(
    environment: Any, answers: Sequence[dict[str, Any]], status: int = 200, max_images: int = 0
) -> tuple[RewardResult, list[Any]]:
    """Play an episode with these answers; the last one has ``status`` if it has an ``error``. Returns the result, and
    the requests."""
    (result, turns), sent = played(environment, answers, status, max_images)
    if turns:
        assert sum(turn.reward for turn in turns) == result.reward
    return result, sent


def played(environment: Any, answers: Sequence[dict[str, Any]], status: int = 200, max_images: int = 0) -> Any:
    """As ``playing``, with the episode's turns."""

    async def scene() -> Any:
        left, sent = list(answers), []

        async def answer(request: web.Request) -> web.Response:
            assert request.headers["Authorization"] == "Bearer key"
            sent.append(await request.json())
            body = left.pop(0)
            return web.json_response(body, status=status if "error" in body else 200)

        async with policy(answer) as access, aiohttp.ClientSession() as http:
            if isinstance(environment, OneCall):
                return await environment.run(ROW, access), sent
            return await play(environment, replace(access, max_images=max_images), http), sent

    return run(scene())


@asynccontextmanager
async def policy(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[ModelAccess]:
    """A server on this machine that answers a session's chat requests."""
    app = web.Application()
    app.router.add_post("/sessions/1-0/v1/chat/completions", answer)
    server = web.AppRunner(app)
    await server.setup()
    try:
        await web.TCPSite(server, "127.0.0.1", 0).start()
        port = server.addresses[0][1]
        yield ModelAccess(f"http://127.0.0.1:{port}/sessions/1-0/v1", "key", "policy", "1-0")
    finally:
        await server.cleanup()


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 60))


class Begins:
    """Begins each of the policy's two messages."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": "begin"}, BEGUN]

    def step(self, reply: Message) -> Step:
        self.replies.append(reply["content"])
        return Step([{"role": "user", "content": "?"}, BEGUN], 1.0, len(self.replies) == 2)


def test_a_reply_and_the_message_that_it_continues_are_one_message() -> None:
    environment = Begins()
    _, sent = playing(environment, [reply_with("a"), reply_with("b")])
    assert environment.replies == ["a", "b"], "the environment reads what the policy wrote"
    assert all(CONTINUED.items() <= body.items() for body in sent)
    assert [message["content"] for message in sent[1]["messages"]] == ["begin", "It is a", "?", "It is "]


def test_one_call_has_the_variables_and_the_begun_message_of_its_row() -> None:
    _, (body,) = played(OneCall(None), [reply_with("a")])
    assert body["messages"][-1] == BEGUN and CONTINUED.items() <= body.items()
    assert body["chat_template_kwargs"] == {"quiet": True}


class Count:
    """Counts up to ``end``, with a reward of 0.25 for each turn."""

    def __init__(self, end: int) -> None:
        self.end, self.replies, self.closed = end, [], 0

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": "begin"}]

    def step(self, reply: Message) -> Step:
        self.replies.append(reply["content"])
        turn = len(self.replies)
        return Step([{"role": "user", "content": f"turn {turn}"}], 0.25, turn == self.end, {"turns": 1.0})

    def close(self) -> None:
        self.closed += 1


def test_turns_alternate_and_rewards_add_up() -> None:
    environment = Count(3)
    result, sent = playing(environment, [reply_with("a"), reply_with("b"), reply_with("c")])
    assert result == RewardResult(0.75, {"turns": 3.0})
    assert environment.replies == ["a", "b", "c"]
    assert environment.closed == 1
    assert [body["messages"] for body in sent] == [
        [{"role": "user", "content": "begin"}, *turns]
        for turns in (
            [],
            [{"role": "assistant", "content": "a"}, {"role": "user", "content": "turn 1"}],
            [
                *({"role": "assistant", "content": "a"}, {"role": "user", "content": "turn 1"}),
                *({"role": "assistant", "content": "b"}, {"role": "user", "content": "turn 2"}),
            ],
        )
    ]
    assert all(body["model"] == "policy" and "tools" not in body for body in sent)


@settings(max_examples=20)
@given(st.lists(st.floats(-10, 10) | st.integers(-3, 3), min_size=1, max_size=6))
def test_every_turn_keeps_its_reward_and_they_sum_to_the_rollouts(rewards: list[float]) -> None:
    (result, turns), _ = played(giving(rewards), [reply_with("a")] * len(rewards))
    assert [turn.reward for turn in turns] == rewards
    assert sum(turn.reward for turn in turns) == result.reward


def giving(rewards: Sequence[float | None]) -> Any:
    """An environment with these rewards, one for each turn."""
    left = list(rewards)
    return SimpleNamespace(
        reset=lambda: [{"role": "user", "content": "begin"}],
        step=lambda reply: Step([{"role": "user", "content": "on"}], left.pop(0), not left, {"turns": 1.0}),
    )


def test_a_step_without_a_reward_masks_the_rollout() -> None:
    result, _ = playing(giving([1.0, None, 1.0]), [reply_with(text) for text in "abc"])
    assert result == RewardResult(None, {"turns": 3.0})


@pytest.mark.parametrize("code", sorted(LIMITS))
def test_at_a_limit_the_reward_so_far_counts(code: str) -> None:
    environment = Count(9)
    refused = {"error": REFUSED["error"] | {"code": code}}
    result, _ = playing(environment, [reply_with("a"), refused], status=400)
    assert result.reward == 0.25
    assert environment.closed == 1


def test_any_other_refusal_and_an_exception_fail_the_episode() -> None:
    environment = Count(9)
    refused = {"error": REFUSED["error"] | {"code": "session_ended"}}
    with pytest.raises(RuntimeError, match="answered 410: too long"):
        playing(environment, [reply_with("a"), refused], status=410)
    environment.replies = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        playing(environment, [reply_with("a")])
    assert environment.closed == 2


# -- tools


def divide(a: float, b: float = 2.0, *, note: str = "") -> float:
    """One number by another.

    As exact as floats are.

    a: what is divided
    """
    return a / b


def words(text: list[str]) -> str:
    return " ".join(text)


class Divisions(ToolTask):
    def tools(self, prompt: Prompt) -> list[Callable[..., Any]]:
        return [divide, words]

    def judge(self, prompt: Prompt, text: str) -> RewardResult:
        return RewardResult(float(text == prompt.fields["answer"]), {"letters": float(len(text))})


def test_functions_are_described_by_signature_and_docstring() -> None:
    tools = Divisions().environment(Prompt("p", "3 by 2?")).tools
    assert tools[0] == {
        "type": "function",
        "function": {
            "name": "divide",
            "description": "One number by another.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "what is divided"},
                    "b": {"type": "number", "default": 2.0},
                    "note": {"type": "string", "default": ""},
                },
                "required": ["a"],
            },
        },
    }
    assert tools[1]["function"]["parameters"]["properties"]["text"]["items"] == {"type": "string"}


def test_calls_and_their_errors_are_answered_and_the_last_reply_is_judged() -> None:
    environment = Divisions().environment(Prompt("p", "3 by 2?", {"answer": "1.5"}))
    calls = [
        ("divide", '{"a": 3}'),
        ("divide", '{"a": 3, "b": 0}'),
        ("divide", '{"a": "three"}'),
        ("divide", "not json"),
        ("guess", "{}"),
        ("words", '{"text": ["a", "b"]}'),
    ]
    result, sent = playing(environment, [reply_with(None, *calls), reply_with("1.5")])
    assert result == RewardResult(1.0, {"tool_calls": 6.0, "tool_errors": 4.0, "letters": 3.0})
    assert sent[0]["tools"] == environment.tools
    results = sent[1]["messages"][2:]
    assert [message["tool_call_id"] for message in results] == [f"call{index}" for index in range(6)]
    texts = [message["content"] for message in results]
    assert texts[0] == "1.5"
    assert texts[1] == "Error: ZeroDivisionError: float division by zero"
    assert "valid number" in texts[2]
    assert "JSON" in texts[3]
    assert texts[4] == "Error: there is no tool 'guess'; there are divide, words"
    assert texts[5] == "a b"


class Place(BaseModel):
    city: str
    day: int = 0


@dataclass
class Forecast:
    place: Place
    degrees: float


class Station:
    """A weather station."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def measure(self, city: str) -> Forecast:
        """Measure."""
        return Forecast(Place(city=city), self.degrees)

    async def place(self, city: str) -> Place:
        await asyncio.sleep(0)
        return Place(city=city)


def anything(a, b=0):  # type: ignore[no-untyped-def]
    return [a, b]


def test_methods_and_async_tools_are_called_and_their_results_are_json() -> None:
    station = Station(21.5)
    assert Tool(station.measure)('{"city": "Paris"}') == '{"place": {"city": "Paris", "day": 0}, "degrees": 21.5}'
    assert Tool(station.place)('{"city": "Paris"}') == '{"city": "Paris", "day": 0}'
    assert Tool(anything)('{"a": {"x": [1, null]}, "b": "1"}') == '[{"x": [1, null]}, "1"]'
    assert Tool(anything).definition["function"]["parameters"]["properties"] == {"a": {}, "b": {"default": 0}}


def test_an_async_tool_runs_in_the_loop_of_the_episode() -> None:
    loops = []

    async def look(city: str) -> str:
        loops.append(asyncio.get_running_loop())
        return city

    class Looks(ToolTask):
        def tools(self, prompt: Prompt) -> list[Callable[..., Any]]:
            return [look]

        async def judge(self, prompt: Prompt, text: str) -> dict[str, float]:  # type: ignore[override]
            loops.append(asyncio.get_running_loop())
            return {"score": 1.0, "length": len(text)}

    calls = [("look", '{"city": "Paris"}')] * 2
    result, sent = playing(Looks().environment(Prompt("p", "?")), [reply_with(None, *calls), reply_with("Paris")])
    assert [message["content"] for message in sent[1]["messages"][2:]] == ["Paris", "Paris"]
    assert result == RewardResult(1.0, {"tool_calls": 2.0, "tool_errors": 0.0, "length": 5.0})
    assert len(loops) == 3 and len(set(map(id, loops))) == 1


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit("usage"), "Error: SystemExit: usage"),
        (asyncio.CancelledError(), "Error: CancelledError: "),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt: "),
    ],
)
def test_a_tool_that_tries_to_end_the_process_is_an_error(is_async: bool, error: BaseException, text: str) -> None:
    def stop(city: str) -> str:
        raise error

    async def stop_later(city: str) -> str:
        raise error

    environment = ToolEnvironment(Prompt("p", "?"), [stop_later if is_async else stop], lambda prompt, text: 1.0)
    calls = [(environment.tools[0]["function"]["name"], '{"city": "Paris"}')]
    result, sent = playing(environment, [reply_with(None, *calls), reply_with("Paris")])
    assert sent[1]["messages"][-1]["content"] == text
    assert result == RewardResult(1.0, {"tool_calls": 1.0, "tool_errors": 1.0})


def test_cancelling_an_episode_cancels_its_async_tool() -> None:
    async def wait(city: str) -> str:
        entered.set()
        await asyncio.Event().wait()
        return city

    async def test() -> None:
        LOOP.set(asyncio.get_running_loop())
        environment = ToolEnvironment(Prompt("p", "?"), [wait], lambda prompt, text: 1.0)
        before = asyncio.all_tasks()
        reply = reply_with(None, *[("wait", '{"city": "Paris"}')] * 2)["choices"][0]["message"]
        call = asyncio.create_task(asyncio.to_thread(environment.step, reply))
        await entered.wait()
        for task in asyncio.all_tasks() - before - {call}:
            task.cancel()
        with pytest.raises(EpisodeEnded):
            await call

    entered = asyncio.Event()
    asyncio.run(test())


GOOGLE = """Noon temperature,
in degrees.

Args:
    city (str): in English,
        without the country
    day (int, optional): days from today
    place (dict[str, int]): where: exactly

Returns:
    float: degrees
"""


def test_docstrings_in_googles_style_describe_the_parameters() -> None:
    def temperature(city: str, place: dict[str, int], day: int = 0) -> float:
        return 0.0

    temperature.__doc__ = GOOGLE
    described = Tool(temperature).definition["function"]
    assert described["description"] == "Noon temperature, in degrees."
    assert {name: one["description"] for name, one in described["parameters"]["properties"].items()} == {
        "city": "in English, without the country",
        "place": "where: exactly",
        "day": "days from today",
    }


def listed(*cities: str) -> str:
    return ""


def named(**cities: str) -> str:
    return ""


def only_by_place(city: str, /) -> str:
    return ""


def typed(engine: aiohttp.ClientSession) -> str:
    return ""


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([listed], r"the tool listed\(\*cities: .* has the parameter \*cities"),
        ([named], r"has the parameter \*\*cities"),
        ([only_by_place], "has the parameter city"),
        ([typed], "the tool typed cannot be described"),
        ([lambda city: ""], "<lambda> cannot be a tool"),
        ([Place], "Place cannot be a tool"),
        ([divide, divide], "two tools are named 'divide'"),
    ],
)
def test_tools_that_a_model_cannot_call_are_refused(tools: list[Any], says: str) -> None:
    with pytest.raises(TaskError, match=says) as refused:
        ToolEnvironment(Prompt("p", "?"), tools, lambda prompt, text: 1.0)
    assert refused.value.hint
    assert refused.value.location.startswith(__file__) or tools == [Place]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"reset": lambda: "begin"}, "reset returned 'begin', which is not a list of messages"),
        ({"reset": list}, "reset returned"),
        ({"step": lambda reply: None}, "step returned None, which is not a Step"),
        ({"step": lambda reply: Step(reward="1")}, "the reward '1', which is not a finite number or None"),  # type: ignore[arg-type]
        ({"tools": [divide]}, "must be OpenAI tool definitions"),
    ],
)
def test_a_wrong_environment_is_refused_with_the_reason(answer: dict[str, Any], says: str) -> None:
    environment = Count(1)
    vars(environment).update(answer)
    with pytest.raises(TypeError, match=re.escape(says)):
        try_environment(environment, Prompt("a", "2+2="))
    assert environment.closed == 1


def test_a_tool_returns_images_and_an_image_that_is_none_is_refused() -> None:
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", (2, 3), "red")

    def screenshot() -> Any:
        return picture

    def both() -> Any:
        return ["the page", picture, {"links": 3}]

    for tool, kinds in ((screenshot, ["image"]), (both, ["text", "image", "text"])):
        content = Tool(tool)("{}")
        assert [part["type"] for part in content] == kinds
        (sent,) = with_data_urls([{"role": "tool", "content": content}])
        urls = [part["image_url"]["url"] for part in sent["content"] if part["type"] == "image_url"]
        data = base64.b64decode(urls[0].partition(";base64,")[2])
        assert len(urls) == 1 and Pillow.open(io.BytesIO(data)).convert("RGB").tobytes() == picture.tobytes()
    assert content[2]["text"] == '{"links": 3}'
    with pytest.raises(TypeError, match="an image is a list: give a Pillow image"):
        with_data_urls([{"role": "user", "content": [{"type": "image", "image": [1]}]}])
