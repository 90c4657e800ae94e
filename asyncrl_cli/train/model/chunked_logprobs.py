"""The output head: log-probabilities and entropies of tokens, without all logits in memory.

Positions go through the output layer in chunks. Invariant: except for the layer's weights and their gradient, no tensor
here has more than ``CHUNK_NUMBERS`` numbers (on a GPU ``GPU_CHUNK_NUMBERS``), or one position's if the vocabulary is
larger. A chunk's logits exist once, in float32: they become log-probabilities in place, and these become the logits'
gradient in place. If there are several chunks, each is computed again in the backward pass, so only one exists at a
time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

CHUNK_NUMBERS = 2**25
"""Logits that exist at a time on a CPU: 128 MiB in float32."""
GPU_CHUNK_NUMBERS = 2**27
"""Logits that exist at a time on a GPU: 512 MiB in float32. Each chunk reads and writes the gradient of all weights, so
smaller chunks take longer: an H100 needs 64 ms with 2^25, 35 ms with 2^27 and 33 ms with 2^28 for 4,096 tokens, a
vocabulary of 151,936 and a width of 2,560. A constant, because other chunk sizes add up gradients in another order, and
a replayed step would not have the same bits."""

BLOCK_NUMBERS = 2**18
"""Numbers in a block, the unit in which a CPU sums entropies. A block stays in the cache, and a chunk's probabilities
never exist next to its logits. On a GPU the block is the chunk: with a large vocabulary a block would have a row or
two, and each block costs several kernel launches."""

Entropy = Literal["none", "measure", "train"]
"""Entropies are not computed, computed, or computed with a gradient."""


def chunked_logprobs(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Entropy = "none",
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Score one token at each position.

    Args:
        head: the output layer.
        hidden: [positions, width]; gradients flow through it.
        targets: int64, [positions]; the tokens to score.
        max_logits: logits that exist at a time; None: chosen by the device of ``hidden``.

    Returns:
        log softmax(logits / temperature) at ``targets``, and the entropy of the distribution, H = −Σ p log p: nats,
        [positions], float32 (float64 for float64 logits). Entropies are zeros with ``entropy`` "none".
    """
    apply: Any = _Scores.apply

    def score(hidden: Tensor) -> Any:
        return apply(hidden, head.weight, head.bias, targets, temperature, entropy, max_logits)

    # Called as a module and just once: ZeRO-3's hooks gather its weights for exactly one pass (decision 0019).
    head.forward = score  # type: ignore[method-assign, assignment]
    try:
        logprobs, entropies = head(hidden)
    finally:
        del head.forward
    return logprobs, entropies


class _Scores(torch.autograd.Function):
    """With z the scaled logits and p their softmax, for token y: d log p_y / dz = 1_y − p, dH / dz = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: Entropy,
        max_logits: int | None,
    ) -> Any:
        logprobs, entropies = torch.zeros(2, hidden.shape[0], dtype=_wide(hidden), device=hidden.device)
        max_logits = max_logits or (GPU_CHUNK_NUMBERS if hidden.is_cuda else CHUNK_NUMBERS)
        chunks = _chunks(hidden.shape[0], weight.shape[0], max_logits)
        logs = None
        for chunk in chunks:
            logs = None  # frees the last chunk before the next one is computed
            logs = _logs(hidden[chunk], weight=weight, bias=bias, temperature=temperature)
            logprobs[chunk] = logs.gather(-1, targets[chunk, None])[:, 0]
            if entropy != "none":
                entropies[chunk] = _entropies(logs)
        if entropy != "train":
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, logs if len(chunks) == 1 else None)
        ctx.chunks, ctx.temperature, ctx.entropy = chunks, temperature, entropy
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> Any:
        hidden, weight, bias, targets, entropies, saved_logs = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        # Sums over chunks are at least float32: in bfloat16 they lose half a percent over 32 chunks.
        of_weight = torch.zeros_like(weight, dtype=_wide(weight)) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=_wide(bias)) if needs[2] else None
        by_logprob, by_entropy = by_logprob / ctx.temperature, by_entropy / ctx.temperature
        for chunk in ctx.chunks:
            logs = (
                _logs(hidden[chunk], weight=weight, bias=bias, temperature=ctx.temperature)
                if saved_logs is None
                else saved_logs
            )
            saved_logs = None
            if ctx.entropy == "train":
                for block in _blocks(logs):
                    block_logs = logs[block]
                    factor = block_logs.add(entropies[chunk][block, None]).mul_(by_entropy[chunk][block, None])
                    block_logs.exp_().mul_(factor.add_(by_logprob[chunk][block, None])).neg_()
            else:
                logs.exp_().mul_(-by_logprob[chunk, None])
            logs.scatter_add_(-1, targets[chunk, None], by_logprob[chunk, None])
            gradient = logs.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = gradient @ weight
            if of_weight is not None:
                _add_product(of_weight, gradient=gradient, exact=logs, hidden=hidden[chunk])
            if of_bias is not None:
                of_bias.add_(logs.sum(0))
            del logs, gradient
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _add_product(total: Tensor, gradient: Tensor, exact: Tensor, hidden: Tensor) -> None:
    """Add gradientᵀ · hidden to ``total``, [vocabulary, width], in its dtype. ``exact``: ``gradient`` in this dtype,
    before it was rounded to the dtype of ``hidden``."""
    if hidden.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    elif hidden.is_cuda:  # its bfloat16 units add in float32
        torch.addmm(total, gradient.T, hidden, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(exact.T, hidden.float())


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logs(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Log-probabilities of all tokens, [positions, vocabulary], in the memory of the logits."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        # Like the engine's head (``gpu_args``): logits rounded to bfloat16 are off by up to 0.08 nats.
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = hidden @ weight.T
    if bias is not None:
        logits.add_(bias)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if temperature != 1.0:
        logits.div_(temperature)
    # Every row is read before it is written, so it can be its own output.
    return torch.log_softmax(logits, dim=-1, out=logits)


def _entropies(logs: Tensor) -> Tensor:
    """Entropy of each row of log-probabilities, [positions]."""
    if logs.is_cuda and logs.dtype == torch.float32:
        from asyncrl_cli.train.model.entropy_kernel import row_entropies

        return row_entropies(logs)
    return torch.cat([logs[block].exp().mul_(logs[block]).sum(-1).neg_() for block in _blocks(logs)])


def _blocks(logs: Tensor) -> list[slice]:
    return [slice(0, len(logs))] if logs.is_cuda else _chunks(logs.shape[0], logs.shape[1], BLOCK_NUMBERS)


def _chunks(rows: int, width: int, max_numbers: int) -> list[slice]:
    """Slices of rows with at most ``max_numbers`` numbers, or of one row. Without rows there is none, so a micro-batch
    without tokens calls no kernel, and its gradient is zero."""
    size = max(1, max_numbers // width)
    return [slice(start, start + size) for start in range(0, rows, size)]
