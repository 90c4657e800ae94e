"""Images in requests of all APIs: one sequence of tokens with their places, which later turns continue."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import aiohttp
import pytest

from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.data.tokenizer import load_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.sessions import session_url
from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import ModelAccess, Step
from asyncrl_cli.tasks.play import play
from tests.data.pictures import picture
from tests.gateway.conversation_stand_ins import rollout_of
from tests.gateway.gateway_stand_ins import MODEL, Engine, key_of, served, until
from tests.small_models import IMAGE_FOLDERS

pytestmark = [pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is missing"), pytest.mark.slow]

RED, BLUE = picture("red", 112), picture("blue", 84, 112)
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{{ 'a:' if add_generation_prompt else '' }}"
)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def source(data: bytes) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}


CALLS: dict[str, tuple[str, Callable[[bytes], dict[str, Any]], str]] = {
    "chat": ("/chat/completions", lambda data: {"type": "image_url", "image_url": {"url": url(data)}}, "text"),
    "responses": ("/responses", lambda data: {"type": "input_image", "image_url": url(data)}, "input_text"),
    "messages": ("/messages", lambda data: {"type": "image", "source": source(data)}, "text"),
}
"""Each API's path, its form of an image, and its type of a text."""


def message(api: str, data: bytes, text: str) -> dict[str, Any]:
    _, image, text_type = CALLS[api]
    return {"role": "user", "content": [image(data), {"type": text_type, "text": text}]}


def chat_format(**options: Any) -> ChatFormat:
    folder = IMAGE_FOLDERS / "qwen2_5_vl"
    tokenizer = load_tokenizer(folder, None)
    tokenizer.chat_template = TEMPLATE
    return ChatFormat(tokenizer, images=ImageTokens(str(folder), max_images=2, max_pixels=2**20), **options)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return chat_format()


def body(api: str, messages: list[Any]) -> dict[str, Any]:
    return {"input": messages} if api == "responses" else {"messages": messages, "max_tokens": 20}


@pytest.mark.parametrize("api", CALLS)
async def test_image_of_a_request_reaches_engine_and_rollout(chat: ChatFormat, api: str) -> None:
    path = CALLS[api][0]
    engine = Engine(lambda *_: "two", chat=chat)
    async with served(engine) as there:
        session = there.session()
        first = [message(api, RED, "how many?")]
        answer = await there.post(f"/v1{path}", body(api, first), session="7-0")
        assert answer.status_code == 200, answer.text
        reply = {"role": "assistant", "content": "two"}
        second = [*first, reply, message(api, BLUE, "and now?")]
        answer = await there.post(f"/v1{path}", body(api, second), session="7-0")
        assert answer.status_code == 200, answer.text
        one, two = engine.asked
        assert [placed.image for placed in one.images] == [Image.from_bytes(RED)]
        assert [placed.image for placed in two.images] == [Image.from_bytes(RED), Image.from_bytes(BLUE)]
        assert two.images[0] == one.images[0] and two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
        pad = chat._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        for placed in two.images:
            assert set(two.prompt_ids[placed.offset : placed.end]) == {pad}
        assert two.prompt_ids.count(pad) == sum(placed.length for placed in two.images)
        rollout = rollout_of(session)
        assert rollout.images == two.images and not rollout.branches
        assert tuple(rollout.ids[: len(two.prompt_ids)].tolist()) == two.prompt_ids


@pytest.mark.parametrize("renders_history", [False, True])
async def test_same_text_with_another_image_is_another_branch(renders_history: bool) -> None:
    chat = chat_format(renders_history=renders_history)
    async with served(Engine(lambda *_: "two", chat=chat)) as there:
        session = there.session()
        reply, later = {"role": "assistant", "content": "two"}, {"role": "user", "content": "sure?"}
        blue = picture("blue", 112)  # as many tokens as RED
        for messages in (
            [message("chat", RED, "?")],
            [message("chat", blue, "?"), reply, later],
            [message("chat", RED, "?"), reply, later],
        ):
            answer = await there.post("/v1/chat/completions", body("chat", messages), session="7-0")
            assert answer.status_code == 200, answer.text
        rollout = rollout_of(session)
        shown = [[placed.image for placed in one.images] for one in rollout.sequences]
        assert shown == [[Image.from_bytes(RED)], [Image.from_bytes(blue)]]


async def test_token_ids_that_continue_a_chat_keep_its_images(chat: ChatFormat) -> None:
    engine = Engine(lambda *_: "two", chat=chat)
    async with served(engine) as there:
        session = there.session()
        await there.post("/v1/chat/completions", body("chat", [message("chat", RED, "?")]), session="7-0")
        chat_rollout = rollout_of(session)
        ids = [*chat_rollout.ids.tolist(), *chat.encode("more")]
        engine.held = asyncio.Event()
        cancelled = asyncio.create_task(there.post("/v1/completions", {"prompt": ids}, session="7-0"))
        await until(lambda: engine.running == 1)
        cancelled.cancel()
        await until(lambda: engine.cancelled == 1)
        assert rollout_of(session).images == chat_rollout.images
        engine.held = None
        answer = await there.post("/v1/completions", {"prompt": ids}, session="7-0")
        assert answer.status_code == 200, answer.text
        assert engine.asked[-1].images == engine.asked[0].images
        rollout = rollout_of(session)
        assert rollout.images == chat_rollout.images and not rollout.branches


async def test_reply_of_a_cancelled_call_is_not_continued_under_another_image(chat: ChatFormat) -> None:
    engine = Engine(lambda *_: "one two three", chat=chat, held=asyncio.Event())
    async with served(engine) as there:
        session = there.session()
        call = body("chat", [message("chat", RED, "?")]) | {"stream": True}
        async with there.http.stream(
            "POST",
            "/sessions/7-0/v1/chat/completions",
            json=call,
            headers={"Authorization": f"Bearer {key_of('7-0')}"},
        ) as answer:
            assert await anext(answer.aiter_text())  # some tokens
        await until(lambda: engine.cancelled == 1)
        engine.held = None
        blue = Image.from_bytes(picture("blue", 112))  # as many tokens as RED
        answer = await there.post(
            "/v1/chat/completions", body("chat", [message("chat", blue.data, "?")]), session="7-0"
        )
        assert answer.status_code == 200, answer.text
        first, second = engine.asked
        assert second.prompt_ids == first.prompt_ids and not second.prefix
        rollout = rollout_of(session)
        assert [placed.image for placed in rollout.images] == [blue] and not rollout.branches


async def test_images_of_a_prompt_and_of_an_environment_reach_the_engine(chat: ChatFormat) -> None:
    """The prompt's are named by digest, as the journal has them; the environment's are bytes."""
    prompt = Prompt(
        "row", ({"role": "user", "content": [part(Image.from_bytes(RED).digest)]},), images=(Image.from_bytes(RED),)
    )

    class Camera:
        turns = 0

        def reset(self) -> Any:
            return prompt.content

        def step(self, reply: Any) -> Step:
            self.turns += 1
            text = {"type": "text", "text": "and now?"}
            return Step([{"role": "user", "content": [part(BLUE), text]}], reward=0.5, done=self.turns == 2)

    engine = Engine(lambda *_: "two", chat=chat)
    async with served(engine) as there, aiohttp.ClientSession() as http:
        there.session(max_calls=9)
        access = ModelAccess(session_url(there.gateway.url, "7-0"), key_of("7-0"), MODEL)
        result, _ = await play(Camera(), access, http, images=prompt.images)
        assert result.reward == 1.0
        seen = [[placed.image for placed in asked.images] for asked in engine.asked]
        assert seen == [[Image.from_bytes(RED)], [Image.from_bytes(RED), Image.from_bytes(BLUE)]]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], "nothing is downloaded"),
        ([{"type": "image_url", "image_url": {"url": url(RED[:60])}}], "image 1 is broken"),
        ([{"type": "image_url", "image_url": {"url": url(picture("red", 1100, 1100)[:60])}}], "more than 1,048,576"),
        ([{"type": "image_url", "image_url": {"url": url(RED[:60])}}] * 3, "3 images, more than model.max_images (2)"),
    ],
)
async def test_image_that_cannot_be_used_is_refused_with_a_reason(chat: ChatFormat, content: Any, why: str) -> None:
    async with served(Engine(chat=chat)) as there:
        there.session()
        asked = {"messages": [{"role": "user", "content": content}]}
        answer = await there.post("/v1/chat/completions", asked, session="7-0")
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text


async def test_image_for_a_model_of_text_is_refused_by_the_key_that_allows_it() -> None:
    async with served() as there:
        content = [{"type": "image_url", "image_url": {"url": url(RED[:60])}}]  # broken, and never decoded
        answer = await there.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400 and "model.max_images is 0" in answer.json()["error"]["message"]
