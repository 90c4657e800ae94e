"""The policy as the trainer sees it: token ids in, log-probabilities of the response tokens out.

Only positions that predict a response token reach the output head, and ``head.py`` keeps their logits from existing at
once. With packing the rows go through the model one after another in one sequence, without padding; what goes in and
what comes out is the same, so nothing else knows of it.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from asyncrl_cli.train.head import Entropy, score_tokens


class Policy(nn.Module):
    """A causal language model that answers with log-probabilities instead of logits."""

    def __init__(self, model: Any, temperature: float, packing: bool = False) -> None:
        """``packing``: rows are joined in one sequence, in which each begins at position 0 and sees itself alone."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.packing = packing

    @overload
    def forward(self, input_ids: Tensor, response_mask: Tensor) -> Tensor: ...
    @overload
    def forward(
        self, input_ids: Tensor, response_mask: Tensor, entropy: Literal["measure", "train"]
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, input_ids: Tensor, response_mask: Tensor, entropy: Entropy = "none"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities (float32, nats, [rows, tokens]) of the tokens under ``response_mask``, else 0.

        ``input_ids``: int64 [rows, tokens], padded on the right; ``response_mask``: bool, same shape, never
        true at position 0. Right padding needs no attention mask: under causal attention no response token
        sees what comes after it.

        With ``entropy`` the entropies (as log-probabilities in shape, dtype and unit) of the distributions that the
        tokens were drawn from come second; ``train`` lets gradients flow through them, ``measure`` does not.
        """
        predicts = response_mask[:, 1:]
        hidden = (self._packed if self.packing else self._padded)(input_ids[:, :-1], predicts)
        logprobs, entropies = score_tokens(
            self.model.get_output_embeddings(),
            hidden,
            input_ids[:, 1:][predicts],
            self.model.config.get_text_config().vocab_size,
            self.temperature,
            entropy,
        )
        nothing = torch.zeros(response_mask.shape, dtype=logprobs.dtype, device=input_ids.device)
        scored = nothing.masked_scatter(response_mask, logprobs)
        return scored if entropy == "none" else (scored, nothing.masked_scatter(response_mask, entropies))

    def _padded(self, input_ids: Tensor, predicts: Tensor) -> Tensor:
        """Hidden states where a response token is predicted, [response tokens, width], row by row."""
        return self._hidden(input_ids)[predicts]

    def _packed(self, input_ids: Tensor, predicts: Tensor) -> Tensor:
        """As ``_padded``; each row up to its last prediction, as nothing after that is read."""
        places = torch.arange(predicts.shape[1], device=predicts.device).expand_as(predicts)
        last = places.mul(predicts).amax(dim=1, keepdim=True)
        kept = places <= last
        hidden = self._hidden(input_ids[kept][None], position_ids=places[kept][None])
        return hidden[0][predicts[kept]]

    def _hidden(self, input_ids: Tensor, **positions: Tensor) -> Tensor:
        states: Tensor = self.model.base_model(input_ids=input_ids, use_cache=False, **positions).last_hidden_state
        return states
