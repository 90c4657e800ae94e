"""vLLM's end of a transfer that brings only adapters, which replace the previous ones in vLLM's slots.

vLLM itself joins the matrices of fused layers, and takes each worker's part under tensor parallelism. The slots keep
their memory, so captured CUDA graphs and running requests use the new adapter: all requests name the same adapter
(decision 0053).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from asyncrl_cli.weights.vllm_worker import ReplicaInitInfo, ReplicaTransferEngine, ReplicaUpdateInfo

ADAPTER_ID = 1


def adapter_request() -> LoRARequest:
    """The LoRA request for every request to the policy. vLLM reads the path only if it has no adapter with this id."""
    return LoRARequest("policy", ADAPTER_ID, "published by the trainer")


@dataclass
class AdapterInitInfo(ReplicaInitInfo):
    """The layout, and the adapter's rank and alpha from the spec."""

    rank: int
    alpha: float


class AdapterTransferEngine(ReplicaTransferEngine):
    """Loads adapters from the host's replica, on any device. They are prepared while the engine generates."""

    init_info_cls = AdapterInitInfo

    def init_transfer_engine(self, init_info: ReplicaInitInfo) -> None:
        super().init_transfer_engine(init_info)
        assert isinstance(init_info, AdapterInitInfo)
        self.helper = PEFTHelper(r=init_info.rank, lora_alpha=init_info.alpha, target_modules=[])
        self.adapter: Future[LoRAModel]
        self.names = [matrix.name for slot in self.slots for matrix in slot.parts or (slot,)]

    def unserved(self) -> list[str]:
        """The adapters' layers that vLLM would ignore."""
        manager = self._manager
        served = {layer for name in manager.modules for layer in manager.packed_modules.get(name, [name])}
        empty = dict.fromkeys(self.names, torch.empty(0))
        return sorted(self._adapter(empty).loras.keys() - served)

    def prepare(self, version: int, path: str) -> Future[Any]:
        """Begin to read the adapter of ``version`` while the engine generates."""

        def read_adapter() -> LoRAModel:
            with self.replica.open(path, version) as tensors:
                # Copies: vLLM scales the matrices in place, which would change the replica.
                return self._adapter({name: tensor.clone() for name, tensor in self.named_tensors(tensors)})

        self.adapter = self.thread.submit(read_adapter)
        return self.adapter

    def prepared(self) -> bool:
        """True if the adapter is read. Raises ``ReplicaGone`` if the memory now has another version."""
        return self.adapter.done() and self.adapter.result() is not None

    # During an update vLLM calls the next three, and at its end removes all adapters, because they belong to other
    # weights. The model's own weights do not change, and ``install`` follows.
    def start_weight_update(self) -> None: ...
    def receive_weights(self, update_info: ReplicaUpdateInfo) -> None: ...
    def finish_weight_update(self) -> None: ...

    def install(self) -> None:
        """Have the model use the prepared adapter. Call it while the model computes nothing."""
        self._manager.add_adapter(self.adapter.result())
        self._manager.activate_adapter(ADAPTER_ID)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # before the engine computes with it

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
