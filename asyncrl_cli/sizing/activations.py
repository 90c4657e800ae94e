"""Memory of a micro-batch's forward and backward pass, counted by running the model's own code.

The policy runs on torch's fake tensors, which have shapes but no memory, and every storage is counted while it lives.
Weights are not counted, and a weight's gradient only until it is complete: ``trainer.py`` counts these. Two short
models are traced; their difference gives the bytes of one more layer.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl_cli.spec.inputs import LoraSpec


class TracedMicrobatch(NamedTuple):
    """A micro-batch, and the settings that determine its memory."""

    rows: int
    length: int
    positions: int  # positions that predict a response token, in all rows together
    recompute: bool  # trainer.gradient_checkpointing
    dtype: str  # trainer.dtype
    attention: str  # trainer.attention; flash attention, with varlen, is counted as sdpa, which is fused as well
    lora: LoraSpec | None = None
    masked: bool = False  # rows share prefixes: each is a tree, with a mask of all pairs of its positions
    images: bool = False  # the model sees images; its vision tower is not counted
    chunk: int | None = None  # logits that the head computes at a time; None: as on a CPU


def activation_bytes(config: Any, layer_kinds: Sequence[object], microbatch: TracedMicrobatch) -> int:
    """Return the peak bytes of one micro-batch, without weights and complete gradients.

    Args:
        config: the model's transformers config.
        layer_kinds: one value per layer, in order; equal values mean equal shapes.

    Raises an error of transformers or torch if the model's code needs the values of its tensors.
    """
    # ``unrepeated_count``: layers before the last kind begins, such as DeepSeek-V3's dense layers. From there on the
    # kinds repeat after ``period`` layers.
    unrepeated_count = next(index for index, kind in enumerate(layer_kinds) if kind == layer_kinds[-1])
    repeated_kinds = layer_kinds[unrepeated_count:]
    period = next(
        length
        for length in range(1, len(repeated_kinds) + 1)
        if all(a == b for a, b in zip(repeated_kinds, repeated_kinds[length:], strict=False))
    )
    short_count, long_count = unrepeated_count + period, unrepeated_count + 2 * period
    if long_count >= len(layer_kinds):
        return _trace(config, len(layer_kinds), microbatch)
    short_bytes = _trace(config, short_count, microbatch)
    return (
        short_bytes
        + (_trace(config, long_count, microbatch) - short_bytes) * (len(layer_kinds) - short_count) // period
    )


def _trace(config: Any, layers: int, microbatch: TracedMicrobatch) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from asyncrl_cli.train.deepspeed_engine import recompute_activations
    from asyncrl_cli.train.model.chunked_logprobs import chunked_logprobs
    from asyncrl_cli.train.model.saving import model_class

    with FakeTensorMode(), _experts_without_routing(), torch.random.fork_rng(devices=[]):
        model: Any = model_class(microbatch.images).from_config(
            shortened(config, layers),
            attn_implementation="eager" if microbatch.attention == "eager" else "sdpa",
            dtype=getattr(torch, microbatch.dtype),
        )
        if microbatch.recompute:
            recompute_activations(model)
        if microbatch.lora is not None:
            _adapt(model, microbatch.lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        ids = torch.zeros(microbatch.rows, microbatch.length, dtype=torch.long)
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            mask_arguments = {"attention_mask": _mask(config, microbatch)} if microbatch.masked else {}
            states = model.base_model(input_ids=ids, use_cache=False, **mask_arguments).last_hidden_state
            predicting = states.flatten(0, 1)[: microbatch.positions]
            targets = torch.zeros(len(predicting), dtype=torch.long)
            logprobs, _ = chunked_logprobs(
                model.get_output_embeddings(),
                hidden=predicting,
                targets=targets,
                temperature=1.0,
                max_logits=microbatch.chunk,
            )
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return int(live.peak)


def _mask(config: Any, microbatch: TracedMicrobatch) -> Any:
    """Like ``TreeLayout.masks``; None for a model whose rows cannot form trees."""
    from asyncrl_cli.train.prefix_trees import windows_of

    text = config.get_text_config()
    windows = windows_of(text)
    if windows is None:
        return None
    shape = (microbatch.rows, 1, microbatch.length, microbatch.length)
    masks = {attention_type: torch.zeros(shape, dtype=getattr(torch, microbatch.dtype)) for attention_type in windows}
    return masks if hasattr(text, "layer_types") else masks.popitem()[1]


def shortened(config: Any, layers: int) -> Any:
    """Return the config with only its first layers; lists with a value per layer are cut as well."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


class _Adapted(torch.nn.Module):
    """Stands for peft's adapted layer, which cannot be made of fake tensors."""

    def __init__(self, layer: torch.nn.Linear, lora: LoraSpec) -> None:
        super().__init__()
        self.base_layer, self.scale = layer, lora.alpha / lora.rank
        self.down_projection = torch.nn.Linear(layer.in_features, lora.rank, bias=False, dtype=layer.weight.dtype)
        self.up_projection = torch.nn.Linear(lora.rank, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states_with_adapter: torch.Tensor = (
            self.base_layer(states) + self.up_projection(self.down_projection(states)) * self.scale
        )
        return states_with_adapter


def _adapt(model: Any, lora: LoraSpec) -> None:
    model.requires_grad_(False)
    name_ends = None if isinstance(lora.target_modules, str) else tuple(f".{name}" for name in lora.target_modules)
    for name, layer in list(model.named_modules()):
        is_adapted = layer is not model.get_output_embeddings() and (
            name_ends is None or f".{name}".endswith(name_ends)
        )
        if isinstance(layer, torch.nn.Linear) and is_adapted:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, _Adapted(layer, lora))
    model.enable_input_require_grads()  # like the trainer


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@contextmanager
def _experts_without_routing() -> Iterator[None]:
    """Inside the block every token goes to the first expert, because fake tensors cannot be routed. The products have
    the same shapes."""
    from transformers.integrations import moe

    original, level = moe._grouped_mm, logging.getLogger("transformers").level
    moe._grouped_mm = lambda input, weight, offs: input @ weight[0]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        yield
    finally:
        moe._grouped_mm = original
        logging.getLogger("transformers").setLevel(level)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations in this context make, as long as the storages live.

    Attributes:
        live_bytes: bytes alive now.
        peak: most bytes alive at any time.
    """

    def __init__(self, uncounted: Iterable[torch.Tensor] = ()) -> None:
        """``uncounted``: tensors that are not counted, nor their views. This object keeps their storages alive."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak = 0
        self._uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self._living = {storage._cdata for storage in self._uncounted}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live_bytes)
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._living:
            self._living.add(storage._cdata)
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, identity: int, nbytes: int) -> None:
        self._living.discard(identity)
        self.live_bytes -= nbytes
