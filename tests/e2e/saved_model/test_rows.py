"""Rows as people have them, on the real stack: shards of several kinds, answers that are begun, and variables of the
chat template, in rows and in an agent's requests. One run, which is resumed after another shard has appeared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asyncrl_cli.data.sources import read_source
from asyncrl_cli.spec.load import load_spec

from ..conftest import Runs, rows
from ..journal import batched_groups

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

QUIET = {"enable_thinking": False}
BEGUN = {"role": "assistant", "content": "The answer is"}
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"{number} + 1?"}, *([BEGUN] if number % 2 else [])], "answer": number + 1}
    | ({"chat_template_kwargs": QUIET} if number % 3 == 0 else {})
    for number in range(24)
]
REWARD = """
def reward(prompt, response):
    assert "The answer is" not in response, "a reward reads what the model wrote"
    return len(response) / 1000
"""
AGENT = """
import aiohttp

ASKED = [{"role": "user", "content": "2 + 2?"}]
BEGUN = {"role": "assistant", "content": "The answer is"}


async def agent(prompt, model):
    async def ask(messages, **more):
        body = {"model": model.model, "messages": messages, "return_token_ids": True, **more}
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with http.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return answer["prompt_token_ids"], answer["choices"][0]["token_ids"], answer["choices"][0]["message"]["content"]

    more = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4}
    async with aiohttp.ClientSession() as http:
        plain, *_ = await ask(ASKED)
        quiet, *_ = await ask(ASKED, chat_template_kwargs={"enable_thinking": False})
        first, ids, text = await ask([*ASKED, BEGUN], **more)
        whole = {"role": "assistant", "content": BEGUN["content"] + text}
        second, *_ = await ask([*ASKED, whole], **more)
    assert plain == prompt["plain"], plain
    assert quiet == prompt["quiet"], quiet
    assert first == prompt["begun"], first
    assert second in (first + ids, first + ids[:-1]), (second, first, ids)  # without an end token
    return 1.0
"""


def test_shards_begun_answers_and_variables_reach_the_model_and_survive_a_resume(shared_runs: Runs) -> None:
    folder = shared_runs.folder / "rows"
    assert shared_runs.run("init", "saved-model", folder).code == 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def expected(messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        ends = (
            {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {"add_generation_prompt": True}
        )
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, **ends, **({"enable_thinking": True} | variables)
        )
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    (folder / "part-1.json").write_text(json.dumps(ROWS[:12]))
    with gzip.open(folder / "part-2.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in ROWS[12:])
    (folder / "rows_reward.py").write_text(REWARD)
    (folder / "rows_agent.py").write_text(AGENT)
    (folder / "spec.yaml").rename(folder / "base.yaml")
    spec = folder / "rows.yaml"
    spec.write_text(
        f"extends: base.yaml\nname: rows\nruns_dir: {shared_runs.folder}\n"
        "task: {use: 'rows_reward:reward'}\ntracking: {mlflow: false}\nstop: {steps: 2}\n"
        "data: {train: {path: part-*, template: null}, eval: null}\n"
        "evaluation: {every: 0, sets: {agent: {data: {path: asked.jsonl}, task: {use: 'rows_agent:agent'}}}}\n"
    )
    asked = [{"role": "user", "content": "2 + 2?"}]
    fields = {"plain": expected(asked, {}), "quiet": expected(asked, QUIET), "begun": expected([*asked, BEGUN], {})}
    (folder / "asked.jsonl").write_text(json.dumps({"prompt": "2 + 2?", **fields}))

    run = shared_runs.train_spec(spec)
    (folder / "part-3.jsonl").write_text('{"prompt": "not in this run"}')
    shared_runs.succeed("resume", run, "--steps", "3")
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2, 3]

    recorded = load_spec(run / "spec.yaml").spec.data.train
    assert recorded.path == [str(folder / "part-1.json"), str(folder / "part-2.jsonl.gz")]
    by_uid = {prompt.uid: prompt for prompt in read_source(recorded, "train", Path())}
    assert len(by_uid) == len(ROWS)
    groups = batched_groups(run)
    assert len(groups) == 3 * 8
    begun = 0
    for group in groups:
        prompt = by_uid[group.prompt.uid]
        messages = [dict(message) for message in prompt.content]
        assert list(group.prompt_ids) == expected(messages, prompt.fields.get("chat_template_kwargs", {}))
        begun += messages[-1]["role"] == "assistant"
    assert 0 < begun < len(groups)
    for step in (0, 2, 3):
        head, *samples = rows(run, f"evaluations/step-{step:06}-agent-greedy.jsonl")
        assert [sample["reward"] for sample in samples] == [1.0], (head, samples)
