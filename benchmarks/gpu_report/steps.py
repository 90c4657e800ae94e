"""Training steps in this process, without engines: a profile of one, and the same rows with other settings."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from trainer import start

from asyncrl_cli.checks.memory import microbatch_text
from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.sizing.microbatch import is_auto
from gpu_report.numerics import timed
from gpu_report.runs import Bench
from gpu_report.specs import alone, qwen_spec, resolved, spec_of, timed_spec, with_offload, write_random_model

if TYPE_CHECKING:
    from asyncrl_cli.train.precompute import Learner

GROUP_SIZE = 8
MEAN_RESPONSE = {"cuda": 102, "cpu": 20}
"""Tokens of a response in the timed runs, in the mean; their distribution is geometric."""
MICROBATCHES = {"cuda": (16384, 65536), "cpu": (2048, 4096)}
"""Tokens of a usual and of a large micro-batch."""
QWEN_MICROBATCHES = {"cuda": (18432, 36864), "cpu": (512, 1024)}
QWEN_ROWS = {"cuda": ((16, 2300), (4, 9000)), "cpu": ((16, 40), (4, 150))}
"""Responses and the tokens of each: every entry is a batch."""
TIMED_STEPS = 3
LISTED = 10
"""Kernels and gaps in a profile."""


class Variant(NamedTuple):
    """Changes of a spec, by key."""

    name: str
    changes: tuple[str, ...] = ()


def variants(tokens: int, large_tokens: int) -> tuple[Variant, ...]:
    """The settings to compare, with two sizes of micro-batches. A spec without one of the keys or values is refused,
    and the variant is reported as not run.

    Fused kernels come last, because liger-kernel changes a model type for the whole process.
    """
    fa4, fused = "trainer.attention=flash_attention_4", "trainer.fused_kernels=true"
    sdpa, varlen = "trainer.attention=sdpa", "trainer.attention=varlen"
    size, large = (f"trainer.tokens_per_microbatch={count}" for count in (tokens, large_tokens))
    kept = "trainer.gradient_checkpointing=false"
    auto = ("trainer.tokens_per_microbatch=auto", "trainer.gradient_checkpointing=auto")
    return (
        Variant("sdpa, recomputed", (sdpa, size, "trainer.gradient_checkpointing=true")),
        Variant("sdpa", (sdpa, size, kept)),
        Variant("varlen", (varlen, size, kept)),
        Variant("varlen, large", (varlen, large, kept)),
        Variant("auto", auto),
        Variant("flash_attention_4", (fa4, size, kept)),
        Variant("flash_attention_4, large", (fa4, large, kept)),
        Variant("sdpa, large", (sdpa, large, kept)),
        Variant("sdpa, fused kernels", (sdpa, size, kept, fused)),
        Variant("varlen, large, fused kernels", (varlen, large, kept, fused)),
        Variant("auto, fused kernels", (*auto, fused)),
    )


def compare_settings(bench: Bench) -> dict[str, Any]:
    """Train the timed run's rows with each variant."""
    settings, batch = alone(timed_spec(bench.device, "async"), bench.device), timed_batch(bench.device)
    return compare(bench, settings, variants(*MICROBATCHES[bench.device]), {"": batch})


def compare_qwen_settings(bench: Bench) -> dict[str, Any]:
    """Train rows of several lengths with the shape of Qwen3-4B; first check that the model fits the GPU."""
    settings = alone(qwen_spec(bench.device, bench.out / "qwen"), bench.device)
    tokens, large_tokens = QWEN_MICROBATCHES[bench.device]
    if bench.device == "cuda":
        settings["trainer"] |= {"gradient_checkpointing": True, "tokens_per_microbatch": tokens}
        settings = with_offload(settings, bench.gpu_bytes)
    batches = {
        f"rows of {length:,} tokens": random_batch(np.full((1, rollouts), length), prompt=16, vocabulary=500)
        for rollouts, length in QWEN_ROWS[bench.device]
    }
    choices = [variant for variant in variants(tokens, large_tokens) if variant.name != "sdpa, large"]
    offload = settings["trainer"].get("offload", "none")
    return {"offload": offload, **compare(bench, settings, choices, batches)}


def profile(bench: Bench) -> dict[str, Any]:
    """One step of the timed rows under torch.profiler: how long the device works, its kernels, and its pauses."""
    import torch

    from asyncrl_cli.train.step import train_batch

    settings = alone(timed_spec(bench.device, "async"), bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    folder, batch = bench.out / "models" / bench.part, timed_batch(bench.device)
    prepare(settings, bench.device, folder)
    with learner(settings, folder) as rank:
        train_batch(rank, batch)  # compiles kernels
        with torch.profiler.profile(activities=activities) as profiler:
            report = train_batch(rank, batch)
    events = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name.lower() == bench.device and not event.is_user_annotation()
    ]
    busy_ns, gaps_ns = busy_time([(begin, end) for _, begin, end in events])
    totals: Counter[str] = Counter()
    for name, begin, end in events:
        totals[name] += end - begin
    return {
        "device": device_speeds(bench.device),
        "seconds": report.seconds,
        "share of time in which the device works": busy_ns / 1e9 / report.seconds,
        "kernels" if bench.device == "cuda" else "operations": len(events),
        "longest pauses ms": [round(gap / 1e6, 3) for gap in sorted(gaps_ns, reverse=True)[:LISTED]],
        "longest kernels": [f"{total / 1e6:10.2f} ms  {name[:100]}" for name, total in totals.most_common(LISTED)],
    }


def busy_time(spans: Iterable[tuple[int, int]]) -> tuple[int, list[int]]:
    """Return the length of the union of spans (begin, end), and the gaps between them."""
    busy, gaps, last_end = 0, [], None
    for begin, end in sorted(spans):
        if last_end is not None and begin > last_end:
            gaps.append(begin - last_end)
        busy += max(0, end - (begin if last_end is None else max(begin, last_end)))
        last_end = end if last_end is None else max(last_end, end)
    return busy, gaps


def device_speeds(device: str) -> dict[str, float]:
    """What limits small operations: the time of a launch, the bandwidth of an eager RMSNorm, and products by width."""
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    gpu = device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    scalar, rows, launches = torch.zeros(1, device=device), 16384 if gpu else 256, 1000

    def launch() -> None:
        for _ in range(launches):
            scalar.add_(1)

    speeds = {"launch µs": 1e6 * timed(launch, device) / launches}
    states, norm = torch.randn(rows, 1024, device=device, dtype=dtype), Qwen3RMSNorm(1024).to(device, dtype)
    with torch.no_grad():
        speeds["RMSNorm GB/s"] = 2 * states.nbytes / 1e9 / timed(lambda: norm(states), device)
    for width in (1024, 2560):
        states = torch.randn(rows, width, device=device, dtype=dtype)
        weight = torch.randn(width, 4 * width, device=device, dtype=dtype)
        seconds = timed(lambda states=states, weight=weight: states @ weight, device)
        speeds[f"TFLOP/s, width {width}"] = 8 * rows * width**2 / 1e12 / seconds
    return speeds


@contextmanager
def learner(settings: Mapping[str, Any], folder: Path, changes: Sequence[str] = ()) -> Iterator[Learner]:
    """A single rank with the model in ``folder`` and a spec's settings. Raises ``SpecError`` for unknown changes."""
    import torch

    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner

    spec = spec_of(dict(settings), *changes)
    if is_auto(spec.trainer):
        spec, _ = resolved(spec)
    gc.collect()  # the rank before, which an error may have kept alive
    if spec.trainer.gpus_per_rank:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = start(spec, folder, joined=torch.distributed.is_initialized())
    try:
        yield Learner(spec, 0, Objective.of(spec.algorithm, folder), engine, SkipLimit(10))
    finally:
        engine.destroy()


def prepare(settings: Mapping[str, Any], device: str, folder: Path) -> None:
    """Set this process up as a trainer's, and write the model."""
    from asyncrl_cli.train.deepspeed_engine import trainer_environment

    spec = spec_of(dict(settings))
    os.environ.update(trainer_environment(spec))
    write_random_model(spec, device, folder)


def compare(
    bench: Bench, settings: Mapping[str, Any], choices: Iterable[Variant], batches: Mapping[str, TrainingBatch]
) -> dict[str, Any]:
    """Train the batches with each choice of settings, a case of the report. ``batches``: by a name for their figures,
    empty if there is only one.

    Returns the fastest choice. Raises ``RuntimeError`` if none could be trained.
    """
    folder = bench.out / "models" / bench.part
    prepare(settings, bench.device, folder)
    seconds: dict[str, float] = {}

    def measure(variant: Variant) -> dict[str, Any]:
        with learner(settings, folder, variant.changes) as rank:
            figures = implementation(rank)
            for name, batch in batches.items():
                batch_figures = speed(rank, batch)
                seconds[variant.name] = seconds.get(variant.name, 0.0) + batch_figures["s"]
                figures |= {name: batch_figures} if name else batch_figures
        return figures

    for variant in choices:
        if bench.case(variant.name, partial(measure, variant)) is None:
            seconds.pop(variant.name, None)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    if not seconds:
        raise RuntimeError("no setting could be trained")
    return {"fastest": min(seconds, key=seconds.__getitem__)}


def implementation(rank: Learner) -> dict[str, Any]:
    """How a rank really computes: a key of the spec may have been ignored, replaced or chosen."""
    model = rank.engine.module.model
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    forward = norms[0].forward
    return {
        "attention": model.config._attn_implementation,
        "norms by": getattr(forward, "__module__", type(norms[0]).__module__).partition(".")[0],
        "passes of": microbatch_text(rank.spec.trainer),
    }


def speed(rank: Learner, batch: TrainingBatch) -> dict[str, Any]:
    """Train a batch a few times: its speed, and the positions that the model computes for each real token."""
    import torch

    from asyncrl_cli.train.step import train_batch

    model, gpu = rank.engine.module.model, rank.engine.device.type == "cuda"
    passes: list[int] = []  # positions of each forward pass; recomputation does not look up embeddings again
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: passes.append(inputs[0].numel()))
    reports = []
    for _ in range(1 + TIMED_STEPS):  # the first one compiles kernels
        passes.clear()
        reports.append(train_batch(rank, batch))
    hook.remove()
    report = sorted(reports[1:], key=lambda report: report.seconds)[TIMED_STEPS // 2]
    figures: dict[str, Any] = {
        "tokens/s": round(report.trained_tokens / report.seconds),
        "s": report.seconds,
        "micro-batches": len(passes),
        "computed per real token": sum(passes) / report.computed_tokens,
        "loss": report.metrics["train/loss"],
    }
    if report.peak_flops is not None:
        figures["MFU of updates"] = report.flops / report.update_s / report.peak_flops
        figures["MFU of the step"] = report.flops / report.seconds / report.peak_flops
    if gpu:
        figures["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def timed_batch(device: str) -> TrainingBatch:
    """A batch with the number and the lengths of the rows of the timed runs."""
    limits = timed_spec(device, "async")
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / MEAN_RESPONSE[device], (limits["pipeline"]["groups_per_step"], GROUP_SIZE))
    return random_batch(lengths.clip(2, limits["rollout"]["max_response_tokens"]), prompt=8)


def random_batch(lengths: NDArray[Any], prompt: int, vocabulary: int = 90, seed: int = 0) -> TrainingBatch:
    """Groups of random rollouts with these ``lengths`` [groups, rollouts], and a prompt of ``prompt`` tokens for each
    group."""
    random = np.random.default_rng(seed)

    def rollout(name: str, prompt_ids: tuple[int, ...], length: int) -> Rollout:
        return Rollout(
            random.integers(3, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, -4.5, np.float32),
            versions=np.zeros(length, np.int32),
            rollout_id=name,
            prompt_ids=prompt_ids,
            text="",
            finish_reason="stop",
        )

    groups = []
    for group, group_lengths in enumerate(lengths.tolist()):
        prompt_ids = tuple(random.integers(3, vocabulary, prompt).tolist())
        rollouts = tuple(rollout(f"{group}-{index}", prompt_ids, length) for index, length in enumerate(group_lengths))
        rewards = tuple(float(index % 2) for index in range(len(rollouts)))
        groups.append(TrainingGroup(group, "uid", 0, rollouts, rewards))
    return TrainingBatch(0, 0, tuple(groups))
