"""Kernels from other packages: flash attention (`trainer.attention`) and liger-kernel (`trainer.fused_kernels`).

Nothing heavy is imported before a rank uses them, so a start can check its GPUs and packages.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from asyncrl_cli.core.errors import ConfigError


class Flash(NamedTuple):
    """One version's requirements."""

    package: str | None  # None: torch has the kernel
    install: str
    majors: range  # major compute capabilities of supported GPUs
    gpus: str


VERSIONS = {
    "varlen": Flash(None, "", range(8, 100), "Ampere or newer"),
    "flash_attention_2": Flash(
        "flash-attn", "pip install flash-attn --no-build-isolation", range(8, 100), "Ampere or newer"
    ),
    "flash_attention_3": Flash(
        "flash-attn-3",
        "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130",
        range(8, 10),
        "Ampere, Ada or Hopper (such as A100, H100)",
    ),
    "flash_attention_4": Flash(
        "flash-attn-4", "pip install flash-attn-4==4.0.0b36", range(9, 100), "Hopper or Blackwell (such as H100, B200)"
    ),
}
FUSED_SWIGLU = {"llama": True, "qwen2": True, "qwen3": True, "qwen3_moe": False}
"""Model types with fused kernels, and whether SwiGLU is replaced as well. For experts it is not: liger-kernel's kernel
adds up their outputs and gradients by atomic operations, so in no fixed order, and a replay would not repeat the
weights."""


def check_attention(attention: str, major: int | None) -> None:
    """Raise ``ConfigError`` unless this machine can compute ``attention`` (`trainer.attention`).

    ``major``: the GPU's major compute capability; None: unknown.
    """
    needs = VERSIONS.get(attention)
    if needs is None:
        return
    if major is not None and major not in needs.majors:
        raise ConfigError(
            f"{attention} is for {needs.gpus}, and this GPU has compute capability {major}.x",
            location="trainer.attention",
            hint="use sdpa, or varlen on GPUs from Ampere on",
        )
    if needs.package is not None:
        _check_package(needs.package, "trainer.attention", f"{needs.install}, or use sdpa")


def check_fused_package() -> None:
    """Raise ``ConfigError`` unless liger-kernel is installed."""
    _check_package("liger-kernel", "trainer.fused_kernels", "pip install liger-kernel==0.8.5, or set it to false")


def _check_package(package: str, location: str, hint: str) -> None:
    try:
        version(package)
    except PackageNotFoundError:
        message = f"needs the package {package}, which is not installed"
        raise ConfigError(message, location=location, hint=hint) from None


def check_fused_model(config: Any) -> None:
    """Raise ``ConfigError`` unless the kernels compute the same function as a model with this config."""
    reason = ""
    if config.model_type not in FUSED_SWIGLU:
        reason = f"is not one of {', '.join(FUSED_SWIGLU)}"
    elif config.hidden_act not in ("silu", "swish"):  # liger-kernel would replace any activation by SwiGLU's
        reason = f"is activated by {config.hidden_act}, and not by silu"
    if reason:
        message = f"no fused kernels for this model: its type, {config.model_type}, {reason}"
        raise ConfigError(message, location="trainer.fused_kernels", hint="set it to false")


def fuse_kernels(model: Any) -> None:
    """Make a loaded model compute a norm, the rotary embedding and SwiGLU in one kernel each.

    Its weights stay as they are, also if they are sharded. This changes transformers' module of the model type, so it
    applies to every model of the type in this process. Raises ``ConfigError`` like the checks above.
    """
    check_fused_model(model.config)
    check_fused_package()
    from liger_kernel.backends import set_impl
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # By default liger-kernel may take the rotary embedding from CUTLASS, which is in the GPU lock for other packages.
    set_impl("nvidia-triton")
    _apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        swiglu=FUSED_SWIGLU[model.config.model_type],
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
