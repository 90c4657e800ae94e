"""Rules for engines that quantize the weights that the trainer publishes."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import argument_name, rule
from asyncrl_cli.spec.sections import ExperimentSpec

FP8_ENGINES = {
    "quantization": ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
    "kv_cache_dtype": ("fp8", "fp8_e4m3"),
}
"""Values of vLLM's arguments that make engines convert every published version to FP8. vLLM's other quantizations need
a quantized checkpoint, or are too coarse for the log-probs to agree."""
EXACT = {"quantization": (), "kv_cache_dtype": ("auto", "bfloat16")}
"""Values that do not change how engines compute."""


def fp8_arguments(spec: ExperimentSpec) -> dict[str, object]:
    """Return the entries of `rollout.engine_args` that make engines compute in FP8 or another quantized format."""
    values = {argument_name(argument): value for argument, value in spec.rollout.engine_args.items()}
    return {
        name: values[name]
        for name in FP8_ENGINES
        if values.get(name) is not None and values.get(name) not in EXACT[name]
    }


@rule
def fp8_engines(spec: ExperimentSpec) -> Iterator[Problem]:
    """In `rollout.engine_args`, `quantization` and `kv_cache_dtype` may be FP8 for engines on GPUs, with
    `rollout.dtype: bfloat16` and an off-policy correction (`algorithm.correction`)."""
    for name, value in fp8_arguments(spec).items():
        path, allowed_values = f"rollout.engine_args.{name}", ", ".join(FP8_ENGINES[name])
        correction = spec.algorithm.correction
        if value not in FP8_ENGINES[name]:
            message = f"{value!r} cannot work: engines must compute with the weights that the trainer publishes"
            yield Problem(path, message, f"remove it, or use one of {allowed_values} on GPU engines")
        elif not spec.rollout.gpus_per_engine:
            message = f"{value!r} cannot work: vLLM's CPU engines do not compute in FP8"
            yield Problem(path, message, "remove it, or use engines on GPUs (rollout.gpus_per_engine)")
        elif spec.rollout.dtype != "bfloat16":
            yield Problem("rollout.dtype", f"engines with {name} {value} need bfloat16", "set it to bfloat16")
        elif correction.level is None and correction.reject_by is None and correction.proximal != "behaviour":
            message = f"missing: tokens are sampled in FP8 ({name}), so the trainer's log-probs differ"
            yield Problem("algorithm.correction.level", message, "use the preset truncated")
