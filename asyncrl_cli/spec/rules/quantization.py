"""Rules of engines that compute with other numbers than the trainer publishes."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule
from asyncrl_cli.spec.sections import ExperimentSpec

FP8_ENGINES = {
    "quantization": ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
    "kv_cache_dtype": ("fp8", "fp8_e4m3"),
}
"""The values of vLLM's arguments with which engines make FP8 of every published version; vLLM's other
quantizations read a checkpoint that was quantized before, or are too coarse for log-probs to agree."""
EXACT = {"quantization": (), "kv_cache_dtype": ("auto", "bfloat16")}
"""Those that change no numbers."""


def fp8_arguments(spec: ExperimentSpec) -> dict[str, object]:
    """The entries of `rollout.engine_args` that make engines compute in FP8, or in other formats, by name."""
    own = {name.strip("-").replace("-", "_").lower(): value for name, value in spec.rollout.engine_args.items()}
    return {name: own[name] for name in FP8_ENGINES if own.get(name) is not None and own.get(name) not in EXACT[name]}


@rule
def fp8_engines(spec: ExperimentSpec) -> Iterator[Problem]:
    """In `rollout.engine_args`, `quantization` and `kv_cache_dtype` may be FP8 for engines on GPUs, with
    `rollout.dtype: bfloat16` and a correction of the difference to the trainer."""
    for name, value in fp8_arguments(spec).items():
        path, allowed = f"rollout.engine_args.{name}", ", ".join(FP8_ENGINES[name])
        correction = spec.algorithm.correction
        if value not in FP8_ENGINES[name]:
            message = f"{value!r} cannot work: engines must compute with what the trainer publishes"
            yield Problem(path, message, f"remove it, or use one of {allowed} on GPU engines")
        elif not spec.rollout.gpus_per_engine:
            message = f"{value!r} cannot work: vLLM's CPU engines do not compute in FP8"
            yield Problem(path, message, "remove it, or use engines on GPUs (rollout.gpus_per_engine)")
        elif spec.rollout.dtype != "bfloat16":
            yield Problem("rollout.dtype", f"engines with {name} {value} need bfloat16", "set it to bfloat16")
        elif correction.level is None and correction.reject_by is None and correction.proximal != "behaviour":
            message = f"missing: tokens are sampled in FP8 ({name}), and trained as if they were not"
            yield Problem("algorithm.correction.level", message, "use the preset truncated")
