"""The full weights of a model that ZeRO-3 has sharded over the ranks. Below stage 3 every rank has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch

from asyncrl_cli.train.model.lora import PlainWeight, plain_weights

LAYER = re.compile(r".*?\.\d+\.")
"""The front of a weight's name up to the number of its layer, such as `model.layers.3.`"""


@contextmanager
def gathered(parameters: list[torch.Tensor], zero_stage: int) -> Iterator[None]:
    """Full parameters inside the block; a collective call under ZeRO-3."""
    if zero_stage < 3 or not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


@contextmanager
def replaced(parameters: list[torch.Tensor], zero_stage: int) -> Iterator[None]:
    """As ``gathered``; after the block all ranks have rank 0's values."""
    if zero_stage < 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


def full_weights(model: torch.nn.Module, zero_stage: int) -> Iterator[PlainWeight]:
    """The weights of a model, each complete until the next is taken. Collective: all ranks take all of them."""
    for layer in by_layer(plain_weights(model)):
        with gathered([part for weight in layer for part in weight.parts], zero_stage), torch.no_grad():
            for weight in layer:
                yield weight if weight.experts is None else PlainWeight(weight.name, weight.experts.gathered(), None)


def by_layer(weights: Iterable[PlainWeight]) -> Iterator[list[PlainWeight]]:
    """The weights in their order: those of one transformer layer together, to be gathered at once, others alone."""
    for _, layer in groupby(weights, _layer_name):
        yield list(layer)


def _layer_name(weight: PlainWeight) -> str:
    found = LAYER.match(weight.name)
    return weight.name if found is None else found[0]
