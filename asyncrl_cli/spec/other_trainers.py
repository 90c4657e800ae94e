"""Names of other trainers (verl, TRL, OpenRLHF, prime-rl, AReaL, slime) for the keys of a spec.

A name may include its sections, as in `rollout.n`.
"""

from __future__ import annotations

# fmt: off
_KEYS = {
    "data.train.path": "train_files train_data data_files dataset_name dataset dataset_path prompt_data",
    "data.eval.path": "val_files val_data eval_dataset",
    "data.train.config": "dataset_config",
    "data.train.split": "dataset_train_split",
    "data.eval.split": "dataset_test_split",
    "data.train.prompt_column": "prompt_key input_key",
    "data.train.image_column": "image_key images_key",
    "data.image_max_pixels": "max_pixels",
    "model.max_images": "limit_images limit_mm_per_prompt.image limit_mm_per_prompt",
    "model.freeze": "freeze_vision_tower freeze_vision_encoder freeze_vision",
    "data.train.template": "input_template",
    "data.train.size": "max_samples train_max_samples",
    "data.eval.size": "val_max_samples",
    "data.shuffle": "shuffle_dataset",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "rollout.max_response_tokens":
        "max_response_length response_length max_completion_length generate_max_len max_new_tokens max_tokens "
        "rollout_max_response_len max_generate_length",
    "model.max_length": "max_model_len max_seq_len max_seq_length seq_len",
    "pipeline.groups_per_step":
        "train_batch_size rollout_batch_size global_batch_size batch_size generation_batch_size",
    "evaluation.prompts": "val_batch_size per_device_eval_batch_size",
    "trainer.minibatches": "steps_per_generation ppo_mini_batch_size num_minibatches policy_mini_batch_size",
    "rollout.max_running_rollouts": "micro_rollout_batch_size max_num_seqs max_concurrent_rollouts max_inflight",
    "trainer.tokens_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu max_tokens_per_microbatch",
    "rollout.group_size": "rollout.n rollout_n n num_generations n_samples_per_prompt n_samples rollouts_per_example",
    "rollout.sampling.temperature": "temperature",
    "rollout.sampling.stop": "stop_strings",
    "evaluation.samples": "val_kwargs.n val_kwargs.do_sample",
    "evaluation.temperature": "val_kwargs.temperature",
    "rollout.engines": "vllm_num_engines parallel.dp data_parallel_size num_engines",
    "rollout.gpus_per_engine": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size parallel.tp",
    "task.episode.max_calls": "multi_turn.max_assistant_turns max_turns",
    "task.episode.workers": "agent.num_workers",
    "task.use": "agent_func_path env env_id environment env_class",
    "algorithm.advantage algorithm.preset": "adv_estimator advantage_estimator",
    "algorithm.advantage algorithm.whiten_advantages": "normalize_advantages",
    "algorithm.loss algorithm.aggregation": "loss_type",
    "algorithm.loss": "policy_loss.loss_mode policy_loss_type",
    "algorithm.aggregation": "loss_agg_mode loss_reduction",
    "algorithm.clip_low algorithm.clip_high": "clip_ratio eps_clip cliprange clip_range eps_clip_low_high",
    "algorithm.clip_high": "eps_clip_high epsilon_high clip_ratio_high",
    "algorithm.clip_low": "epsilon epsilon_low clip_ratio_low eps_clip_low",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.critic.value_clip": "cliprange_value",
    "algorithm.critic.warmup_steps": "critic_warmup",
    "algorithm.critic.learning_rate": "critic_learning_rate critic.optim.lr",
    "algorithm.kl_coef": "beta kl_beta init_kl_coef kl_loss_coef kl_coeff kl_ctrl.kl_coef",
    "algorithm.kl_estimator": "kl_penalty kl_loss_type kl_estimator_type",
    "algorithm.kl_placement algorithm.kl_coef": "use_kl_loss use_kl_in_reward",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef ent_coef",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.reference_update_every": "sync_ref_model ref_model_sync_steps",
    "model.warm_start.train_on": "assistant_only_loss completion_only_loss mask_history train_on_inputs",
    "model.warm_start.response_column": "response_key output_key response_field",
    "algorithm.reference_path":
        "ref_model_path ref.model.path teacher_model teacher_model_path teacher_model_name_or_path "
        "teacher_name_or_path",
    "algorithm.preset rollout.group_size": "spo.enable spo.offline_values",
    "algorithm.baseline_half_life": "spo.rho rho.value rho.clip_lower",
    "algorithm.preset algorithm.reference_path": "distillation distillation.enabled gkd on_policy_distillation",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.overlong_buffer": "overlong_buffer.len",
    "algorithm.overlong_penalty": "overlong_buffer.penalty_factor",
    "algorithm.uniform_groups":
        "filter_groups filter_groups.enable dynamic_filtering filter_zero_advantages zero_variance_filter",
    "data.filter algorithm.uniform_groups": "online_difficulty_filtering",
    "algorithm.correction.cap":
        "importance_cap vllm_importance_sampling_cap vllm_is_truncated_threshold rollout_is_threshold "
        "tis_imp_ratio_cap behav_imp_weight_cap",
    "algorithm.correction.preset":
        "vllm_importance_sampling_correction enable_vllm_is_correction use_tis use_decoupled_loss",
    "algorithm.correction.level": "rollout_is",
    "algorithm.correction.mask_high": "token_mask_high",
    "algorithm.correction.mask_low": "token_mask_low",
    "algorithm.reward_parts task.mix": "reward_weights",
    "algorithm.reward_parts": "gdpo_reward_keys gdpo_reward_weights reward_components",
    "algorithm.reward_aggregation": "multi_objective_aggregation",
    "task.tools.mcp":
        "mcp_servers mcpservers mcp_servers_config_path multi_turn.tool_config_path tool_config_path mcp_config",
    "trainer.optimizer.learning_rate": "lr learning_rate actor_learning_rate",
    "trainer.optimizer.betas": "optim.betas",
    "trainer.optimizer.eps": "adam_epsilon optimizer.epsilon",
    "trainer.optimizer.max_grad_norm": "grad_clip max_norm max_grad gradient_clipping",
    "trainer.schedule.kind": "lr_scheduler_type lr_scheduler warmup_style",
    "trainer.schedule.final_fraction": "min_lr_ratio",
    "trainer.schedule.warmup_updates": "warmup_steps lr_warmup_steps",
    "trainer.epochs": "ppo_epochs num_iterations max_epochs update_epochs_per_batch",
    "trainer.dtype rollout.dtype": "torch_dtype",
    "trainer.zero_stage": "deepspeed",
    "trainer.offload": "adam_offload param_offload optimizer_offload",
    "trainer.gradient_checkpointing": "enable_gradient_checkpointing",
    "trainer.packing": "use_remove_padding packing_samples",
    "trainer.attention": "flash_attn attn_implementation attn",
    "trainer.ranks": "num_processes world_size",
    "model.path": "model_name_or_path model_path model_name model.name pretrain base_model",
    "model.lora": "use_peft",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.target_modules": "lora_target_modules",
    "model.init.config": "override_config",
    "model.chat_template_kwargs": "apply_chat_template_kwargs tokenizer_kwargs enable_thinking",
    "stop.epochs": "total_epochs num_train_epochs num_episodes total_train_epochs num_epoch num_epochs",
    "stop.steps": "max_steps total_steps total_training_steps num_steps num_rollout max_training_steps",
    "pipeline.max_staleness":
        "max_async_level async_level max_off_policy_steps max_head_offpolicyness staleness_threshold "
        "async_queue_size max_policy_age max_staleness_steps",
    "pipeline.mode": "async_train async_training",
    "pipeline.publish_every": "trigger_parameter_sync_step update_weights_interval",
    "pipeline.partial_rollouts": "partial_rollout",
    "evaluation.every": "eval_steps eval_interval eval.interval test_freq eval_strategy",
    "checkpoints.every": "save_steps save_freq save_interval save_strategy ckpt.interval ckpt_interval",
    "checkpoints.keep_last": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num max_ckpts_to_keep",
    "checkpoints.keep_every": "keep_interval",
    "rollout.tool_parser": "tool_call_parser",
    "runs_dir": "output_dir save_path ckpt_path default_local_dir logging_dir",
    "name": "run_name trial_name exp_name",
    "name tracking.experiment": "experiment_name",
    "tracking.experiment": "project_name",
    "tracking.wandb.project": "wandb_project",
    "tracking.wandb": "use_wandb wandb",
    "tracking.tensorboard": "use_tensorboard",
    "cluster.address": "ray_address",
}
"""The keys to use, likeliest first, each with other trainers' names for them."""

_HINTS = {
    "all columns of a row reach the task: name it in task.options, or read it in your reward function": "label_key",
    "an assistant message at the end of a prompt is continued by itself; remove it":
        "continue_final_message add_generation_prompt",
    "prompts above rollout.max_prompt_tokens are always skipped and counted; remove it":
        "filter_overlong_prompts truncation",
    "asyncrl takes care of this itself; remove it":
        "return_raw_chat balance_batch rollout.mode use_vllm vllm_mode enable_chunked_prefill "
        "free_cache_engine load_format vllm_enable_sleep",
    "micro-batches are counted in tokens: set trainer.tokens_per_microbatch":
        "gradient_accumulation_steps per_device_train_batch_size micro_batch_size micro_train_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "micro-batches are always filled by tokens, up to trainer.tokens_per_microbatch; remove it": "use_dynamic_bsz",
    "the trainer chooses these batches itself, within trainer.tokens_per_microbatch; remove it":
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu",
    "the engines are vLLM's; remove it": "rollout.name",
    "engines do not guess tokens: it was slower in every measured run; remove it":
        "speculative_tokens num_speculative_tokens speculative_config speculative_num_draft_tokens",
    "sampling has no top-p, top-k, min-p or penalties: they would make the recorded log-probs wrong; remove it":
        "top_p top_k min_p repetition_penalty",
    "set rollout.engine_args.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "set rollout.engine_args.enforce_eager": "enforce_eager",
    "set rollout.engine_args.max_num_batched_tokens": "max_num_batched_tokens",
    "set rollout.engine_args.enable_prefix_caching": "enable_prefix_caching",
    "put vLLM's own arguments under rollout.engine_args": "vllm engine_kwargs",
    "set algorithm.advantage: group_norm scales by the deviation, group_mean does not":
        "scale_rewards norm_adv_by_std_in_grpo",
    "set algorithm.loss: `gspo` has ratios of sequences, `clip` of tokens": "importance_sampling_level",
    "set algorithm.kl_coef, with algorithm.reference_path or reference_update_every": "ref_model_mixup_alpha",
    "rewards are the task's: set task.use to `module:function`":
        "reward_funcs reward_fn reward_fn_key reward_model reward_manager reward_pretrain remote_rm_url "
        "custom_reward_function",
    "set trainer.optimizer.betas, a list of two": "adam_beta1 adam_beta2",
    "warm-up is counted in optimizer updates: set trainer.schedule.warmup_updates":
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "set trainer.dtype and rollout.dtype to bfloat16": "bf16",
    "float16 is not supported: set trainer.dtype and rollout.dtype to bfloat16": "fp16",
    "trainers run DeepSpeed ZeRO: set trainer.zero_stage": "strategy",
    "distribute GPUs with trainer.ranks and gpus_per_rank, rollout.engines and gpus_per_engine":
        "n_gpus_per_node num_gpus n_gpus actor_num_gpus_per_node gpus_per_node",
    "a spec does not count machines: start a Ray cluster on them, and name it in cluster.address":
        "nnodes num_nodes actor_num_nodes",
    "trainer and engines have separate devices; remove it": "colocate_all_models hybrid_engine",
    "every run is evaluated before and after training; remove it": "val_before_train",
    "evaluate without training with `asyncrl evaluate SPEC` (or a RUN); remove it": "val_only eval_only do_eval",
    "continue a run with `asyncrl resume RUN`; remove it": "resume_mode resume_from_checkpoint resume_from_path",
    "choose with tracking.mlflow, tracking.tensorboard and tracking.wandb": "report_to logger",
    "every step is logged; remove it": "logging_steps",
    "nodes are chosen by labels: `ray start --labels role=trainer`, and cluster.trainer.labels: {role: trainer}":
        "cluster.trainer.nodes cluster.engines.nodes",
    "copy complete checkpoints yourself, for example with `aws s3 sync` or `rclone copy` (docs/tutorial.md)":
        "checkpoints.upload default_hdfs_dir push_to_hub hub_model_id",
    "the warm start uses the trainer's optimizer: set model.warm_start.learning_rate and trainer.optimizer":
        "warm_start.matrix_learning_rate warm_start.weight_decay",
    "set model.warm_start.schedule.warmup_updates": "warm_start.warmup_steps",
    "the warm start runs on the trainer's ranks: set trainer.threads_per_rank": "warm_start.threads",
    "tasks have no demonstrations: name your rows in model.warm_start.data, and remove it":
        "warm_start.clean_fraction",
    "notify yourself with a monitor: set tracking.monitors (docs/watching.md has an example)": "notify",
    "every rollout is in the run's journal: see `asyncrl inspect buffer`; remove it": "log_completions",
}
# fmt: on
"""Hints for other trainers' names without a corresponding key, each with these names."""

VALUES = {
    "spo": ("single_rollout", "running_baseline"),
    "reinforce_plus_plus": ("reinforce_pp",),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline",),
    "vanilla": ("clip",),
}
"""Values of other trainers, each with the values to use instead."""

CONVERTIBLE = {
    "actor_rollout_ref": "verl",
    "async_training": "verl",
    "model_name_or_path": "trl",
    "num_generations": "trl",
    "per_device_train_batch_size": "trl",
}
"""Top-level keys that identify another trainer's complete configuration, which `asyncrl convert` can read."""

KEYS = {name: keys.split() for keys, names in _KEYS.items() for name in names.split()}
HINTS = {name: hint for hint, names in _HINTS.items() for name in names.split()}
