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


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The killed actors."""
    actors: list[Any] = []
    monkeypatch.setattr("ray.kill", actors.append)
    return actors


def plain(scored: list[Scored | RewardFailure]) -> list[float | RewardFailure]:
    return [score.reward if isinstance(score, Scored) else score for score in scored]


async def lengths(texts: list[str]) -> list[Any]:
    return [Scored(float(len(text))) for text in texts]


async def dies(texts: list[str]) -> list[Any]:
    raise ActorDiedError()


async def dies_of(deadly: str, texts: list[str]) -> list[Any]:
    return await (dies if deadly in texts else lengths)(texts)


def scoring_with(*actors: StandIn, max_restarts: int = 10, spec: TaskSpec = SPEC) -> tuple[Scoring, Notes]:
    notes = Notes()
    return Scoring(spec, iter(actors).__next__, budget=notes.budget(max_restarts), task_object=None), notes


def test_a_group_is_one_response_with_a_score_for_each_of_its_texts(killed: list[Any]) -> None:
    async def answers(texts: list[Any]) -> list[Any]:
        return [
            Scored(float(len(text)))
            if isinstance(text, str)
            else RewardFailure("no")
            if "fails" in text
            else tuple(Scored(float(len(one))) for one in text)
            for text in texts
        ]

    async def score_all() -> list[Scored | RewardFailure]:
        asked, _ = scoring_with(StandIn(answers))
        many: list[Response] = [
            *responses("one"),
            (Prompt("a", "?"), ("x", "four"), (True, False)),
            (Prompt("b", "?"), ("fails", "with", "it"), (True, True, True)),
            *responses("three"),
        ]
        return await asked.score(many)

    scored = asyncio.run(score_all())
    assert plain(scored) == [3.0, 1.0, 4.0, *[RewardFailure("no")] * 3, 5.0]


def test_concurrent_callers_take_turns_and_get_their_own_scores_in_order(killed: list[Any]) -> None:
    actor = StandIn(lengths)
    many = [("x" * i) for i in range(2 * AT_ONCE + 1)]

    async def both() -> list[list[Scored | RewardFailure]]:
        asked, _ = scoring_with(actor)
        return list(await asyncio.gather(asked.score(responses(*many)), asked.score(responses("one", "three"))))

    assert list(map(plain, asyncio.run(both()))) == [[float(i) for i in range(2 * AT_ONCE + 1)], [3.0, 5.0]]
    assert [len(call) for call in actor.calls] == [AT_ONCE, 2, AT_ONCE, 1]
    assert killed == []


def test_the_actor_gets_as_many_calls_as_it_has_places(killed: list[Any]) -> None:
    """Three workers with two rewards each. The six rewards return when all are requested."""
    everything = asyncio.Event()

    async def when_all_are_there(texts: list[str]) -> list[Any]:
        if sum(map(len, actor.calls)) == 6:
            everything.set()
        await everything.wait()
        return await lengths(texts)

    actor = StandIn(when_all_are_there)
    spec = TaskSpec(use="a:b", reward_workers=3, reward_concurrency=2)

    async def both() -> list[list[Scored | RewardFailure]]:
        asked, _ = scoring_with(actor, spec=spec)
        calls = asyncio.gather(asked.score(responses("a", "bb", "ccc", "dddd")), asked.score(responses("a", "bb")))
        return list(await asyncio.wait_for(calls, 300))

    assert list(map(plain, asyncio.run(both()))) == [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0]]


def test_many_small_calls_share_the_room_of_the_actor(killed: list[Any]) -> None:
    """One worker process, and callers with one response each, like engines' deliveries."""
    most = asyncio.Event()

    async def when_the_room_is_full(texts: list[str]) -> list[Any]:
        if len(actor.calls) == AT_ONCE:
            most.set()
        await most.wait()
        return await lengths(texts)

    actor = StandIn(when_the_room_is_full)

    async def ask() -> list[list[Scored | RewardFailure]]:
        asked, _ = scoring_with(actor)
        calls = [asyncio.ensure_future(asked.score(responses("x" * i))) for i in range(AT_ONCE + 3)]
        await asyncio.wait_for(most.wait(), 300)
        assert len(actor.calls) == AT_ONCE
        return await asyncio.wait_for(asyncio.gather(*calls), 300)

    assert [plain(scored) for scored in asyncio.run(ask())] == [[float(i)] for i in range(AT_ONCE + 3)]


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("full")])
def test_a_dead_actor_is_replaced_and_everything_scored(killed: list[Any], error: Exception) -> None:
    async def fails(texts: list[str]) -> list[Any]:
        raise error

    first, second = StandIn(fails), StandIn(lengths)
    asked, notes = scoring_with(first, second)
    assert plain(asyncio.run(asked.score(responses("a", "bb")))) == [1.0, 2.0]
    assert second.calls == [["a"], ["bb"]]
    assert (killed, notes) == ([first], [("scorer", "scorer", "the process died")])


def test_the_response_that_kills_twice_has_no_reward(killed: list[Any]) -> None:
    async def deadly(texts: list[str]) -> list[Any]:
        return await dies_of("bad", texts)

    actors = [StandIn(deadly) for _ in range(3)]
    asked, notes = scoring_with(*actors)
    scored = plain(asyncio.run(asked.score(responses("a", "bad", "ccc"))))
    assert scored == [1.0, RewardFailure("scorer: the process died, twice with prompt 'uid of bad'"), 3.0]
    assert killed == actors[:2]
    assert len(notes) == 2


def test_a_silent_actor_is_replaced(killed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(texts: list[str]) -> list[Any]:
        never: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        return await never

    monkeypatch.setattr(scoring, "ACTOR_S", 0.01)
    silent = StandIn(never)
    silent.ping = SimpleNamespace(remote=lambda: never([]))
    asked, notes = scoring_with(silent, StandIn(lengths), spec=TaskSpec(use="a:b", reward_timeout_s=0.01))
    assert plain(asyncio.run(asked.score(responses("a")))) == [1.0]
    assert killed == [silent]
    assert notes == [("scorer", "scorer", "no answer within 0 s")]


def test_a_task_that_cannot_be_loaded_ends_the_call(killed: list[Any]) -> None:
    from ray.exceptions import RayTaskError

    refused = StandIn(lengths, RayTaskError("start", "", TaskError("no such module")).as_instanceof_cause())
    asked, notes = scoring_with(refused)
    with pytest.raises(TaskError, match="no such module"):
        asyncio.run(asked.start())
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
def test_a_group_that_kills_its_process_costs_other_groups_no_reward(cluster: None, tmp_path: Path) -> None:
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
    asked = Scoring(task, actors(task, tmp_path), budget=Notes().budget(), task_object=loaded)
    assert asked.sees_group(Prompt("a", "?"))
    groups: list[Response] = [
        (Prompt(name, "?"), texts, (True,) * len(texts)) for name, texts in (("a", ("x", "")), ("b", ("die", "y")))
    ]

    async def score_all() -> list[Scored | RewardFailure]:
        await asked.start()
        return await asked.score([*groups, groups[0]])

    first, second, *failures, third, last = asyncio.run(score_all())
    assert [first, second, third, last] == [Scored(1.0), Scored(None)] * 2
    assert len(failures) == 2
    assert all("user_rewards:rewards failed twice on prompt 'b'" in str(failure) for failure in failures)
