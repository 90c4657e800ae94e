"""DeepSpeed under Ray: joins the process group, and makes engines with their settings."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.spec.sections import ExperimentSpec, TrainerSpec
from asyncrl_cli.system.network import interface_to
from asyncrl_cli.train.model.adapter_folder import load_adapter
from asyncrl_cli.train.model.attention import ENVIRONMENT, install_attention, why_not_varlen
from asyncrl_cli.train.model.expert_parallel import check_experts, expert_settings
from asyncrl_cli.train.model.gpu_kernels import check_attention, fuse_kernels
from asyncrl_cli.train.model.images import Vision, freeze
from asyncrl_cli.train.model.lora import add_adapters
from asyncrl_cli.train.model.policy import Policy, ValueModel, check_policy
from asyncrl_cli.train.model.saving import model_class
from asyncrl_cli.train.model.sequence_parallel import sequence_group
from asyncrl_cli.train.model.streaming import streamed
from asyncrl_cli.train.prefix_trees import why_separate

MEETING = timedelta(minutes=30)
"""How long ranks wait for each other, as in torch and DeepSpeed; the driver's limits for their calls are shorter."""
REDUCE_NUMBERS = 2**24
GPU_REDUCE_NUMBERS = 2 * 10**8
"""How many gradient values ranks add up in one message, on CPUs and on GPUs. A larger gradient gets its own message and
is not copied. GPUs need larger messages: each rank receives only the sum of its own part, which is small with many
ranks."""
PREFETCH_NUMBERS = 5 * 10**7
"""DeepSpeed's default for the number of weights that ZeRO-3 gathers ahead."""


def trainer_environment(spec: ExperimentSpec) -> dict[str, str]:
    """Return the environment variables that a trainer rank's process must start with."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "DS_LOG_LEVEL": "warning",
        # On GPUs as well: with ``offload`` these threads compute the optimizer's step.
        "OMP_NUM_THREADS": str(spec.trainer.threads_per_rank),
    }
    if spec.trainer.gpus_per_rank:
        # Micro-batches and gathered layers differ in size, and without this torch cannot join the gaps between them.
        # Engines must not have it, because vLLM's sleep mode uses another allocator.
        # Both names: torch 2.13 reads its settings in two places, and each prefers another name if the host sets one.
        environment |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
        environment |= ENVIRONMENT
    else:
        environment |= {
            "DS_ACCELERATOR": "cpu",
            # One device. Without it DeepSpeed runs numactl for every micro-batch, to count NUMA nodes.
            "LOCAL_SIZE": "1",
            # Waiting threads sleep. Spinning threads take time from the thread that they wait for if other work runs on
            # their cores: two trainings of a minute each took ten minutes together.
            "OMP_WAIT_POLICY": "PASSIVE",
            # The C library returns freed tensors of at least this size to the system. By default it keeps blocks of up
            # to 32 MiB, and a rank took up to 1.7 times the memory in use. A lower limit costs speed: with 512 KiB the
            # quickstart trained 38 % fewer tokens a second (decision 0047).
            "MALLOC_MMAP_THRESHOLD_": str(2**22),
        }
    return environment


def join_process_group(
    rank: int, ranks: int, address: str, port: int, gpu: bool, listener: socket.socket | None = None
) -> None:
    """Join the process group; returns when all ranks have joined.

    ``listener``: rank 0's socket, which has held the port so far. An unheld port may by now belong to another
    connection.
    """
    import deepspeed

    # Before ``init_distributed``, which would load DeepSpeed's own all-reduce for CPUs. It needs a compiler and half a
    # minute at the first start, and leaves named segments in /dev/shm when a rank is killed. Gloo has an all-reduce.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Local rank 0 on every host: Ray shows an actor only its own GPU.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR=address, MASTER_PORT=str(port))
    # By default gloo and NCCL may choose an interface that leads nowhere (a container's, for example) and wait forever.
    # The host's own environment takes precedence, except on loopback.
    interface = interface_to(address)
    for name, value in (("GLOO_SOCKET_IFNAME", interface), ("NCCL_SOCKET_IFNAME", f"={interface}")):
        if interface == "lo" or not os.environ.get(name):
            os.environ[name] = value
    backend = "nccl" if gpu else "gloo"
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        ranks,
        is_master=rank == 0,
        timeout=MEETING,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=MEETING)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def deepspeed_settings(trainer: TrainerSpec, load_universal: bool = False, largest_layer: int = 0) -> dict[str, Any]:
    """Return DeepSpeed's configuration. ``load_universal``: the engine will load a universal checkpoint.
    ``largest_layer``: the most weights that a rank gathers for a layer.

    ``update_policy`` sets the accumulation boundary by hand, because updates differ in their number of micro-batches.
    With bfloat16 weights DeepSpeed also has float32 copies, which the optimizer updates. Gradients add up in float32
    over ranks, and with ZeRO 2 and 3 over micro-batches as well.
    """
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        # DeepSpeed's linear layer, in Python, frees gathered weights between the passes. A single rank gathers none,
        # and a layer that is computed again keeps none.
        "memory_efficient_linear": trainer.ranks > 1 and not trainer.recomputes,
        "reduce_bucket_size": reduce_numbers(trainer),
    }
    if trainer.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if trainer.gpus_per_rank and trainer.zero_stage == 3:
        zero["prefetch_bucket_size"] = prefetch_numbers(trainer, largest_layer)
    if trainer.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    bfloat16 = trainer.dtype == "bfloat16"
    return expert_settings(trainer) | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": trainer.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        # The default is the weights' dtype, which would round each sum of two ranks' gradients to bfloat16.
        "communication_data_type": "fp32" if sums_in_float32(trainer) else None,
        "data_types": {"grad_accum_dtype": "fp32" if bfloat16 and trainer.zero_stage >= 2 else None},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": load_universal},
    }


def sums_in_float32(trainer: TrainerSpec) -> bool:
    """True if ranks convert bfloat16 gradients to float32 before they add them up."""
    return trainer.dtype == "bfloat16" and trainer.ranks > 1


def prefetch_numbers(trainer: TrainerSpec, largest_layer: int) -> int:
    """Return how many weights ZeRO-3 gathers ahead. A GPU rank needs a whole layer, or it waits for the rest of it."""
    return max(PREFETCH_NUMBERS, largest_layer * 11 // 10) if trainer.gpus_per_rank else PREFETCH_NUMBERS


def gathered_experts(trainer: TrainerSpec, expert_weights: int) -> int:
    """Return how many of a layer's ``expert_weights`` a rank gathers. It has its share of divided experts anyway if no
    other rank has the same ones."""
    size = trainer.expert_parallel
    return expert_weights // size if size < trainer.ranks else 0


def reduce_numbers(trainer: TrainerSpec) -> int:
    """Return how many gradient values a rank collects before ranks add them up."""
    return GPU_REDUCE_NUMBERS if trainer.gpus_per_rank and trainer.ranks > 1 else REDUCE_NUMBERS


def start_engine(spec: ExperimentSpec, model_dir: str, load_universal: bool = False) -> Any:
    """Start the DeepSpeed engine around the policy, with its adapters; collective.

    With ZeRO-3 no rank ever holds the full model. Raises ``LoraError``, and ``UserError`` like ``check_policy``.
    """
    model = load_model(spec.trainer, model_dir, images=spec.model.max_images > 0)
    freeze(model, spec.model)
    # Before ``initialize``: the optimizer must get only the adapters.
    if spec.model.lora is not None:
        add_adapters(model, spec.model.lora, spec.seed)
        if spec.model.lora.path is not None:
            load_adapter(model, spec.model.lora)
    policy = policy_around(model, spec, model_dir)
    engine = initialize(policy, spec.trainer, load_universal)
    if policy.replay is not None and spec.trainer.expert_parallel > 1:
        policy.replay.hook(model)
    check(policy, engine, spec.trainer)
    return engine


def check(policy: Policy, score: Any, trainer: TrainerSpec) -> None:
    """Call ``check_policy``. If the model's log-probs are wrong with shared prefixes, share none by default."""
    try:
        check_policy(policy, score)
    except UserError:
        if trainer.share_prefixes is not None or not policy.shares_prefixes:
            raise
        policy.shares_prefixes = False
        check_policy(policy, score)


def policy_around(model: Any, spec: ExperimentSpec, model_dir: str) -> Policy:
    """Make the spec's policy around the transformers model from ``model_dir``."""
    vision = None
    if spec.model.max_images:
        vision = Vision(model, model_dir, bidirectional=spec.rollout.gpus_per_engine > 0)
    shares = spec.trainer.share_prefixes is not False
    if shares and (reason := why_separate(spec.trainer, model.config, vision is not None and vision.bidirectional)):
        if spec.trainer.share_prefixes:
            raise ConfigError(
                f"rows of this model cannot share prefixes: {reason}",
                location="trainer.share_prefixes",
                hint="set it to false, or remove it",
            )
        shares = False
    return Policy(
        model,
        spec.rollout.sampling.temperature,
        packing=spec.trainer.packing,
        sequence=sequence_group(spec.trainer),
        router_replay=spec.algorithm.router_replay,
        vision=vision,
        shares_prefixes=shares,
    )


def start_critic(spec: ExperimentSpec, model_dir: str, load_universal: bool = False) -> Any:
    """Start the DeepSpeed engine around a critic with the transformer from ``model_dir``; collective.

    The critic is trained with the policy's micro-batches.
    """
    trainer = spec.trainer
    model = load_model(trainer, model_dir, images=spec.model.max_images > 0)
    freeze(model, spec.model)
    return initialize(ValueModel(model.base_model, trainer.packing, sequence_group(trainer)), trainer, load_universal)


def load_model(trainer: TrainerSpec, model_dir: str, images: bool = False) -> Any:
    """Load a causal language model for training, sharded during loading. ``images``: one that sees images.

    Raises ``ConfigError`` like ``check_attention`` and ``fuse_kernels``, and if `varlen` cannot compute the model's
    attention.
    """
    from transformers.integrations import HfDeepSpeedConfig

    check_attention(trainer.attention, torch.cuda.get_device_capability()[0] if trainer.gpus_per_rank else None)
    if trainer.gpus_per_rank:
        install_attention()
    # from_pretrained shards the model only while this object exists.
    sharding = HfDeepSpeedConfig(deepspeed_settings(trainer)) if trainer.zero_stage == 3 else None
    with streamed() if sharding is not None else nullcontext():
        model = model_class(images).from_pretrained(
            model_dir,
            dtype=getattr(torch, trainer.dtype),
            attn_implementation=trainer.attention,
            local_files_only=os.path.isdir(model_dir),
        )
    del sharding
    if trainer.attention == "varlen" and (reason := why_not_varlen(model, bidirectional=False)) is not None:
        raise ConfigError(f"varlen does not work: {reason}", location="trainer.attention", hint="use sdpa")
    if trainer.fused_kernels:
        fuse_kernels(model)
    if trainer.recomputes:
        recompute_activations(model)
    return model


def recompute_activations(model: Any) -> None:
    """Store only the inputs of layers, and compute the rest again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the layer recomputes only in training mode; dropout stays off in its modules


def initialize(module: torch.nn.Module, trainer: TrainerSpec, load_universal: bool = False) -> Any:
    """Make the DeepSpeed engine around a module, with the spec's optimizer; collective."""
    import deepspeed

    optimizer = torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=trainer.optimizer.learning_rate,
        betas=trainer.optimizer.betas,
        eps=trainer.optimizer.eps,
        weight_decay=trainer.optimizer.weight_decay,
        fused=True,  # other variants copy all of a rank's weights
    )
    # Before DeepSpeed installs its hooks in the modules (decision 0019).
    if trainer.zero_stage == 3:
        _gather_by_layer(module)
    if trainer.expert_parallel > 1:  # DeepSpeed reads from the config how the model routes
        module.config = config = next(
            submodule.config for submodule in module.modules() if hasattr(submodule, "config")
        )
        check_experts(config, trainer)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_settings(trainer, load_universal, largest_layer(module, trainer)),
    )
    _restore_rotary_frequencies(module)  # afterwards, because DeepSpeed rounds them
    return engine


def without_optimizer(module: torch.nn.Module, trainer: TrainerSpec) -> Any:
    """Make the ZeRO-3 engine around a module that is not trained; collective."""
    import deepspeed

    settings = deepspeed_settings(trainer, largest_layer=largest_layer(module, trainer))
    settings["zero_optimization"].pop("offload_optimizer", None)
    settings.pop("expert_parallel", None)
    _gather_by_layer(module)
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    _restore_rotary_frequencies(module)
    return engine


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def largest_layer(module: torch.nn.Module, trainer: TrainerSpec) -> int:
    """Return the most weights that a rank gathers for one layer of an unsharded or sharded module."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def gathered(name: str, weight: Any) -> int:
        count = int(getattr(weight, "ds_numel", weight.numel()))  # of the whole weight if ZeRO-3 has sharded it
        return gathered_experts(trainer, count) if ".experts." in name else count

    layers = (submodule for submodule in module.modules() if isinstance(submodule, GradientCheckpointingLayer))
    return max((sum(gathered(*weight) for weight in layer.named_parameters()) for layer in layers), default=0)


def _gather_by_layer(module: torch.nn.Module) -> None:
    """Make ZeRO-3 gather each transformer layer as a whole.

    Hooks around every small module cost an eighth of a small model's time. Also, a rank would gather experts that only
    its own tokens use, and would wait for the other ranks forever.
    """
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {type(submodule) for submodule in module.modules() if isinstance(submodule, GradientCheckpointingLayer)}
    if layers:
        set_z3_leaf_modules(module, list(layers))


def _restore_rotary_frequencies(module: torch.nn.Module) -> None:
    """Restore the float32 frequencies of position embeddings.

    With bfloat16 weights DeepSpeed rounds these, too, when it shards or wraps a model. vLLM does not, so at position
    1000 the rotations could differ by a radian. Raises ``UserError`` if the frequencies cannot be computed again.
    """
    for submodule in module.modules():
        # One buffer per module, or one for every kind of layer: `full_attention_inv_freq` (Gemma 3, OLMo 3).
        rounded = {name: buffer for name, buffer in submodule.named_buffers(recurse=False) if name.endswith("inv_freq")}
        if rounded and hasattr(submodule, "config"):
            exact = dict(type(submodule)(config=submodule.config).named_buffers(recurse=False))
            for name, buffer in rounded.items():
                buffer.data = exact[name].to(buffer.device)
        elif any(buffer.dtype != torch.float32 for buffer in rounded.values()):
            raise UserError(
                f"DeepSpeed has rounded the rotary frequencies of this model ({type(submodule).__name__}), and they "
                "cannot be computed again",
                hint="set trainer.dtype to float32, or use another model",
            )
