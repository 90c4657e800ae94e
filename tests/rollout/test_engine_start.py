"""Why a core process of vLLM ended: a killed one is started again; after a mistake in the settings it is not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asyncrl_cli.rollout.engine_death import LogSince, death, start_failure
from asyncrl_cli.system.remote import ActorDied

FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): %s"
BEFORE = "ValueError: of an earlier start\n"


def failure(codes: str, log: Path, wrote: str) -> BaseException | None:
    return start_failure(FAILED % codes, written(log, wrote))


def written(log: Path, wrote: str) -> LogSince:
    log.write_text(BEFORE)
    since = LogSince(log)
    log.write_text(BEFORE + wrote)
    return since


@pytest.mark.parametrize("codes", ["{}", "{'EngineCore_DP0': -9}", "{'EngineCore_DP0': 0}"])
def test_a_core_that_ends_without_a_cause_was_killed(tmp_path: Path, codes: str) -> None:
    assert isinstance(failure(codes, tmp_path / "engine.log", "loading\n"), ActorDied)


@pytest.mark.parametrize("codes", ["{}", "{'EngineCore_DP0': 1}"])
def test_a_core_that_names_a_cause_is_not_started_again(tmp_path: Path, codes: str) -> None:
    error = failure(codes, tmp_path / "engine.log", "Traceback\nValueError: block_size 7 is not supported\n")
    assert error is not None
    assert not isinstance(error, ActorDied)
    assert "block_size 7 is not supported" in str(error)


def test_other_errors_are_not_about_the_core() -> None:
    assert start_failure("CUDA out of memory", LogSince(None)) is None


def core_that(how: Callable[[], object]) -> multiprocessing.Process:
    core = multiprocessing.get_context("fork").Process(target=how)
    core.start()
    return core


def end_by(number: signal.Signals) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # remove the handler of pytest's faulthandler
    os.kill(os.getpid(), number)


ERROR = "Traceback\nValueError: head size 24 is not supported\n"
GONE = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace\n"


@pytest.mark.parametrize(
    ("how", "wrote", "cause"),
    [
        (partial(os._exit, 1), ERROR + GONE, ": ValueError: head size 24 is not supported"),
        (partial(end_by, signal.SIGTERM), ERROR, ": ValueError: head size 24 is not supported"),
        (partial(end_by, signal.SIGABRT), "", ": SIGABRT"),
    ],
)
def test_a_core_that_fails_by_itself_has_crashed(
    tmp_path: Path, how: Callable[[], object], wrote: str, cause: str
) -> None:
    error = death([core_that(how)], written(tmp_path / "engine.log", wrote))
    assert isinstance(error, ActorDied)
    assert error.message == f"vLLM's core process has died{cause}"


@pytest.mark.parametrize(("number", "wrote"), [(signal.SIGKILL, ERROR), (signal.SIGTERM, GONE)])
def test_a_core_that_others_end_has_not_crashed(tmp_path: Path, number: signal.Signals, wrote: str) -> None:
    error = death([core_that(partial(end_by, number))], written(tmp_path / "engine.log", wrote))
    assert isinstance(error, ActorDied)
