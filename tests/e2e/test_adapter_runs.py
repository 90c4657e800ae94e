"""A run's adapters as its result: peft and vLLM load them, and the next run starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.small_models import CHAIN_SUM

from .conftest import Runs

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

LORA = {"rank": 4, "alpha": 8.0, "serve": "adapter"}
SYNC = {"mode": "sync", "max_staleness": 0, "groups_per_step": 4}


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_the_adapter_is_a_result_and_a_start(shared_runs: Runs) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    model: dict[str, Any] = {"path": str(CHAIN_SUM), "max_length": 64}
    trainer = {"ranks": 2, "optimizer": {"learning_rate": 1.0e-3}}
    run = shared_runs.train(model=model | {"lora": LORA}, trainer=trainer, pipeline=SYNC, stop={"steps": 2})
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(run / "model")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(CHAIN_SUM)
        initial = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (merged - initial).abs().max() > 1e-2, "the run has trained the adapter"
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    helper = PEFTHelper.from_local_dir(str(run / "adapter"), max_position_embeddings=64)
    served = LoRAModel.from_local_checkpoint(str(run / "adapter"), modules, helper, lora_model_id=1, device="cpu")
    assert len(served.loras) == len(adapter(run / "adapter")) // 2

    shared_runs.succeed("checkpoint", "export", run, "--adapter", "--to", shared_runs.folder / "exported")
    for name, matrix in adapter(run / "adapter").items():
        assert torch.equal(adapter(shared_runs.folder / "exported")[name], matrix)

    lora = LORA | {"path": str(run / "adapter")}
    frozen = {"optimizer": {"learning_rate": 1.0e-30}}
    later = shared_runs.train(model=model | {"lora": lora}, trainer=frozen, pipeline=SYNC, stop={"steps": 1})
    for name, matrix in adapter(run / "adapter").items():
        assert torch.equal(adapter(later / "adapter")[name], matrix), name
    refused = shared_runs.run("evaluate", later / "spec.yaml")
    assert refused.code == 2
    assert "model.lora.path" in refused.err
