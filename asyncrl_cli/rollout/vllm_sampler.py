"""The last step of vLLM's sampler, with random numbers by seed and position (decision 0064).

vLLM's model runner V2 already draws this way. V1, which runs CPU engines, gives each request its own generator and
draws from them one by one. ``PositionSampler`` replaces that step and draws for all requests together, with vLLM's own
kernels: its CPU sampler's, or V2's.

Imported only in vLLM's worker process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from asyncrl_cli.rollout.draws import position_seeds
from asyncrl_cli.weights import vllm_worker

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WorkerExtension(vllm_worker.WorkerExtension):
    """Calls for asyncrl that vLLM mixes into its worker."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    available_kv_cache_memory_bytes: int

    def sample_by_position(self) -> bool:
        """See the function ``sample_by_position``."""
        return sample_by_position(self.model_runner, self.vllm_config)

    def measured_cache(self) -> int:
        """Size of the key-value cache that vLLM chose for the GPU, in bytes."""
        return self.available_kv_cache_memory_bytes


def sample_by_position(runner: GPUModelRunner, config: VllmConfig) -> bool:
    """Make a model runner draw every token's random numbers by seed and position.

    Returns False, and changes nothing, where vLLM has no kernel for this.
    """
    if config.use_v2_model_runner:
        return True
    sampler = runner.sampler
    if current_platform.is_cpu():
        uses_kernel = getattr(sampler.topk_topp_sampler.forward, "__func__", None) is TopKTopPSampler.forward_cpu
        if not uses_kernel or sampler.use_fp64_gumbel:
            return False
    elif not (current_platform.is_cuda_alike() and HAS_TRITON):
        return False
    # vLLM itself selects its implementation for a platform through this attribute.
    sampler.topk_topp_sampler.forward = PositionSampler(runner)
    return True


class PositionSampler:
    """Replaces vLLM's ``TopKTopPSampler``: logits [requests, vocabulary] to tokens [requests]."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._seeds_of: tuple[SamplingMetadata | None, Mapping[int, torch.Generator] | None] = (None, None)
        """The batch with known seeds, and its generators."""

    def __call__(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens, and the distribution [requests, vocabulary] drawn from if ``logprobs_mode`` asks for it.

        ``generators``: by row, of requests with a seed. ``k`` (integers) and ``p``: limits [requests].
        """
        logits = apply_top_k_top_p(logits, k, p)
        processed = None
        if self._runner.sampler.logprobs_mode == "processed_logits":
            processed = logits
        elif self._runner.sampler.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        # The number of tokens that the model has read is the index of the token that comes next.
        positions = self._runner.seq_lens[: len(logits)]
        seeds = self._seeds(generators, len(logits), logits.device)
        if logits.is_cpu:
            return _draw_on_cpu(logits, seeds, positions), processed
        return _draw_on_gpu(
            logits, seeds=seeds, positions=positions, in_float64=self._runner.sampler.use_fp64_gumbel
        ), processed

    def _seeds(self, generators: Mapping[int, torch.Generator], rows: int, device: torch.device) -> torch.Tensor:
        """Return the seeds [rows], int64. A request without a seed gets a random one in each step."""
        batch = self._runner.input_batch.sampling_metadata
        # vLLM makes new metadata when a request comes, ends or changes its row; trial steps have other generators.
        if batch is not self._seeds_of[0] or generators is not self._seeds_of[1]:
            seeds = np.array([generator.initial_seed() for generator in generators.values()], np.uint64)
            self._seeded_rows = torch.tensor(list(generators), dtype=torch.int64, device=device)
            self._known_seeds = torch.from_numpy(seeds.view(np.int64)).to(device)
            self._seeds_of = batch, generators
        if len(self._known_seeds) == rows:
            return torch.empty_like(self._known_seeds).index_copy_(0, self._seeded_rows, self._known_seeds)
        drawn = torch.empty(rows, dtype=torch.int64, device=device).random_()
        return drawn.index_copy_(0, self._seeded_rows, self._known_seeds)


def _draw_on_cpu(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The kernel's noise for token i of a row is a hash of the row's seed and i, computed in float64."""
    row_seeds = torch.from_numpy(position_seeds(seeds.numpy(), positions.numpy()))
    return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), row_seeds)  # type: ignore[no-any-return]


def _draw_on_gpu(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, in_float64: bool) -> torch.Tensor:
    """Draw the same numbers as V2, which counts positions from the previous token. ``seeds``, ``positions``: [rows]."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return gumbel_sample(  # type: ignore[no-any-return]
        logits,
        torch.arange(len(logits), dtype=torch.int32, device=logits.device),
        torch.ones(len(logits), dtype=torch.float32, device=logits.device),
        seeds,
        positions.to(torch.int64) - 1,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=in_float64,
    )
