"""On GPUs: the copies that load a version, recorded once from the model's own weight loaders.

vLLM's layerwise reload runs each tensor's loader twice in Python and makes each layer again, all of it in the pause. If
a model's layers keep nothing but their tensors, only the loaders' copies matter. They are the same for every version
(decision 0052).

Invariant: a plan writes each element that the reload writes exactly once, from the same element of the version.
Otherwise ``CopyPlan`` raises ``NoCopyPlan``, and every version is reloaded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain, pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig

from asyncrl_cli.weights.engine_layers import layers_are_plain, with_own_weights
from asyncrl_cli.weights.layout import ByteRange


class NoCopyPlan(Exception):
    """Copies alone do not load the model. The message gives the reason."""


class _Region(NamedTuple):
    """Elements of a version's memory, as arguments of ``Tensor.set_``."""

    dtype: torch.dtype
    offset: int  # elements
    shape: torch.Size
    strides: tuple[int, ...]


class CopyPlan:
    """Loads versions that all have the layout of the recorded one."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        memory: torch.UntypedStorage,
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Record the copies of ``tensors`` (views of ``memory``, by checkpoint name). Nothing is written, so the model
        may compute at the same time. Raises ``NoCopyPlan``."""
        if not layers_are_plain(model):
            raise NoCopyPlan("a layer keeps more than its unquantized tensors")
        vllm_model: Any = model  # unlike other modules it has ``load_weights``
        with _Recorder(memory) as recorder:
            vllm_model.load_weights(tensors)
        _check_coverage(model, model_config, [*(target for target, _ in recorder.copies), *recorder.constants])

        def needs_mode(copy: tuple[Tensor, Tensor]) -> bool:
            return copy[0].dtype != copy[1].dtype or not copy[1].is_contiguous()

        self._model, self._addresses = model, _addresses(model)
        copies = sorted(recorder.copies, key=needs_mode)
        self._targets = [target for target, _ in copies]
        self._regions = [_Region(s.dtype, s.storage_offset(), s.shape, s.stride()) for _, s in copies]
        self._contiguous_copies = len(copies) - sum(map(needs_mode, copies))

    def sources(self, memory: torch.UntypedStorage) -> list[Tensor]:
        """The views of a version's ``memory`` to copy from."""
        return [torch.empty(0, dtype=dtype).set_(memory, *region) for dtype, *region in self._regions]

    @torch.no_grad()
    def copy(self, sources: list[Tensor], loads: AbstractContextManager[object]) -> None:
        """Begin the copies from ``sources``. ``loads``: see ``Copies.loads``."""
        count = self._contiguous_copies  # the others need the help of ``loads``
        if count:
            torch._foreach_copy_(self._targets[:count], sources[:count], non_blocking=True)
        with loads:
            for target, source in zip(self._targets[count:], sources[count:], strict=True):
                target.copy_(source)

    @torch.no_grad()
    def agrees(self, sources: list[Tensor]) -> bool:
        """True if the model still has its recorded memory, with exactly the bits that ``copy`` would write. Compares on
        the CPU, because a GPU may have no memory for a second embedding."""
        if _addresses(self._model) != self._addresses:
            return False
        expected = (source.to(target.dtype) for target, source in zip(self._targets, sources, strict=True))
        return all(starmap(torch.equal, zip(map(_bits, self._targets), map(_bits, expected), strict=True)))


class _Recorder(TorchDispatchMode):
    """Records copies from ``memory`` and constants, instead of writing them. Refuses all operations but views, because
    they may compute what a copy would not."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory.data_ptr()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.constants: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.fill_.Scalar:  # padding; the first reload has written it
            self.constants.append(args[0])
        elif func is torch.ops.aten.copy_.default and self._is_load(*args[:2]):
            self.copies.append((args[0], args[1]))
        else:
            raise NoCopyPlan(f"a weight loader calls {func}")
        return args[0]

    def _is_load(self, target: Tensor, source: Tensor) -> bool:
        target_memory, source_memory = (tensor.untyped_storage().data_ptr() for tensor in (target, source))
        return source_memory == self._memory != target_memory and source.shape == target.shape


def _check_coverage(model: nn.Module, model_config: ModelConfig, targets: Iterable[Tensor]) -> None:
    """Raise ``NoCopyPlan`` unless ``targets`` write each tensor wholly and once. Only tensors that may lack weights
    may be left out."""
    writes = sorted(map(_address_range, filter(torch.Tensor.numel, targets)))
    if any(write.stop > next_write.start for write, next_write in pairwise(writes)):
        raise NoCopyPlan("two weights are loaded into the same elements")
    required = {
        parameter.data_ptr()
        for layer in with_own_weights(model, model_config)
        for parameter in layer.parameters(recurse=False)
    }
    written_bytes = 0
    for address, (name, tensor) in {
        tensor.data_ptr(): (name, tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }.items():
        start, stop = (bisect_left(writes, (edge,)) for edge in (address, address + tensor.nbytes))
        nbytes = sum(write.stop - write.start for write in writes[start:stop])
        if nbytes not in (0, tensor.nbytes) or (nbytes and not tensor.is_contiguous()):
            raise NoCopyPlan(f"{nbytes} of the {tensor.nbytes} bytes of {name} are loaded")
        if not nbytes and tensor.nbytes and address in required:
            raise NoCopyPlan(f"no weights come for {name}")
        written_bytes += nbytes
    if written_bytes != sum(write.stop - write.start for write in writes):
        raise NoCopyPlan("a weight is loaded into a tensor that is not the model's")


def _addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def _address_range(target: Tensor) -> ByteRange:
    if not target.is_contiguous():
        raise NoCopyPlan("a weight is loaded into scattered elements")
    return ByteRange(target.data_ptr(), target.data_ptr() + target.nbytes)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
