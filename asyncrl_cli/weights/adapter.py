"""vLLM's end of a weight transfer that brings adapters alone: they take the place of the former ones in vLLM's slots.

vLLM itself joins the matrices of layers that it fuses, and takes each worker's part under tensor parallelism. The slots
keep their memory, so captured CUDA graphs see the new adapter, and so do requests that run: they name the one adapter
that there is (decision 0057).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from asyncrl_cli.weights.vllm_worker import ReplicaInitInfo, ReplicaTransferEngine

ADAPTER_ID = 1


def adapter_request() -> LoRARequest:
    """What every request of the policy carries. vLLM would look for the path if it had no adapter of this id."""
    return LoRARequest("policy", ADAPTER_ID, "published by the trainer")


@dataclass
class AdapterInitInfo(ReplicaInitInfo):
    """``rank`` and ``alpha`` are those of the spec."""

    rank: int
    alpha: float


class AdapterTransferEngine(ReplicaTransferEngine):
    """Loads adapters from the host's replica, on any device: they are made ready while the engine generates."""

    init_info_cls = AdapterInitInfo

    def init_transfer_engine(self, init_info: ReplicaInitInfo) -> None:
        super().init_transfer_engine(init_info)
        assert isinstance(init_info, AdapterInitInfo)
        self.helper = PEFTHelper(r=init_info.rank, lora_alpha=init_info.alpha, target_modules=[])
        self.names = [slot["name"] for slot in init_info.slots]

    def unserved(self) -> list[str]:
        """The layers of adapters that vLLM would ignore."""
        manager = self._manager
        served = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        empty = dict.fromkeys(self.names, torch.empty(0))
        return sorted(self._adapter(empty).loras.keys() - served)

    def _prepare(self, version: int, path: str) -> NextAdapter:
        with self.replica.open(path, version) as tensors:
            # Copies: vLLM scales the matrices in place, and these are the replica's own.
            adapter = self._adapter({name: tensor.clone() for name, tensor in tensors.items()})
        return NextAdapter(self._manager, adapter, self.device)

    def _adapter(self, tensors: Mapping[str, torch.Tensor]) -> LoRAModel:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            dict(tensors),
            self.helper,
            device="cpu",
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    @property
    def _manager(self) -> LRUCacheLoRAModelManager:
        model: Any = self.model
        manager = model.lora_manager
        assert isinstance(manager, LRUCacheLoRAModelManager)
        return manager


class NextAdapter:
    """An adapter in host memory, to take the place of the one in vLLM's slots."""

    def __init__(self, manager: LRUCacheLoRAModelManager, adapter: LoRAModel, device: torch.device) -> None:
        self._manager = manager
        self._adapter = adapter
        self._device = device

    def install(self) -> None:
        """Exchange the adapters, while the model computes nothing."""
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(self._adapter)
        self._manager.activate_adapter(ADAPTER_ID)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # before the engine computes with them

    def clear(self) -> None:
        """vLLM keeps the adapter that it serves."""
