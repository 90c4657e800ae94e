"""After a publish vLLM's own classes have the same tensors as after loading the folder, for each architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.small_models import ARCHITECTURES, IMAGE_MODELS

pytestmark = pytest.mark.stack

LIMIT_S = 280.0
OFTEN = ("qwen3_moe", "gemma3_text")
"""They cover fused experts that are loaded in the pause, dense layers that are prepared, a tied and an untied head."""
REFUSED = {"gpt_oss"}
"""Refused before a run starts (`architecture_is_served`)."""
NEED_TORCHVISION = {"qwen3_5_text"}
RARELY = sorted(ARCHITECTURES.keys() - {*OFTEN, *REFUSED})


def compare(*architectures: str) -> list[dict[str, Any]]:
    """One process for all architectures: importing vLLM takes longer than the rest."""
    command = [sys.executable, "-m", "tests.weights.engine_models", *architectures]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    found = [json.loads(text) for word, _, text in lines if word == "RESULT"]
    assert [one["architecture"] for one in found] == list(architectures)
    return found


def test_a_published_version_is_what_the_folder_is() -> None:
    check(compare(*OFTEN))


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's models for images import torchvision")
def test_a_published_version_is_what_the_folder_is_for_models_that_see_images() -> None:
    check(compare(*IMAGE_MODELS))


@pytest.mark.nightly
def test_a_published_version_is_what_the_folder_is_for_the_other_architectures() -> None:
    missing = NEED_TORCHVISION if find_spec("torchvision") is None else set()
    check(compare(*(name for name in RARELY if name not in missing)))


def check(results: list[dict[str, Any]]) -> None:
    for found in results:
        name = found["architecture"]
        assert found["differ"] == [], f"{name}: tensors that differ, or are on one side only"
        assert found["rotary"] == [], f"{name}: rotary frequencies that differ from the trainer's"
        assert found["tensors"] > 20 and found["kernels"] and found["rotaries"], f"{name}: nothing was compared"
