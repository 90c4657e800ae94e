"""Sequence parallelism: the ranks of a sequence group train the same rows, and each has a slice of the positions.

DeepSpeed's Ulysses (arXiv 2309.14509; ALST, arXiv 2506.13996): everything in a layer except attention is computed per
position, so a rank computes it for its slice. Around attention, ``UlyssesSPAttentionHF`` exchanges slices of positions
for shares of the heads, and back: each rank attends over the full sequence with its share of the heads. We do not use
DeepSpeed's ``register_with_transformers``, because it drops masks: rows packed without flash attention would see each
other, and sliding windows would have no end (decision 0055).

Invariants. Every rank of a group runs the same passes in the same order. The slices' results are joined
(``SequenceGroup.joined``) before anything else sees them, so every rank has the loss of the full rows. The gradient
flows only through the rank's own slice: the gradients of a group's ranks add up to the gradient of a single rank with
the full rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.rules.model import sequence_parallel_problems
from asyncrl_cli.spec.sections import TrainerSpec

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers."""


class SequenceError(ConfigError):
    """The model's sequences cannot be divided over ranks."""

    def __init__(self, reason: str, hint: str = "set it to 1, or use another model") -> None:
        super().__init__(reason, location="trainer.sequence_parallel", hint=hint)


ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings with frequencies that depend on the given positions, and would be wrong for a slice."""


def check_config(config: Any, size: int) -> None:
    """Raise ``SequenceError`` when ``size`` ranks cannot divide the sequences of a model with this config."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    for problem in sequence_parallel_problems(heads, getattr(text, "num_key_value_heads", None) or heads, size):
        raise SequenceError(problem.message, problem.hint)
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # one set, or one for each kind of layer
        rope_type = str(settings.get("rope_type")) if isinstance(settings, dict) else ""
        if size > 1 and any(name in rope_type for name in ROPE_BY_LENGTH):
            raise SequenceError(f"rotary embeddings of type {rope_type} depend on a sequence's length")


class SequenceGroup:
    """The ranks that have the same rows, as seen by one of them.

    Attributes:
        size: number of ranks in the group.
        rank: this rank's number in the group.
        data: the ranks with the same slice of other rows; a step's sums are taken over these.
    """

    def __init__(self, ranks: Any, data: Any) -> None:
        """``ranks``, ``data``: process groups."""
        self.size: int = torch.distributed.get_world_size(ranks)
        self.rank: int = torch.distributed.get_rank(ranks)
        self.data = data
        self._ranks = ranks
        self._full = False
        self._layers = 0

    def joined(self, values: Tensor, local: Tensor, count: int) -> Tensor:
        """Return the values of all slices, [count]; collective. Gradients flow only through this rank's values.

        ``values``: this rank's values, [m]; ``local``, int64 [m], has their indices.
        """
        all_values = torch.zeros(count, dtype=values.dtype, device=values.device).scatter(0, local, values.detach())
        torch.distributed.all_reduce(all_values, group=self._ranks)
        return all_values.scatter(0, local, values)

    def local_states(self, backbone: Any, ids: Tensor, positions: Tensor | None, **attention_arguments: Any) -> Tensor:
        """Return the hidden states of this rank's slice of the positions, [rows, slice, width]. Collective.

        ``backbone``: a transformers model without its head. ``ids``: int64 [rows, positions]. ``positions``: for packed
        rows, like ``ids``; None: 0, 1, 2, ...
        """
        from transformers.masking_utils import create_masks_for_generate

        padding = -ids.shape[1] % self.size
        ids = nn.functional.pad(ids, (0, padding))
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if positions is None:
            positions = columns
        else:
            positions = torch.cat([positions, positions[:, -1:] + 1 + columns[:, :padding]], dim=1)
        # Masks of the full sequences, because attention is over these. By itself the model would mask its slice.
        masks = create_masks_for_generate(
            config=backbone.config,
            inputs_embeds=torch.empty(*ids.shape, 0, dtype=backbone.dtype, device=ids.device),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        self._layers = 0
        states: Tensor = backbone(
            input_ids=self.local_slice(ids),
            attention_mask=masks,
            position_ids=self.local_slice(positions),
            use_cache=False,
            **attention_arguments,
        ).last_hidden_state
        layers = backbone.config.get_text_config().num_hidden_layers
        if self._layers != layers:
            raise SequenceError(
                f"{layers - self._layers} of the {layers} layers of this {backbone.config.model_type} mix positions "
                "by other means than attention"
            )
        return states

    def local_slice(self, matrix: Tensor) -> Tensor:
        """Return this rank's slice of a matrix [rows, positions, ...]; zeros extend it to slices of equal length."""
        padding = -matrix.shape[1] % self.size
        full = nn.functional.pad(matrix, (0, 0) * (matrix.ndim - 2) + (0, padding)) if padding else matrix
        return full.chunk(self.size, dim=1)[self.rank].contiguous()

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Inside the block, each rank passes the full rows through the model by itself.

        Only for passes without a gradient: gradient checkpointing would compute activations after the block.
        """
        self._full = True
        try:
            yield
        finally:
            self._full = False

    def share_attention(self, implementation: str) -> None:
        """Make transformers' attention of this name, in this process, attend over a group's full sequences."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[implementation] = partial(self._attend, ALL_ATTENTION_FUNCTIONS[implementation])

    def _attend(
        self, core: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """``query``, ``key``, ``value``: [rows, heads, positions, head size]; result: [rows, positions, ...]."""
        if self._full:
            return core(module, query, key, value, mask, **kwargs)
        self._layers += 1
        rows, heads, positions, size = query.shape
        if mask is not None and mask.shape[-1] != positions * self.size:
            raise SequenceError("this model makes its own attention masks, which cover only a slice")
        if kwargs.get("position_ids") is None:
            raise SequenceError("this model does not pass positions to attention")
        if any(kwargs.get(name) is not None for name in ("s_aux", "position_bias")):
            raise SequenceError("attention of this model has weights for each head, which are not divided")
        # Ulysses needs values of the keys' size, but latent attention (DeepSeek) has smaller values.
        padding = size - value.shape[-1]
        ulysses = _ulysses(core, ranks=self._ranks, rows=rows, heads=heads, size=size, kv_heads=key.shape[1])
        groups = getattr(module, "num_key_value_groups", None)
        attended, weights = ulysses(module, query, key, nn.functional.pad(value, (0, padding)), mask, **kwargs)
        if groups is not None:  # DeepSpeed sets it for a share of the heads, but passes with all heads use it, too
            module.num_key_value_groups = groups
        return attended.view(rows, positions, heads, size)[..., : size - padding], weights


@cache
def _ulysses(core: Attention, ranks: Any, rows: int, heads: int, size: int, kv_heads: int) -> Any:
    """DeepSpeed's module, without weights, for one shape of micro-batch."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF(
        attn=core,
        batch_size=rows,
        attn_head_count=heads,
        attn_head_size=size,
        kv_head_count=kv_heads,
        num_hidden_layers=1,  # read only by its debug mode
        process_group=ranks,
        seq_length_is_variable=True,
    )


def sequence_group(trainer: TrainerSpec) -> SequenceGroup | None:
    """Return this rank's group of ``trainer.sequence_parallel`` consecutive ranks; None if it is alone.

    The first call in a process is collective over all ranks, and changes attention for every model in the process.
    """
    return _started(trainer.sequence_parallel, trainer.attention) if trainer.sequence_parallel > 1 else None


def data_group(trainer: TrainerSpec) -> Any:
    """Return the process group for sums over a step, in which every row counts once. None: all ranks."""
    sequence = sequence_group(trainer)
    return None if sequence is None else sequence.data


@cache
def _started(size: int, attention: str) -> SequenceGroup:
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    shape = (torch.distributed.get_world_size() // size, size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))
    group = SequenceGroup(mesh.get_group("sequence"), mesh.get_group("data"))
    group.share_attention(attention)
    return group
