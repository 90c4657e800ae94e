"""The table of verl's keys (0.7 to 0.10).

Source: verl's `trainer/config`, `experimental/*/config` and examples, commit 1dda039 of 2026-08-22. In ``OTHERS``, the
first matching row decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.convert import verl_settings as settings
from asyncrl_cli.convert.common import AUDIO, PROCESSOR, VIDEO
from asyncrl_cli.convert.rows import Row, Trainer, lost, needless, unsupported
from asyncrl_cli.convert.source import launched, short
from asyncrl_cli.convert.verl_settings import CORRECTION, OVERLONG, PROGRAM, TEACHERS, V1, A, D, F, L, M, R
from asyncrl_cli.core.errors import ConfigError

# fmt: off
DEFAULTS = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet", "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt", "data.max_prompt_length": 512, "data.max_response_length": 512,
    "data.train_batch_size": 1024, "data.shuffle": True, "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001, f"{CORRECTION}rollout_is_threshold": 2.0,
    f"{A}ppo_mini_batch_size": 256, f"{A}ppo_epochs": 1, f"{A}ppo_max_token_len_per_gpu": 16384, f"{A}clip_ratio": 0.2,
    f"{A}clip_ratio_c": 3.0, f"{A}tau_pos": 1.0, f"{A}tau_neg": 1.05, f"{A}policy_loss.loss_mode": "vanilla",
    f"{A}loss_agg_mode": "token-mean", f"{A}entropy_coeff": 0, f"{A}kl_loss_coef": 0.001,
    f"{A}kl_loss_type": "low_var_kl", f"{A}grad_clip": 1.0, f"{A}optim.lr": 1e-6, f"{A}optim.betas": [0.9, 0.999],
    f"{A}optim.weight_decay": 0.01, f"{A}optim.lr_warmup_steps": -1, f"{A}optim.lr_scheduler_type": "constant",
    f"{A}optim.min_lr_ratio": 0.0, f"{R}n": 1, f"{R}temperature": 1.0, f"{R}tensor_model_parallel_size": 2,
    f"{R}max_num_seqs": 256, f"{R}enforce_eager": False,
    f"{R}max_num_batched_tokens": 8192, f"{R}val_kwargs.n": 1, "reward.num_workers": 8,
    f"{M}path": "~/models/deepseek-llm-7b-chat",
    f"{M}enable_gradient_checkpointing": True, f"{M}use_remove_padding": True, f"{M}lora_alpha": 16,
    f"{M}target_modules": "all-linear", f"{L}loss_mode": "k3", f"{L}use_task_rewards": True, f"{L}clip_ratio_low": 0.2,
    f"{L}clip_ratio_high": 0.2, "critic.optim.lr": 1e-5, "critic.cliprange_value": 0.5, "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8, "trainer.total_epochs": 30, "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.logger": ["console", "wandb"], "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k",
    "async_training.staleness_threshold": 0.1, "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1, "async_training.partial_rollout": True,
    f"{V1}separate_async.parameter_sync_step": 4, f"{V1}sampler.max_off_policy_threshold": 8, "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
}
# fmt: on
"""verl's defaults of the keys that decide a key here. A file with `defaults: [ppo_trainer]` has them, too."""

OVERRIDE = r"[+~]*[a-z]\w*(\.\w+)+="
"""A pattern for an override on a command line."""
INSTEAD = (
    "convert the shell script that starts it, or have Hydra print its configuration, `bash run.sh --cfg job > "
    "config.yaml`, and convert that file (docs/from-verl.md)"
)


def read_line(line: list[str]) -> tuple[str, list[str]]:
    """Return the name of the program's configuration (or nothing), and the overrides and files of a command line.

    A configuration that `--config-path` and `--config-name` find is the first file. Raises ``ConfigError``.
    """
    end = launched(line)
    if line and line[-1].endswith(".py") and end == len(line):
        raise ConfigError("programs are not read", location=short(line[-1]), hint=INSTEAD)
    program = str(line[end - 1]) if end else ""
    words, options = [], {}
    remaining = iter(line[end:])
    for word in remaining:
        if not word.startswith("-"):
            words += [] if word == "$@" else [word]  # the script's arguments
            continue
        name, equals, value = word.partition("=")
        options[name] = str(value if equals else next(remaining, "")).strip("'\"")
        if name not in ("--config-path", "--config-name", "--config-dir"):
            raise ConfigError(f"`{short(word)}` is not an override of verl", hint="overrides are key=value")
    name = options.get("--config-name", "").removesuffix(".yaml")
    if name and not re.fullmatch(r"(one_step_off_|fully_async_)?ppo_(megatron_)?trainer", name):
        folder = options.get("--config-path") or options.get("--config-dir") or "."
        file = Path(folder, f"{name}.yaml")
        if not file.is_file():
            message = f"`{short(name)}` is not one of verl's configurations, and there is no file {short(str(file))}"
            raise ConfigError(message, hint=INSTEAD)
        words.insert(0, str(file))
    return name or program, words


def trainer_of(name: str, values: Mapping[str, Any]) -> Trainer:
    """Return the trainer with the defaults of a program, given its configuration's name, or else by its keys."""
    text = f"{name} {values.get('defaults')}"
    if "fully_async" in text or any(key.startswith("async_training.") for key in values):
        return TRAINERS["fully_async"]
    return TRAINERS["one_step_off" if "one_step_off" in text or "rollout.nnodes" in values else "ppo"]


_GAE = "only with `advantage: gae`"
# fmt: off
ROWS = [
    Row("trainer.experiment_name", "name"),
    Row("data.seed", "seed"),
    Row(f"{M}path", "model.path"),
    Row("data.max_prompt_length data.max_response_length", "model.max_length", "prompt and response together"),
    Row("data.apply_chat_template_kwargs.*", "model.chat_template_kwargs"),
    Row("*limit_mm_per_prompt.image *limit_images", "model.max_images", "images of a prompt"),
    Row(f"{A}freeze_vision_tower", "model.freeze", "the projector is always trained"),
    Row(f"{M}lora_rank {M}lora.rank", "model.lora.rank", "engines get merged weights, or adapters (serve: adapter)"),
    Row(f"{M}lora_alpha {M}lora.alpha", "model.lora.alpha"),
    Row(f"{M}target_modules", "model.lora.target_modules"),
    Row("reward.custom_reward_function.path reward.custom_reward_function.name custom_reward_function.path "
        f"custom_reward_function.name {R}multi_turn.enable", "task.use"),
    Row("reward.num_workers reward_model.num_workers", "task.reward_workers", "processes"),
    Row(f"{R}multi_turn.max_assistant_turns", "task.episode.max_calls"),
    Row("data.train_files", "data.train.path"),
    Row("data.train_max_samples", "data.train.size"),
    Row("data.prompt_key", "data.train.prompt_column"),
    Row("data.image_key", "data.train.image_column"),
    Row("data.val_files", "data.eval.path"),
    Row("data.val_max_samples", "data.eval.size"),
    Row("data.prompt_key", "data.eval.prompt_column"),
    Row("data.image_key", "data.eval.image_column"),
    Row("data.shuffle", "data.shuffle"),
    Row(f"{R}tensor_model_parallel_size {R}data_parallel_size rollout.nnodes rollout.n_gpus_per_node {R}nnodes "
        f"{R}n_gpus_per_node", "rollout.engines", "an engine is one vLLM instance"),
    Row(f"{R}tensor_model_parallel_size", "rollout.gpus_per_engine", "the size of vLLM's tensor parallelism"),
    Row(f"{R}n", "rollout.group_size"),
    Row(f"{R}max_num_seqs", "rollout.max_running_rollouts", "per engine, and at most its share of the batch"),
    Row("data.max_prompt_length data.filter_overlong_prompts data.truncation", "rollout.max_prompt_tokens",
        "longer prompts are skipped and counted, never truncated"),
    Row("data.max_response_length", "rollout.max_response_tokens"),
    Row(f"{R}temperature {R}do_sample", "rollout.sampling.temperature",
        "trainer and engine compute log-probs at this temperature"),
    Row(f"{R}dtype", "rollout.dtype", "the trainer computes in the same dtype"),
    Row(f"{R}multi_turn.format", "rollout.tool_parser", "the name of one of vLLM's tool parsers"),
    Row(f"{R}gpu_memory_utilization {R}standalone_gpu_memory_utilization",
        "rollout.engine_args.gpu_memory_utilization", "an engine has its GPUs to itself"),
    Row(f"{R}enforce_eager", "rollout.engine_args.enforce_eager"),
    Row(f"{R}max_num_batched_tokens", "rollout.engine_args.max_num_batched_tokens"),
    Row(f"algorithm.adv_estimator {D}enabled", "algorithm.preset",
        "only a name: the keys that it decides are written below"),
    Row("algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage"),
    Row("algorithm.adv_estimator", "algorithm.whiten_advantages", "in verl a part of gae and REINFORCE++"),
    Row("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", "algorithm.reward_parts"),
    Row("algorithm.adv_estimator", "algorithm.reward_aggregation"),
    Row("algorithm.gamma", "algorithm.gamma"),
    Row("algorithm.lam", "algorithm.gae_lambda"),
    Row(f"{A}policy_loss.loss_mode", "algorithm.loss"),
    Row(f"{A}clip_ratio_low {A}clip_ratio", "algorithm.clip_low"),
    Row(f"{A}clip_ratio_high {A}clip_ratio", "algorithm.clip_high"),
    Row(f"{A}clip_ratio_c", "algorithm.dual_clip", "verl always has it; its default is 3"),
    Row(f"{A}tau_pos {A}tau_neg", "algorithm.sapo_temperatures"),
    Row(f"{A}loss_agg_mode", "algorithm.aggregation", "over the entire minibatch of all ranks"),
    Row(f"{A}loss_scale_factor", "algorithm.sequence_divisor"),
    Row(f"{A}entropy_coeff", "algorithm.entropy_coef"),
    Row(f"{A}use_kl_loss {A}kl_loss_coef algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef",
        "0 needs no reference model"),
    Row(f"{A}kl_loss_type algorithm.kl_penalty", "algorithm.kl_estimator",
        "verl's names: kl is k1, mse is k2, low_var_kl is k3"),
    Row(f"{A}use_kl_loss algorithm.use_kl_in_reward", "algorithm.kl_placement"),
    Row(f"{TEACHERS} {D}teacher_key", "algorithm.reference_path", "the teacher"),
    Row(f"{L}*", "algorithm.reward_coef", "the clipped loss with the teacher's divergence as the only reward"),
    Row(f"{A}router_replay.mode *router_replay.mode *enable_rollout_routing_replay", "algorithm.router_replay"),
    Row(f"{CORRECTION}bypass_mode {CORRECTION}loss_type", "algorithm.correction.preset",
        "`decoupled`: the ratio is relative to the policy at the start of the step; `off`: to the sampling policy"),
    Row(f"{CORRECTION}rollout_is", "algorithm.correction.level"),
    Row(f"{CORRECTION}rollout_is_threshold", "algorithm.correction.cap"),
    Row(f"{CORRECTION}rollout_is_threshold", "algorithm.correction.mask_low"),
    Row(f"{CORRECTION}rollout_is_threshold", "algorithm.correction.mask_high"),
    Row(f"{CORRECTION}rollout_rs", "algorithm.correction.reject_by"),
    Row(f"{CORRECTION}rollout_rs", "algorithm.correction.reject_over"),
    Row(f"{CORRECTION}rollout_rs_threshold", "algorithm.correction.reject_low"),
    Row(f"{CORRECTION}rollout_rs_threshold", "algorithm.correction.reject_high"),
    Row(" ".join(f"{name}enable {name}penalty_factor" for name in OVERLONG), "algorithm.overlong_penalty"),
    Row(" ".join(f"{name}len" for name in OVERLONG), "algorithm.overlong_buffer",
        "a fraction of the longest response; verl counts tokens"),
    Row("algorithm.filter_groups.enable", "algorithm.uniform_groups",
        "groups with equal rewards: `reject` replaces them; `train` keeps them in the loss's denominator, as verl "
        "does; `skip` saves their computation"),
    Row("critic.optim.lr critic.model.path", "algorithm.critic.learning_rate",
        "the critic starts from the policy's weights, not from another model"),
    Row("critic.cliprange_value", "algorithm.critic.value_clip", _GAE),
    Row("trainer.critic_warmup", "algorithm.critic.warmup_steps", _GAE),
    Row("trainer.nnodes trainer.n_gpus_per_node", "trainer.ranks", "one GPU each"),
    Row("trainer.device", "trainer.gpus_per_rank"),
    Row(f"{A}strategy {F}strategy {F}reshard_after_forward model_engine", "trainer.zero_stage",
        "DeepSpeed ZeRO-3 in place of FSDP or Megatron"),
    Row(f"{F}dtype {F}model_dtype", "trainer.dtype", "Adam's state and the main weights are float32"),
    Row(f"{A}optim.lr", "trainer.optimizer.learning_rate"),
    Row(f"{A}optim.betas", "trainer.optimizer.betas"),
    Row(f"{A}optim.weight_decay", "trainer.optimizer.weight_decay"),
    Row(f"{A}grad_clip {A}optim.clip_grad", "trainer.optimizer.max_grad_norm"),
    Row(f"{A}optim.lr_scheduler_type {A}optim.warmup_style {A}optim.lr_decay_style", "trainer.schedule.kind"),
    Row(f"{A}optim.lr_warmup_steps {A}optim.lr_warmup_steps_ratio", "trainer.schedule.warmup_updates",
        "in optimizer updates; verl counts steps"),
    Row(f"{A}optim.min_lr_ratio", "trainer.schedule.final_fraction"),
    Row(f"{A}ppo_mini_batch_size", "trainer.minibatches", "updates per pass; verl gives the prompts per update"),
    Row(f"{A}ppo_epochs", "trainer.epochs"),
    Row(f"{A}ppo_max_token_len_per_gpu {A}use_dynamic_bsz {A}ppo_micro_batch_size_per_gpu",
        "trainer.tokens_per_microbatch", "verl's number times the GPUs of a sequence"),
    Row(f"{A}ulysses_sequence_parallel_size", "trainer.sequence_parallel"),
    Row(f"{M}use_remove_padding {A}use_remove_padding", "trainer.packing"),
    Row(f"{M}override_config.attn_implementation", "trainer.attention",
        "each version needs its package; sdpa works without"),
    Row(f"{M}enable_gradient_checkpointing", "trainer.gradient_checkpointing"),
    Row(f"{F}param_offload {F}optimizer_offload {F}offload_policy", "trainer.offload"),
    Row(f"{V1}trainer_mode", "pipeline.mode"),
    Row(f"async_training.staleness_threshold {V1}sampler.max_off_policy_threshold", "pipeline.max_staleness",
        "in weight versions, and never exceeded; in verl, staleness_threshold is a share of one version's prompts; "
        "max_off_policy_threshold counts versions, including the first"),
    Row("data.train_batch_size data.gen_batch_size async_training.require_batches", "pipeline.groups_per_step",
        "prompts per step, in verl and here; each gives rollout.group_size rollouts"),
    Row(f"async_training.trigger_parameter_sync_step {V1}separate_async.parameter_sync_step",
        "pipeline.publish_every"),
    Row("async_training.partial_rollout", "pipeline.weight_update"),
    Row("trainer.test_freq", "evaluation.every", "every run is evaluated before and after training as well"),
    Row(f"{R}val_kwargs.n", "evaluation.samples"),
    Row(f"{R}val_kwargs.temperature {R}val_kwargs.do_sample", "evaluation.temperature",
        "for sampled responses; greedy responses are generated, too"),
    Row("data.val_files", "evaluation.sets", "the files after the first, which is data.eval.path"),
    Row("trainer.save_freq", "checkpoints.every"),
    Row("trainer.max_actor_ckpt_to_keep", "checkpoints.keep_last"),
    Row("trainer.logger", "tracking.mlflow"),
    Row("trainer.project_name", "tracking.experiment"),
    Row("trainer.logger", "tracking.tensorboard"),
    Row("trainer.logger trainer.project_name", "tracking.wandb.project"),
    Row("trainer.total_training_steps rollout.total_rollout_steps", "stop.steps"),
    Row("trainer.total_epochs", "stop.epochs"),
]
# fmt: on
"""verl's keys that decide a key of a spec, in the order of the spec."""

_VLLM = "put vLLM's own arguments under rollout.engine_args"
# fmt: off
OTHERS = [
    needless("*_target_ hydra.* defaults ray_kwargs.* trainer.ray_wait_register_center_timeout *nccl_timeout",
             "about verl's own processes and configuration"),
    needless("*profiler.* *profiler", "profiling: asyncrl has `report`, `events` and metrics"),
    lost("*megatron.*_parallel_size *megatron.sequence_parallel *virtual_pipeline_model_parallel_size "
         "*.veomni.expert_parallel_size *.engine.tp *.engine.pp *.engine.vpp *.engine.ep *.engine.cp *.engine.etp",
         "the trainer is DeepSpeed ZeRO-3: experts are divided by trainer.expert_parallel", 1, True),
    lost("*moe_aux_loss_coeff *router_aux_loss_coef", "no auxiliary loss for experts"),
    needless("*.megatron.* *.veomni.* *.torchtitan.* *.actor.engine.* *.ref.engine.* critic.engine.* *model_engine *@*",
             "settings of another trainer than DeepSpeed ZeRO-3: set trainer.zero_stage and trainer.offload"),
    lost(f"{A}optim.optimizer critic.optim.optimizer", "the optimizer is AdamW", "AdamW", "adam"),
    lost(f"{A}optim.override_optimizer_config", "options of AdamW are in trainer.optimizer"),
    lost("critic.optim.weight_decay critic.optim.betas critic.optim.lr_warmup_steps critic.optim.lr_warmup_steps_ratio "
         "critic.optim.lr_scheduler_type critic.optim.clip_grad critic.optim.min_lr_ratio critic.grad_clip "
         "critic.ppo_epochs critic.ppo_mini_batch_size critic.loss_agg_mode",
         "the critic has its own learning rate, and the policy's other settings", when=settings.critic_differs),
    needless(f"{A}optim.* critic.optim.*", "AdamW with the schedule above; the critic has the policy's schedule"),
    lost("actor_rollout_ref.ref.model.path actor_rollout_ref.ref.model", "set algorithm.reference_path"),
    needless("actor_rollout_ref.ref.*",
             "the reference is the initial policy, on the trainer's ranks; see algorithm.reference_update_every"),
    lost("*qat.enable *quantization *quantization_config_file", "no quantized training or rollouts"),
    needless("*.qat* *turbo_config* *fsdp_config* *.fsdp.* *torch_compile *fused_kernel* *_checkpointing "
             "*entropy_from_logits* *pad_to_length* *tiled_mlp* *enable_activation_offload *use_liger *use_shm "
             "actor_rollout_ref.hybrid_engine *prefix_grouper *calculate_* *data_loader_seed *actor.shuffle "
             "*ulysses_sequence_parallel_size",
             "how the trainer computes: DeepSpeed ZeRO, a chunked output head, and no option needed"),
    needless("*micro_batch_size *micro_batch_size_per_gpu *log_prob_* *max_token_len_per_gpu *use_dynamic_bsz",
             "micro-batches are filled up to trainer.tokens_per_microbatch, also for log-probs and the critic"),
    needless("critic.*",
             "`advantage: gae` has a critic, which trains on the policy's ranks, with its batches and memory settings"),
    lost("reward.reward_model.enable reward_model.enable *reward_model.model_path reward_model.model.path "
         "reward.reward_manager.module.path reward_model.reward_loop_module_path",
         "call a reward model from a reward function or use the task `judge` (docs/tasks.md)"),
    lost("*sandbox_fusion.url", "the task `unit_tests` runs code in asyncrl's sandbox (docs/tasks.md)"),
    lost("reward.reward_manager.name reward_model.reward_manager reward_manager.name",
         "a reward is a function of one response: do this reward manager's work there", "naive", "dapo", "gdpo"),
    lost("*custom_reward_function.reward_kwargs.* reward.reward_kwargs.* reward_model.reward_kwargs.*",
         "make them defaults of your reward function's parameters", when=settings.reward_arguments_are_used),
    needless("reward.* reward_model.* reward_manager.* sandbox_fusion.* custom_reward_function.* data.reward_fn_key",
             "rewards come from the function in task.use, which gets all columns; task.reward_* limits its processes"),
    needless("distillation.*", "the teacher is on the trainer's ranks, sharded like the policy"),
    lost("*mtp.enable *mtp.enable_train *mtp.enable_rollout", "multi-token prediction: not in a spec"),
    needless("*router_replay.* *mtp.* *.mtp *moe_load_balance*", "router replay and multi-token prediction"),
    lost(f"{R}top_p {R}top_k {R}val_kwargs.top_p {R}val_kwargs.top_k",
         "no top-p and no top-k, because they would make the recorded log-probs wrong", 1, 1.0),
    lost(f"{R}ignore_eos {R}over_sample_rate {R}pipeline_model_parallel_size {R}expert_parallel_size "
         f"{R}moe_tensor_parallel_size {R}max_model_len {R}logprobs_mode {R}cudagraph_capture_sizes "
         f"{R}scheduling_policy",
         _VLLM, 1, "processed_logprobs", "fcfs"),
    lost(f"{R}engine_kwargs.*", _VLLM),
    lost(f"{R}agent.default_agent_loop {R}agent.agent_loop_config_path {R}agent.custom_async_server.*",
         "name your own agent as `module:function` in task.use (docs/agents.md)", "single_turn_agent", "tool_agent"),
    lost(f"{R}prompt_length {R}response_length", "set rollout.max_prompt_tokens and rollout.max_response_tokens",
         when=settings.lengths_differ),
    needless(f"{R}disaggregation.* {R}name {R}mode {R}load_format {R}free_cache_engine {R}layered_summon {R}seed "
             f"{R}enable_chunked_prefill {R}enable_prefix_caching {R}multi_stage_wake_up {R}disable_log_stats "
             f"{R}full_determinism {R}skip_* {R}prompt_length {R}response_length {R}checkpoint_engine.* "
             f"{R}agent.* {R}prometheus.* {A}use_rollout_log_probs {A}rollout_n",
             "the engines are vLLM's, and asyncrl sets this itself"),
    needless(f"{R}trace.* trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir skip.*",
             "every prompt, rollout and reward is in the run's journal: `asyncrl inspect buffer`, `asyncrl watch`"),
    lost(f"{R}multi_turn.tool_config_path {R}multi_turn.function_tool_path {R}multi_turn.interaction_config_path "
         "data.tool_config_path data.function_tool_path",
         "tools are MCP servers in task.tools.mcp, or part of your environment or agent (docs/agents.md)"),
    lost(f"{R}multi_turn.max_user_turns {R}multi_turn.max_tool_response_length {R}multi_turn.max_parallel_calls "
         f"{R}multi_turn.tool_response_truncate_side", "limits of turns and tools are your environment's or agent's",
         when=lambda s: s.flag(f"{R}multi_turn.enable")),
    needless(f"{R}multi_turn.*", "turns and tools are your environment's (docs/agents.md)"),
    needless(f"{A}policy_loss.* {A}tau_* {A}clip_ratio*", "settings of other losses"),
    unsupported("data.video_key *limit_mm_per_prompt.video", VIDEO, when=lambda s: not settings.is_complete(s)),
    unsupported("data.audio_key *limit_mm_per_prompt.audio", AUDIO, when=lambda s: not settings.is_complete(s)),
    lost("data.video_key *limit_mm_per_prompt.video", VIDEO),
    lost("data.audio_key *limit_mm_per_prompt.audio", AUDIO),
    lost("data.mm_processor_kwargs.* data.image_patch_size", PROCESSOR),
    needless("data.image_* data.mm_processor_kwargs *multi_modal* *limit_mm_per_prompt", PROCESSOR),
    lost("data.custom_cls.* data.sampler.* data.datagen.*",
         "name your own source as `module:function` in data.train.path (docs/data.md)"),
    lost(f"data.apply_chat_template_kwargs {M}custom_chat_template",
         "save a chat template as a file, and name it in model.chat_template"),
    lost("*trust_remote_code *external_lib *hf_config_path *tokenizer_path data.tokenizer *lora_adapter_path "
         "*exclude_modules", "models and tokenizers are loaded by transformers, from model.path"),
    lost(f"{M}override_config.*", "change it in the config.json of a copy of the model"),
    lost(f"{M}lora.type {M}lora.dropout", "adapters are plain LoRA, without dropout", "lora"),
    needless(f"{M}lora.* {M}override_config {M}lora_* {M}tokenizer {M}type",
             "other settings of the model"),
    needless("data.val_batch_size data.return_* data.*num_workers data.validation_shuffle data.*_workers "
             "data.filter_prompts data.enable_thinking_mode data.*tokenized*",
             "prompts get the chat template; longer ones are skipped"),
    lost("algorithm.use_pf_ppo", "no PF-PPO"),
    lost(f"{CORRECTION}rollout_is_batch_normalize", "weights are not normalized over the batch"),
    lost("algorithm.filter_groups.metric", "groups are compared by their rewards", "seq_reward", "seq_final_reward",
         "score", when=lambda s: s.flag("algorithm.filter_groups.enable")),
    needless("algorithm.kl_ctrl.* algorithm.pf_ppo.* algorithm.filter_groups.*",
             "off or fixed: the KL coefficient is constant, and replacing groups has no limit of batches"),
    lost("trainer.val_only", "`asyncrl evaluate SPEC` evaluates without training"),
    lost("trainer.resume_from_path trainer.default_hdfs_dir trainer.esi_redundant_time",
         "`asyncrl resume RUN` continues a run; checkpoints are on a file system"),
    needless(f"{A}checkpoint.* trainer.resume_mode trainer.val_before_train trainer.balance_batch "
             "trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep trainer.use_legacy_worker_impl "
             "trainer.use_v1 trainer.default_local_dir",
             "every run has a folder below runs_dir, with its checkpoints, and is evaluated first"),
    lost("rollout.n", f"{R}n has the rollouts per prompt"),
    lost(f"{V1}colocate_async.* {V1}sampler.custom_sampler.*", "only for verl's asynchronous trainer", 1),
    needless(f"{V1}* transfer_queue.* async_training.*",
             "the ledger decides which groups start and which are trained; no group is dropped for its age"),
]
# fmt: on
"""verl's keys without a counterpart."""

_ASYNCHRONOUS: dict[str, Any] = {f"{CORRECTION}bypass_mode": True}
TRAINERS = {
    program: Trainer("verl", DEFAULTS | own_defaults | {PROGRAM: program}, ROWS, OTHERS, settings.settings)
    for program, own_defaults in {
        "ppo": {},
        "one_step_off": _ASYNCHRONOUS,
        "fully_async": _ASYNCHRONOUS | {"rollout.total_rollout_steps": 100},
    }.items()
}
"""verl's programs with their defaults."""
