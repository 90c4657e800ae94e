"""`asyncrl validate-spec --memory`: the table, refusals, and the source of a model's config."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asyncrl_cli.cli.app import app

pytestmark = pytest.mark.slow  # models of real sizes

ROOT = Path(__file__).parents[2]
GPU_SPECS = (
    "qwen3-0.6b-1gpu",
    pytest.param("qwen3-4b-8gpu", marks=pytest.mark.rotating),
    pytest.param("qwen3-30b-a3b-4x8gpu", marks=pytest.mark.rotating),
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate-spec", *arguments, "--memory"])


@pytest.mark.parametrize("name", GPU_SPECS)
def test_the_specs_of_gpus_fit_with_room_to_spare(name: str) -> None:
    answer = ask(str(ROOT / f"specs/{name}.yaml"), "--json")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["valid"] and document["fits"] and document["memory"]["problems"] == []
    for device in document["memory"]["devices"]:
        used = sum(part["bytes"] for part in device["parts"])
        most = 0.93 if device["role"] == "engine" else 0.9  # an engine's cache fills its share of the GPU
        assert device["capacity"] is None or 0.1 < used / device["capacity"] < most


def test_a_spec_that_does_not_fit_is_refused_with_a_remedy_in_three_lines() -> None:
    answer = ask(str(ROOT / "specs/qwen3-4b-8gpu.yaml"), "--set", "cluster.gpu_memory_gb=24")
    assert answer.exit_code == 2
    error = answer.stderr[answer.stderr.index("error: ") :].strip().splitlines()
    assert len(error) == 3 and "does not fit" in error[0] and error[1].startswith(" --> ")
    assert error[2].startswith("hint: use ")


def test_a_missing_model_config_is_refused_with_a_hint(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("{model: {path: someone/unknown}, task: {use: chain_sum}, stop: {steps: 1}}")
    answer = ask(str(spec))
    assert answer.exit_code == 2 and "--set model.path=FOLDER" in answer.stderr
    folder = ROOT / "asyncrl_cli/sizing/configs/Qwen--Qwen3-0.6B"
    assert "0.60B weights" in ask(str(spec), "--set", f"model.path={folder}").stdout
