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
        hidden = predicting_states(self.model.base_model, input_ids, response_mask, self.packing)
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


def predicting_states(backbone: Any, input_ids: Tensor, response_mask: Tensor, packing: bool) -> Tensor:
    """Hidden states of the positions before response tokens, [response tokens, width], row by row.

    ``backbone`` is a transformers model without its head; the other arguments are as those of ``Policy``.
    """
    ids, predicts = input_ids[:, :-1], response_mask[:, 1:]
    if not packing:
        padded: Tensor = backbone(input_ids=ids, use_cache=False).last_hidden_state
        return padded[predicts]
    # A row's last token, and what comes after the last that counts, is read by none.
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    kept = places <= places.mul(predicts).amax(dim=1, keepdim=True)
    packed: Tensor = backbone(
        input_ids=ids[kept][None], position_ids=places[kept][None], use_cache=False
    ).last_hidden_state
    return packed[0][predicts[kept]]
