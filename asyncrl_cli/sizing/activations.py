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


class Pass(NamedTuple):
    """A micro-batch, and the settings that determine its memory."""

    rows: int
    length: int
    positions: int  # positions that predict a response token, in all rows together
    recompute: bool  # trainer.gradient_checkpointing
    dtype: str  # trainer.dtype
    attention: str  # trainer.attention; flash attention is counted as sdpa, which is fused as well
    lora: LoraSpec | None = None
    masked: bool = False  # rows share prefixes: each is a tree, with a mask of all pairs of its positions
    images: bool = False  # the model sees images; its vision tower is not counted
    chunk: int | None = None  # logits that the head computes at a time; None: as on a CPU


def activation_bytes(config: Any, kinds: Sequence[object], trained: Pass) -> int:
    """Return the peak bytes of one micro-batch, without weights and complete gradients.

    Args:
        config: the model's transformers config.
        kinds: one value per layer, in order; equal values mean equal shapes.

    Raises an error of transformers or torch if the model's code needs the values of its tensors.
    """
    # ``first``: number of layers before the last kind begins, such as DeepSeek-V3's dense layers. From there on the
    # kinds repeat after ``period`` layers.
    first = next(index for index, kind in enumerate(kinds) if kind == kinds[-1])
    rest = kinds[first:]
    period = next(p for p in range(1, len(rest) + 1) if all(a == b for a, b in zip(rest, rest[p:], strict=False)))
    short, long = first + period, first + 2 * period
    if long >= len(kinds):
        return _trace(config, len(kinds), trained)
    least = _trace(config, short, trained)
    return least + (_trace(config, long, trained) - least) * (len(kinds) - short) // period


def _trace(config: Any, layers: int, trained: Pass) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from asyncrl_cli.train.deepspeed_engine import recompute_activations
    from asyncrl_cli.train.model.chunked_logprobs import chunked_logprobs
    from asyncrl_cli.train.model.image_models import model_class

    with FakeTensorMode(), _experts_without_routing(), torch.random.fork_rng(devices=[]):
        model: Any = model_class(trained.images).from_config(
            shortened(config, layers),
            attn_implementation="eager" if trained.attention == "eager" else "sdpa",
            dtype=getattr(torch, trained.dtype),
        )
        if trained.recompute:
            recompute_activations(model)
        if trained.lora is not None:
            _adapt(model, trained.lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        ids = torch.zeros(trained.rows, trained.length, dtype=torch.long)
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            given = {"attention_mask": _mask(config, trained)} if trained.masked else {}
            states = model.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state
            predicting = states.flatten(0, 1)[: trained.positions]
            targets = torch.zeros(len(predicting), dtype=torch.long)
            logprobs, _ = chunked_logprobs(
                model.get_output_embeddings(), hidden=predicting, targets=targets, temperature=1.0, most=trained.chunk
            )
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return int(live.peak)


def _mask(config: Any, trained: Pass) -> Any:
    """Like ``TreeLayout.masks``; None for a model whose rows cannot form trees."""
    from asyncrl_cli.train.prefix_trees import windows_of

    text = config.get_text_config()
    windows = windows_of(text)
    if windows is None:
        return None
    shape = (trained.rows, 1, trained.length, trained.length)
    masks = {kind: torch.zeros(shape, dtype=getattr(torch, trained.dtype)) for kind in windows}
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
        self.base, self.scale = layer, lora.alpha / lora.rank
        self.first = torch.nn.Linear(layer.in_features, lora.rank, bias=False, dtype=layer.weight.dtype)
        self.second = torch.nn.Linear(lora.rank, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(states) + self.second(self.first(states)) * self.scale
        return added


def _adapt(model: Any, lora: LoraSpec) -> None:
    model.requires_grad_(False)
    wanted = None if isinstance(lora.target_modules, str) else tuple(f".{name}" for name in lora.target_modules)
    for name, layer in list(model.named_modules()):
        is_wanted = layer is not model.get_output_embeddings() and (wanted is None or f".{name}".endswith(wanted))
        if isinstance(layer, torch.nn.Linear) and is_wanted:
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
        now: bytes alive now.
        peak: most bytes alive at any time.
    """

    def __init__(self, uncounted: Iterable[torch.Tensor] = ()) -> None:
        """``uncounted``: tensors that are not counted, nor their views. This object keeps their storages alive."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self._living = {storage._cdata for storage in self._uncounted}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._living:
            self._living.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, identity: int, nbytes: int) -> None:
        self._living.discard(identity)
        self.now -= nbytes
