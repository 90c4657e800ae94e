"""Compare fused kernels with transformers' functions in Triton's interpreter: the program of test_fused_kernels.py.

TRITON_INTERPRET=1 python fused_one.py

A process of its own: Triton reads the variable when it is imported, and liger-kernel changes transformers' modules.
Prints the replaced modules of each architecture, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[2]))

from asyncrl_cli.train.model.gpu_kernels import FUSED_SWIGLU, fuse_kernels
from tests.small_models import small_model


def complete_interpreter() -> None:
    """Add what the kernels need and the interpreter lacks: float32 tensors for numbers, and CUDA's function."""
    from liger_kernel.ops import rms_norm

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # noqa: PLW0108 - each launch replaces ``tl.rsqrt``


def computed(model: Any) -> tuple[torch.Tensor, ...]:
    """Logits and all gradients for two short rows, one with positions as in a packed row."""
    ids = torch.arange(12).reshape(2, 6) * 7 % 96
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])).logits
    logits.square().mean().backward()
    return logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())


def replaced_modules(architecture: str) -> dict[str, int]:
    """Compare a model before and after ``fuse_kernels``; returns the number of its fused modules by name."""
    torch.manual_seed(0)
    model = small_model(architecture)
    for tensor in model.state_dict().values():
        tensor.mul_(0.1)  # with weights around 1, attention saturates, and a rounding error grows a thousandfold
    expected = computed(model)
    fuse_kernels(model)
    for fused, original in zip(computed(model), expected, strict=True):
        torch.testing.assert_close(fused, original, rtol=0, atol=1e-4 * original.abs().max().item())
    rotary = import_module(type(model).__module__).apply_rotary_pos_emb.__name__
    names = [module._get_name() for module in model.modules()]
    return Counter([rotary, *(name for name in names if name.startswith("Liger"))])


if __name__ == "__main__":
    complete_interpreter()
    print(json.dumps({architecture: replaced_modules(architecture) for architecture in FUSED_SWIGLU}))
