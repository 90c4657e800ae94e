"""Loads small models into vLLM's classes, from a folder and from a published version, and compares all tensors.

    python -m tests.weights.engine_models [--two-workers ARCHITECTURE] [--copied ARCHITECTURE]... ARCHITECTURE...

With ``--two-workers`` two tensor-parallel workers also load an architecture like workers on GPUs, first with all
experts in both, then with half of them in each. With ``--copied`` one worker, then two also load an architecture as
on GPUs, where no weight is packed and the second version is copied by plan.

No engine runs: the classes are made with vLLM's loaders and the project's transfer engine, in processes that are forked
after all imports, which take longer than the rest. Prints a line of JSON for each comparison: the differences, which
must be empty, and what was compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from asyncrl_cli.rollout.engine_settings import CPU_ENVIRONMENT, ENVIRONMENT

os.environ |= ENVIRONMENT | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # first, as in vLLM's own worker: it adapts torch to CPUs
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from asyncrl_cli.system.process_tree import die_with
from asyncrl_cli.train.shards import engine_layout, shards, write_shard
from asyncrl_cli.weights import vllm_worker
from asyncrl_cli.weights.layout import ByteRange, TensorSlot, size_of
from asyncrl_cli.weights.mapped import Copies, PinnedLoads
from asyncrl_cli.weights.replica import VERSION_BYTES
from asyncrl_cli.weights.vllm_worker import BACKEND, ReplicaInitInfo, ReplicaTransferEngine
from tests.small_models import IMAGE_MODELS, small_model
from tests.train.pictures import saved_model

POSITION = 4000
"""The position at which rotary frequencies are compared."""


class Worker(NamedTuple):
    """One of an engine's workers."""

    rank: int = 0
    size: int = 1
    world: Path | None = None
    experts: bool = False
    packs: bool = True
    """True if linear layers pack their weights, as on CPUs. Otherwise copies are planned, as on GPUs."""


class PinnedOnCpu(Copies):
    """Stands for a GPU's copies: all memory counts as pinned, and the device is the CPU."""

    def __init__(self) -> None:
        self.addresses: dict[int, bool] = {}
        self.made: list[PinnedLoads] = []

    def pin(self, memory: torch.Tensor, parts: Iterable[ByteRange]) -> None:
        self.addresses[memory.data_ptr()] = True

    def loads(self) -> PinnedLoads:
        self.made.append(PinnedLoads(torch.device("cpu"), self.addresses))
        return self.made[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--two-workers")
    parser.add_argument("--copied", action="append", default=[])
    parser.add_argument("architectures", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    alone = [(architecture, Worker()) for architecture in given.architectures]
    found = in_two_processes([*alone, *((architecture, Worker(packs=False)) for architecture in given.copied)])
    pairs = [(given.two_workers, experts, True) for experts in (False, True) if given.two_workers]
    for architecture, experts, packs in [*pairs, *((architecture, False, False) for architecture in given.copied)]:
        with tempfile.TemporaryDirectory() as folder:
            workers = [Worker(rank, 2, Path(folder), experts, packs) for rank in range(2)]
            found += in_two_processes([(architecture, worker) for worker in workers])
    for one in found:
        print("RESULT", json.dumps(one), flush=True)


def in_two_processes(calls: Sequence[tuple[str, Worker]]) -> list[dict[str, Any]]:
    """The results of ``compared``. The processes are new: workers with other jobs before could not agree on names."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, fork, initializer=die_with, initargs=(os.getpid(),)) as processes:
        return list(processes.map(compared, *zip(*calls, strict=True)))


def compared(architecture: str, worker: Worker) -> dict[str, Any]:
    os.environ["VLLM_DIST_IDENT"] = str(worker.rank)  # different names: no shared memory, which would remain
    copies = PinnedOnCpu()
    copies_of = (lambda _: copies) if worker.size > 1 else vllm_worker.copies_of
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.object(vllm_worker, "copies_of", copies_of))
        if not worker.packs:
            stack.enter_context(patch.object(vllm_layers, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None))
        found = compared_in(Path(folder), architecture, worker)
    cleanup_dist_env_and_memory()
    gc.collect()
    return found | {
        "workers": worker.size,
        "packs": worker.packs,
        "staged": sum(loads.staged_bytes for loads in copies.made),
    }


def compared_in(folder: Path, architecture: str, worker: Worker) -> dict[str, Any]:
    torch.manual_seed(0)
    if architecture in IMAGE_MODELS:
        saved_model(architecture, folder / "model")
        model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    else:
        model = small_model(architecture)
        model.save_pretrained(folder / "model")
    _, loaded = engine_model(folder, "auto", worker)
    config, served = engine_model(folder, "dummy", worker)
    transfer = ReplicaTransferEngine(WeightTransferConfig(backend=BACKEND), config, torch.device("cpu"), served)
    slots = engine_layout(model, torch.float32)
    transfer.init_transfer_engine(ReplicaInitInfo([asdict(slot) for slot in slots]))
    transfer.plans_copies = worker.size > 1 or not worker.packs
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Nothing may remain of the first version, or of an engine's random first weights.
    publish(transfer, config, {name: tensor + 1 for name, tensor in weights.items()}, model, slots, 1, folder)
    publish(transfer, config, weights, model, slots, 2, folder)
    ours, theirs = dict(held(served)), dict(held(loaded))
    differ = [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]
    rotary = [name for name, cosines in rotary_of(served) if not any(map(cosines.allclose, trainers_rotary(model)))]
    return {
        "architecture": architecture,
        "class": type(served).__name__,
        "differ": sorted(differ) + sorted(ours.keys() - theirs.keys()),
        "rotary": rotary,
        "copied": transfer.plan is not None and transfer.plan_is_proved,
        "tensors": len(theirs),
        "kernels": sum(name.endswith(KERNEL) for name in theirs),
        "rotaries": len(list(rotary_of(served))),
        "experts": sum(".experts." in name for name in loads_of(transfer)),
    }


def engine_model(folder: Path, load_format: str, worker: Worker) -> tuple[VllmConfig, nn.Module]:
    """vLLM's model for the folder ``model``, created like in its CPU worker."""
    images = (folder / "model/processor_config.json").is_file()
    latent = hasattr(AutoConfig.from_pretrained(folder / "model").get_text_config(), "kv_lora_rank")
    config = AsyncEngineArgs(
        model=str(folder / "model"),
        dtype="float32",
        max_model_len=2 * POSITION,
        max_num_batched_tokens=2 * POSITION,
        load_format=load_format,
        enforce_eager=True,
        skip_tokenizer_init=not images,  # an image processor has a tokenizer
        limit_mm_per_prompt={"image": 1} if images else {},
        mm_device_do_normalize=False,
        language_model_only=not images,
        distributed_executor_backend="uni" if worker.size == 1 else "mp",
        tensor_parallel_size=worker.size,
        enable_expert_parallel=worker.experts,
        kv_cache_memory_bytes=2**20,
        block_size=32,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,  # models with linear attention need chunked prefill
        use_tqdm_on_load=False,
        attention_backend="CPU_MLA" if latent else None,  # the other kernel, for CPUs with AMX, has no float32
    ).create_engine_config()
    with set_current_vllm_config(config):
        meeting = f"file://{(worker.world or folder) / 'world'}"
        init_worker_distributed_environment(config, worker.rank, meeting, worker.rank, "gloo")
        return config, get_model(vllm_config=config)


def publish(
    transfer: ReplicaTransferEngine,
    config: VllmConfig,
    weights: dict[str, torch.Tensor],
    model: Any,
    slots: tuple[TensorSlot, ...],
    version: int,
    folder: Path,
) -> None:
    """Write a version's memory like a trainer rank, and load it with the engine's transfer engine."""
    model.load_state_dict(weights)
    path, size = folder / "memory", size_of(slots)
    path.write_bytes(bytes(size) + version.to_bytes(VERSION_BYTES, "little"))
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    own = {slot.name: memory[slot.offset : slot.offset + slot.nbytes] for slot in slots}
    typed = {slot.name: own[slot.name].view(slot.torch_dtype).view(slot.shape) for slot in slots}
    for name, begin, elements in shards(model, rank=0, ranks=1, zero_stage=0):
        write_shard(typed[name], begin, elements, Copies())
    with set_current_vllm_config(config), torch.inference_mode():
        transfer.prepare(version, str(path))
        while not transfer.prepared():
            time.sleep(0.001)
        transfer.start_weight_update()
        transfer.update_weights({"version": version, "path": str(path)})
        transfer.finish_weight_update()


KERNEL = " kernel"


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, and each packed kernel's output for the same input."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            sizes = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
            width = next(filter(None, sizes))
            inputs = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
            yield f"{name}{KERNEL}", layer.cpu_linear(inputs, layer.weight, None)


def loads_of(transfer: ReplicaTransferEngine) -> list[str]:
    """The names of the tensors that vLLM loads."""
    return [name for name, _ in transfer.named_tensors({slot.name: torch.empty(slot.shape) for slot in transfer.slots})]


def rotary_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in model.named_buffers():
        if name.endswith("cos_sin_cache") and not name.startswith("vis"):  # only for language models
            yield name, buffer[POSITION].chunk(2)[0].float()


def trainers_rotary(model: Any) -> list[torch.Tensor]:
    """The cosines of the trainer's rotary embeddings, for each kind of layer with separate ones."""
    rotary = getattr(model.base_model, "language_model", model.base_model).rotary_emb
    states, positions = torch.zeros(1, 1, 1), torch.tensor([[POSITION]])
    kinds = {name.removesuffix("_inv_freq") for name, _ in rotary.named_buffers()} - {"inv_freq"}
    kinds = {kind for kind in kinds if not kind.endswith("original")}
    found = [rotary(states, positions, kind)[0] for kind in kinds] or [rotary(states, positions)[0]]
    return [cosines.flatten()[: cosines.numel() // 2].float() for cosines in found]


if __name__ == "__main__":
    main()
