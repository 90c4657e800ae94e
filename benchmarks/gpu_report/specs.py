"""The specs and models of the report. Settings that a GPU's memory limits are `auto`: a run's start chooses them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from common import CHAIN_SUM, INIT, QUICKSTART

from asyncrl_cli.checks.memory import resolve_microbatch, resolve_rollouts
from asyncrl_cli.sizing.config import COPIES, find_config
from asyncrl_cli.sizing.estimate import estimate, excesses
from asyncrl_cli.sizing.model import SizedModel, size_model
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

MODEL = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 64, "initializer_range": 0.02},
    "cpu": {},
}
"""The differences from the quickstart's model in timed runs: 0.4 billion parameters on GPUs."""
QWEN_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
"""Keys of a model's config that its shape depends on."""
SMALL_QWEN = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "head_dim": 32,
}
VOCABULARY = 151_936
"""Words of Qwen3's vocabulary."""


def spec_of(settings: dict[str, Any], *changes: str) -> ExperimentSpec:
    """The spec of these settings. Raises ``SpecError``, also for keys that this version does not have."""
    return load_spec("report.yaml", changes, data=yaml.safe_dump(settings).encode()).spec


def resolved(spec: ExperimentSpec, gpu_bytes: int | None = None) -> tuple[ExperimentSpec, SizedModel]:
    """The spec with the numbers that a run's start chooses for `auto`, and its model as the estimate sees it.

    ``gpu_bytes``: memory of a GPU; None: of this machine's.
    """
    with TemporaryDirectory() as folder:
        model = size_model(spec, find_config(spec, Path(folder)))
    spec, _ = resolve_microbatch(spec, model, gpu_bytes)
    spec, _ = resolve_rollouts(spec, model, gpu_bytes)
    return spec, model


def with_offload(settings: dict[str, Any], gpu_bytes: int) -> dict[str, Any]:
    """Settings that keep the optimizer's state in CPU memory if a GPU has no room, by the estimate of `validate-spec
    --memory`.

    Raises ``RuntimeError`` if a GPU has no room for the rest.
    """
    for offload in ("none", "optimizer"):
        candidate = settings | {"trainer": settings["trainer"] | {"offload": offload}}
        spec, model = resolved(spec_of(candidate), gpu_bytes)
        if not excesses(spec, estimate(spec, model, gpu_bytes, host_bytes=None)):
            return candidate
    raise RuntimeError(f"by the estimate the model does not fit a GPU with {gpu_bytes / 1e9:.0f} GB")


def quickstart_spec(dtype: str) -> dict[str, Any]:
    """The quickstart."""
    spec: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    spec["model"]["path"] = str(CHAIN_SUM)
    for side in ("rollout", "trainer"):
        spec[side]["dtype"] = dtype
    return spec | {"tracking": {"mlflow": False}}


def untrained_spec(dtype: str) -> dict[str, Any]:
    """A model with random weights, which ends a response with the same probability at every token, and a task with
    rewards that differ between responses, which gives gradients."""
    spec = quickstart_spec(dtype)
    spec["model"] |= {"path": None, "init": copy.deepcopy(INIT)}
    spec["task"] = {"use": "long_tail:LongTail"}
    spec["algorithm"] |= {"uniform_groups": "train"}
    return spec


def exact_spec(mode: str, dtype: str = "float32") -> dict[str, Any]:
    """A few small steps at staleness 0, with checkpoints."""
    spec = untrained_spec(dtype)
    spec["rollout"] |= {"max_response_tokens": 32, "group_size": 4}
    spec["pipeline"] = {"mode": mode, "max_staleness": 0, "groups_per_step": 8}
    spec["data"]["eval"]["size"] = 8
    return spec | {"evaluation": {"every": 0}, "checkpoints": {"every": 2}, "stop": {"steps": 6}}


def timed_spec(device: str, mode: str) -> dict[str, Any]:
    """Lengths of responses have a long tail, and do not change, because the learning rate is almost zero."""
    gpu = device == "cuda"
    spec = untrained_spec("bfloat16" if gpu else "float32")
    spec["model"]["init"]["config"] |= MODEL[device]
    spec["model"]["max_length"] = 1100 if gpu else 160
    spec["rollout"] |= {"max_response_tokens": 1024 if gpu else 96, "max_running_rollouts": "auto" if gpu else 64}
    spec["trainer"]["tokens_per_microbatch"] = "auto" if gpu else 2048
    spec["trainer"]["optimizer"]["learning_rate"] = 1e-7
    spec["pipeline"] = {"mode": mode, "groups_per_step": 64 if gpu else 8}
    spec["data"]["eval"]["size"] = 1
    return spec | {"evaluation": {"every": 0}, "stop": {"steps": 12 if gpu else 8}}


def qwen_spec(device: str, folder: Path) -> dict[str, Any]:
    """A model with the shape of Qwen3-4B and a vocabulary of the same size, trained on rows of up to 9,216 tokens.

    Writes a tokenizer to ``folder``. On a CPU model, vocabulary and rows are small.
    """
    gpu = device == "cuda"
    config = json.loads((COPIES / "Qwen--Qwen3-4B/config.json").read_text())
    spec = timed_spec(device, "async")
    write_tokenizer(folder / "tokenizer", VOCABULARY if gpu else 512)
    spec["model"]["init"] = {
        "architecture": "qwen3",
        "config": {key: config[key] for key in QWEN_KEYS} | ({} if gpu else SMALL_QWEN),
        "tokenizer": str(folder / "tokenizer"),
    }
    longest = 9216 if gpu else 160
    spec["model"]["max_length"] = longest
    spec["rollout"] |= {"max_response_tokens": longest - 64, "max_running_rollouts": 64}
    return spec


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with this many words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="w1"
    )
    tokenizer.save_pretrained(folder)


def alone(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Settings of a process that has the device for itself."""
    gpus = int(device == "cuda")
    return settings | {
        "rollout": settings["rollout"] | {"gpus_per_engine": gpus},
        "trainer": settings["trainer"] | {"gpus_per_rank": gpus},
    }


def write_random_model(spec: ExperimentSpec, device: str, folder: Path) -> None:
    """Write the model of ``model.init`` with random weights in the trainer's dtype, made on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncrl_cli.train.model.initial import write_model_stub

    assert spec.model.init is not None
    write_model_stub(spec.model.init, spec.model.max_length, folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=getattr(torch, spec.trainer.dtype)
        )
    model.save_pretrained(folder)
