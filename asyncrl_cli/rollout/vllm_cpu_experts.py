"""vLLM's CPU worker and scheduler, with the chosen experts in their output (decision 0054).

vLLM returns routed experts only on GPUs, and refuses its argument for them on a CPU. Its own code still captures and
delivers them here, also for prefix-cached tokens: this worker calls it at the same points of a step as vLLM's GPU
worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker


class SchedulerWithExperts(Scheduler):  # type: ignore[misc]
    """Adds the worker's choice of experts to each request's output."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class CPUWorkerWithExperts(CPUWorker):  # type: ignore[misc]
    """Needs an engine without asynchronous scheduling, which vLLM's CPU platform turns off."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._experts: AuxOutputWorkerConnector | None = None
        self._scheduled: Any = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._experts = get_aux_output_connector(
            model=self.model_runner.get_model(), vllm_config=self.vllm_config, kv_cache_config=kv_cache_config
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        assert self._experts is not None
        self._experts.begin_step(scheduler_output.aux_output_connector_metadata)
        self._scheduled = scheduler_output
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output.req_ids:
            output.aux_output_connector_output = self._chosen(output)
        return output

    def _chosen(self, output: Any) -> Any:
        """The experts of the step that has just ended. The batch still has its state."""
        assert self._experts is not None
        counts = [self._scheduled.num_scheduled_tokens[request_id] for request_id in output.req_ids]
        batch: Any = SimpleNamespace(
            req_ids=output.req_ids,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=self.model_runner.input_batch.num_computed_tokens_cpu[: len(counts)].copy(),
        )
        pending = self._experts.prepare_output(batch)
        assert pending is not None
        sampled = np.asarray([len(ids) for ids in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))  # zero rejected tokens: they need speculation
        return pending.process_output()
