"""The agent of this task: it asks the model, and allows a second try with a hint.

It is an ordinary program that calls an OpenAI-compatible server. Any library with a base URL and a key works, too.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from asyncrl_cli.tasks.base import ModelAccess, RewardResult


async def agent(prompt: dict[str, Any], model: ModelAccess) -> RewardResult:
    """Play one episode and return its reward: 1.0 for the right answer, and a little for answering in digits.

    ``prompt`` is the row of the JSON Lines file: ``prompt``, ``uid`` and every other key, here ``answer``. Every call
    to ``model.base_url`` belongs to this episode, in any order and from any process.
    """
    messages: list[Any] = [{"role": "user", "content": prompt["prompt"]}]
    reward = 0.0
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        for tries in (1, 2):
            completion = await client.chat.completions.create(model=model.model, messages=messages)
            reply = completion.choices[0].message.content or ""
            if reply.strip() == prompt["answer"]:
                return RewardResult(1.0, {"tries": float(tries)})
            reward = max(reward, 0.2 * sum(map(str.isdigit, reply)) / max(1, len(reply)))
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "no, digits only:"}]
    return RewardResult(reward, {"tries": 2.0})
