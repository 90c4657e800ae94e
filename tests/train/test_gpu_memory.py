"""When GPU memory is full, the error names the keys to change; other errors are not affected."""

from __future__ import annotations

import pytest
import torch

from asyncrl_cli.rollout.engine_settings import engine_environment
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import trainer_environment
from asyncrl_cli.train.worker import FullGpu, explaining_a_full_gpu, free_gpu_cache
from tests.train.test_train_episodes import experiment


def spec(rollout: dict[str, object], trainer: dict[str, object]) -> ExperimentSpec:
    numbers = {"tokens_per_microbatch": 8192, "gradient_checkpointing": False}
    return experiment(rollout=rollout, trainer=numbers | trainer)


def test_full_gpu_error_names_the_keys_that_help() -> None:
    of = spec({"gpus_per_engine": 1}, {"gpus_per_rank": 1})
    with pytest.raises(FullGpu) as caught, explaining_a_full_gpu(of, 3):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
    assert caught.value.message == "the GPU's memory is full: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert caught.value.location == "trainer-3"
    assert "lower trainer.tokens_per_microbatch (8192)" in str(caught.value.hint)


def test_ranks_on_gpus_alone_join_gaps_in_memory_and_repeat_flash_attention() -> None:
    on_gpus = spec({"gpus_per_engine": 0.4, "dtype": "bfloat16"}, {"gpus_per_rank": 0.6})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert trainer_environment(on_gpus)[name] == "expandable_segments:True"
        assert name not in trainer_environment(spec({}, {})) | engine_environment(on_gpus)
    assert trainer_environment(on_gpus)["FLASH_ATTENTION_DETERMINISTIC"] == "1"


@pytest.mark.parametrize(("free_gb", "mode", "frees"), [(60, "sync", False), (30, "sync", True), (30, "async", False)])
def test_cached_memory_is_freed_only_if_a_sleeping_engine_needs_it(
    monkeypatch: pytest.MonkeyPatch, free_gb: int, mode: str, frees: bool
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free_gb * 10**9, 100 * 10**9))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append(None))
    shared = spec({"gpus_per_engine": 0.5}, {"gpus_per_rank": 0.5})
    free_gpu_cache(shared.model_copy(update={"pipeline": shared.pipeline.model_copy(update={"mode": mode})}))
    assert bool(calls) == frees
