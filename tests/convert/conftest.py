"""A home folder with the model and data of verl's defaults, and the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl_cli.cli.app import main

Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder and home folder of a user, with the files that verl's examples need."""
    for name in ("models/deepseek-llm-7b-chat", "data/rlhf/gsm8k"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / f"data/rlhf/gsm8k/{name}.parquet").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asyncrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line: its exit code, stdout and stderr."""
    monkeypatch.setenv("ASYNCRL_DEBUG", "0")

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run
