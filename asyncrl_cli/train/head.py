"""The output head: log-probabilities and entropies of tokens without the logits of all of them.

Positions go through the head in chunks. Invariant: no tensor here has more than ``HEAD_NUMBERS`` numbers, or those of
one position where a vocabulary is larger than that. A chunk's logits live once, in float32: they become
log-probabilities in place, and those become the logits' gradient in place. With more than one chunk each is computed
again in the backward pass, so that one of them lives at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HEAD_NUMBERS = 2**25
"""Logits that exist at a time: 128 MiB in float32."""

BLOCK_NUMBERS = 2**18
"""Numbers of a block, in which entropies are summed: the probabilities of a chunk never exist beside its logits."""

Entropy = Literal["none", "measure", "train"]
"""Whether entropies are wanted: not at all, as numbers, or with a gradient."""


def score_tokens(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    vocabulary: int,
    temperature: float,
    entropy: Entropy = "none",
) -> tuple[Tensor, Tensor]:
    """Score the tokens that follow positions.

    Args:
        head: the output layer's module, from [positions, width] to new logits [positions, vocabulary]. Its weights get
            their gradient, and its hooks run, as it is called as a module is.
        hidden: [positions, width]; gradients flow through it.
        targets: int64, [positions]; the token whose log-probability is wanted at each.
        vocabulary: number of logits of a position.
        temperature: logits are divided by it.
        entropy: whether entropies are wanted.

    Returns:
        log softmax(logits / temperature) at ``targets``, and the entropy of that distribution, H = −Σ p log p: nats,
        [positions], float32 (float64 for float64 logits). Entropies are zeros when they are not wanted.
    """

    def score(hidden_chunk: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor]:
        scores: Any = _Scores.apply
        scored: tuple[Tensor, Tensor] = scores(head(hidden_chunk), target_chunk, temperature, entropy)
        return scored

    rows = max(1, HEAD_NUMBERS // vocabulary)
    again = torch.is_grad_enabled() and hidden.shape[0] > rows
    chunks = [
        checkpoint(score, *chunk, use_reentrant=False) if again else score(*chunk)
        for chunk in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _Scores(torch.autograd.Function):
    """Log-probabilities and entropies of one chunk, which takes the logits' memory for itself.

    With z the scaled logits and p their softmax, for token y: d log p_y / dz = 1_y − p and dH / dz = −p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: Entropy) -> Any:
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if temperature != 1.0:
            logits.div_(temperature)
        # Every row is read before it is written, so it can be its own output.
        logs = torch.log_softmax(logits, dim=-1, out=logits)
        logprobs = logs.gather(-1, targets[:, None]).squeeze(-1)
        entropies = torch.zeros_like(logprobs)
        if entropy != "none":
            for block, summed in zip(_blocks(logs), torch.split(entropies, _block_rows(logs)), strict=True):
                torch.sum(block.exp().mul_(block).neg_(), dim=-1, out=summed)
        if entropy != "train":
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(logs, targets, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor) -> Any:
        logs, targets, entropies = ctx.saved_tensors
        logprob_gradient = logprob_gradient / ctx.temperature
        if ctx.entropy == "train":
            entropy_gradient = entropy_gradient / ctx.temperature
            parts = [torch.split(each, _block_rows(logs)) for each in (entropies, entropy_gradient, logprob_gradient)]
            for block, bits, by_entropy, by_logprob in zip(_blocks(logs), *parts, strict=True):
                factor = block.add(bits[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
                block.exp_().mul_(factor).neg_()
        else:
            logs.exp_().mul_(-logprob_gradient[:, None])
        gradient = logs.scatter_add_(-1, targets[:, None], logprob_gradient[:, None])
        return gradient, None, None, None


def _block_rows(logs: Tensor) -> int:
    return max(1, BLOCK_NUMBERS // logs.shape[-1])


def _blocks(logs: Tensor) -> tuple[Tensor, ...]:
    return torch.split(logs, _block_rows(logs))
