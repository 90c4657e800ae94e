"""The critic: a value network that learns what reward to expect from each token on.

It has the policy's architecture and initial weights, and a linear head to one number, which begins at 0. It is a
DeepSpeed engine of its own beside the policy's, trained with the same micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train.model.policy import predicting_states
from asyncrl_cli.train.packing import PaddedRows


class ValueModel(nn.Module):
    """A transformer that answers with values."""

    def __init__(self, backbone: Any, packing: bool = False) -> None:
        """``packing``: as in ``Policy``."""
        super().__init__()
        self.backbone = backbone
        self.packing = packing
        width = backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, bias=False, dtype=backbone.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """Values, float32 [rows, tokens]: what is expected before a token under ``response_mask`` is known; else 0.

        Arguments are as those of ``Policy``.
        """
        hidden = predicting_states(self.backbone, input_ids, response_mask, self.packing)
        values = self.head(hidden)[:, 0].float()
        return torch.zeros(response_mask.shape, device=values.device).masked_scatter(response_mask, values)


def start_critic(trainer: TrainerSpec, model_dir: str, load_universal: bool = False) -> Critic:
    """A critic whose transformer has the weights in ``model_dir``; collective.

    ``load_universal``: whether the checkpoint that it will load is a universal one.
    """
    from asyncrl_cli.train.deepspeed_engine import initialize, load_model

    model = ValueModel(load_model(trainer, model_dir).base_model, trainer.packing)
    return Critic(initialize(model, trainer, load_universal))


@dataclass(frozen=True, slots=True)
class Critic:
    """A DeepSpeed engine round a ``ValueModel``."""

    engine: Any

    def values(self, padded: PaddedRows) -> Tensor:
        """As ``ValueModel.forward``, of a micro-batch."""
        values: Tensor = self.engine(padded.input_ids, padded.response_mask)
        return values
