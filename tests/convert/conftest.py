"""A home folder with the model and data of verl's defaults, the command line in this process, and cases.yaml."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl_cli.cli.app import main
from asyncrl_cli.convert.table import Conversion, spec_text
from asyncrl_cli.spec.load import load_spec, resolved

Command = Callable[..., tuple[object, str, str]]
DATA = Path(__file__).parents[1] / "data"
NOT_SUPPORTED = "not supported: "
ABBREVIATIONS = {
    "$counts": "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_generations 16",
    "$batch": "--per_device_train_batch_size 4 --gradient_accumulation_steps 16",
    "$gkd": "gkd --lmbda 1 --beta 1 --teacher_model_name_or_path teacher/model",
    "$distill": (
        "distillation.enabled=True distillation.distillation_loss.loss_mode=k1 "
        "distillation.distillation_loss.use_policy_gradient=True "
        "distillation.teacher_models.teacher_model.model_path=teacher/model "
        "distillation.distillation_loss.use_task_rewards=False"
    ),
    "$": "actor_rollout_ref.",
    "tests/data": str(DATA),
}


def cases(trainer: str) -> list[Any]:
    """Parameters of a test: the words of each case in cases.yaml, and what they give."""
    text = (Path(__file__).parent / "cases.yaml").read_text(encoding="utf-8")
    for abbreviation, words in ABBREVIATIONS.items():
        text = text.replace(abbreviation, words)
    return [(shlex.split(line), result) for line, result in yaml.safe_load(text)[trainer].items()]


def check_case(conversion: Conversion, words: Sequence[str], result: dict[str, Any] | str | None) -> None:
    """Assert what the words of a case give."""
    if isinstance(result, dict):
        values = spec_values(conversion)
        assert {key: values[key] for key in result} == result
        assert conversion.unsupported == []
    elif result is None:
        assert [words[0].partition("=")[0].lstrip("+-")] in conversion.lost.values()
    elif result.startswith(NOT_SUPPORTED):
        assert result.removeprefix(NOT_SUPPORTED) in "\n".join(conversion.unsupported)
    else:
        assert result in "\n".join(text for _, text in conversion.remarks)


def spec_values(conversion: Conversion) -> dict[str, Any]:
    """Return all values of the converted spec by dotted key, with defaults. It must be valid."""
    values: dict[str, Any] = {}

    def visit(value: Any, prefix: str) -> None:
        values[prefix] = value
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, f"{prefix}.{name}" if prefix else name)

    visit(resolved(load_spec("spec.yaml", data=spec_text(conversion, "test", Path()).encode())), "")
    return values


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
