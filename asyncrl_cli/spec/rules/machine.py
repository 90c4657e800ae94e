"""Rules for devices, engines and their arguments, the runs folder, MLflow, and mappings without fixed keys."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import all_tasks, argument_name, members, rule, warning
from asyncrl_cli.spec.sections import ClusterSpec, EngineRange, ExperimentSpec
from asyncrl_cli.spec.sharing import engines_sleep, memory_share, shares_gpus

OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "max_model_len": "model.max_length",
    "max_num_seqs": "rollout.max_running_rollouts",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.gpus_per_engine",
    "data_parallel_size": "rollout.engines",
    "enable_lora": "model.lora.serve",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    **dict.fromkeys(("max_loras", "max_cpu_loras", "lora_dtype")),
    **dict.fromkeys(("load_format", "generation_config", "worker_cls", "worker_extension_cls")),
    **dict.fromkeys(("weight_transfer_config", "logprobs_mode", "enable_chunked_prefill", "async_scheduling")),
}
"""vLLM arguments that asyncrl sets itself, each with the key to use instead, or None. Arguments that begin with
`schedul` are treated in the same way."""

_ONE_ACTOR = "an engine is one process group on one host, with only the GPUs of rollout.gpus_per_engine"
_DRAWS = "guessed tokens use other random numbers, so an interrupted rollout would not continue as it began"
_SAMPLED = "tokens must be sampled from the distribution of the weights, as the trainer computes it"
_EXACT = "engines must compute with exactly the weights that the trainer publishes"
IMPOSSIBLE_ENGINE_ARGS = {
    "pipeline_parallel_size": ((1,), _ONE_ACTOR, "use rollout.gpus_per_engine (tensor parallelism)"),
    "prefill_context_parallel_size": ((1,), _ONE_ACTOR, "use rollout.gpus_per_engine"),
    "nnodes": ((1,), _ONE_ACTOR, "use rollout.engines for more engines"),
    "data_parallel_external_lb": ((False,), _ONE_ACTOR, "use rollout.engines for more engines"),
    "data_parallel_hybrid_lb": ((False,), _ONE_ACTOR, "use rollout.engines for more engines"),
    "distributed_executor_backend": (
        ("mp", "uni"),
        "vLLM's other executors request GPUs that the engine's actor already holds",
        "remove it, or set it to mp",
    ),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), ((), _DRAWS, "remove it")),
    **dict.fromkeys(("logits_processors", "watermark_config"), ((), _SAMPLED, "remove it")),
    "override_generation_config": ((), "asyncrl sets every sampling parameter itself", "use rollout.sampling"),
    "quantization_config": ((), _EXACT, "remove it; rollout.engine_args.quantization can be fp8_per_tensor on GPUs"),
    "calculate_kv_scales": ((False,), _EXACT, "remove it"),
    "runner": (("auto", "generate"), "only a generating engine can produce rollouts", "remove it"),
    "convert": (("auto", "none"), "only a generating engine can produce rollouts", "remove it"),
    "skip_tokenizer_init": ((False,), "engines need the tokenizer to stop at rollout.sampling.stop", "remove it"),
}
"""vLLM arguments with few values that work: these values, the reason, and the hint. None is always allowed."""


@rule
def one_dtype(spec: ExperimentSpec) -> Iterator[Problem]:
    """Trainer and engines compute in the same dtype. Otherwise their log-probs differ more."""
    if spec.trainer.dtype != spec.rollout.dtype:
        message = f"engines in {spec.rollout.dtype} and trainer in {spec.trainer.dtype}: their log-probs differ more"
        yield warning("rollout.dtype", message, f"use {spec.trainer.dtype} for both, if memory allows")


@rule
def float32_on_gpus(spec: ExperimentSpec) -> Iterator[Problem]:
    """Trainer and engines on GPUs compute in bfloat16. float32 is for tests of exactness."""
    gpu_counts = {"rollout.dtype": spec.rollout.gpus_per_engine, "trainer.dtype": spec.trainer.gpus_per_rank}
    slow = [
        path for path, gpus in gpu_counts.items() if gpus and getattr(spec, path.partition(".")[0]).dtype == "float32"
    ]
    if slow:
        message = "float32 on a GPU takes twice the memory and several times as long: it has no flash attention"
        yield warning(slow[0], message, f"set {' and '.join(slow)} to bfloat16")


@rule
def fused_kernels(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.fused_kernels` needs GPU ranks."""
    if spec.trainer.fused_kernels and not spec.trainer.gpus_per_rank:
        message = "fused kernels run on GPUs, and the trainer's ranks run on CPUs"
        yield Problem("trainer.fused_kernels", message, "set it to false, or trainer.gpus_per_rank to 1")


@rule
def one_kind_of_device(spec: ExperimentSpec) -> Iterator[Problem]:
    """Trainer and engines both run on GPUs, or both on CPUs."""
    if bool(spec.trainer.gpus_per_rank) != bool(spec.rollout.gpus_per_engine):
        trainer, engines = ("GPU", "CPU") if spec.trainer.gpus_per_rank else ("CPU", "GPU")
        slow = "rollout.gpus_per_engine" if engines == "CPU" else "trainer.gpus_per_rank"
        yield warning(slow, f"the trainer is on {trainer} and the engines are on {engines}", "set it to 1")


@rule
def shared_gpus(spec: ExperimentSpec) -> Iterator[Problem]:
    """With shares of a GPU, every engine shares its GPU with one trainer rank, and both fit on it."""
    rollout, trainer = spec.rollout, spec.trainer
    engine, rank = rollout.gpus_per_engine, trainer.gpus_per_rank
    shares = {"rollout.gpus_per_engine": engine, "trainer.gpus_per_rank": rank}
    fractions = [path for path, gpus in shares.items() if 0 < gpus < 1]
    if not fractions:
        return
    if len(fractions) < 2:
        (whole_key,) = shares.keys() - fractions
        message = f"must be a share of a GPU, too: {fractions[0]} is {shares[fractions[0]]:g}"
        yield Problem(whole_key, message, f"set it to {1 - shares[fractions[0]]:g}, or both to 1")
    elif engine + rank > 1:
        message = f"an engine and a rank take {engine:g} + {rank:g} of the GPU that they share"
        yield Problem("rollout.gpus_per_engine", message, f"lower it to {1 - rank:g}, or lower trainer.gpus_per_rank")
    if isinstance(rollout.engines, EngineRange) or rollout.engines != trainer.ranks:
        message = f"must be trainer.ranks ({trainer.ranks}): each engine shares a GPU with a trainer rank"
        yield Problem("rollout.engines", message, f"set it to {trainer.ranks}, or give engines whole GPUs")
    if spec.cluster.engines != ClusterSpec().engines:
        message = "engines that share GPUs with trainer ranks run on the nodes of these ranks"
        yield Problem("cluster.engines", message, "remove it; cluster.trainer chooses the nodes")
    used = rollout.engine_args.get("gpu_memory_utilization")
    if shares_gpus(spec) and isinstance(used, (int, float)) and used > engine:
        message = f"{used:g} is more than the engine's share of the GPU, {engine:g}"
        hint = f"remove it (then it is {memory_share(engine):.2g}), or raise rollout.gpus_per_engine"
        yield Problem("rollout.engine_args.gpu_memory_utilization", message, hint)


@rule
def shared_gpus_of_several_ranks(spec: ExperimentSpec) -> Iterator[Problem]:
    """Several ranks share their GPUs with engines only in mode `sync`, because its engines sleep during training.

    A message between ranks needs all of them on their GPUs at the same time. Next to a busy engine, each rank gets its
    GPU only for slices of time, and the ranks wait until their slices coincide.
    """
    if shares_gpus(spec) and not engines_sleep(spec) and spec.trainer.ranks > 1:
        message = f"{spec.trainer.ranks} ranks wait for each other while engines use the same GPUs, which is slow"
        hint = "set pipeline.mode to sync, or give ranks and engines whole GPUs (gpus_per_rank and gpus_per_engine: 1)"
        yield warning("trainer.gpus_per_rank", message, hint)


@rule
def threads(spec: ExperimentSpec) -> Iterator[Problem]:
    """If ranks and engines run on this machine's CPUs, there is a core for each of their threads."""
    trainer, rollout, cores = spec.trainer, spec.rollout, os.cpu_count()
    if spec.cluster.address is not None or trainer.gpus_per_rank or rollout.gpus_per_engine or cores is None:
        return
    counts = (trainer.ranks * trainer.threads_per_rank, rollout.max_engines * rollout.threads_per_engine)
    thread_count = max(counts) if spec.pipeline.mode == "sync" else sum(counts)
    if thread_count > cores:
        message = f"trainer and engines need {counts[0]} + {counts[1]} threads, and this machine has {cores} cores"
        path = "trainer.threads_per_rank" if counts[0] > counts[1] else "rollout.threads_per_engine"
        yield warning(path, message, f"lower threads, ranks or engines until they need {cores} together")


@rule
def joined_cluster(spec: ExperimentSpec) -> Iterator[Problem]:
    """A cluster is joined from one of its hosts. The other keys of `cluster` need `cluster.address`."""
    cluster = spec.cluster
    if cluster.address is not None and "://" in cluster.address:
        message = "the driver has to run on a host of the cluster, together with the journal and the gateway"
        hint = "run asyncrl there, with cluster.address: auto (`ray job submit` does; see docs/clusters.md)"
        yield Problem("cluster.address", message, hint)
    for key in ("trainer", "engines", "autoscaling"):
        if cluster.address is None and getattr(cluster, key) != getattr(ClusterSpec(), key):
            message = "applies to a joined cluster only, and this run starts its own"
            yield Problem(f"cluster.{key}", message, "set cluster.address, or remove this key")


@rule
def engine_arguments(spec: ExperimentSpec) -> Iterator[Problem]:
    """`rollout.engine_args` has no argument that asyncrl sets itself, and no value that cannot work."""
    for argument, value in spec.rollout.engine_args.items():
        name = argument_name(argument)
        path = f"rollout.engine_args.{argument}"
        if name in OWN_ENGINE_ARGS or name.startswith("schedul"):
            key = OWN_ENGINE_ARGS.get(name)
            hint = f"use {key} instead" if key else "remove it; asyncrl depends on its own value"
            yield Problem(path, "asyncrl sets this itself", hint)
        elif name in IMPOSSIBLE_ENGINE_ARGS:
            accepted_values, reason, hint = IMPOSSIBLE_ENGINE_ARGS[name]
            if value is not None and value not in accepted_values:
                yield Problem(path, f"{value!r} cannot work: {reason}", hint)


TRACKING_SCHEMES = (
    *("file", "sqlite", "postgresql", "mysql", "mssql"),
    *("http", "https", "databricks", "databricks-uc", "uc"),
)
"""Schemes of MLflow's tracking stores; installed plugins add theirs."""


@rule
def runs_folder(spec: ExperimentSpec) -> Iterator[Problem]:
    """`runs_dir` is a folder, or does not exist yet."""
    for path in (spec.runs_dir, *spec.runs_dir.absolute().parents):
        if os.path.exists(path):
            if not os.path.isdir(path):
                yield Problem("runs_dir", f"{path} is a file", "name a folder")
            return


@rule
def tracking_target(spec: ExperimentSpec) -> Iterator[Problem]:
    """MLflow knows the scheme of `tracking.uri`."""
    scheme, separator, _ = (spec.tracking.uri or "").partition(":")
    plugins = (entry.name for entry in entry_points(group="mlflow.tracking_store"))
    if separator and scheme.partition("+")[0] not in (*TRACKING_SCHEMES, *plugins):
        hint = f"use a path, or one of {', '.join(TRACKING_SCHEMES)}"
        yield Problem("tracking.uri", f"MLflow has no tracking store of scheme `{scheme}`", hint)


@rule
def finite_values(spec: ExperimentSpec) -> Iterator[Problem]:
    """Numbers in `model.init.config`, a task's `options` and `rollout.engine_args` are finite."""
    free: list[tuple[str, object]] = [
        ("model.init.config", spec.model.init.config if spec.model.init else {}),
        ("rollout.engine_args", spec.rollout.engine_args),
    ]
    free += [(f"{key}.options", task.options) for key, task in (all_tasks(spec) | members(spec)).items()]
    for path, value in free:
        for value_path in _not_finite(path, value):
            yield Problem(value_path, "must be a finite number", "the spec is recorded as JSON, which has no others")


def _not_finite(path: str, value: object) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(f"{path}.{name}", inner)
