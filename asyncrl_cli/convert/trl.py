"""The table of TRL's arguments (0.19 to 1.10, and open-r1's).

Sources: TRL's `trainer/*_config.py`, `experimental/{ppo,async_grpo}`, `scripts/` and examples, commit f2cd577 of
2026-07-24, transformers' `TrainingArguments`, and open-r1's recipes. In ``OTHERS``, the first matching row decides.
"""

from __future__ import annotations

from typing import Any

from asyncrl_cli.convert.common import AUDIO, PROCESSOR, VIDEO
from asyncrl_cli.convert.rows import Row, Trainer, lost, needless, unsupported
from asyncrl_cli.convert.trl_settings import CORRECTION, METHOD, settings

# fmt: off
_COMMON = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3, "learning_rate": 1e-6,
    "lr_scheduler_type": "linear", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "gradient_checkpointing": True, "seed": 42, "save_strategy": "steps", "save_steps": 500,
    "eval_strategy": "no", "logging_steps": 10, "report_to": "none", "project": "huggingface",
    "dataset_train_split": "train", "dataset_test_split": "test", "dataset_prompt_column": "prompt",
    "shuffle_dataset": True, "lora_r": 16, "lora_alpha": 32, "temperature": 1.0, "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
}
_GRPO = {
    "num_generations": 8, "max_completion_length": 512, "num_iterations": 1, "beta": 0.0, "epsilon": 0.2,
    "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token", "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, f"{CORRECTION}correction": True, f"{CORRECTION}mode": "sequence_mask",
    f"{CORRECTION}clip_max": 3.0, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _COMMON | _GRPO,
    "rloo": _COMMON | _GRPO | {"num_generations": 2, "beta": 0.05, f"{CORRECTION}correction": False},
    "async_grpo": _COMMON | _GRPO | {
        "max_completion_length": 2048, "lr_scheduler_type": "constant", "max_staleness": 4, "weight_sync_steps": 1,
        f"{CORRECTION}correction": False,
    },
    "ppo": _COMMON | {
        "learning_rate": 3e-6, "num_ppo_epochs": 4, "num_mini_batches": 1, "response_length": 53, "temperature": 0.7,
        "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
        "reward_model_path": "EleutherAI/pythia-160m", "sft_model_path": "EleutherAI/pythia-160m",
    },
    "gkd": _COMMON | {
        "learning_rate": 2e-5, "temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_new_tokens": 128, "max_length": 1024,
    },
}
# fmt: on
"""TRL's defaults of the arguments that decide a key, for each trainer."""

_PPO_ONLY = "only in PPO"
# fmt: off
ROWS = [
    Row("run_name output_dir", "name"),
    Row("seed", "seed"),
    Row("model_name_or_path sft_model_path", "model.path"),
    Row("max_prompt_length max_completion_length vllm_max_model_length response_length max_length", "model.max_length",
        "prompt and response together"),
    Row("chat_template_kwargs.*", "model.chat_template_kwargs"),
    Row("model_name_or_path", "model.max_images", "images of a prompt"),
    Row("freeze_vision*", "model.freeze", "the projector is always trained"),
    Row("use_peft lora_r", "model.lora.rank", "engines get merged weights, or adapters (serve: adapter)"),
    Row("lora_alpha", "model.lora.alpha"),
    Row("lora_target_modules", "model.lora.target_modules"),
    Row("reward_funcs reward_weights reward_model_name_or_path reward_model_path", "task.use"),
    Row("reward_funcs", "task.options.field", "the column with the answer"),
    Row("max_tool_calling_iterations", "task.episode.max_calls"),
    Row("dataset_name", "data.train.path"),
    Row("dataset_config", "data.train.config"),
    Row("dataset_train_split", "data.train.split"),
    Row("dataset_prompt_column", "data.train.prompt_column"),
    Row("dataset_name", "data.train.image_column"),
    Row("system_prompt", "data.train.system"),
    Row("dataset_name eval_strategy do_eval", "data.eval.path"),
    Row("dataset_config", "data.eval.config"),
    Row("dataset_test_split", "data.eval.split"),
    Row("dataset_prompt_column", "data.eval.prompt_column"),
    Row("dataset_name", "data.eval.image_column"),
    Row("system_prompt", "data.eval.system"),
    Row("shuffle_dataset", "data.shuffle"),
    Row("system_prompt", "data.apply_chat_template",
        "for text prompts; TRL does not put them into the chat template, open-r1 does"),
    Row("use_vllm vllm_mode", "rollout.engines", "the engines are always vLLM's"),
    Row("vllm_tensor_parallel_size", "rollout.gpus_per_engine"),
    Row("num_generations", "rollout.group_size", "PPO has one response per prompt"),
    Row("max_inflight_tasks", "rollout.max_running_rollouts", "per engine: 256, or all of a step"),
    Row("max_prompt_length vllm_max_model_length max_length", "rollout.max_prompt_tokens",
        "longer prompts are skipped and counted, never truncated"),
    Row("max_completion_length response_length max_new_tokens", "rollout.max_response_tokens"),
    Row("temperature", "rollout.sampling.temperature", "trainer and engine compute log-probs at this temperature"),
    Row("dtype torch_dtype bf16 fp16 mixed_precision", "rollout.dtype", "the trainer's dtype"),
    Row("loss_type importance_sampling_level", "algorithm.preset",
        "only a name: the keys that it decides are written below"),
    Row("scale_rewards", "algorithm.advantage", "in each group; TRL adds 1e-4 to the deviation, asyncrl 1e-6"),
    Row("reward_funcs reward_weights multi_objective_aggregation", "algorithm.reward_parts"),
    Row("multi_objective_aggregation", "algorithm.reward_aggregation"),
    Row("normalize_advantages", "algorithm.whiten_advantages", "over all tokens of a step; in TRL a part of PPO"),
    Row("gamma", "algorithm.gamma", "for PPO; 0 in GKD, where later tokens have no effect"),
    Row("lam", "algorithm.gae_lambda", _PPO_ONLY),
    Row("loss_type importance_sampling_level", "algorithm.loss"),
    Row("epsilon cliprange", "algorithm.clip_low"),
    Row("epsilon_high epsilon cliprange", "algorithm.clip_high", "above 1; TRL's cispo takes the upper edge itself"),
    Row("delta", "algorithm.dual_clip", "upper bound of the ratio for negative advantages"),
    Row("sapo_temperature_pos sapo_temperature_neg", "algorithm.sapo_temperatures"),
    Row("loss_type", "algorithm.aggregation", "grpo is sequence_mean, dapo and bnpo token_mean, dr_grpo sequence_sum"),
    Row("loss_type", "algorithm.sequence_divisor", "RLOO adds up the tokens of a sequence"),
    Row("entropy_coef", "algorithm.entropy_coef", "over tokens"),
    Row("beta kl_coef", "algorithm.kl_coef", "0 needs no reference model"),
    Row("teacher_model_name_or_path", "algorithm.reference_path", "the teacher"),
    Row("lmbda seq_kd", "algorithm.reward_coef", "every response is the student's own, and no reward trains"),
    Row("kl_estimator", "algorithm.kl_estimator", "k3 in the loss of GRPO, k1 in the reward of RLOO"),
    Row("beta kl_coef", "algorithm.kl_placement"),
    Row("sync_ref_model ref_model_sync_steps ref_model_mixup_alpha", "algorithm.reference_update_every",
        "in steps; TRL counts updates"),
    Row(f"{CORRECTION}correction", "algorithm.correction.preset",
        "the ratio is relative to the policy at the start of the step"),
    Row(f"{CORRECTION}mode", "algorithm.correction.level"),
    Row(f"{CORRECTION}clip_max {CORRECTION}cap", "algorithm.correction.cap"),
    Row(f"{CORRECTION}clip_min", "algorithm.correction.mask_low"),
    Row(f"{CORRECTION}clip_max {CORRECTION}cap", "algorithm.correction.mask_high"),
    Row("mask_truncated_completions", "algorithm.mask_truncated"),
    Row(METHOD, "algorithm.uniform_groups", "groups with equal rewards stay in the loss's denominator, as in TRL; "
        "`skip` saves their computation"),
    Row("cliprange_value", "algorithm.critic.value_clip", _PPO_ONLY),
    Row("learning_rate", "algorithm.critic.learning_rate", "TRL has one learning rate for both"),
    Row("num_processes accelerate_config", "trainer.ranks", "one GPU each"),
    Row("use_cpu", "trainer.gpus_per_rank"),
    Row("deepspeed_config.zero_stage accelerate_config distributed_type", "trainer.zero_stage",
        "3 needs the least memory; the results are the same"),
    Row("bf16 fp16 dtype torch_dtype mixed_precision", "trainer.dtype",
        "Adam's state and the main weights are float32"),
    Row("learning_rate", "trainer.optimizer.learning_rate"),
    Row("adam_beta1 adam_beta2", "trainer.optimizer.betas"),
    Row("adam_epsilon", "trainer.optimizer.eps"),
    Row("weight_decay", "trainer.optimizer.weight_decay"),
    Row("max_grad_norm", "trainer.optimizer.max_grad_norm"),
    Row("lr_scheduler_type", "trainer.schedule.kind"),
    Row("warmup_steps warmup_ratio", "trainer.schedule.warmup_updates", "in optimizer updates, as in TRL"),
    Row("lr_scheduler_kwargs.min_lr_rate", "trainer.schedule.final_fraction"),
    Row("steps_per_generation num_mini_batches", "trainer.minibatches", "updates per pass over a step's groups"),
    Row("num_iterations num_ppo_epochs", "trainer.epochs"),
    Row("per_device_train_batch_size", "trainer.tokens_per_microbatch",
        "tokens per GPU; TRL counts completions, here at their longest"),
    Row("attn_implementation model_init_kwargs.attn_implementation", "trainer.attention",
        "sdpa if TRL leaves the choice to transformers"),
    Row("gradient_checkpointing", "trainer.gradient_checkpointing"),
    Row("deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device", "trainer.offload"),
    Row(METHOD, "pipeline.mode"),
    Row("max_staleness", "pipeline.max_staleness", "in weight versions, and never exceeded; TRL drops older rollouts"),
    Row("per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size",
        "pipeline.groups_per_step",
        "prompts; TRL counts completions: per device · processes · accumulation / num_generations"),
    Row("weight_sync_steps", "pipeline.publish_every"),
    Row("eval_strategy eval_steps", "evaluation.every", "in steps; TRL counts updates"),
    Row("num_generations_eval", "evaluation.samples"),
    Row("save_strategy save_steps", "checkpoints.every", "in steps; TRL counts updates"),
    Row("save_total_limit", "checkpoints.keep_last"),
    Row("report_to", "tracking.mlflow"),
    Row("project wandb_project", "tracking.experiment"),
    Row("report_to", "tracking.tensorboard"),
    Row("report_to wandb_project", "tracking.wandb.project"),
    Row("wandb_entity", "tracking.wandb.entity"),
    Row("max_steps total_episodes", "stop.steps", "a step is a generation batch; TRL counts optimizer updates"),
    Row("num_train_epochs", "stop.epochs"),
]
# fmt: on
"""TRL's arguments that decide a key of a spec, in the order of the spec."""

# fmt: off
OTHERS = [
    lost("top_p top_k min_p repetition_penalty generation_kwargs*",
         "no top-p, top-k or penalties, because they would make the recorded log-probs wrong", 1, 1.0),
    lost("load_in_8bit load_in_4bit", "no quantized training"),
    lost("use_rslora use_dora lora_target_parameters lora_modules_to_save",
         "adapters are plain LoRA, of the layers in model.lora.target_modules"),
    lost("lora_dropout",
         "LoRA has no dropout, because it would make the trainer's log-probs differ from the engines' log-probs",
         when=lambda s: s.flag("use_peft")),
    needless("lora_dropout lora_task_type bnb_* use_bnb_nested_quant", "no adapters, or no quantized training"),
    unsupported("video_* *_video*", VIDEO),
    unsupported("audio_* *_audio*", AUDIO),
    lost("image_* *_image* *_pixels *multimodal* limit_mm_per_prompt*", PROCESSOR),
    lost("chat_template chat_template_kwargs chat_template_path",
         "save a chat template as a file, and name it in model.chat_template"),
    lost("router_aux_loss_coef", "no auxiliary loss for experts", 0.001),
    lost("vespo_* top_entropy_quantile use_adaptive_entropy off_policy_mask_threshold use_bias_correction_kl "
         "reward_clip_range whiten_rewards missing_eos_penalty vf_coef stop_token_id",
         "not in a spec", 1.0, 0.1, 2.0, 3.0),
    needless("entropy_coef_* entropy_target", "settings of adaptive entropy"),
    lost("lr_scheduler_kwargs*", "schedules are linear, cosine and constant, down to trainer.schedule.final_fraction"),
    lost("optim optim_args optim_target_modules neftune_noise_alpha label_smoothing_factor auto_find_batch_size",
         "the optimizer is AdamW", "adamw_torch_fused", "adamw_torch"),
    lost("dataset_mixture* datasets* dataset_streaming", "several data sets: task.mix (docs/tasks.md)"),
    lost("model_revision", "download that revision, and name its folder in model.path", "main"),
    lost("trust_remote_code model_init_kwargs* cast_lm_head_to_fp32 disable_dropout",
         "models are loaded by transformers from model.path; the output head is computed in float32, without dropout"),
    lost("vllm_structured_outputs_regex vllm_guided_decoding_regex", "no structured outputs in training"),
    lost("push_to_hub", "export a model with `asyncrl checkpoint export`, and upload that folder"),
    lost("callbacks benchmarks", "your own monitors: tracking.monitors; benchmarks: evaluation.sets"),
    lost("load_best_model_at_end", "checkpoints.keep_best keeps the best"),
    lost("deepspeed fsdp parallelism_config* fsdp_config*",
         "the trainer is DeepSpeed ZeRO: set trainer.zero_stage and trainer.offload"),
    lost("fork_threshold_tokens", "not in a spec", 1024),
    needless("vllm_* use_transformers_* transformers_* cache_implementation request_timeout heartbeat_* "
             "queue_maxsize token_budget",
             "asyncrl starts and restarts its engines itself; their other settings are under rollout.engine_args"),
    needless("teacher_model_init_kwargs*", "the teacher is loaded like the policy, in trainer.dtype"),
    needless("packing* padding_free dataset_text_field dataset_kwargs* completion_only_loss assistant_only_loss "
             "eos_token pad_token activation_offloading eval_packing",
             "for supervised training: here the student answers the prompts itself"),
    needless("hub_* trackio_* env.*", "the hub, and environment variables"),
    needless("logging_* log_* num_completions_to_print include_* disable_tqdm report_to_*",
             "every step is logged; every rollout is in the journal: `asyncrl inspect buffer`, `asyncrl watch`"),
    needless("eval_* per_device_eval_batch_size do_eval do_train do_predict prediction_loss_only batch_eval_metrics "
             "metric_for_best_model greater_is_better",
             "every run is evaluated before and after training, and every evaluation.every steps"),
    needless("save_* resume_from_checkpoint overwrite_output_dir ignore_data_skip enable_jit_checkpoint "
             "restore_callback_states_from_checkpoint", "checkpoints are complete; `asyncrl resume RUN` continues"),
    needless("dataloader_* remove_unused_columns dataset_num_proc data_seed accelerator_config* label_names "
             "train_sampling_strategy length_column_name group_by_length pad_to_multiple_of code_eval_* "
             "local_rollout_forward_batch_size num_sample_generations",
             "prompts are read by asyncrl; all columns of a row reach the reward"),
    needless("ddp_* torch_* tf32 bf16_full_eval fp16_full_eval gradient_checkpointing_kwargs* use_liger_kernel "
             "liger_kernel_config* use_cache average_tokens_across_devices full_determinism local_rank debug "
             "skip_memory_metrics compute_environment deepspeed_config* downcast_bf16 machine_rank "
             "main_training_function num_machines rdzv_backend same_network tpu_* dynamo_* enable_cpu_affinity "
             "main_process_* gpu_ids ds3_gather_for_generation world_size num_total_batches micro_batch_size "
             "local_batch_size batch_size local_mini_batch_size mini_batch_size response_template stop_token "
             "model_adapter_name ref_adapter_name jit_mode_eval ignore_bias_buffers",
             "about the process that trains; asyncrl starts DeepSpeed ranks itself (docs/clusters.md)"),
]
# fmt: on
"""TRL's arguments without a counterpart."""

TRAINERS = {
    method: Trainer("TRL", defaults=defaults | {METHOD: method}, rows=ROWS, others=OTHERS, settings=settings)
    for method, defaults in DEFAULTS.items()
}
"""Trainers by the names of TRL's commands."""
