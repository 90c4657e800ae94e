"""Choices have separate seeds, and sessions have separate settings."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_stand_ins import MODEL, in_time, served

from tests.gateway.conversation_stand_ins import ask_text

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]


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
                await ask_text(own, "y", None)  # type: ignore[arg-type]

    in_time(test)
