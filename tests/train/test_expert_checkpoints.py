"""Real DeepSpeed with divided experts: checkpoints resume, and have the model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_checkpoints import differs, go

from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.train.model.export import consolidate, export_model
from asyncrl_cli.weights.layout import TensorSlot

pytestmark = pytest.mark.stack

MIXTURE = {
    "model.init.architecture": "mixtral",
    "model.init.config.num_local_experts": 4,
    "model.init.config.intermediate_size": 64,
}
TRAINER: dict[str, Any] = {"ranks": 2, "zero_stage": 3, "expert_parallel": 2} | MIXTURE


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that divide the experts, trained two steps, saved, and trained one more."""
    folder = tmp_path_factory.mktemp("divided")
    results, checkpoint = go(folder / "first", TRAINER, None, True, 0, 2)
    return folder, results, checkpoint
