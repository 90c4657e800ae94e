"""The memory estimate of `asyncrl validate-spec --memory`, compared with the memory of ranks and engines on a CPU.

    python benchmarks/memory.py [--only NAME ...] [--engine] [--record FILE]

Each case is a DeepSpeed rank (or two ranks) in a separate process, with gloo: it loads the model, and trains two
updates of two micro-batches of the largest size. The result is the peak of its resident memory (VmHWM), minus its
memory after the imports and one pass of a tiny model, which loads the libraries' kernels. The start is measured
separately: transformers reads the model's file, and its pages count while they are mapped. An engine (`--engine`) is
started with each model, without a publish: the result is the additional memory of its processes, compared with an
engine of the tiny model. `--record` adds the results to a JSON file, such as tests/sizing/measured.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec

QUICKSTART = Path(__file__).parents[1] / "specs/quickstart.yaml"
MB = 10**6
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**19)}
"""Makes the C library return almost all freed memory, which torch's allocator on a GPU can reuse. Then only memory in
use is measured, which the estimate counts. Ranks of a run keep more memory, and are faster (decision 0047)."""
GOAL = 0.15
"""The allowed error of an estimate, as a fraction of the measurement."""
TINY = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
DENSE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "quickstart": ("qwen3", TINY),
    "dense": ("qwen3", DENSE),
    "experts": ("qwen3_moe", EXPERTS),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the trainer's settings that determine its memory."""

    model: str
    stage: int
    ranks: int = 1
    dtype: str = "float32"
    tokens: int = 1024
    recompute: bool = False
    lora: bool = False
    sequence_parallel: int = 1
    expert_parallel: int = 1

    @property
    def name(self) -> str:
        extra = [self.dtype, *(["recompute"] if self.recompute else []), *(["lora"] if self.lora else [])]
        extra += [f"sequence_parallel {self.sequence_parallel}"] if self.sequence_parallel > 1 else []
        extra += [f"expert_parallel {self.expert_parallel}"] if self.expert_parallel > 1 else []
        return f"{self.model}, ZeRO {self.stage}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, {', '.join(extra)}"

    def spec(self, folder: Path) -> ExperimentSpec:
        """The case's spec, with its model in ``folder``."""
        overrides = [
            "trainer.share_prefixes=false",
            f"model.path={folder}",
            f"trainer.zero_stage={self.stage}",
            f"trainer.ranks={self.ranks}",
            f"trainer.sequence_parallel={self.sequence_parallel}",
            f"trainer.expert_parallel={self.expert_parallel}",
            f"trainer.dtype={self.dtype}",
            f"rollout.dtype={self.dtype}",
            f"trainer.tokens_per_microbatch={self.tokens}",
            f"trainer.gradient_checkpointing={str(self.recompute).lower()}",
        ]
        return load_spec(QUICKSTART, [*overrides, *(["model.lora.rank=16"] if self.lora else [])]).spec


CASES = [
    *(Case(model, stage) for model in MODELS for stage in range(4)),
    *(Case(model, stage, lora=True) for model in ("dense", "experts") for stage in range(4)),
    *(Case("dense", stage, ranks=2) for stage in range(4)),
    *(Case("experts", stage, ranks=2) for stage in range(4)),
    Case("dense", 2, ranks=2, lora=True),
    Case("dense", 3, ranks=2, lora=True),
    *(Case("dense", stage, dtype="bfloat16") for stage in range(4)),
    Case("dense", 3, ranks=2, dtype="bfloat16"),
    Case("dense", 3, ranks=2, tokens=2048, sequence_parallel=2),
    Case("experts", 3, ranks=2, expert_parallel=2),
    Case("experts", 3, ranks=2, expert_parallel=2, recompute=True),
    Case("dense", 3, recompute=True),
    Case("experts", 3, recompute=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases whose name has one of these")
    parser.add_argument("--engine", action="store_true", help="the engine instead of trainer ranks")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was measured into this JSON file")
    parser.add_argument("--rank", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(**json.loads(options.rank))
        return
    measured = json.loads(options.record.read_text()) if options.record and options.record.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            write_model(name, Path(folder) / name)
        for kind, results in engines(Path(folder)) if options.engine else ranks(Path(folder), options.only):
            if options.record:
                measured.setdefault(kind, {}).update(results)
                options.record.write_text(json.dumps(measured, indent=1) + "\n")


Result = tuple[str, dict[str, dict[str, Any]]]
"""Update a part of the record with new values, by the name of a case."""


COUNTED: dict[tuple[object, ...], int] = {}
"""Bytes of activations. Counting takes some seconds; the result does not depend on ZeRO and the number of ranks."""


def ranks(folder: Path, only: Sequence[str]) -> Iterator[Result]:
    """Measure the cases with one of the words in their names, and print a table row for each."""
    print("| case | estimated MB | measured MB | off by | at the start MB |\n|-|-|-|-|-|")
    for case in CASES:
        if only and not any(word in case.name for word in only):
            continue
        estimated, activations = estimate(case, folder)
        try:
            peak, start = measure(case, folder)
        except (IndexError, ValueError):
            print(f"| {case.name} | {estimated / MB:,.0f} | failed | | |", flush=True)
            continue
        print(f"| {case.name} | {compared(estimated, peak)} | {start / MB:,.0f} |", flush=True)
        yield "ranks", {case.name: asdict(case) | {"activations": activations, "peak": peak, "start": start}}


def estimate(case: Case, folder: Path) -> tuple[int, int]:
    """The estimated bytes of a rank, and of its activations."""
    from transformers import AutoConfig

    from asyncrl_cli.sizing.model import size_model
    from asyncrl_cli.sizing.trainer import largest_microbatch, rank_uses

    spec = case.spec(folder / case.model)
    model = size_model(spec, AutoConfig.from_pretrained(folder / case.model))
    shape = case.model, case.tokens, case.dtype, case.recompute, case.lora
    if shape not in COUNTED:
        COUNTED[shape] = model.activations(*largest_microbatch(spec), case.recompute)
    model = replace(model, activations=lambda *_: COUNTED[shape])
    return sum(part.bytes for part in rank_uses(spec, model).device), COUNTED[shape]


def measure(case: Case, folder: Path) -> tuple[int, int]:
    """A rank's bytes at its peak and at its start; with several ranks, the largest rank's bytes.

    Raises ``IndexError`` or ``ValueError`` if a rank has failed.
    """
    from asyncrl_cli.train.deepspeed_engine import trainer_environment

    spec = case.spec(folder / case.model)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(case.ranks):
        argument = json.dumps({"case": asdict(case), "folder": str(folder), "rank": rank, "port": port})
        command = [sys.executable, "-W", "ignore", __file__, "--rank", argument]
        processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | trainer_environment(spec) | GIVE_BACK,
            )
        )
    answers = [process.communicate()[0] for process in processes]
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return max(one["peak"] for one in found), max(one["start"] for one in found)


def compared(estimated: int, measured: int) -> str:
    """Cells of a table: both values in MB, and the error of the first."""
    off = estimated / measured - 1
    mark = "" if abs(off) <= GOAL else " (outside)"
    return f"{estimated / MB:,.0f} | {measured / MB:,.0f} | {off:+.0%}{mark}"


def run_rank(case: dict[str, Any], folder: str, rank: int, port: int) -> None:
    """Run one rank of a case, and print its memory."""
    made = Case(**case)
    spec = made.spec(Path(folder) / made.model)
    import deepspeed  # noqa: F401
    import torch

    from asyncrl_cli.train import deepspeed_engine as ds
    from asyncrl_cli.train.nonfinite_guard import backward, step

    torch.set_num_threads(1)
    load_kernels(Path(folder) / "quickstart", made.dtype)
    before = memory("VmRSS")
    listener = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
    ds.join_process_group(rank, made.ranks, "127.0.0.1", port, False, listener)
    engine = ds.start_engine(spec, str(Path(folder) / made.model))
    started = memory("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    ids, mask = largest(spec, engine.module.model.config.vocab_size)
    for _ in range(2):  # the first update creates Adam's moments
        for last in (False, True):
            engine.set_gradient_accumulation_boundary(last)
            logprobs, _ = engine(ids, mask, "measure")
            backward(engine, -logprobs.sum() / ids.numel())
            del logprobs, _
        step(engine)
    print(json.dumps({"peak": memory("VmHWM") - before, "start": started - before}), flush=True)
    os._exit(0)  # otherwise the end of one rank's gloo threads would end the other ranks


def largest(spec: ExperimentSpec, vocabulary: int) -> tuple[Any, Any]:
    """Ids and mask of the largest possible micro-batch of a run of the spec."""
    import torch

    from asyncrl_cli.sizing.trainer import largest_microbatch

    rows, length, positions = largest_microbatch(spec)
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, length - positions // rows :] = True
    return ids, mask


def load_kernels(folder: Path, dtype: str) -> None:
    """Train a tiny model once: libraries load their kernels and start their threads."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=torch.ones(2, 16, dtype=torch.long)).logits.float().log_softmax(-1).sum().backward()
    optimizer.step()


def write_model(name: str, folder: Path) -> None:
    """Write a model with random weights, and a tokenizer."""
    from asyncrl_cli.spec.inputs import ModelInit
    from asyncrl_cli.train.model.initial import write_model_stub, write_weights

    architecture, config = MODELS[name]
    folder.mkdir(parents=True)
    write_model_stub(ModelInit(architecture=architecture, config=config), 256, folder)
    write_weights(folder, seed=0)


def memory(kind: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def engines(folder: Path) -> Iterator[Result]:
    """Measure an engine with each model by the proportional set sizes of its processes, and print a row for each.

    The additional memory, compared with the engine of the first model, is compared with the estimate.
    """
    from transformers import AutoConfig

    from asyncrl_cli.rollout.engine_settings import kv_cache_bytes
    from asyncrl_cli.sizing.engine import engine_uses, token_bytes
    from asyncrl_cli.sizing.model import size_model

    print("| engine | estimated MB | measured MB | off by |\n|-|-|-|-|")
    least = base = 0
    for name in MODELS:
        spec = Case(name, 3).spec(folder / name)
        sized = size_model(spec, AutoConfig.from_pretrained(folder / name))
        # Without a publish there is no memory for the next version.
        parts = [part.bytes for part in engine_uses(spec, sized) if part.name != "next version"]
        estimated = sum(parts) + kv_cache_bytes(spec, token_bytes(spec, sized))
        measured = engine_memory(spec, str(folder / name))
        if not base:
            least, base = estimated, measured
            print(f"| {name} | | {measured / MB:,.0f} in all | |", flush=True)
        else:
            print(f"| {name}, above the first | {compared(estimated - least, measured - base)} |", flush=True)
        yield "engines", {name: {"peak": measured}}


def engine_memory(spec: ExperimentSpec, folder: str) -> int:
    """Bytes of an engine's processes after rollouts in all its slots."""
    program = (
        "import asyncio, json, sys, psutil; from pathlib import Path\n"
        "from asyncrl_cli.rollout.engine import Engine; from asyncrl_cli.spec.load import load_spec\n"
        "async def main():\n"
        "    from vllm import SamplingParams\n"
        "    spec = load_spec(Path(sys.argv[1]), json.loads(sys.argv[2])).spec\n"
        "    engine = Engine(spec, sys.argv[3], own_weights=True)\n"
        "    async def one(n):\n"
        "        params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0, seed=n)\n"
        "        prompt = {'prompt_token_ids': [3] * 32}\n"
        "        async for _ in engine._vllm.generate(prompt, params, request_id=str(n)): pass\n"
        "    await asyncio.gather(*map(one, range(spec.rollout.max_running_rollouts)))\n"
        "    me = psutil.Process()\n"
        "    print('bytes', sum(p.memory_full_info().pss for p in [me, *me.children(recursive=True)]), flush=True)\n"
        "    engine.shutdown()\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    from asyncrl_cli.rollout.engine_settings import engine_environment

    overrides = [
        f"model.path={folder}",
        f"rollout.dtype={spec.rollout.dtype}",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        command = [sys.executable, "-W", "ignore", file.name, str(QUICKSTART), json.dumps(overrides), folder]
        environment = os.environ | engine_environment(spec) | {"PYTHONPATH": str(QUICKSTART.parents[1])}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    # vLLM prints to the same output.
    return int(next(line for line in done.stdout.splitlines() if line.startswith("bytes ")).split()[1])


if __name__ == "__main__":
    main()
