"""The relative error of a float32 product in a Triton kernel, as attention computes it: prints one number.

In its own process and file: Triton reads its environment once, and the source of kernels from files.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 64


@triton.jit  # type: ignore[untyped-decorator]
def product(left, right, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = left @ right, of size × size numbers."""
    offsets = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + offsets, tl.dot(tl.load(left + offsets), tl.load(right + offsets)))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU only with TRITON_INTERPRET
    left, right = torch.randn(2, SIZE, SIZE, device=device)
    out = torch.empty_like(left)
    product[(1,)](left, right, out, SIZE)
    exact = left.double() @ right.double()
    print(float((out.double() - exact).abs().max() / exact.abs().max()))


if __name__ == "__main__":
    main()
