"""After a publish, vLLM's classes have the same tensors as after loading the folder, for each architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.small_models import ARCHITECTURES, IMAGE_MODELS

pytestmark = pytest.mark.stack

LIMIT_S = 280.0
OFTEN = ("qwen3_moe", "gemma3_text")
"""They cover fused experts (loaded in the pause), dense layers (prepared), a tied and an untied head."""
PART = (63 * 128 + 64) * 4
"""Bytes from the first to the last of the 64 × 64 numbers that one of two workers has of a layer's ``o_proj``
[64, 128]. The 4 experts' [64, 32] together span as many."""
REFUSED = {"gpt_oss"}
"""Architectures that are refused before a run starts (`architecture_is_served`)."""
NEED_TORCHVISION = {"qwen3_5_text"}
RARELY = sorted(ARCHITECTURES.keys() - {*OFTEN, *REFUSED})


def compare(*architectures: str) -> list[dict[str, Any]]:
    """One process for all architectures: importing vLLM takes longer than the rest."""
    return results(started(*architectures), architectures)


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.weights.engine_models", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process: subprocess.Popen[str], architectures: Sequence[str]) -> list[dict[str, Any]]:
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    lines = [line.partition(" ") for line in output.splitlines()]
    found = [json.loads(text) for word, _, text in lines if word == "RESULT"]
    assert [one["architecture"] for one in found] == list(architectures)
    assert "Failed to load weights" not in output + errors, "vLLM warns of layers for which nothing is published"
    return found


def test_a_published_version_equals_the_folder() -> None:
    found = compare(*OFTEN)
    check(found)
    assert found[0]["experts"] == 2 * 3, "the experts of each of 2 layers are loaded together"


@pytest.mark.parametrize(("options", "staged"), [([], 2 * 2 * PART), (["--experts"], 2 * PART)])
def test_workers_of_one_engine_get_their_parts_as_on_gpus(tmp_path: Path, options: list[str], staged: int) -> None:
    """If workers divide a weight by columns, whole rows go to the device: ``o_proj``, and the experts' down
    projection unless each worker has whole experts."""
    ranks = [started("--rank", str(rank), "--world", str(tmp_path), *options, "qwen3_moe") for rank in range(2)]
    for process in ranks:
        found = results(process, ["qwen3_moe"])
        check(found)
        assert (found[0]["experts"], found[0]["staged"]) == (2 * 3, 2 * staged), "of two publishes"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's models for images import torchvision")
def test_a_published_version_equals_the_folder_for_models_that_see_images() -> None:
    check(compare(*IMAGE_MODELS))


@pytest.mark.nightly
def test_a_published_version_equals_the_folder_for_the_other_architectures() -> None:
    missing = NEED_TORCHVISION if find_spec("torchvision") is None else set()
    check(compare(*(name for name in RARELY if name not in missing)))


def check(results: list[dict[str, Any]]) -> None:
    for found in results:
        name = found["architecture"]
        assert found["differ"] == [], f"{name}: tensors that differ, or are on one side only"
        assert found["rotary"] == [], f"{name}: rotary frequencies that differ from the trainer's"
        assert found["tensors"] > 20 and found["kernels"] and found["rotaries"], f"{name}: nothing was compared"
