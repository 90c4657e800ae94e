"""The time an engine needs to load a mixture of experts: one expert at a time, or a layer's experts together.

    python benchmarks/expert_loading.py [--experts 128] [--layers 4] [--repeats 5]

The experts are small, so this measures Python's work for each tensor, which every engine does in its pause. Both ways
take turns in one process, with vLLM's own class for Qwen3-MoE and the project's transfer engine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from common import header, row

from asyncrl_cli.rollout.engine_settings import CPU_ENVIRONMENT, ENVIRONMENT

os.environ |= ENVIRONMENT | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}


def transfer_engine(folder: Path, experts: int, layers: int) -> tuple[Any, Any, str]:
    """A transfer engine with its model, vLLM's configuration, and the path of a version's memory."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  # first, as in vLLM's own worker: it adapts torch to CPUs
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    from asyncrl_cli.train.shards import engine_layout
    from asyncrl_cli.weights.layout import size_of
    from asyncrl_cli.weights.replica import VERSION_BYTES
    from asyncrl_cli.weights.vllm_worker import BACKEND, ReplicaInitInfo, ReplicaTransferEngine

    torch.set_num_threads(1)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    number = {"num_experts": experts, "num_hidden_layers": layers, "max_position_embeddings": 256}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **heads, **number))
    model.save_pretrained(folder / "model")
    config = AsyncEngineArgs(
        model=str(folder / "model"),
        dtype="float32",
        max_model_len=256,
        load_format="dummy",
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=2**20,
        block_size=32,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, 0, f"file://{folder / 'world'}", 0, "gloo")
        served = get_model(vllm_config=config)
    slots = engine_layout(model, torch.float32)
    path = folder / "memory"
    path.write_bytes(bytes(size_of(slots)) + (1).to_bytes(VERSION_BYTES, "little"))
    transfer = ReplicaTransferEngine(WeightTransferConfig(backend=BACKEND), config, torch.device("cpu"), served)
    transfer.init_transfer_engine(ReplicaInitInfo([asdict(slot) for slot in slots]))
    return transfer, config, str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        import torch

        transfer, config, path = transfer_engine(Path(folder), given.experts, given.layers)
        together = transfer.experts
        from vllm.config import set_current_vllm_config

        seconds: dict[str, list[float]] = {"one by one": [], "together": []}
        counts: dict[str, int] = {}
        with set_current_vllm_config(config), torch.inference_mode():
            for _ in range(given.repeats + 1):
                for way, experts in (("one by one", {}), ("together", together)):
                    transfer.experts = experts
                    with transfer.replica.open(path, 1) as tensors:
                        counts[way] = sum(1 for _ in transfer.named_tensors(tensors))
                    started = time.perf_counter()
                    transfer.start_weight_update()
                    transfer.update_weights({"version": 1, "path": path})
                    transfer.finish_weight_update()
                    seconds[way].append(time.perf_counter() - started)
    number = 3 * given.experts * given.layers
    print(header("experts", "tensors that vLLM loads", "ms", "us for each of an expert's matrices"))
    for way, times in seconds.items():
        each = median(times[1:])
        print(row(way, f"{counts[way]:,}", f"{each * 1e3:.0f}", f"{each * 1e6 / number:.0f}"))


if __name__ == "__main__":
    main()
