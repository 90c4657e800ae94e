"""vLLM's own kernels for RMS normalization on CPU engines (decision 0081).

vLLM has these kernels for CPUs too, but its CPU engines without a compiler calculate a normalization with six calls of
PyTorch. Here the kernels are registered as one more implementation of vLLM's operations, and ``IR_OP_PRIORITY`` chooses
them.

Two processes register them: vLLM's worker, which runs them, with ``vllm_sampler``, and the process that makes a
configuration which names them.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops, ir
from vllm.platforms import current_platform

PROVIDER = "asyncrl_cpu"
"""The name of the implementations."""
IR_OP_PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
"""For vLLM's argument of this name. vLLM adds its implementation in PyTorch, for calls that the kernels do not take."""


def register_norms() -> None:
    """Register the kernels in this process, once; on GPUs vLLM has its own."""
    if current_platform.is_cpu() and PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_float32)(rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_all_float32, inplace=True)(fused_add_rms_norm)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """``x`` over its root mean square in the last dimension, times ``weight``; [..., n], float32, as ``x``."""
    # The kernel reads row after row whatever the strides are, and a head's keys are slices of wider rows.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    normed = torch.empty_like(rows)
    _custom_ops.rms_norm(normed, rows, weight, epsilon)
    return normed.view(x.shape)


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum: [..., n], float32. They are written into ``x`` and ``x_residual``."""
    _custom_ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _float32(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether the kernel calculates what the trainer's model does. In bfloat16 the model rounds before it multiplies by
    the weight, and the kernel afterwards."""
    return weight is not None and variance_size is None and x.dtype == weight.dtype == torch.float32


def _all_float32(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    contiguous = x.is_contiguous() and x_residual.is_contiguous()
    return contiguous and x_residual.dtype == torch.float32 and _float32(x, weight, epsilon, variance_size)
