"""The policy as the trainer sees it: token ids in, log-probabilities of the response tokens out.

Only positions that predict a response token reach the output head, and they reach it in chunks that are
recomputed in the backward pass, so the logits of a whole batch never exist at once: at most
``HEAD_CHUNK`` × vocabulary numbers do, per pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEAD_CHUNK = 4096
"""Positions that go through the output head together."""


class Policy(nn.Module):
    """A causal language model that answers with log-probabilities instead of logits."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """Log-probabilities (float32, nats, [rows, tokens]) of the tokens under ``response_mask``, else 0.

        ``input_ids``: int64 [rows, tokens], padded on the right; ``response_mask``: bool, same shape, never
        true at position 0. Right padding needs no attention mask: under causal attention no response token
        sees what comes after it.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        predicts = response_mask[:, 1:]
        hidden = hidden[:, :-1][predicts]
        targets = input_ids[:, 1:][predicts]
        chunks = [
            self._head(hidden_chunk, target_chunk)
            if hidden.shape[0] <= HEAD_CHUNK or not torch.is_grad_enabled()
            else checkpoint(self._head, hidden_chunk, target_chunk, use_reentrant=False)
            for hidden_chunk, target_chunk in zip(
                torch.split(hidden, HEAD_CHUNK), torch.split(targets, HEAD_CHUNK), strict=True
            )
        ]
        logprobs = torch.zeros(response_mask.shape, dtype=torch.float32, device=input_ids.device)
        return logprobs.masked_scatter(response_mask, torch.cat(chunks))

    def _head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature
        return -nn.functional.cross_entropy(logits, targets, reduction="none")
