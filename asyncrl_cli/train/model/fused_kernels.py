"""Kernels of liger-kernel (`trainer.fused_kernels`): a norm, the rotary embedding and SwiGLU become one kernel each."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from asyncrl_cli.core.errors import ConfigError

KEY = "trainer.fused_kernels"
PACKAGE, INSTALL = "liger-kernel", "pip install liger-kernel==0.8.5"
FUSED_SWIGLU = {"llama": True, "qwen2": True, "qwen3": True, "qwen3_moe": False}
"""Supported model types, and whether SwiGLU is replaced as well. For experts it is not: liger-kernel's kernel adds up
their outputs and gradients by atomic operations, so in no fixed order, and a replay would not repeat the weights."""


def check_package() -> None:
    """Raise ``ConfigError`` unless liger-kernel is installed."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(
            f"fused kernels need the package {PACKAGE}, which is not installed",
            location=KEY,
            hint=f"{INSTALL}, or set it to false",
        ) from None


def check_fused_model(config: Any) -> None:
    """Raise ``ConfigError`` unless the kernels compute the same function as a model with this config."""
    reason = ""
    if config.model_type not in FUSED_SWIGLU:
        reason = f"is not one of {', '.join(FUSED_SWIGLU)}"
    elif config.hidden_act not in ("silu", "swish"):  # liger-kernel would replace any activation by SwiGLU's
        reason = f"is activated by {config.hidden_act}, and not by silu"
    if reason:
        message = f"no fused kernels for this model: its type, {config.model_type}, {reason}"
        raise ConfigError(message, location=KEY, hint="set it to false")


def fuse_kernels(model: Any) -> None:
    """Make a loaded model compute with the kernels. Its weights stay as they are, also if they are sharded.

    This changes transformers' module of the model type, so it applies to every model of the type in this process.
    Raises ``ConfigError`` like the checks above.
    """
    check_fused_model(model.config)
    check_package()
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
