"""The table of prime-rl's keys (its TOML files and command line).

Source: prime-rl's `packages/prime-rl-configs` and `src/prime_rl/trainer/rl/loss.py`, commit 559b447 of 2026-08-21. The
separate files of trainer, orchestrator and inference server have the keys that `rl.toml` has below these names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.convert.common import ASSUMED_STEPS, ATTENTION, Devices, model_path, run_name, running_rollouts
from asyncrl_cli.convert.rows import Row, Trainer, lost, needless, unsupported
from asyncrl_cli.convert.source import Source, options_of, read_file, shown, typed
from asyncrl_cli.core.errors import ConfigError

C, T, V = "orchestrator.", "trainer.", "inference.vllm."
PARTS = ("trainer", "orchestrator", "inference")
PARSERS = ("tool_parser", "reasoning_parser")
ASSUMED_PROMPTS = 100
# fmt: off
DEFAULTS = {
    "model.name": "Qwen/Qwen3-0.6B", "seq_len": 2048,
    "deployment.gpus_per_node": 8, "deployment.num_train_gpus": 1, "deployment.num_infer_gpus": 1,
    "deployment.num_infer_replicas": 1, f"{V}tensor_parallel_size": 1, f"{V}data_parallel_size": 1,
    f"{C}batch_size": 128, f"{C}group_size": 1, f"{C}max_off_policy_steps": 8, f"{C}concurrency.max_inflight": 1024,
    f"{C}train.sampling.temperature": 1.0, f"{C}train.filter_zero_advantages": True, f"{C}algo.type": "grpo",
    f"{C}eval.interval": 100, f"{C}eval.num_examples": -1, f"{C}eval.group_size": 1,
    f"{T}optim.lr": 1e-6, f"{T}optim.weight_decay": 0.01, f"{T}optim.max_norm": 1.0, f"{T}optim.betas1": 0.9,
    f"{T}optim.betas2": 0.999, f"{T}scheduler.type": "constant", f"{T}scheduler.warmup_steps": 10,
    f"{T}model.lora.rank": 16, f"{T}model.lora.alpha": 32.0, f"{T}model.cp": 1, f"{T}model.cp_style": "ring",
    f"{T}model.optim_cpu_offload": True,
}
ROWS = [
    Row("run.name *monitors.wandb.name", "name"),
    Row(f"model.name {T}model.name {C}model.name {V}model", "model.path"),
    Row(f"*seq_len {V}max_model_len", "model.max_length", "prompt and response together"),
    Row(f"{T}model.lora.rank", "model.lora.rank", "engines get merged weights, or adapters (serve: adapter)"),
    Row(f"{T}model.lora.alpha", "model.lora.alpha"),
    Row(f"{T}model.lora.target_modules", "model.lora.target_modules"),
    Row(f"{C}train.source.0.env.*", "task.use"),
    Row(f"{C}train.source.0.env.*", "task.options"),
    Row(f"{C}train.source.*.env.* {C}train.source.*.name {C}train.source.*.ratio", "task.mix"),
    Row("deployment.num_infer_gpus deployment.num_infer_nodes deployment.num_infer_replicas "
        f"{V}data_parallel_size deployment.type deployment.gpus_per_node", "rollout.engines", "vLLM instances"),
    Row(f"{V}tensor_parallel_size", "rollout.gpus_per_engine"),
    Row(f"{C}group_size", "rollout.group_size"),
    Row(f"{C}concurrency.max_inflight", "rollout.max_running_rollouts", "per engine; prime-rl counts the run's"),
    Row("*seq_len", "rollout.max_prompt_tokens", "longer prompts are skipped and counted"),
    Row(f"{C}train.sampling.max_completion_tokens", "rollout.max_response_tokens"),
    Row(f"{C}train.sampling.temperature", "rollout.sampling.temperature"),
    Row(f"{V}dtype", "rollout.dtype", "the trainer computes in the same dtype"),
    Row(f"{V}tool_call_parser", "rollout.tool_parser"),
    Row(f"{V}reasoning_parser", "rollout.reasoning_parser"),
    Row(f"{V}gpu_memory_utilization", "rollout.engine_args.gpu_memory_utilization"),
    Row(f"{V}enforce_eager", "rollout.engine_args.enforce_eager"),
    Row(f"{C}algo.type", "algorithm.preset", "only a name: the keys that it decides are written below"),
    Row(f"{C}algo.type", "algorithm.advantage", "grpo is the reward minus the group's mean"),
    Row(f"{C}algo.type", "algorithm.whiten_advantages"),
    Row(f"{C}algo.teacher.name", "algorithm.reference_path", "the teacher, on the trainer's ranks"),
    Row(f"{T}loss.*", "algorithm.loss"),
    Row(f"{T}loss.*", "algorithm.correction.preset"),
    Row(f"{T}enable_router_replay {V}enable_return_routed_experts", "algorithm.router_replay"),
    Row(f"{C}train.filter_zero_advantages", "algorithm.uniform_groups"),
    Row("deployment.num_train_gpus deployment.num_train_nodes", "trainer.ranks", "one GPU each"),
    Row("", "trainer.gpus_per_rank"),
    Row(f"{V}dtype", "trainer.dtype", "Adam's state and the main weights are float32"),
    Row("", "trainer.zero_stage", "DeepSpeed in place of FSDP"),
    Row(f"{T}optim.lr", "trainer.optimizer.learning_rate"),
    Row(f"{T}optim.betas1 {T}optim.betas2", "trainer.optimizer.betas"),
    Row(f"{T}optim.weight_decay", "trainer.optimizer.weight_decay"),
    Row(f"{T}optim.max_norm", "trainer.optimizer.max_grad_norm"),
    Row(f"{T}scheduler.type {T}scheduler.decay_steps", "trainer.schedule.kind"),
    Row(f"{T}scheduler.warmup_steps", "trainer.schedule.warmup_updates"),
    Row(f"{T}scheduler.min_lr", "trainer.schedule.final_fraction"),
    Row("*seq_len", "trainer.tokens_per_microbatch"),
    Row(f"{T}model.attn", "trainer.attention", "each version needs its package; sdpa works without"),
    Row(f"{T}model.cp {T}model.cp_style", "trainer.sequence_parallel"),
    Row(f"{T}model.ep", "trainer.expert_parallel"),
    Row(f"{T}model.ac*", "trainer.gradient_checkpointing"),
    Row(f"{T}model.optim_cpu_offload {T}model.full_offload {T}model.fsdp_cpu_offload", "trainer.offload",
        "prime-rl keeps the optimizer in the host's memory by default"),
    Row("", "pipeline.mode"),
    Row(f"{C}max_off_policy_steps", "pipeline.max_staleness", "never exceeded; prime-rl drops older rollouts"),
    Row(f"{C}batch_size {C}group_size", "pipeline.groups_per_step", "prompts; prime-rl counts rollouts"),
    Row(f"{C}eval.sampling.temperature", "evaluation.temperature"),
    Row(f"{C}eval.source.* {C}eval.num_examples {C}eval.group_size {C}eval.interval",
        "evaluation.sets"),
    Row("ckpt *ckpt.interval", "checkpoints.every", "0 saves only at the end"),
    Row("*ckpt.keep_last", "checkpoints.keep_last"),
    Row("*ckpt.keep_interval", "checkpoints.keep_every"),
    Row("", "tracking.mlflow"),
    Row("*monitors.wandb.project", "tracking.wandb.project"),
    Row("*monitors.wandb.entity", "tracking.wandb.entity"),
    Row("*max_steps", "stop.steps"),
]
"""prime-rl's keys that decide a key of a spec."""

OTHERS = [
    lost(f"{C}token_batch_size", "a step has a fixed number of groups: set pipeline.groups_per_step"),
    lost(f"{C}algo.length_penalty*", "write it as a reward of the group (docs/tasks.md)"),
    unsupported(f"{C}train.source.*.algo*", "one algorithm trains all tasks"),
    needless(f"{C}algo.*", "for algorithms that asyncrl lacks, or a teacher's address: asyncrl loads the teacher"),
    lost(f"{C}*curriculum*", "algorithm.uniform_groups: reject replaces groups without an advantage; data.filter and "
         "data.curriculum choose prompts"),
    lost(f"{C}train.source.*.sampling.* {C}train.source.*.group_size", "all tasks have the settings under rollout"),
    lost(f"{C}*sampling.extra_body* {C}eval*.sampling.*",
         "evaluations have the settings of rollouts, except evaluation.temperature"),
    unsupported("*model.vlm* *freeze_vision_encoder", "asyncrl's own keys for images: docs/models.md"),
    lost(f"{T}model.lora.dropout {T}model.lora.modules_to_save", "adapters are plain LoRA, without dropout"),
    lost(f"{T}optim.type", "the optimizer is AdamW", "adamw"),
    lost(f"{T}optim.*", "settings of another optimizer"),
    lost(f"*quantization* {T}model.index_cache* {T}model.freeze_moe_router {T}model.debug*", "not in a spec"),
    lost("*trust_remote_code *chat_template *tokenizer.name *conversion_dir",
         "models and tokenizers are loaded by transformers from model.path; model.chat_template names a file"),
    lost(f"{T}data.fake* {C}tasks_per_minute", "not in a spec"),
    lost("*resume*", "`asyncrl resume RUN --step N` continues a run"),
    lost(f"{V}rope_scaling {V}seed {V}max_loras {V}max_cpu_loras {V}max_lora_rank {V}lora_target_modules {V}enable_*",
         "put vLLM's own arguments under rollout.engine_args"),
    needless("run.dir *output_dir clean dry_run *log.* *env_vars* *slurm* "
             "*weight_broadcast* *rollout_transport* *heartbeat* *metrics_server* *monitors.* *ckpt *ckpt.* "
             "deployment.* inference.*",
             "asyncrl starts its processes itself, publishes weights through the hosts' memory, and logs every step"),
    needless(f"{T}model.* {T}gc* {T}matmul_precision {T}memory_profiler_path {T}trace_path {T}dist_timeout_seconds "
             f"{T}enable_token_export", "how the trainer computes: DeepSpeed ZeRO"),
    needless(f"{C}train.source.*.serve* {C}eval.* {C}renderer* {C}model.* {C}concurrency.* {C}env_server_base_port "
             f"{C}num_train_workers {C}pad_to_multiple_of {C}*inference_metrics*", "about prime-rl's orchestrator"),
]
# fmt: on


def read(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the files and keys of a command line such as `uv run rl @ rl.toml --max-steps 9`.

    All files are one configuration, and the last value of a key counts. Raises ``ConfigError``.
    """
    plain, options = options_of(words)
    files = [word for word in plain if word not in ("uv", "run", "rl", "@", *PARTS)]
    if not files and not options:
        raise ConfigError("there is no file and no key", hint="name prime-rl's TOML file, such as rl.toml")
    values: dict[str, Any] = {}
    for file in files:
        part = next((part for part in PARTS if Path(file).stem.startswith((part[:5], part[:4]))), "")
        own = {key: value for key, value in read_file(file).items() if value != {}}  # an empty table says nothing
        values |= {f"{part}.{key}": value for key, value in own.items()} if part else own
    own = typed(options)
    return files, {key: values[key] for key in values if not any(key.startswith(f"{name}.") for name in own)} | own


def _sources(s: Source, part: str) -> list[dict[str, Any]]:
    nested: dict[str, Any] = {}
    prefix = f"{C}{part}.source."
    for name in s.matching(f"{prefix}*"):
        *path, last = name.removeprefix(prefix).split(".")
        inner = nested
        for key in path:
            inner[key] = inner[key] if isinstance(inner.get(key), dict) else {}
            inner = inner[key]
        inner[last] = s.given[name]
    sources = [source for source in nested.values() if isinstance(source, dict)]
    return [source | {"env": env if isinstance(env := source.get("env"), dict) else {}} for source in sources]


def _tasks(s: Source) -> dict[str, Any]:
    sources, sets = _sources(s, "train"), {}
    mix = [
        {
            "name": run_name(source.get("name")) or f"source-{at}",
            "weight": source.get("ratio", 1.0),
            "use": "verifiers",
            "options": source["env"],
        }
        for at, source in enumerate(sources)
    ]
    for at, source in enumerate(_sources(s, "eval")):
        count, samples, every = (
            source.get(key, s.get(f"{C}eval.{key}")) for key in ("num_examples", "group_size", "interval")
        )
        known = isinstance(count, int) and count > 0
        sets[re.sub(r"\W", "_", str(source.get("name") or f"set_{at}"))[:28]] = {
            "data": {"size": count if known else ASSUMED_PROMPTS},
            "task": {"use": "verifiers", "options": source["env"] | {"held_out": False}},
            "every": every,
            "greedy": False,
            "samples": samples,
        }
        if not known:
            everything = f"prime-rl evaluates on all examples of a taskset; {ASSUMED_PROMPTS} is a placeholder"
            s.remarks["evaluation.sets"] = [everything]
    single = len(mix) == 1
    held_out = "one task in ten is held out for evaluations; the option held_out: false trains on all of them"
    s.remark("task.options" if single else "task.mix", held_out if mix else "choose a task: there is no taskset")
    return {
        "task.use": mix[0]["use"] if single else None,
        "task.options": mix[0]["options"] if single else None,
        "task.mix": None if single else mix,
        "evaluation.sets": sets or None,
    }


def _algorithm(s: Source) -> dict[str, Any]:
    name, distills = s.get(f"{C}algo.type"), s.get(f"{C}algo.type") == "opd"
    if name not in ("grpo", "opd"):
        s.unsupported.append(f"{C}algo.type = {shown(name)}: grpo and opd have a counterpart")
    text = "prime-rl masks tokens by the change in their probability (DPPO); the closest is clip with icepop"
    if own := s.get(f"{T}loss.import_path"):
        text = f"your loss {own} has different arguments: write it again (docs/algorithms.md)"
    s.remark("algorithm.loss", text)
    return {
        "algorithm.preset": "distill" if distills else "grpo",
        "algorithm.advantage": "none" if distills else "group_mean",
        "algorithm.whiten_advantages": False,
        "algorithm.loss": "clip",
        "algorithm.correction.preset": "icepop",
        "algorithm.uniform_groups": "skip" if s.flag(f"{C}train.filter_zero_advantages") and not distills else "train",
    }


def settings(s: Source) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    per_engine, size = max(s.count(f"{V}tensor_parallel_size"), 1), max(s.count(f"{C}group_size"), 1)
    node = s.count("deployment.gpus_per_node") if s.get("deployment.type") == "multi_node" else 0
    generating = s.count("deployment.num_infer_nodes") * node * s.count("deployment.num_infer_replicas")
    generating = generating or s.count("deployment.num_infer_gpus")
    training = s.count("deployment.num_train_nodes") * node or s.count("deployment.num_train_gpus")
    engines = max(generating // per_engine, s.count(f"{V}data_parallel_size"), 1)
    devices = Devices(max(training, 1), engines, per_engine)
    groups = max(s.count(f"{C}batch_size") // size, 1)
    length = s.count(f"{T}model.seq_len", f"{C}seq_len", "seq_len")
    response = s.count(f"{C}train.sampling.max_completion_tokens")
    if not 0 < response < length:
        s.remark("rollout.max_response_tokens", "prime-rl limits prompt and response together; half of them is a guess")
        response = length // 2
    lora, ep = s.section(f"{T}model.lora.") is not None, s.count(f"{T}model.ep")
    kind, rate = str(s.get(f"{T}scheduler.type")), s.number(f"{T}optim.lr")
    if kind == "linear":
        s.remark("trainer.schedule.kind", "prime-rl decays only in the last decay_steps, asyncrl over the entire run")
    if s.count(f"{T}model.cp") > 1 and s.get(f"{T}model.cp_style") == "ring":
        s.remark("trainer.sequence_parallel", "no ring attention: ranks exchange heads (Ulysses)")
    names, limits = s.matching("*monitors.wandb.name"), s.matching("*max_steps")
    if s.get(*limits) is None:
        s.remark("stop.steps", f"prime-rl runs without an end; {ASSUMED_STEPS} is a placeholder")
    in_host = s.flag(f"{T}model.optim_cpu_offload") or s.flag(f"{T}model.full_offload")
    offload = "optimizer" if in_host and ep < 2 else "none"
    lowest = s.number(f"{T}scheduler.min_lr") / rate if rate else None
    dtype = "float32" if s.get(f"{V}dtype") == "float32" else "bfloat16"
    attention = str(s.get(f"{T}model.attn")).replace("fa4", "flash_attention_4")
    running = max(s.count(f"{C}concurrency.max_inflight") // engines, 1)
    parsers = {f"rollout.{name}": s.get(f"{V}{name.replace('tool', 'tool_call')}") for name in PARSERS}
    return {
        "name": run_name(s.get("run.name", *names)),
        "model.path": model_path(s.get(f"{T}model.name", f"{C}model.name", f"{V}model", "model.name"), s),
        "model.max_length": length,
        "model.lora.rank": s.count(f"{T}model.lora.rank") if lora else None,
        "model.lora.alpha": s.number(f"{T}model.lora.alpha") if lora else None,
        **_tasks(s),
        "rollout.engines": engines,
        "rollout.max_running_rollouts": running_rollouts(running, group_size=size, groups=groups * 9, devices=devices),
        "rollout.max_prompt_tokens": length - response,
        "rollout.max_response_tokens": response,
        "rollout.dtype": dtype,
        **{key: None if parser == "auto" else parser for key, parser in parsers.items()},
        **_algorithm(s),
        "algorithm.router_replay": s.flag(f"{T}enable_router_replay") or None,
        "trainer.ranks": devices.ranks,
        "trainer.gpus_per_rank": 1,
        "trainer.dtype": dtype,
        "trainer.zero_stage": 3,
        "trainer.optimizer.betas": [s.number(f"{T}optim.betas1"), s.number(f"{T}optim.betas2")],
        "trainer.schedule.kind": kind if kind in ("linear", "cosine") else "constant",
        "trainer.schedule.warmup_updates": s.count(f"{T}scheduler.warmup_steps") if kind != "constant" else 0,
        "trainer.schedule.final_fraction": lowest if kind != "constant" else None,
        "trainer.tokens_per_microbatch": length,
        "trainer.attention": (attention if attention in ATTENTION else "flash_attention_2")
        if dtype == "bfloat16"
        else "sdpa",
        "trainer.expert_parallel": ep if ep > 1 else None,
        "trainer.gradient_checkpointing": True,
        "trainer.offload": "all" if s.flag(f"{T}model.fsdp_cpu_offload") else offload,
        "pipeline.mode": "async",
        "pipeline.groups_per_step": groups,
        "checkpoints.every": s.get(*s.matching("*ckpt.interval")) or 0,
        "tracking.mlflow": False,
        "stop.steps": s.get(*limits) or ASSUMED_STEPS,
    }


TRAINER = Trainer("prime-rl", defaults=DEFAULTS, rows=ROWS, others=OTHERS, settings=settings)
