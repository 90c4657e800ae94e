"""The engine's end of a weight transfer, inside vLLM's worker process.

vLLM imports this module as its ``worker_extension_cls``; importing it registers the transport and ties the
process's life to its parent's. Loading goes through vLLM's own layerwise reload, so kernels that keep
repacked copies of a weight are rebuilt too.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
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
from asyncrl_cli.weights.layout import TensorSlot
from asyncrl_cli.weights.mapped import MappedReplica

BACKEND = "asyncrl_replica"


@dataclass
class ReplicaInitInfo(WeightTransferInitInfo):
    """The layout: what ``TensorSlot`` has, of each tensor."""

    slots: list[dict[str, Any]]


@dataclass
class ReplicaUpdateInfo(WeightTransferUpdateInfo):
    """A version that is complete on this host, and the path of its memory."""

    version: int
    path: str


class ReplicaTransferEngine(WeightTransferEngine[ReplicaInitInfo, ReplicaUpdateInfo]):
    """Loads the model from the host's replica. The agent has checked the bytes: nothing is computed over them here."""

    init_info_cls = ReplicaInitInfo
    update_info_cls = ReplicaUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ReplicaInitInfo) -> None:
        self.replica = MappedReplica(tuple(TensorSlot(**slot) for slot in init_info.slots))
        self.reading = ExitStack()

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes an accelerator afterwards; a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReplicaUpdateInfo) -> None:
        """Load every tensor; raises ``ReplicaGone`` when the memory is of another version by now."""
        self.reading.close()  # of an update that failed
        # Until ``finish_weight_update``: the layerwise reload reads some tensors no earlier, such as padded ones.
        tensors = self.reading.enter_context(self.replica.open(update_info.path, update_info.version))
        # Views of the shared memory: a tensor-parallel loader takes its part before it copies to the device.
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # before the memory is given back
        self.reading.close()

    def _repack_tied_head(self) -> None:
        # vLLM's CPU linear keeps a packed copy of lm_head that the layerwise reload does not see when the
        # weight is tied to the embedding: without this the engine answers with the old head.
        head = getattr(self.model, "lm_head", None)
        if self.device.type != "cpu" or head is None or not hasattr(head, "cpu_linear"):
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        self.__dict__.pop("replica", None)


class WorkerExtension:
    """Mixed into vLLM's worker; carries no method, its import is what counts."""


die_with(os.getppid())
# Else a progress bar of vLLM, shown or not, makes a named semaphore, which a killed process leaves in /dev/shm.
tqdm.set_lock(threading.RLock())
WeightTransferEngineFactory.register_engine(BACKEND, ReplicaTransferEngine)
