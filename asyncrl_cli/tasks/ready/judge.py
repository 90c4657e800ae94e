"""The ready task ``judge``: a language model behind an OpenAI-compatible URL scores the responses.

The judge's answer must end with a number. If it does not, the judge is shown its answer and asked again. After a few
attempts the rollout fails with this reason; it does not count as bad.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import RewardResult
from asyncrl_cli.tasks.function_task import row_of
from asyncrl_cli.tasks.ready.matching import MissingField

TEMPLATE = """\
Rate the response to the prompt below, from {low} (worthless) to {high} (perfect).

# Prompt
{prompt}

# Response
{response}

Think briefly. Then end with a line that says `Score: ` and the number."""
SCORE = re.compile(
    r"(?:^|\b(?:score|rating)[\s*_`]*[:=])[\s*_`]*(?P<score>[-+]?\d+(?:\.\d+)?)"
    r"(?:\s*(?:/|out of)\s*(?P<highest>\d+(?:\.\d+)?))?[\s.*_`]*$",
    re.IGNORECASE,
)
"""The number must be alone on the line or follow the label, because "7,5", ".5" and "10 - 3" are ambiguous."""
AGAIN = "Your answer does not end with a score as asked. Answer with that last line alone."
LONGEST_LINE = 1_000
"""The score is searched for in so many characters at the end, because a pattern may take quadratic time."""
SHOWN_CHARACTERS = 100
"""Errors show so many characters from the end of an answer."""


class NoScore(Exception):
    """The judge gave no score; the message has its answer."""


class Judge:
    """The task ``judge``."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        template: str = TEMPLATE,
        scale: Sequence[float] = (0.0, 10.0),
        timeout_s: float = 25.0,
        retries: int = 2,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        """docs/tasks.md describes the options. Raises ``TaskError`` and ``ValueError`` for invalid ones."""
        address = urlsplit(base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise TaskError(
                "base_url is not an http or https address",
                location="task.options.base_url",
                hint="name the judge's server, such as http://judge:8000/v1",
            )
        low, high = scale
        if not low < high:
            raise ValueError(f"scale must be the lowest and the highest score, not {list(scale)}")
        if not timeout_s > 0 or retries < 0:
            raise ValueError("timeout_s must be more than 0, and retries 0 or more")
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        if "response" not in names:
            raise ValueError("template must have {response} in it")
        key = "none" if api_key_env is None else os.environ.get(api_key_env)
        if not key:
            raise TaskError(
                f"the environment variable {api_key_env} is not set",
                location="task.options.api_key_env",
                hint="export it where asyncrl is started",
            )
        self._template = template
        self._low, self._high = float(low), float(high)
        self._access: dict[str, Any] = {
            "base_url": base_url,
            "api_key": key,
            "timeout": timeout_s,
            "max_retries": retries,
        }
        self._request = {"model": model, **({"temperature": 0} if request is None else request)}
        self._retries = retries
        self._client: Any = None

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row that lacks a field of the template."""
        try:
            self._messages(row_of(prompt), "")
        except (KeyError, IndexError) as error:
            raise MissingField(f"the row has no field {error} of the template") from None

    async def reward(self, prompt: Prompt, response: str, finished: bool) -> RewardResult:
        """The judge's score, scaled to 0.0 to 1.0. The metric ``judge_score`` is the unscaled score.

        Raises ``NoScore``, ``KeyError`` for a field that the row lacks, and exceptions of the ``openai`` package.
        """
        if self._client is None:
            from openai import AsyncOpenAI

            self._client = AsyncOpenAI(**self._access)
        messages = self._messages(row_of(prompt), response)
        for attempts_left in reversed(range(self._retries + 1)):
            answer = await self._client.chat.completions.create(messages=messages, **self._request)
            choice = answer.choices[0]
            text = choice.message.content or ""
            try:
                if choice.finish_reason == "length":  # "Score: 10" may be the start of "Score: 10 - 3"
                    raise NoScore(f"the judge's answer is truncated at its length limit: {_answer_end(text)}")
                score = self._score(text)
                break
            except NoScore:
                if not attempts_left:
                    raise
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": AGAIN}]
        return RewardResult((score - self._low) / (self._high - self._low), {"judge_score": score})

    def _messages(self, row: Mapping[str, Any], response: str) -> list[dict[str, str]]:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in row.items()
        }
        if not isinstance(row["prompt"], str):
            texts["prompt"] = "\n\n".join(
                f"{message['role']}: {_text(message['content'])}" for message in row["prompt"]
            )
        scale = {"low": f"{self._low:g}", "high": f"{self._high:g}"}
        return [{"role": "user", "content": self._template.format_map(texts | scale | {"response": response})}]

    def _score(self, answer: str) -> float:
        """The score in the last line that is not empty. "7 out of 10" must name the highest score."""
        line = next((line for line in reversed(answer.splitlines()) if line.strip()), "")
        match = SCORE.search(line, max(0, len(line) - LONGEST_LINE))
        if match is None:
            raise NoScore(f"the judge's answer does not end with a score: {_answer_end(answer)}")
        score, highest = float(match["score"]), float(match["highest"] or self._high)
        if highest != self._high or not self._low <= score <= self._high:
            score_text = match["score"] if highest == self._high else f"{match['score']} out of {highest:g}"
            limits = f"{self._low:g} to {self._high:g}"
            raise NoScore(f"the judge's score {score_text} is not from {limits}: {_answer_end(answer)}")
        return score


def _answer_end(answer: str) -> str:
    return repr(answer if len(answer) <= SHOWN_CHARACTERS else "…" + answer[-SHOWN_CHARACTERS:])


def _text(content: Any) -> Any:
    """A message's text; images are replaced by ``[image]``."""
    if not isinstance(content, list):
        return content
    return " ".join(item["text"] if item["type"] == "text" else "[image]" for item in content)
