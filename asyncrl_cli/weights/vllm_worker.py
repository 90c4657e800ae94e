"""The engine's end of a weight transfer, inside vLLM's worker process.

vLLM imports this module as its ``worker_extension_cls``; importing it registers the transport and ties the
process's life to its parent's. Loading goes through vLLM's own layerwise reload, so kernels that keep
repacked copies of a weight are rebuilt too.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl_cli.system.process_tree import die_with
from asyncrl_cli.weights.mapping import WeightMapping

BACKEND = "asyncrl_mapping"


@dataclass
class MappingInitInfo(WeightTransferInitInfo):
    """What ``WeightMapping.describe`` returns."""

    path: str
    slots: list[dict[str, Any]]


@dataclass
class MappingUpdateInfo(WeightTransferUpdateInfo):
    """The checksum that the mapped bytes must have."""

    checksum: str


class MappingTransferEngine(WeightTransferEngine[MappingInitInfo, MappingUpdateInfo]):
    """Loads the model from a ``WeightMapping``."""

    init_info_cls = MappingInitInfo
    update_info_cls = MappingUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: MappingInitInfo) -> None:
        self.mapping = WeightMapping.open(init_info.path, init_info.slots)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes an accelerator afterwards; a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MappingUpdateInfo) -> None:
        """Load every tensor; raises ``RuntimeError`` when the bytes are not the ones announced."""
        found = self.mapping.checksum()
        if found != update_info.checksum:
            raise RuntimeError(f"the mapped weights have checksum {found}, announced was {update_info.checksum}")
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in self.mapping.tensors())

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        # vLLM's CPU linear keeps a packed copy of lm_head that the layerwise reload does not see when the
        # weight is tied to the embedding: without this the engine answers with the old head.
        head = getattr(self.model, "lm_head", None)
        if self.device.type != "cpu" or head is None or not hasattr(head, "cpu_linear"):
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        self.__dict__.pop("mapping", None)


class WorkerExtension:
    """Mixed into vLLM's worker; carries no method, its import is what counts."""


die_with(os.getppid())
# Else a progress bar of vLLM, shown or not, makes a named semaphore, which a killed process leaves in /dev/shm.
tqdm.set_lock(threading.RLock())
WeightTransferEngineFactory.register_engine(BACKEND, MappingTransferEngine)
