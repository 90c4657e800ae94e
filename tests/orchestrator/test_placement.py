"""While Ray has no room for an actor, the run reports what is missing, and the wait ends."""

from __future__ import annotations

import asyncio

import pytest
from stand_ins import run, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator import cluster
from asyncrl_cli.orchestrator.cluster import check_resources, placed, shortage

WANTS = {"CPU": 1, "GPU": 2}
FREE, TOTAL = {"CPU": 3.0}, {"CPU": 8.0, "GPU": 4.0}


async def waits(seconds_of_limit: float, monkeypatch: pytest.MonkeyPatch, reported: list[str], answered: bool) -> None:
    monkeypatch.setattr(cluster, "FIRST_NOTICE_S", 0.001)
    monkeypatch.setattr(cluster, "NOTICE_S", 0.001)
    monkeypatch.setattr(cluster, "START_TIMEOUT_S", seconds_of_limit)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look() -> tuple[dict[str, float], dict[str, float]]:
        return FREE, TOTAL

    def warn(text: str) -> None:
        reported.append(text)
        if answered and not answer.done():
            answer.set_result(None)

    await placed(answer, "engine-0", WANTS, warn, look)


def test_what_is_missing_is_reported_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    run(waits(600.0, monkeypatch, reported, answered=True))
    assert reported == [
        "engine-0 waits until Ray has room for it: it needs 1 CPU and 2 GPUs; free are 3 of 8 CPUs, 0 of 4 GPUs"
    ]


def test_a_wait_for_room_ends_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunError, match=r"Ray found no room for engine-0 .*: it needs 1 CPU and 2 GPUs; free are"
    ) as error:
        run(waits(0.0, monkeypatch, [], answered=False))
    assert error.value.location == "cluster"
    assert error.value.hint


def test_an_actor_that_has_room_is_not_talked_about() -> None:
    async def check() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        await placed(answer, "engine-0", WANTS, pytest.fail)

    run(check())


def test_a_cluster_must_have_what_the_run_wants_in_all() -> None:
    wanting = spec()
    rollout = wanting.rollout.model_copy(update={"engines": 3, "gpus_per_engine": 2})
    wanting = wanting.model_copy(update={"rollout": rollout})
    with pytest.raises(RunError, match="the run needs 4 CPUs and 6 GPUs, and the cluster has 16 CPUs and no GPUs"):
        check_resources(wanting, {"CPU": 16.0})
    assert check_resources(wanting, {"CPU": 4.0, "GPU": 6.0}) == (
        "4 CPUs and 6 GPUs needed, 4 CPUs and 6 GPUs in the cluster"
    )


def test_resources_that_an_actor_does_not_want_are_omitted() -> None:
    assert shortage({"CPU": 2, "GPU": 0}, {}, {"CPU": 1.0}) == "it needs 2 CPUs; free are 0 of 1 CPUs"
