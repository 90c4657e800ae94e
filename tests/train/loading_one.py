"""The program of test_loading.py: a rank loads saved models.

The result has, for each model, ZeRO stage and dtype, which weights or buffers differ from ``from_pretrained``; the
message for a damaged model; and the private memory for loading the largest model, weight by weight and by transformers
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks import Rank

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train import deepspeed_engine as ds
from asyncrl_cli.train.model.lora import gathered

MEMORY, BROKEN = "memory", "broken"
"""Models in the folder that are not compared with transformers."""


def main(rank: Rank, models: Path) -> dict[Any, Any]:
    rank.join()
    sharded = rank.spec.trainer.model_copy(update={"zero_stage": 3})
    results: dict[Any, Any] = {}
    ds.load_model(sharded, str(models / "qwen3_moe"))  # loads lazily imported code
    kept = []
    for streamed in (ds.streamed, nullcontext):
        with patch.object(ds, "streamed", streamed):
            taken = own_memory(lambda: kept.append(ds.load_model(sharded, str(models / MEMORY))))
        results[MEMORY, streamed is nullcontext] = taken
        kept.clear()
    for folder in sorted(models.iterdir()):
        if folder.name in (MEMORY, BROKEN):
            continue
        for stage, dtype in ((0, "float32"), (3, "float32"), (3, "bfloat16")):
            trainer = rank.spec.trainer.model_copy(update={"zero_stage": stage, "dtype": dtype})
            results[folder.name, stage, dtype] = differences(trainer, str(folder))
    try:
        ds.load_model(sharded, str(models / BROKEN))
    except UserError as error:
        results[BROKEN] = str(error)
    return results


def differences(trainer: TrainerSpec, folder: str) -> list[str]:
    """Names of the tensors that differ between a loaded model and the model that transformers loads by itself."""
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, trainer.dtype))
    model = ds.load_model(trainer, folder)
    ds._restore_rotary_frequencies(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with gathered(list(model.parameters()), trainer.zero_stage):
        own = tensors(model)
        wanted = tensors(expected)
        different = sorted(own.keys() ^ wanted.keys())
        different += [
            name
            for name, tensor in wanted.items()
            if name in own and (own[name].dtype != tensor.dtype or not torch.equal(own[name], tensor))
        ]
    tied = expected.get_input_embeddings().weight is expected.get_output_embeddings().weight
    if (parameters["model.embed_tokens.weight"] is parameters["lm_head.weight"]) != tied:
        different.append("tied")
    return different


def tensors(model: Any) -> dict[str, Any]:
    """Parameters and buffers, including those that are not in checkpoints."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def own_memory(work: Callable[[], None]) -> int:
    """The peak of this process's private memory (without files) during ``work``, minus its value before."""
    most, ended = 0, threading.Event()

    def look() -> int:
        text = Path("/proc/self/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, look())

    before = look()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return max(most, look()) - before
