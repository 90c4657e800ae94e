"""Scoring continues whatever happens to the scorer: with stand-ins, and with a real actor that scores groups."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError
from stand_ins import Notes

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.orchestrator import scoring
from asyncrl_cli.orchestrator.scoring import AT_ONCE, Scoring
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.workers.actors import RewardActor
from asyncrl_cli.workers.scoring import Response

SPEC = TaskSpec(use="user_rewards:reward")


def responses(*texts: str) -> list[Response]:
    return [(Prompt(f"uid of {text}", "?"), text, True) for text in texts]


class StandIn:
    """An actor with a ``score`` that returns ``answer(texts)``, later like a Ray call."""

    def __init__(self, answer: Callable[[list[str]], Awaitable[list[Any]]], start: BaseException | None = None) -> None:
        self._answer = answer
        self._start = start
        self.start = self.score = self
        self.ping: Any = self
        self.calls: list[list[str]] = []

    def remote(self, asked: list[Response] | None = None) -> Awaitable[Any]:
        if asked is None:
            return self._started()
        self.calls.append([text for _, text, _ in asked])
        return self._answered(self.calls[-1])

    async def _answered(self, texts: list[str]) -> list[Any]:
        await asyncio.sleep(0)  # lets the other callers call it
        return await self._answer(texts)

    async def _started(self) -> None:
        await asyncio.sleep(0)
        if self._start is not None:
            raise self._start


def plain(scores: list[Scored | RewardFailure]) -> list[float | RewardFailure]:
    return [score.reward if isinstance(score, Scored) else score for score in scores]


async def lengths(texts: list[str]) -> list[Any]:
    return [Scored(float(len(text))) for text in texts]


def scoring_with(*actors: StandIn, spec: TaskSpec = SPEC) -> tuple[Scoring, Notes]:
    notes = Notes()
    return Scoring(spec, iter(actors).__next__, budget=notes.budget(), task_object=None), notes


async def test_a_group_is_one_response_with_a_score_for_each_of_its_texts() -> None:
    async def answers(texts: list[Any]) -> list[Any]:
        return [
            Scored(float(len(text)))
            if isinstance(text, str)
            else RewardFailure("no")
            if "fails" in text
            else tuple(Scored(float(len(part))) for part in text)
            for text in texts
        ]

    scorer, _ = scoring_with(StandIn(answers))
    group: Response = (Prompt("a", "?"), ("x", "four"), (True, False))
    failing: Response = (Prompt("b", "?"), ("fails", "with", "it"), (True, True, True))
    scores = await scorer.score([*responses("one"), group, failing, *responses("three")])
    assert plain(scores) == [3.0, 1.0, 4.0, *[RewardFailure("no")] * 3, 5.0]


async def test_concurrent_callers_take_turns_and_get_their_own_scores_in_order(killed: list[Any]) -> None:
    actor = StandIn(lengths)
    scorer, _ = scoring_with(actor)
    texts = ["x" * count for count in range(2 * AT_ONCE + 1)]
    many, few = await asyncio.gather(scorer.score(responses(*texts)), scorer.score(responses("one", "three")))
    assert (plain(many), plain(few)) == ([float(len(text)) for text in texts], [3.0, 5.0])
    assert [len(call) for call in actor.calls] == [AT_ONCE, 2, AT_ONCE, 1]
    assert killed == []


async def test_each_answer_is_progress_and_waiting_responses_are_counted() -> None:
    """Otherwise a run whose rewards take longer than pipeline.stall_minutes would end."""
    waiting: list[int] = []
    scorer, _ = scoring_with(StandIn(lengths))
    scorer.on_progress = lambda: waiting.append(scorer.unscored)
    await scorer.score(responses(*["x"] * (AT_ONCE + 1)))
    assert waiting == [AT_ONCE + 1] * 2 and scorer.unscored == 0


async def test_the_actor_gets_as_many_calls_as_it_has_places() -> None:
    """Three workers with two rewards each. The six rewards return when all are requested."""
    all_requested = asyncio.Event()

    async def when_all_are_requested(texts: list[str]) -> list[Any]:
        if sum(map(len, actor.calls)) == 6:
            all_requested.set()
        await all_requested.wait()
        return await lengths(texts)

    actor = StandIn(when_all_are_requested)
    scorer, _ = scoring_with(actor, spec=TaskSpec(use="a:b", reward_workers=3, reward_concurrency=2))
    many, few = await asyncio.gather(
        scorer.score(responses("a", "bb", "ccc", "dddd")), scorer.score(responses("a", "bb"))
    )
    assert (plain(many), plain(few)) == ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0])


async def test_many_small_calls_share_the_room_of_the_actor() -> None:
    """One worker process, and callers with one response each, like engines' deliveries."""
    full = asyncio.Event()

    async def when_the_room_is_full(texts: list[str]) -> list[Any]:
        if len(actor.calls) == AT_ONCE:
            full.set()
        await full.wait()
        return await lengths(texts)

    actor = StandIn(when_the_room_is_full)
    scorer, _ = scoring_with(actor)
    calls = [asyncio.ensure_future(scorer.score(responses("x" * count))) for count in range(AT_ONCE + 3)]
    await full.wait()
    assert len(actor.calls) == AT_ONCE
    assert list(map(plain, await asyncio.gather(*calls))) == [[float(count)] for count in range(AT_ONCE + 3)]


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("full")])
async def test_the_response_that_kills_twice_has_no_reward(killed: list[Any], error: Exception) -> None:
    async def dies_of_bad(texts: list[str]) -> list[Any]:
        if "bad" in texts:
            raise error
        return await lengths(texts)

    actors = [StandIn(dies_of_bad) for _ in range(3)]
    scorer, notes = scoring_with(*actors)
    scores = plain(await scorer.score(responses("a", "bad", "ccc")))
    assert scores == [1.0, RewardFailure("scorer: the process died, twice with prompt 'uid of bad'"), 3.0]
    assert killed == actors[:2]
    assert len(notes) == 2


async def test_a_silent_actor_is_replaced(killed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> list[Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(scoring, "ACTOR_S", 0.01)
    silent = StandIn(never)
    silent.ping = SimpleNamespace(remote=never)
    scorer, notes = scoring_with(silent, StandIn(lengths), spec=TaskSpec(use="a:b", reward_timeout_s=0.01))
    assert plain(await scorer.score(responses("a"))) == [1.0]
    assert killed == [silent]
    assert notes == [("scorer", "scorer", "no answer within 0 s")]


async def test_a_task_that_cannot_be_loaded_ends_the_call(killed: list[Any]) -> None:
    from ray.exceptions import RayTaskError

    refused = StandIn(lengths, RayTaskError("start", "", TaskError("no such module")).as_instanceof_cause())
    scorer, notes = scoring_with(refused)
    with pytest.raises(TaskError, match="no such module"):
        await scorer.start()
    assert (killed, notes) == ([refused], [])


# -- with Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # paths of its sockets must be short
    # Killed actors leave their files, which must be below the folder, too.
    environment = {"env_vars": {"TMPDIR": folder}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder, runtime_env=environment)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def actors(task: TaskSpec, folder: Path) -> Callable[[], Any]:
    import ray

    return lambda: ray.remote(RewardActor).options(num_cpus=0).remote("scorer", task, str(folder), str(folder))


@pytest.mark.stack
async def test_a_group_that_kills_its_process_costs_other_groups_no_reward(cluster: None, tmp_path: Path) -> None:
    source = """
        import os
        def rewards(prompt, responses):
            if "die" in responses:
                os._exit(3)
            return [len(response) if response else None for response in responses]
    """
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(source))
    task = TaskSpec(use="user_rewards:rewards")
    loaded = load_task(task, tmp_path)
    scorer = Scoring(task, actors(task, tmp_path), budget=Notes().budget(), task_object=loaded)
    assert scorer.sees_group(Prompt("a", "?"))
    groups: list[Response] = [
        (Prompt(name, "?"), texts, (True,) * len(texts)) for name, texts in (("a", ("x", "")), ("b", ("die", "y")))
    ]
    await scorer.start()
    first, second, *failures, third, last = await scorer.score([*groups, groups[0]])
    assert [first, second, third, last] == [Scored(1.0), Scored(None)] * 2
    assert len(failures) == 2
    assert all("user_rewards:rewards failed twice on prompt 'b'" in str(failure) for failure in failures)
