"""The engine's end of a weight transfer, inside vLLM's worker process.

vLLM imports this module as its ``worker_extension_cls``. The import registers the transport, and has the kernel kill
the process when its parent ends. Weights are loaded with vLLM's own layerwise reload, which also rebuilds kernels with
repacked weights. If a model's layers keep nothing else, a GPU repeats the copies of the first load (``copy_plan``).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl_cli.system.process_tree import die_with
from asyncrl_cli.weights.layout import FIRST_EXPERT, first_expert_parts, slot_from
from asyncrl_cli.weights.mapped import MappedReplica, copies_of

if TYPE_CHECKING:
    from asyncrl_cli.weights.copy_plan import CopyPlan

log = logging.getLogger(__name__)

BACKEND = "asyncrl_replica"
ADAPTER_BACKEND = "asyncrl_adapter"


@dataclass
class ReplicaInitInfo(WeightTransferInitInfo):
    """The layout: the fields of each ``TensorSlot``."""

    slots: list[dict[str, Any]]


@dataclass
class ReplicaUpdateInfo(WeightTransferUpdateInfo):
    """A complete version on this host, and the path of its memory."""

    version: int
    path: str


class ReplicaTransferEngine(WeightTransferEngine[ReplicaInitInfo, ReplicaUpdateInfo]):
    """Loads the model from the host's replica. It computes no checksums, because the agent has checked the bytes."""

    init_info_cls = ReplicaInitInfo
    update_info_cls = ReplicaUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ReplicaInitInfo) -> None:
        self.slots = tuple(map(slot_from, init_info.slots))
        self.replica = MappedReplica(self.slots, copies_of(self.device))
        self.experts = _own_experts(self.model)
        self.reading = ExitStack()
        self.thread = ThreadPoolExecutor(1, "weights")
        self.preparing: Future[None]
        self.plans_copies = self.device.type != "cpu"  # until a plan is recorded or refused
        self.plan: CopyPlan | None = None
        self.plan_is_proved = False
        """True once a reload has left exactly the bits that the plan copies. Until then, versions are reloaded."""
        self.sources: list[torch.Tensor] = []  # of the prepared version, for the plan

    def prepare(self, version: int, path: str) -> Future[Any]:
        """Begin the part of an update that needs no pause: map and pin the version's memory, and plan its copies."""
        self.preparing = self.thread.submit(self._plan_copies, version, path)
        return self.preparing

    def _plan_copies(self, version: int, path: str) -> None:
        from asyncrl_cli.weights.copy_plan import CopyPlan, NoCopyPlan

        with self.replica.open(path, version) as tensors:
            memory = next(iter(tensors.values())).untyped_storage()
            if self.plans_copies:
                self.plans_copies = False
                try:
                    self.plan = CopyPlan(self.model, self.model_config, memory, self.named_tensors(tensors))
                except NoCopyPlan as refusal:
                    log.warning("each version is loaded with vLLM's reload, which takes longer: %s", refusal)
            if self.plan is not None:
                self.sources = self.plan.sources(memory)

    def prepared(self) -> bool:
        """True if ``prepare`` is complete. Raises ``ReplicaGone`` if the memory now has another version."""
        if self.preparing.done():
            self.preparing.result()
        return self.preparing.done()

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        from asyncrl_cli.weights.engine_layers import with_own_weights

        if not self.plan_is_proved:
            if self.device.type == "cpu":
                # vLLM packs experts' weights for its CPU kernel only if the layer has no kernel yet. Otherwise it would
                # write unpacked weights into the packed memory, and compute with numbers in the wrong order.
                for layer in self.model.modules():
                    method: Any = getattr(layer, "quant_method", None)
                    if hasattr(method, "moe_kernel"):
                        method.moe_kernel = None
            self.awaiting = with_own_weights(self.model, self.model_config)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes an accelerator afterwards; a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReplicaUpdateInfo) -> None:
        """Load every tensor. Raises ``ReplicaGone`` if the memory now has another version."""
        self.reading.close()  # left open by a failed update
        # Open until ``finish_weight_update``, because the layerwise reload reads some tensors (padded ones) only there.
        tensors = self.reading.enter_context(self.replica.open(update_info.path, update_info.version))
        if self.plan is not None and self.plan_is_proved:
            self.plan.copy(self.sources, self.replica.loads())
            return
        # Views, not copies: a tensor-parallel loader takes its part before it copies to the device.
        with self.replica.loads():
            self.model.load_weights(self.named_tensors(tensors))

    def named_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that vLLM loads by name, as views of the replica's ``tensors``.

        The matrices of this worker's experts are one tensor [experts, rows, columns] with the first expert's name,
        which vLLM's loaders accept like a single matrix. One by one, the 18,432 matrices of Qwen3-30B-A3B would cost
        1.8 s of Python in the pause (decision 0052).
        """
        for slot in self.slots:
            tensor = tensors[slot.name]
            local_experts = self.experts.get(slot.shape[0]) if (expert_parts := first_expert_parts(slot)) else None
            for matrix in expert_parts if local_experts is not None else slot.parts:
                begin = (matrix.offset - slot.offset) // slot.itemsize
                if local_experts is not None:
                    rows = begin // slot.shape[-1]
                    name = matrix.name.replace(FIRST_EXPERT, f".experts.{local_experts.start}.")
                    yield name, tensor[local_experts, rows : rows + matrix.shape[0]]
                else:
                    yield matrix.name, tensor.view(-1)[begin : begin + matrix.numel].view(matrix.shape)
            if not slot.parts:
                yield slot.name, tensor

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        from asyncrl_cli.weights.engine_layers import expect_nothing_more, refuse_missing

        if not self.plan_is_proved:
            refuse_missing(self.awaiting)
            expect_nothing_more(self.model)
            with self.replica.loads():
                finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()
            self._prove_plan()
        self.reading.close()
        self.sources = []  # they would keep memory mapped that the agent has replaced

    def _prove_plan(self) -> None:
        # In the first pause of a layout: it comes before the engine's first request, so its length matters little.
        if self.plan is not None:
            self.plan_is_proved = self.plan.agrees(self.sources)
            if not self.plan_is_proved:
                log.warning("each version is loaded with vLLM's reload: recorded copies would load other weights")
                self.plan = None

    def _repack_tied_head(self) -> None:
        # vLLM's CPU linear keeps a packed copy of lm_head. If the weight is tied to the embedding, the layerwise reload
        # misses this copy, and the engine would answer with the old head.
        from asyncrl_cli.weights.engine_layers import language_model

        head = getattr(language_model(self.model), "lm_head", None)
        if self.device.type != "cpu" or head is None or not hasattr(head, "cpu_linear"):
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        if (replica := self.__dict__.pop("replica", None)) is not None:
            replica.close()


def _own_experts(model: nn.Module) -> dict[int, slice]:
    """The indices of this worker's experts in a layer, by the layer's total number of experts.

    Without an entry, vLLM's loader must get each expert alone, because it quantizes experts or keeps copies of some.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    slices: dict[int, slice] = {}
    layers: list[RoutedExperts] = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    if all(type(layer.quant_method) is UnquantizedFusedMoEMethod for layer in layers):
        for layer in layers:
            count, local_index = layer.global_num_experts, layer.expert_map_manager.map_global_to_local
            local_experts = [expert for expert in range(count) if local_index(expert) >= 0]
            step = local_experts[1] - local_experts[0] if len(local_experts) > 1 else 1
            span = range(local_experts[0], local_experts[-1] + 1, step)
            if local_experts == [*span] and [*map(local_index, span)] == [*range(layer.local_num_experts)]:
                slices[count] = slice(span.start, span.stop, step)
    return slices


class WorkerExtension:
    """Mixed into vLLM's worker: calls to its transfer engine that vLLM's interface lacks."""

    weight_transfer_engine: ReplicaTransferEngine

    def prepare_weights(self, version: int, path: str, listener: bytes) -> None:
        """Begin to prepare a version. A signal to the socket address ``listener`` says that it is prepared, or failed.

        A call that waited for it would keep vLLM's core from generating.
        """

        def signal(_: object) -> None:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:  # nobody may listen
                sender.sendto(b"\0", listener)

        self.weight_transfer_engine.prepare(version, path).add_done_callback(signal)

    def weights_prepared(self) -> bool:
        return self.weight_transfer_engine.prepared()

    def unserved_adapters(self) -> list[str]:
        engine: Any = self.weight_transfer_engine
        return list(engine.unserved())

    def install_adapter(self) -> None:
        engine: Any = self.weight_transfer_engine
        engine.install()


die_with(os.getppid())
# By default, vLLM's progress bars make a named semaphore, which a killed process leaves in /dev/shm.
tqdm.set_lock(threading.RLock())
WeightTransferEngineFactory.register_engine(BACKEND, ReplicaTransferEngine)
WeightTransferEngineFactory.register_engine(ADAPTER_BACKEND, "asyncrl_cli.weights.adapter", "AdapterTransferEngine")
