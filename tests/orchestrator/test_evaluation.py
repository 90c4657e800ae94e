"""Evaluations: the requested responses, the counts, and the stored results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import StandInEngine, actors, client_over, collecting, prompts, remote, rollout, run, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.data.prompt_encoder import Encoded
from asyncrl_cli.monitors.base import EvaluationResult, evaluation_metrics
from asyncrl_cli.orchestrator.evaluation import Evaluator, HeldOut, pass_at
from asyncrl_cli.orchestrator.offline import offline
from asyncrl_cli.records.generation import CONTEXT, Rollout, RolloutFailure, RolloutRequest, Sampling
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.workers.scoring import Response

VERSIONS = (3, 3, 4)
"""The versions of a rollout's tokens."""


class Engine(StandInEngine):
    """A client that answers immediately."""

    @remote
    async def submit(self, requests: list[RolloutRequest]) -> None:
        self.submitted += requests
        self.put(*(rollout(request.rollout_id, VERSIONS) for request in requests))


class FailingEngine(StandInEngine):
    @remote
    async def submit(self, requests: list[RolloutRequest]) -> None:
        self.put(*(RolloutFailure(request.rollout_id, "out of memory") for request in requests))


class Scorer:
    """Responses with an index in ``right`` are correct; those with an index in ``failed`` or ``masked`` have no
    reward."""

    def __init__(self, right: set[int], failed: Collection[int] = (), masked: Collection[int] = ()) -> None:
        self.right, self.failed, self.masked = right, failed, masked

    def sees_group(self, prompt: Prompt) -> bool:
        return False

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        places = [int(text.rpartition(":")[2]) for _, text, _ in responses]
        return [
            RewardFailure("no reward", "/my_reward.py:3")
            if place in self.failed
            else Scored(None if place in self.masked else float(place in self.right), {"place": place})
            for place in places
        ]


class Player:
    """Plays episodes of two sequences. In every third episode the policy does not reply."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Sampling]] = []

    async def play(self, rollout_id: str, prompt: Prompt, sampling: Sampling) -> tuple[Rollout | None, Any]:
        self.asked.append((rollout_id, prompt.uid, sampling))
        if prompt.uid == "p2":
            return None, RewardFailure("the agent never called")
        whole = rollout(rollout_id, (CONTEXT, CONTEXT, 1, CONTEXT, 2))
        return replace(whole, branches=(rollout(f"{rollout_id}.1", (CONTEXT, 5)),)), Scored(1.0)


class Journal:
    """Keeps the records."""

    def __init__(self) -> None:
        self.results: list[EvaluationResult] = []
        self.warnings: list[str] = []

    async def evaluated(self, result: dict[str, Any]) -> None:
        self.results.append(EvaluationResult(**result))

    async def failed(self, kind: str, part: str, message: str) -> None:
        self.warnings.append(message)


NOTHING = SimpleNamespace(warn=lambda _: None, evaluated=lambda _: None, unevaluated=lambda _: None)
BEGINNING = SimpleNamespace(evaluated={}, evaluations=())


def evaluator(folder: Path, scorer: Any, sets: dict[str, HeldOut] | None = None, **sections: Any) -> Any:
    directory = RunDirectory.create(folder, "run")
    client = client_over(1, make_actor=FailingEngine if scorer is None else Engine)
    found: Any = Evaluator(
        spec(**sections),
        write=directory.write_text,
        client=client,
        buffer=Journal(),  # type: ignore[arg-type]
        reporter=NOTHING,  # type: ignore[arg-type]
        opening=BEGINNING,  # type: ignore[arg-type]
        held_out=HeldOut([(prompt, Encoded((1, 2))) for prompt in prompts(3)], scorer),
        sets=sets or {},
    )
    return found, client, directory


def evaluated(parts: Any, kind: str, step: int) -> EvaluationResult:
    result = outcome(parts, kind, step)[0]
    assert result is not None
    return result


def outcome(parts: Any, kind: str, step: int) -> tuple[EvaluationResult | None, str]:
    """The recorded result, and the recorded warning."""

    async def test() -> None:
        (series,) = [series for series in parts[0].due(step) if series.kind == kind]
        async with collecting(parts[1]):
            evaluating = asyncio.ensure_future(parts[0]._evaluate(series, step))
            await asyncio.wait([evaluating])
        evaluating.result()
        assert kind not in {series.kind for series in parts[0].due(step)}, "it is done"

    run(test())
    journal = parts[0].buffer
    return (journal.results or [None])[0], "".join(journal.warnings)


def rows(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory.path / "evaluations" / name).read_text().splitlines()]


def test_several_samples_of_each_prompt_are_counted_as_pass_at_k(tmp_path: Path) -> None:
    evaluation = {"samples": 4, "temperature": 0.5, "every": 2}
    parts = evaluator(tmp_path, Scorer(right={0, 5, 6}, failed={1}), evaluation=evaluation)
    result = evaluated(parts, "sampled", 2)
    assert (result.prompts, result.samples, result.oldest, result.newest) == (3, 4, 3, 4)
    assert result.accuracy == result.mean_reward == pytest.approx(3 / 11)
    # 2 of 4 and 0 are correct. The first prompt has a response without a reward, so it has no pass@k.
    assert result.pass_at == pytest.approx((2 / 4 / 2, 5 / 6 / 2, 1 / 2, 1 / 2))
    assert result.metrics == {"place": pytest.approx((66 - 1) / 11)}
    assert result.mean_length == 3.0
    (engine,) = actors(parts[1])
    asked = [request.sampling for request in engine.submitted]
    assert [request.rollout_id for request in engine.submitted] == [f"eval:2:sampled:{place}" for place in range(12)]
    assert {sampling.temperature for sampling in asked} == {0.5}
    assert len({sampling.seed for sampling in asked}) == 12
    head, *samples = rows(parts[2], "step-000002-sampled.jsonl")
    intervals = {name: tuple(interval) for name, interval in head["intervals"].items()}
    assert EvaluationResult(**{**head, "pass_at": tuple(head["pass_at"]), "intervals": intervals}) == result
    assert set(intervals) == {"accuracy", "pass_at_1", "pass_at_2", "pass_at_3", "pass_at_4"}, "too few for a mean"
    assert intervals["pass_at_4"] == pytest.approx(wilson(1 / 2, 2)), "2 prompts have all rewards"
    assert intervals["accuracy"][0] < result.accuracy < intervals["accuracy"][1]
    assert [(row["uid"], row["sample"]) for row in samples] == [(f"p{n}", k) for n in range(3) for k in range(4)]
    assert (samples[1]["reward"], samples[1]["failure"]) == (None, "/my_reward.py:3: no reward")
    assert (samples[5]["reward"], samples[5]["metrics"]) == (1.0, {"place": 5})
    assert (samples[0]["oldest"], samples[0]["newest"]) == (3, 4)
    assert [row["answer"] for row in samples[::4]] == [0, 1, 2], "the prompts have reference answers"


def test_without_a_reward_there_is_no_accuracy_and_some_failures_are_counted(tmp_path: Path) -> None:
    parts = evaluator(tmp_path, Scorer(right=set(), failed={0, 1, 2}))
    result, warning = outcome(parts, "greedy", 0)
    assert result is None
    assert warning == (
        "held-out greedy at step 0: 3 of 3 rewards failed, 0 were None; the accuracy counts the others; "
        "the first failure: /my_reward.py:3: no reward"
    )
    head, *samples = rows(parts[2], "step-000000-greedy.jsonl")
    assert (head["accuracy"], head["mean_reward"], head["prompts"]) == (None, None, 0)
    assert dict(evaluation_metrics(head)) == {"eval/greedy_tokens_mean": 3.0}
    assert [row["failure"] for row in samples] == ["/my_reward.py:3: no reward"] * 3
    for reasons, counts in (
        ({"failed": {2}}, "1 of 3 rewards failed, 0"),
        ({"masked": {2}}, "0 of 3 rewards failed, 1"),
    ):
        result, warning = outcome(evaluator(tmp_path, Scorer(right={0}, **reasons)), "greedy", 0)
        assert result is not None and (result.accuracy, result.mean_reward, result.prompts) == (0.5, 0.5, 2)
        assert f"{counts} were None; the accuracy counts the others" in warning
    assert outcome(evaluator(tmp_path, Scorer(right={0})), "greedy", 0)[1] == ""


class Ranking(Scorer):
    """Scores the responses to a prompt together, by their place."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def sees_group(self, prompt: Prompt) -> bool:
        return True

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        self.asked += [(prompt.uid, *text) for prompt, text, _ in responses]
        return [Scored(float(place)) for _, text, _ in responses for place, _ in enumerate(text)]


def test_the_samples_of_a_prompt_are_scored_together_if_the_reward_sees_the_group(tmp_path: Path) -> None:
    scorer = Ranking()
    parts = evaluator(tmp_path, scorer, evaluation={"every": 1, "samples": 4})
    result = evaluated(parts, "sampled", 0)
    assert [(uid, len(texts)) for uid, *texts in scorer.asked] == [("p0", 4), ("p1", 4), ("p2", 4)]
    assert (result.mean_reward, result.accuracy, result.prompts) == (1.5, 0.75, 3)
    assert [int(text.rpartition(":")[2]) for _, *texts in scorer.asked for text in texts] == list(range(12))
    evaluated(evaluator(tmp_path, scorer), "greedy", 0)
    assert [(uid, len(texts)) for uid, *texts in scorer.asked[3:]] == [("p0", 1), ("p1", 1), ("p2", 1)]


async def test_sampled_sets_over_the_same_prompts_have_their_own_seeds(tmp_path: Path) -> None:
    held_out = HeldOut([(prompt, Encoded((1, 2))) for prompt in prompts(3)], Scorer(right={0}))  # type: ignore[arg-type]
    sampled_set = {"data": {"path": "rows.jsonl"}, "greedy": False, "samples": 2}
    evaluation = {"samples": 2, "sets": dict.fromkeys(("again", "offlineagain"), sampled_set)}
    sets = dict.fromkeys(("again", "offlineagain"), held_out)
    parts = evaluator(tmp_path, Scorer(right={0}), sets=sets, evaluation=evaluation)
    sampled = [series for series in parts[0].due(0) if series.samples > 1]
    async with collecting(parts[1]):
        for series in [*sampled, *offline(sampled, "sampled", "")]:
            await asyncio.ensure_future(parts[0]._evaluate(series, 0))
    seeds: dict[str, list[int | None]] = {}
    for request in actors(parts[1])[0].submitted:
        seeds.setdefault(request.rollout_id.split(":", 2)[2].rpartition(":")[0], []).append(request.sampling.seed)
    assert len({*seeds["sampled"], *seeds["again:sampled"], *seeds["offlineagain:sampled"]}) == 18
    assert seeds["offline:sampled"] == seeds["sampled"], "`asyncrl evaluate` repeats the samples"
    assert seeds["offline-again:sampled"] == seeds["again:sampled"]


def test_greedy_responses_need_no_seed_and_no_more_than_one(tmp_path: Path) -> None:
    parts = evaluator(tmp_path, Scorer(right={0}), evaluation={"every": 1, "prompts": 2, "samples": 8})
    assert evaluated(parts, "greedy", 1).prompts == 2
    assert [(r.sampling.temperature, r.sampling.seed) for r in actors(parts[1])[0].submitted] == [(0.0, None)] * 2
    whole = evaluated(evaluator(tmp_path, Scorer(right={0})), "greedy", 10)
    assert (whole.prompts, whole.pass_at) == (3, ()), "after training on all"


def test_evaluations_are_due_at_their_steps(tmp_path: Path) -> None:
    def due(**evaluation: Any) -> dict[int, set[str]]:
        names = evaluation.get("sets", {})
        sets = {name: HeldOut([], Scorer(set())) for name in names}  # type: ignore[arg-type]
        found = evaluator(tmp_path, Scorer(set()), sets, evaluation=evaluation)[0]
        return {step: kinds for step in range(11) if (kinds := {series.kind for series in found.due(step)})}

    both = {"greedy", "sampled"}
    assert due() == {0: both, 10: both}
    assert due(every=4) == {0: both, 4: {"greedy"}, 8: {"greedy"}, 10: both}
    assert due(every=4, samples=2) == {0: both, 4: both, 8: both, 10: both}
    data = {"size": 1}
    sets = {"a": {"data": data}, "b": {"data": data, "every": 5, "greedy": False}, "c": {"data": data, "every": 0}}
    ends = {*both, "a:greedy", "b:sampled", "c:greedy"}
    assert due(every=4, sets=sets) == {
        0: ends,
        4: {"greedy", "a:greedy"},
        5: {"b:sampled"},
        8: {"greedy", "a:greedy"},
        10: ends,
    }


def test_a_set_of_episodes_is_played(tmp_path: Path) -> None:
    player = Player()
    data = HeldOut([(prompt, Encoded(())) for prompt in prompts(3)], Scorer(set()), player)  # type: ignore[arg-type]
    sets = {"tools": {"data": {"size": 3}}}
    parts = evaluator(tmp_path, Scorer(set()), {"tools": data}, evaluation={"sets": sets})
    result = evaluated(parts, "tools:greedy", 0)
    assert [(name, uid) for name, uid, _ in player.asked] == [(f"eval:0:tools:greedy:{n}", f"p{n}") for n in range(3)]
    assert (result.accuracy, result.prompts) == (1.0, 2)
    assert (result.oldest, result.newest) == (1, 5), "of the sampled tokens in all sequences"
    assert result.mean_length == pytest.approx(2 * 3 / 3), "given tokens do not count"
    *_, silent = rows(parts[2], "step-000000-tools-greedy.jsonl")
    assert (silent["response"], silent["failure"]) == ("", "the agent never called")


def test_a_rollout_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="an evaluation rollout failed: out of memory"):
        evaluated(evaluator(tmp_path, None), "greedy", 0)


# -- pass@k equals its definition: a share of all ways to choose k of n responses


@given(st.data(), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(data: st.DataObject, samples: int) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(combinations([index < correct for index in range(samples)], k))
    assert pass_at(k, samples, correct) == pytest.approx(sum(map(any, choices)) / len(choices))
