"""liger-kernel's kernels replace the right modules and give transformers' values; other models are refused.

Without a GPU, Triton interprets the kernels. Compiled kernels have not run on a GPU yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrl_cli.checks.model import check_model
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.train.deepspeed_engine import load_model
from asyncrl_cli.train.model.gpu_kernels import check_fused_model
from tests.small_models import SMALL, small_model


@pytest.mark.slow
def test_fused_kernels_compute_the_models_values() -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed (requirements/cpu.lock)")
    program = [sys.executable, str(Path(__file__).with_name("fused_one.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    dense = {"liger_rotary_pos_emb": 1, "LigerRMSNorm": 2 * 2 + 1, "LigerSwiGLUMLP": 2}
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "llama": dense,
        "qwen2": dense,
        "qwen3": {**dense, "LigerRMSNorm": 2 * 4 + 1},
        "qwen3_moe": {"liger_rotary_pos_emb": 1, "LigerRMSNorm": 2 * 4 + 1},
    }


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("gemma3_text", {}, "gemma3_text, is not one of llama, qwen2, qwen3, qwen3_moe"),
        ("qwen3", {"hidden_act": "gelu"}, "qwen3, is activated by gelu, and not by silu"),
    ],
)
def test_other_models_are_refused(architecture: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check_fused_model(AutoConfig.for_model(architecture, **settings))
    assert refused.value.location == "trainer.fused_kernels" and refused.value.hint


def test_a_start_and_a_rank_refuse_other_models(tmp_path: Path) -> None:
    model = small_model("mixtral")
    model.save_pretrained(tmp_path)
    quickstart = load_spec(Path(__file__).parents[2] / "specs/quickstart.yaml").spec
    trainer = quickstart.trainer.model_copy(update={"fused_kernels": True})
    tokenizer = SimpleNamespace(get_vocab=lambda: {str(token): token for token in range(SMALL["vocab_size"])})
    with pytest.raises(ConfigError, match="its type, mixtral"):
        check_model(quickstart.model_copy(update={"trainer": trainer}), model.config, tokenizer)
    with pytest.raises(ConfigError, match="its type, mixtral"):
        load_model(trainer, str(tmp_path))
