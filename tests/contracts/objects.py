"""The classes of vLLM's and DeepSpeed's objects that are not visible in asyncrl's code.

A path is relative to asyncrl_cli, with ``:name`` for one class or function of the file.
"""

from __future__ import annotations

LLM = "vllm.v1.engine.async_llm.AsyncLLM()"
CORE = "vllm.v1.engine.core_client.AsyncMPClient()"
DEEPSPEED = "deepspeed.runtime.engine.DeepSpeedEngine()"
ADAPTERS = "vllm.lora.model_manager.LRUCacheLoRAModelManager()"
MAPPER = "vllm.model_executor.models.utils.WeightsMapper()"

OBJECTS: dict[str, dict[str, str]] = {
    "rollout/engine.py": {
        "self._vllm": LLM,
        "self._vllm.engine_core": CORE,
        "core": CORE,
        "final_output": "vllm.outputs.RequestOutput()",
        "span": "vllm.outputs.WeightVersionSpan()",
    },
    "rollout/engine_settings.py": {
        "config": "vllm.config.vllm.VllmConfig()",
        "config.model_config": "vllm.config.model.ModelConfig()",
    },
    "rollout/vllm_inflight.py": {
        "vllm": LLM,
        "vllm.output_processor": "vllm.v1.engine.output_processor.OutputProcessor()",
        "state": "vllm.v1.engine.output_processor.RequestState()",
        "state.detokenizer": "vllm.v1.engine.detokenizer.IncrementalDetokenizer()",
        "state.logprobs_processor": "vllm.v1.engine.logprobs.LogprobsProcessor()",
        "flat": "vllm.logprobs.FlatLogprobs()",
    },
    "rollout/vllm_core.py": {
        "core": "vllm.v1.engine.core.EngineCoreProc()",
        "core.output_queue": "",
        "core.scheduler": "vllm.v1.core.sched.scheduler.Scheduler()",
        "request": "vllm.v1.request.Request()",
        "params": "vllm.sampling_params.SamplingParams()",
        "outputs": "vllm.v1.engine.EngineCoreOutputs()",
        "record": "vllm.v1.engine.EngineCoreOutput()",
        "newest_record": "vllm.v1.engine.EngineCoreOutput()",
    },
    "train/checkpoints.py": {"engine": DEEPSPEED},
    "weights/adapter.py": {"manager": ADAPTERS, "self._manager": ADAPTERS, "mapper": MAPPER},
    "train/deepspeed_engine.py": {"engine": DEEPSPEED},
    "train/nonfinite_guard.py": {"engine": DEEPSPEED},
    "train/precompute.py": {"engine": DEEPSPEED},
    "train/model/reference.py": {"engine": DEEPSPEED},
    "train/shards.py": {"parameter.ds_tensor": ""},  # test_installed.py checks the attributes that ZeRO-3 adds
    "train/step.py": {"learner.engine": DEEPSPEED, "learner.critic": DEEPSPEED},
    "train/update.py": {"engine": DEEPSPEED, "critic": DEEPSPEED},
    "train/worker.py": {"self._engine": DEEPSPEED},
}

RESULTS: dict[str, str] = {
    "vllm.platforms.current_platform": "vllm.platforms.interface.Platform()",
    "deepspeed.accelerator.get_accelerator": "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator()",
    "deepspeed.initialize": DEEPSPEED,
    "deepspeed.runtime.engine.DeepSpeedEngine().module": "",
    "vllm.config.model.ModelConfig().try_get_generation_config": "",
    "vllm.distributed.weight_transfer.base.WeightTransferEngine().__dict__": "",
    "vllm.distributed.weight_transfer.base.WeightTransferEngine().device": "",
    "vllm.distributed.weight_transfer.base.WeightTransferEngine().model": "",
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": (
        "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo()"
    ),
    "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p": "",
    "vllm.tool_parsers.ToolParserManager.get_tool_parser": "vllm.tool_parsers.ToolParser",
    "vllm.tool_parsers.ToolParser().extract_tool_calls": (
        "vllm.entrypoints.generate.base.protocol.ExtractedToolCallInformation()"
    ),
    "vllm.reasoning.ReasoningParserManager.get_reasoning_parser": "vllm.reasoning.ReasoningParser",
    "vllm.reasoning.ReasoningParser().extract_reasoning": "",
}
"""The class of a library function's result, or of a member; empty if the class is not the library's, such as a list or
our own model."""
