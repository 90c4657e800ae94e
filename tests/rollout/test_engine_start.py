"""A start of vLLM that fails: a killed core is worth another try, a mistake in the settings is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.rollout.engine_settings import _start_failure
from asyncrl_cli.system.remote import ActorDied

FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): %s"
BEFORE = "ValueError: of an earlier start\n"


def failure(codes: str, log: Path, wrote: str) -> BaseException | None:
    log.write_text(BEFORE + wrote)
    return _start_failure(FAILED % codes, log, len(BEFORE))


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
    assert _start_failure("CUDA out of memory", None, 0) is None
