"""The programs with which `asyncrl doctor` tries vLLM, DeepSpeed and Ray, each in a separate process.

    python -m asyncrl_cli.checks.libraries PROGRAM DEVICE [FOLDER]

DEVICE is cuda or cpu. The imports show that a library can use the device. ``engine`` and ``trainer`` (`--deep`) work
like a run, on a small model that they write to FOLDER: vLLM generates from the model's weights, and one ZeRO-3 step of
DeepSpeed has to lower the loss. The line with ANSWER has the result.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl_cli.spec.sections import ExperimentSpec

TOKENS = 16
"""Tokens that the engine generates."""
MODEL = {
    "architecture": "qwen3",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "tokenizer": "characters",
}
"""About 100,000 weights; the heads have a size that GPU kernels support."""


def small_spec(gpu: bool) -> ExperimentSpec:
    """Return a spec of one engine and one ZeRO-3 rank, each on a GPU or on two threads."""
    return ExperimentSpec.model_validate(
        {
            "name": "doctor",
            "model": {"init": MODEL, "max_length": 64},
            "task": {"use": "chain_sum"},
            "rollout": {"max_running_rollouts": 4, "gpus_per_engine": int(gpu), "threads_per_engine": 2},
            "trainer": {"zero_stage": 3, "gpus_per_rank": int(gpu), "threads_per_rank": 2},
            "stop": {"steps": 1},
        }
    )


def import_vllm(device: str, _: Path) -> str:
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

    if current_platform.device_type != device:
        raise RuntimeError(f"uses {current_platform.device_type or 'no device'}")
    return f"{vllm.__version__} on {device}"


def import_deepspeed(device: str, _: Path) -> str:
    import deepspeed
    import torch

    if not torch.distributed.is_gloo_available():
        raise RuntimeError("torch has no gloo")
    if device == "cuda":
        torch.zeros(1, device="cuda")
    name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device:
        raise RuntimeError(f"uses {name}")
    return f"{deepspeed.__version__} on {device}"


def import_ray(_device: str, _: Path) -> str:
    import ray

    return str(ray.__version__)


def try_engine(device: str, folder: Path) -> str:
    """Start vLLM on a small model, and generate. Errors are not caught."""
    from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling
    from asyncrl_cli.rollout.engine import Engine
    from asyncrl_cli.rollout.engine_settings import engine_environment

    spec = small_spec(device == "cuda")
    os.environ |= engine_environment(spec)
    _make_model(spec, folder)

    async def generated() -> Rollout:
        engine = Engine(spec, str(folder), own_weights=True)
        try:
            await engine.serve_own(0)
            return await engine.generate(RolloutRequest("doctor", (3, 4, 5), Sampling(1.0, TOKENS)))
        finally:
            engine.shutdown()

    return f"an engine generated {len(asyncio.run(generated()).ids)} tokens"


def try_trainer(device: str, folder: Path) -> str:
    """Start DeepSpeed on a small model, and make a ZeRO-3 step. Errors are not caught."""
    from asyncrl_cli.train import deepspeed_engine as ds

    spec = small_spec(device == "cuda")
    os.environ |= ds.trainer_environment(spec)
    import torch

    from asyncrl_cli.train.nonfinite_guard import backward, step

    _make_model(spec, folder)
    server = socket.create_server(("127.0.0.1", 0))
    ds.join_process_group(
        0,
        ranks=1,
        address="127.0.0.1",
        port=server.getsockname()[1],
        gpu=spec.trainer.gpus_per_rank > 0,
        listener=server,
    )
    engine = ds.start_engine(spec, str(folder))
    ids = torch.arange(3, 35, device=engine.device).reshape(2, 16)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False  # no logits predict the first token
    losses = []
    for _ in range(2):
        loss = -engine(ids, mask).mean()
        losses.append(loss.item())
        backward(engine, loss)
        step(engine)
    if not losses[1] < losses[0]:
        raise RuntimeError(f"a step of the optimizer did not lower the loss: {losses[0]} before, {losses[1]} after")
    return f"a ZeRO-3 step lowered a loss from {losses[0]:.4f} to {losses[1]:.4f}"


def _make_model(spec: ExperimentSpec, folder: Path) -> None:
    from asyncrl_cli.train.model.initial import build_initial_model

    assert spec.model.init is not None
    build_initial_model(spec.model.init, max_length=spec.model.max_length, seed=spec.seed, directory=folder)


PROGRAMS: dict[str, Callable[[str, Path], str]] = {
    "vLLM": import_vllm,
    "DeepSpeed": import_deepspeed,
    "Ray": import_ray,
    "engine": try_engine,
    "trainer": try_trainer,
}


def main() -> None:
    """Run one of ``PROGRAMS``."""
    name, device, *folder = sys.argv[1:]
    print("ANSWER", PROGRAMS[name](device, Path(*folder)), flush=True)


if __name__ == "__main__":
    main()
