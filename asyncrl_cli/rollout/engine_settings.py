"""Derives vLLM's settings from a spec, checks them, and starts vLLM.

A wrong setting would fail every start, so it raises ``ConfigError``, and the start is not repeated. If the core process
was killed, the error is ``ActorDied``.

Names that the installed vLLM accepts are read from its source, because importing vLLM takes ten seconds and 700 MB. If
the source has an unexpected form, the names are unknown (None), and the engine itself refuses wrong ones.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.rollout.engine_death import LogSince, start_failure
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engines_sleep, memory_share, tensor_parallel

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_ENVIRONMENT = {
    # With 1, vLLM's CPU platform puts the worker in another process behind the engine core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
EXACT_PRODUCTS = {"TRITON_F32_DEFAULT": "ieee"}
"""In float32 vLLM's attention is a Triton kernel. By default Triton rounds the factors of float32 products to TF32 (10
bits), which moves log-probs by 1e-3 to 1e-2 nats: more than a publish allows. The variable is a part of Triton's cache
key, so its kernels are compiled again when it changes."""
BLOCK_SIZE = 32
"""Tokens per key-value block on CPU."""
LARGE_GPU_BYTES = 70 * 2**30
"""From this memory size on, vLLM's server computes 8,192 tokens at a time."""
CACHE_ARGUMENT = "kv_cache_memory_bytes"
FLOAT32_HEAD = {"head_dtype": "float32"}
"""Like the trainer, engines do not round logits to bfloat16."""
MEDIA = ("image", "video", "audio")
WORKER_EXTENSION = "asyncrl_cli.rollout.vllm_sampler.WorkerExtension"
"""Only vLLM imports it, in its core process."""


def engine_environment(spec: ExperimentSpec) -> dict[str, str]:
    """Return the environment variables that an engine's process must start with."""
    rollout = spec.rollout
    if rollout.gpus_per_engine:
        return ENVIRONMENT | (EXACT_PRODUCTS if rollout.dtype == "float32" else {})
    compiled = {} if rollout.engine_args.get("enforce_eager", True) else {"TORCHDYNAMO_DISABLE": "0"}
    return ENVIRONMENT | CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(rollout.threads_per_engine)} | compiled


def cache_bytes_per_token(spec: ExperimentSpec, hf_config: Any) -> int:
    """2 (key and value) × layers × key-value heads × head size × bytes per number; 0 without attention (mamba)."""
    try:
        heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
        head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    except AttributeError:
        return 0
    item = 4 if spec.rollout.dtype == "float32" else 2
    return 2 * int(hf_config.num_hidden_layers) * int(heads) * int(head_size) * item


def kv_cache_bytes(spec: ExperimentSpec, per_token: int) -> int:
    """Bytes of a CPU engine's key-value cache, from the spec or for ``kv_cache_blocks`` with ``per_token`` bytes."""
    if spec.rollout.kv_cache_mb is not None:
        return spec.rollout.kv_cache_mb * 2**20
    return kv_cache_blocks(spec) * BLOCK_SIZE * per_token


def kv_cache_blocks(spec: ExperimentSpec) -> int:
    """Blocks for ``max_running_rollouts`` sequences of half the longest length, and for at least one of
    ``model.max_length``, without which vLLM does not start."""
    longest_rollout = spec.rollout.longest_rollout
    blocks_each = -(-longest_rollout // (2 * BLOCK_SIZE)) + 1
    min_blocks = -(-max(longest_rollout, spec.model.max_length) // BLOCK_SIZE) + 1
    return max(spec.rollout.running_rollouts * blocks_each, min_blocks)


def engine_args(spec: ExperimentSpec, model_dir: str, load_format: str) -> AsyncEngineArgs:
    """vLLM's arguments for a spec."""
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from asyncrl_cli.weights import vllm_worker

    rollout = spec.rollout
    args: dict[str, Any] = {
        "model": model_dir,
        "dtype": rollout.dtype,
        "max_model_len": spec.model.max_length,
        # One more for the probe, and the first place in the queue: otherwise it would wait in a full engine until a
        # rollout ends or its cache has room for an interrupted one, and the driver would take the engine for hung.
        "max_num_seqs": rollout.running_rollouts + 1,
        "scheduling_policy": "priority",
        "seed": spec.seed,
        "load_format": load_format,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.BACKEND),
    }
    if spec.model.max_images:
        args |= {
            "limit_mm_per_prompt": {name: spec.model.max_images if name == "image" else 0 for name in MEDIA},
            # The image processor normalizes pixels, as in the trainer. vLLM's layer for it keeps mean and deviation in
            # buffers, which an engine that starts with dummy weights fills with random numbers.
            "mm_device_do_normalize": False,
            # vLLM keeps two caches in step, but a weight update clears only one of them. Ours is in ``VllmImages``.
            "mm_processor_cache_gb": 0,
        }
    else:
        args["language_model_only"] = True
    if rollout.gpus_per_engine:
        gpu_bytes = int(current_platform.get_device_total_memory()) if current_platform.is_cuda() else None
        args |= gpu_args(spec, gpu_bytes)
    else:
        per_token = cache_bytes_per_token(spec, AutoConfig.from_pretrained(model_dir).get_text_config())
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": kv_cache_bytes(spec, per_token),
            # vLLM's CPU sampler cannot split a seeded request over chunks of its prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.model.max_length, 2048, rollout.running_rollouts + 1),
        }
    if (lora := spec.model.published_adapter) is not None:
        args |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": lora.slot_rank,
            "lora_target_modules": adapted_names(lora, model_dir),
            "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.ADAPTER_BACKEND),
        }
    return AsyncEngineArgs(**merged(args, rollout.engine_args))


def merged(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override the ``defaults`` by the user's ``overrides``; mappings such as hf_overrides are merged key by key."""
    nested = {
        name: {**defaults[name], **overrides[name]}
        for name in defaults.keys() & overrides.keys()
        if isinstance(defaults[name], Mapping) and isinstance(overrides[name], Mapping)
    }
    return {**defaults, **overrides, **nested}


def batched_tokens(spec: ExperimentSpec, gpu_bytes: int | None) -> int:
    """Tokens that a GPU engine computes at a time (`max_num_batched_tokens`); ``gpu_bytes``: memory of a GPU.

    vLLM's default depends on its caller: 8,192 for its server on a large GPU, 2,048 for us. With only 2,048, prefilling
    long prompts and interrupted rollouts reaches a fraction of the GPU's speed. An engine with a share of the memory
    still computes on the whole GPU.
    """
    large = gpu_bytes is not None and gpu_bytes >= LARGE_GPU_BYTES
    return max(8192 if large else 2048, spec.rollout.running_rollouts + 1)


def gpu_args(spec: ExperimentSpec, gpu_bytes: int | None = None) -> dict[str, Any]:
    """vLLM's arguments that depend on an engine's GPUs; ``gpu_bytes``: memory of one GPU."""
    recorded = {"enable_return_routed_experts": True} if spec.algorithm.router_replay else {}
    return {
        "hf_overrides": FLOAT32_HEAD,
        "tensor_parallel_size": tensor_parallel(spec),
        # By default vLLM, inside an actor of a placement group, would ask Ray for the GPUs that the actor already has.
        "distributed_executor_backend": "mp" if tensor_parallel(spec) > 1 else "uni",
        "gpu_memory_utilization": memory_share(spec.rollout.gpus_per_engine),
        "max_num_batched_tokens": batched_tokens(spec, gpu_bytes),
        "enable_sleep_mode": engines_sleep(spec),
        **recorded,
    }


def with_cache(spec: ExperimentSpec, nbytes: int) -> ExperimentSpec:
    """Set the key-value cache to ``nbytes``, so vLLM does not measure its GPU's free memory.

    While vLLM measures, it counts memory that other processes allocate as its own, and fails if they free some. So an
    engine that restarts next to a training rank gets the size that its first start measured.
    """
    user_args = spec.rollout.engine_args | {CACHE_ARGUMENT: nbytes}
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine_args": user_args})})


def engine_arguments() -> set[str] | None:
    """Return the names of vLLM's engine arguments; None if unknown."""
    names = {
        statement.target.id
        for node in _statements("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return names or None


def tool_parsers() -> set[str] | None:
    return _table("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")


def reasoning_parsers() -> set[str] | None:
    return _table("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")


def check_engine_arguments(arguments: Mapping[str, Any], known_names: Collection[str] | None) -> None:
    """Raise ``ConfigError`` for the first argument of ``rollout.engine_args`` that vLLM does not have."""
    for name in arguments:
        if known_names is not None and name not in known_names:
            python_name = name.strip("-").replace("-", "_")
            raise ConfigError(
                f"vLLM has no engine argument {name!r}",
                location=f"rollout.engine_args.{name}",
                hint=did_you_mean(python_name, known_names, "remove it; `vllm serve --help` lists the arguments"),
            )


def _table(path: str, name: str) -> set[str] | None:
    """Return the keys of the dict that vLLM's file ``path`` assigns to ``name``."""
    for node in _statements(path):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id == name:
                return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return None


def _statements(path: str) -> list[ast.stmt]:
    package = find_spec("vllm")  # does not import it
    if package is None or package.origin is None:
        return []
    file = Path(package.origin).parent / path
    return ast.parse(file.read_text()).body if file.is_file() else []


def engine_config(spec: ExperimentSpec, model_dir: str, load_format: str) -> tuple[AsyncEngineArgs, VllmConfig]:
    """Return vLLM's arguments and configuration for a spec.

    Raises ``ConfigError`` when vLLM refuses them, or would die at its first request.
    """
    user_args = spec.rollout.engine_args
    try:
        args = engine_args(spec, model_dir, load_format)
        config = args.create_engine_config()
    except Exception as error:  # from pydantic, transformers or vLLM
        raise ConfigError(
            f"vLLM refuses the engine's settings: {_refusal(error)}",
            location="rollout.engine_args" if user_args else "rollout",
            hint=f"correct or remove the argument that it names ({', '.join(user_args)})"
            if user_args
            else "change the setting that it names, or use a model that vLLM serves",
        ) from error
    if spec.rollout.gpus_per_engine == 0:
        _check_head_size(config.model_config)
    return args, config


def _check_head_size(model: ModelConfig) -> None:
    """vLLM itself checks the head size only at an engine's first request, and the engine dies."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes, size = CPUAttentionBackend.get_supported_head_sizes(), model.get_head_size()
    if size not in sizes and not model.use_mla:
        raise ConfigError(
            f"attention heads have {size} dimensions; vLLM's CPU engine supports {', '.join(map(str, sizes))}",
            location="model",
            hint="use a model with such heads, or engines on GPUs (rollout.gpus_per_engine)",
        )


def start_vllm(spec: ExperimentSpec, model_dir: str, load_format: str, log: LogSince) -> AsyncLLM:
    """Start an engine. ``log``: this process's output from here on.

    Raises ``ConfigError`` when vLLM refuses the settings, ``ActorDied`` when its core process was killed, and
    ``RunError`` with the cause found in ``log`` when the core failed by itself.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    args, config = engine_config(spec, model_dir, load_format)
    try:
        return AsyncLLM.from_vllm_config(
            config, enable_log_requests=args.enable_log_requests, disable_log_stats=args.disable_log_stats
        )
    except RuntimeError as error:
        failure = start_failure(str(error), log)
        if failure is None:
            raise
        raise failure from error


def _refusal(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(key) for key in details["loc"])
        return f"{where}: {details['msg']}" if where else details["msg"]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


ABSORBED = "kv_b_proj"
"""A layer of latent attention, as in DeepSeek-V3. vLLM folds its weight into others when it loads a model, and never
applies an adapter of this layer. It still makes a slot for the adapter, so it does not report the layer as
unsupported."""


def adapted_names(lora: LoraSpec, model_dir: str) -> list[str]:
    """Return the last parts of the adapted layers' names. vLLM makes slots for these layers.

    By default vLLM would also make slots for the embeddings and the head, and compute with them. Experts have no
    adapters: in transformers they are not linear layers.
    """
    if lora.target_modules != "all-linear":
        return sorted({name.rpartition(".")[2] for name in lora.target_modules})
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    head = model.get_output_embeddings()
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def check_adapters(model: Any, layers: Iterable[str], on_gpus: bool) -> None:
    """Raise ``ConfigError`` when vLLM would ignore an adapter, or cannot run the model with adapters.

    ``layers``: names of the adapted layers of ``model``, a transformers model.
    """
    if not on_gpus and any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise ConfigError(
            "with adapters vLLM computes a mixture of experts on GPUs only",
            location="model.lora.serve",
            hint="set it to merged, or use engines on GPUs (rollout.gpus_per_engine)",
        )
    if ignored := next((layer for layer in layers if layer.rpartition(".")[2] == ABSORBED), None):
        raise ConfigError(
            f"vLLM would ignore the adapter of {ignored}: it computes latent attention without calling that layer",
            location="model.lora.serve",
            hint=f"set it to merged, or list the other layers in model.lora.target_modules, without {ABSORBED}",
        )
