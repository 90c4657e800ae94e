"""A judge's score becomes the reward; any other answer is a failure with its reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.tasks.ready.judge import Judge
from asyncrl_cli.tasks.ready.matching import MissingField
from asyncrl_cli.workers.scoring import score_async
from tests.sandbox.kinds import SilentHandler, serving

pytestmark = pytest.mark.slow

PROMPT = Prompt("row/1", "What is 2+2?", {"answer": "4"})


class Handler(SilentHandler):
    """Answers with the statuses and texts of ``replies``, one after another; the last one is repeated."""

    replies: ClassVar[list[tuple[int, str]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []
    finish_reason: ClassVar[str] = "stop"

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        message = {"index": 0, "finish_reason": self.finish_reason, "message": {"role": "assistant", "content": text}}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "judge", "choices": [message]}
        data = json.dumps(answer if status == 200 else {"error": {"message": text}}).encode()
        self.answer(data, status)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Handler) as address:
        yield f"{address}/v1"


def judged(judge: Judge, *replies: str | tuple[int, str], prompt: Prompt = PROMPT) -> Scored | RewardFailure:
    Handler.replies = [reply if isinstance(reply, tuple) else (200, reply) for reply in replies]
    Handler.asked = []
    return asyncio.run(score_async(judge, (prompt, "It is 4.", True)))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 7.0),
        ("Fine.\nScore: 7.5", 7.5),
        ("It scores 3 on style and 4 on tone.\n\n**Score: 8**\n", 8.0),
        ("Score: 8/10", 8.0),
        ("rating = 10.", 10.0),
        ("Score: 7 out of 10", 7.0),
        ("So, Score: 7/10.0", 7.0),
    ],
)
def test_a_number_at_the_end_is_the_score(url: str, reply: str, score: float) -> None:
    assert judged(Judge(url, "judge"), reply) == Scored(score / 10, {"judge_score": score})


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("I like it.", "does not end with a score: 'I like it.'"),
        ("", "does not end with a score"),
        ("Score: 8\nas it is right", "does not end with a score"),
        ("Score: 11", "score 11 is not from 0 to 10"),
        ("Score: -1", "score -1 is not from 0 to 10"),
        ("Score: nan", "does not end with a score"),
        ("Score: 4/5", "score 4 out of 5 is not from 0 to 10"),
        ("7 out of 100", "score 7 out of 100 is not from 0 to 10"),
        *(
            (text, "does not end with a score")
            for text in (
                *("Score: 7,5", "Score: .5", "Score: 7e0", "Score: 10 - 3", "Score: 0 10", "Score: 8/9/10", "1.2.3"),
                *("It fails, since 2 + 2 = 4", "It should have stopped at step 3", "Version 1.10", "a subscore: 3"),
            )
        ),
    ],
)
def test_any_other_answer_is_not_a_score(url: str, reply: str, says: str) -> None:
    failure = judged(Judge(url, "judge"), reply)
    assert isinstance(failure, RewardFailure)
    assert "Judge.reward failed on prompt 'row/1': NoScore: the judge's" in failure.reason and says in failure.reason


def test_a_long_line_is_searched_at_its_end(url: str) -> None:
    assert judged(Judge(url, "judge"), "*" * 1_000_000 + "Score: 7") == Scored(0.7, {"judge_score": 7.0})


def test_an_answer_that_is_truncated_has_no_score(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "finish_reason", "length")
    failure = judged(Judge(url, "judge", retries=1), "Score: 10")
    assert isinstance(failure, RewardFailure) and "truncated at its length limit: 'Score: 10'" in failure.reason
    assert len(Handler.asked) == 2


def test_judge_gets_the_filled_template(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = Judge(
        url,
        "judge",
        api_key_env="JUDGE_KEY",
        scale=(1, 5),
        template="{prompt} | {response} | {answer} | {low}-{high} {{}}",
        request={"max_tokens": 5},
    )
    assert judged(judge, "2") == Scored(0.25, {"judge_score": 2.0})
    (asked,) = Handler.asked
    assert asked == {
        "path": "/v1/chat/completions",
        "key": "Bearer secret",
        "model": "judge",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "What is 2+2? | It is 4. | 4 | 1-5 {}"}],
    }
    chat = Prompt("row/2", ({"role": "user", "content": "Hi {x}"},), {"answer": "4"})
    judged(judge, "2", prompt=chat)
    assert Handler.asked[0]["messages"][0]["content"].startswith("user: Hi {x} | It is 4.")


def test_a_failing_server_is_retried_up_to_the_limit(url: str) -> None:
    assert judged(Judge(url, "judge", retries=2), (500, "busy"), (503, "busy"), "7") == Scored(
        0.7, {"judge_score": 7.0}
    )
    failure = judged(Judge(url, "judge", retries=0), (500, "busy"))
    assert isinstance(failure, RewardFailure) and "InternalServerError" in failure.reason
    failure = judged(Judge("http://127.0.0.1:9/v1", "judge", retries=0), "7")
    assert isinstance(failure, RewardFailure) and "APIConnectionError" in failure.reason


@pytest.mark.parametrize("options", [{"scale": (1, 1)}, {"template": "x"}, {"timeout_s": 0}])
def test_invalid_options_of_the_judge(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Judge("http://judge/v1", "judge", **options)


def test_a_missing_api_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(TaskError, match="variable JUDGE_KEY is not set"):
        Judge("http://judge/v1", "judge", api_key_env="JUDGE_KEY")


def test_a_judge_without_a_score_is_asked_again_and_shown_its_answer(url: str) -> None:
    assert judged(Judge(url, "judge"), "I like it.", "Well.", "Score: 8") == Scored(0.8, {"judge_score": 8.0})
    assert [len(request["messages"]) for request in Handler.asked] == [1, 3, 5]
    assert Handler.asked[2]["messages"][3] == {"role": "assistant", "content": "Well."}
    assert isinstance(judged(Judge(url, "judge", retries=1), "I like it."), RewardFailure)
    assert len(Handler.asked) == 2


def test_a_row_without_a_field_of_the_template_is_found_before_it_is_judged(url: str) -> None:
    judge = Judge(url, "judge", template="{response} and {answer}")
    judge.check_prompt(PROMPT)
    with pytest.raises(MissingField, match="no field 'answer' of the template"):
        judge.check_prompt(Prompt("row/2", "?"))
