"""After a publish, vLLM's classes have the same tensors as after loading the folder, for each architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from tests.small_models import ARCHITECTURES, IMAGE_MODELS

pytestmark = pytest.mark.stack

LIMIT_S = 1000.0
OFTEN = ("qwen3_moe", "gemma3_text")
"""They cover fused experts, dense layers, a tied and an untied head."""
TORCHVISION = find_spec("torchvision") is not None
SEEING = tuple(IMAGE_MODELS) if TORCHVISION else ()
COPIED = ("qwen2", "gemma3_text")
"""They cover biases, an untied and a tied head, more norms, and a padded vocabulary in both."""
PART = (63 * 128 + 64) * 4
"""Bytes from the first to the last of the 64 × 64 numbers that one of two workers has of a layer's ``o_proj``
[64, 128]. The 4 experts' [64, 32] together span as many."""
REFUSED = {"gpt_oss"}
"""Architectures that are refused before a run starts (`architecture_is_served`)."""
NEED_TORCHVISION = {"qwen3_5_text"}
RARELY = sorted(ARCHITECTURES.keys() - {*OFTEN, *REFUSED})


def compare(*arguments: str) -> list[dict[str, Any]]:
    """One program for all architectures: importing vLLM takes longer than the rest."""
    command = [sys.executable, "-m", "tests.weights.engine_models", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert "Failed to load weights" not in done.stdout + done.stderr, "vLLM warns of layers that are not published"
    return [json.loads(text) for word, _, text in lines if word == "RESULT"]


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    copied = [f"--copied={name}" for name in COPIED]
    return compare("--two-workers", "qwen3_moe", *copied, *OFTEN, *SEEING)


def test_a_published_version_equals_the_folder(compared: list[dict[str, Any]]) -> None:
    check(compared[: len(OFTEN)], OFTEN)
    assert compared[0]["experts"] == 2 * 3, "the experts of each of 2 layers are loaded together"


def test_workers_of_one_engine_get_their_parts_as_on_gpus(compared: list[dict[str, Any]]) -> None:
    """If workers divide a weight by columns, whole rows go to the device: ``o_proj``, and the experts' down
    projection unless each worker has whole experts."""
    workers = [found for found in compared if found["workers"] == 2 and found["packs"]]
    both, divided = workers[:2], workers[2:]
    for found, staged in ((both, 2 * 2 * PART), (divided, 2 * PART)):
        check(found, ["qwen3_moe"] * 2)
        for one in found:
            assert (one["workers"], one["experts"], one["staged"]) == (2, 2 * 3, 2 * staged), "of two publishes"
            assert not one["copied"], "no plan loads experts"


@pytest.mark.skipif(not TORCHVISION, reason="vLLM's models for images import torchvision")
def test_a_published_version_equals_the_folder_for_models_that_see_images(compared: list[dict[str, Any]]) -> None:
    check(compared[len(OFTEN) :][: len(SEEING)], SEEING)


def test_a_version_that_is_copied_by_plan_equals_the_folder(compared: list[dict[str, Any]]) -> None:
    check_copies(compared, COPIED)


@pytest.mark.nightly
def test_a_version_that_is_copied_by_plan_equals_the_folder_for_other_architectures() -> None:
    names = ("qwen3", "llama", "phi3")
    check_copies(compare(*(f"--copied={name}" for name in names), "qwen3"), names)


def check_copies(results: list[dict[str, Any]], architectures: Sequence[str]) -> None:
    """One worker, and two that stage the columns of ``o_proj`` and ``down_proj``."""
    for architecture in architectures:
        planned = [found for found in results if not found["packs"] and found["architecture"] == architecture]
        check(planned, [architecture] * 3)
        assert [(found["workers"], found["copied"]) for found in planned] == [(1, True), (2, True), (2, True)]
        assert [found["staged"] > 0 for found in planned] == [False, True, True]


@pytest.mark.nightly
def test_a_published_version_equals_the_folder_for_the_other_architectures() -> None:
    names = [name for name in RARELY if TORCHVISION or name not in NEED_TORCHVISION]
    check(compare(*names), names)


def check(results: list[dict[str, Any]], architectures: Sequence[str]) -> None:
    assert [found["architecture"] for found in results] == list(architectures)
    for found in results:
        name = found["architecture"]
        assert found["differ"] == [], f"{name}: tensors that differ, or are on one side only"
        assert found["rotary"] == [], f"{name}: rotary frequencies that differ from the trainer's"
        assert found["tensors"] > 20 and found["rotaries"], f"{name}: nothing was compared"
        assert (found["kernels"] > 0) == found["packs"], f"{name}: packed weights"
