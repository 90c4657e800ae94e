"""A weight version of a large model: bytes, tensors, chunks, and the times to plan, to name and to check them.

    python benchmarks/weight_plan.py [--only NAME]

The models are built without memory (torch's meta device), and versions have the layout of a run: bfloat16, a shard for
each trainer rank. Below the table are rates of this machine, with one thread each: a copy in memory, BLAKE3, and the
allocation of a host's replica. ``weight_movers.py`` measures transfers between processes.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import header, row

from asyncrl_cli.weights.layout import TensorSlot, chunks_of, plan_slots, size_of
from asyncrl_cli.weights.manifest import Manifest
from asyncrl_cli.weights.replica import Replica, digest_of

GB = 1e9
COPIED_BYTES = 2**28
SLOTS = (TensorSlot("weights", "bfloat16", (COPIED_BYTES // 2,), 0, 2),)
"""The layout of a version that is copied."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, given by the settings that determine its size, and the number of trainer ranks."""

    ranks: int
    architecture: str
    settings: dict[str, Any]


CASES = {
    "7B": Case(
        4,
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "32B": Case(
        16,
        "qwen3",
        {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "235B-A22B": Case(
        64,
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
        },
    ),
}


def slots_of(case: Case) -> tuple[TensorSlot, ...]:
    """The layout of a version of the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.architecture, tie_word_embeddings=False, **case.settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return plan_slots((name, torch.bfloat16, tuple(weight.shape)) for name, weight in model.named_parameters())


def seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
    """The duration of a call, and its result."""
    began = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - began, result


def case_row(name: str, case: Case) -> str:
    """A row of the table."""
    slots = slots_of(case)
    chunks_of.cache_clear()
    plan_s, chunks = seconds(chunks_of, slots, case.ranks)
    again_s, _ = seconds(chunks_of, slots, case.ranks)
    manifest = Manifest(0, slots, case.ranks, tuple(f"{chunk.index:064x}" for chunk in chunks))
    name_s, _ = seconds(lambda: manifest.checksum)
    weights = sum(slot.numel for slot in slots)
    return row(
        f"{name}, {case.ranks} ranks",
        f"{weights / GB:.2f}",
        f"{size_of(slots) / GB:.1f}",
        f"{len(slots):,}",
        f"{len(chunks):,}",
        f"{sum(len(chunk.ranges) for chunk in chunks):,}",
        f"{plan_s:.2f}",
        f"{again_s * 1e3:.1f}",
        f"{len(pickle.dumps(manifest)) / 1e6:.1f}",
        f"{name_s * 1e3:.0f}",
    )


def rates() -> Iterator[str]:
    """Sentences about this machine."""
    source, target = memoryview(bytearray(b"w" * COPIED_BYTES)), memoryview(bytearray(COPIED_BYTES))
    for what, work in (
        ("a copy in memory, one thread", lambda: target.__setitem__(slice(None), source)),
        ("BLAKE3, one thread", lambda: digest_of([source])),
    ):
        yield f"{what}: {COPIED_BYTES / min(seconds(work)[0] for _ in range(5)) / GB:.1f} GB/s"
    replica = Replica(SLOTS, 1)
    allocating_s, _ = seconds(replica.begin, 0)
    replica.close()
    yield f"a host's memory for two versions, allocated: {2 * COPIED_BYTES / allocating_s / GB:.1f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), help="one model")
    only = parser.parse_args().only
    counts = ("weights, 10⁹", "GB", "tensors", "chunks", "ranges")
    print(header("model", *counts, "plan s", "plan again ms", "manifest MB", "name ms"))
    for name, case in CASES.items():
        if only in (None, name):
            print(case_row(name, case), flush=True)
    print()
    for sentence in rates():
        print(sentence)


if __name__ == "__main__":
    main()
