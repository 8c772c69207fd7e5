"""Keys of NeMo RL that gymloop knows and does not support (yet): each says so, so that nobody hunts for a typo.

A key that is here is refused whatever its value: a recipe that says ``enabled: false`` today says ``true`` tomorrow,
and no key is ever ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

_DYNAMIC = "dynamic sampling is not available yet"
_ASYNC = "asynchronous training is not available yet; training is synchronous"
_METRICS = "metrics go to metrics.jsonl and TensorBoard"
_FP8 = "engine and trainer share one precision, float32 or bfloat16"
_ONE_NODE = "an engine is split by vllm_cfg.tensor_parallel_size only"
_ROWS_AT_ONCE = (
    "use policy.generation.torch_cfg.max_batch_size, or policy.generation.vllm_cfg.max_num_seqs with backend 'vllm'"
)
_SERVER_METRICS = "the generation server counts its own traffic, see /metrics"
_TEMPLATE_KWARGS = "use policy.tokenizer.chat_template_kwargs"
_ROWS = "give rows by data.train.data_path (JSONL of NeMo Gym rows) or data.train.environment"
_VALIDATION_METRIC = "the run ends at grpo.max_num_steps or grpo.max_num_epochs"

NOT_YET: dict[str, str] = {
    # top level
    "async_rl": _ASYNC,
    "data_plane": "rollouts reach the policy through Ray",
    "distillation": "distillation is not available yet",
    "dpo": "only GRPO is available",
    "on_policy_distillation": "distillation is not available yet",
    "reward_penalties.thinking_tags": "the tags are rollouts.thinking_tags",
    "rm": "reward models are not available; rewards come from environments",
    "sft": "only a warm-up before GRPO is available; see sft_warmup",
    "teacher": "distillation is not available yet",
    # grpo
    "grpo.adv_estimator": "use grpo.normalize_rewards and grpo.use_leave_one_out_baseline",
    "grpo.advantage_clip_high": "advantages are not clipped",
    "grpo.advantage_clip_low": "advantages are not clipped",
    "grpo.async_grpo": _ASYNC,
    "grpo.batch_multiplier": _DYNAMIC,
    "grpo.calculate_advantages_on_gpu": "advantages are computed by the driver",
    "grpo.dynamic_sampling_max_gen_batches": _DYNAMIC,
    "grpo.invalid_tool_call_strategy": "grpo.invalid_tool_call_advantage says what an invalid tool call costs",
    "grpo.penalize_invalid_tool_call": "set grpo.invalid_tool_call_advantage; null is off",
    "grpo.penalize_malformed_thinking": "set grpo.malformed_thinking_advantage; null is off",
    "grpo.reward_scaling": "rewards are used as verify() gives them",
    "grpo.reward_shaping": "rewards are used as verify() gives them; grpo.overlong_filtering leaves out cut rollouts",
    "grpo.seq_logprob_error_threshold": "engine and trainer are compared on every step, see mismatch/*",
    "grpo.skip_reference_policy_logprobs_calculation": "loss_fn.reference_policy_kl_penalty: 0 skips it",
    "grpo.stop_at_validation_metric": _VALIDATION_METRIC,
    "grpo.stop_at_validation_threshold": _VALIDATION_METRIC,
    "grpo.use_dynamic_sampling": _DYNAMIC,
    "grpo.val_batch_size": "validation runs all its rows at rollouts.max_concurrency",
    "grpo.val_num_generations_per_prompt": "validation takes one rollout per row",
    "grpo.val_start_at": "use grpo.val_at_start",
    # loss_fn
    "loss_fn.disable_ppo_ratio": "the ratio is always used",
    "loss_fn.force_on_policy_ratio": "one optimizer step per batch (policy.train_global_batch_size: null) has ratio 1",
    "loss_fn.positive_example_nll_weight": "only the clipped policy gradient is available",
    "loss_fn.sequence_level_importance_ratios": "ratios are per token",
    "loss_fn.truncated_importance_sampling_ratio_min": "the correction is truncated from above only",
    "loss_fn.truncated_importance_sampling_type": "loss_fn.truncated_importance_sampling_ratio truncates per token",
    "loss_fn.use_cispo": "only the clipped policy gradient is available",
    "loss_fn.use_on_policy_kl_approximation": "the KL estimator is loss_fn.reference_policy_kl_type",
    # checkpointing
    "checkpointing.checkpoint_dir": "checkpoints lie in the run's folder, under logger.log_dir",
    "checkpointing.ft_keep_latest_k": "use checkpointing.keep_latest_k",
    "checkpointing.ft_save_period": "use checkpointing.save_period",
    "checkpointing.is_async": "a checkpoint is complete when the step goes on",
    "checkpointing.model_repo_id": "the model is policy.model_name",
    "checkpointing.model_save_format": "weights are safetensors that transformers opens",
    "checkpointing.peft_config": "LoRA is not available yet",
    "checkpointing.save_consolidated": "weights are always one whole model",
    "checkpointing.save_optimizer": "the optimizer is always saved",
    # policy
    "policy.draft": "speculative decoding is not available yet",
    "policy.dtensor_cfg": "tensor parallel, sharding, activation checkpointing and LoRA are not available yet",
    "policy.dynamic_batching": "use policy.sequence_packing",
    "policy.fsdp_offload_enabled": "offloading is not available yet",
    "policy.generation_batch_size": _ROWS_AT_ONCE,
    "policy.hf_config_overrides": "the model's own config.json is used",
    "policy.logprob_batch_size": "logprobs use the microbatches of training",
    "policy.logprob_chunk_size": "logits are computed at trained positions only",
    "policy.make_sequence_length_divisible_by": "no part needs padded lengths",
    "policy.megatron_cfg": "the Megatron backend is not available; the policy is a Hugging Face model",
    "policy.offload_optimizer_for_logprob": "offloading is not available yet",
    "policy.optimizer.kwargs.foreach": "the implementation of AdamW is chosen by device",
    "policy.optimizer.kwargs.fused": "the implementation of AdamW is chosen by device",
    "policy.optimizer.kwargs.amsgrad": "plain AdamW is the one supported",
    "policy.reward_model_cfg": "reward models are not available; rewards come from environments",
    "policy.router_replay": "mixture-of-experts routers are not replayed",
    "policy.scheduler": "use policy.lr_warmup_steps; the rate is constant after it",
    "policy.sequence_packing.algorithm": "sequences of one group are packed as a tree",
    "policy.sequence_packing.logprob_mb_tokens": "use policy.sequence_packing.train_mb_tokens",
    "policy.sequence_packing.microbatch_order": "sequences of one group are packed as a tree",
    "policy.sequence_packing.sequence_length_round": "lengths are not rounded",
    "policy.tokenizer.use_processor": "images, video and audio are not available yet",
    "policy.tokenizer.audio": "images, video and audio are not available yet",
    "policy.tokenizer.video": "images, video and audio are not available yet",
    "policy.generation.dynamo_cfg": "the Dynamo backend is not available",
    "policy.generation.ignore_eos": "a turn ends at the model's end tokens",
    "policy.generation.mcore_generation_config": "the Megatron backend is not available",
    "policy.generation.refit_buffer_size_gb": "use policy.refit_buffer_size_gb",
    "policy.generation.sglang_cfg": "the SGLang backend is not available",
    "policy.generation.sglang_server": "the SGLang backend is not available",
    "policy.generation.stop_strings": "use policy.generation.stop_token_ids",
    "policy.generation.trtllm_cfg": "the TensorRT-LLM backend is not available",
    "policy.generation.vllm_cfg.enable_expert_parallel": _ONE_NODE,
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": _SERVER_METRICS,
    "policy.generation.vllm_cfg.env_vars": "set VLLM_* where gymloop starts; name others in cluster.worker_env too",
    "policy.generation.vllm_cfg.expert_parallel_size": _ONE_NODE,
    "policy.generation.vllm_cfg.fp8_cfg": _FP8,
    "policy.generation.vllm_cfg.is_mx": _FP8,
    "policy.generation.vllm_cfg.kv_cache_scale_sync": _FP8,
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": _FP8,
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": _FP8,
    "policy.generation.vllm_cfg.pipeline_parallel_size": _ONE_NODE,
    "policy.generation.vllm_cfg.pow2_activation_scaling_factors": _FP8,
    "policy.generation.vllm_cfg.pow2_weight_scaling_factors": _FP8,
    "policy.generation.vllm_cfg.use_activation_pow2_scale": _FP8,
    "policy.generation.vllm_cfg.use_deep_gemm": _FP8,
    "policy.generation.vllm_cfg.use_weight_pow2_scale": _FP8,
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": _SERVER_METRICS,
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template": "use policy.tokenizer.chat_template",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template_content_format": "content is text",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template_kwargs": _TEMPLATE_KWARGS,
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs": _TEMPLATE_KWARGS,
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.response_role": "replies have the role 'assistant'",
    # data
    "data.agent_name": "every row names its environment in agent_ref.name",
    "data.dataset_name": _ROWS,
    "data.default": _ROWS,
    "data.max_input_seq_length": "policy.max_total_sequence_length limits prompt and reply together",
    "data.num_prompts_per_dataloader": "use grpo.num_prompts_per_step",
    "data.num_workers": "rows are read once, before the first step",
    "data.prompt_file": "prompts are rows as they are",
    "data.system_prompt_file": "system messages are part of the rows",
    "data.train_data_path": "use data.train.data_path",
    "data.train_jsonl_fpath": "use data.train.data_path",
    "data.use_multiple_dataloader": "there is one set of training rows",
    "data.val_data_path": "use data.validation.data_path",
    "data.validation_jsonl_fpath": "use data.validation.data_path",
    # env
    "env.should_log_nemo_gym_responses": "every conversation is written under trajectories/",
    "env.should_mask_flagged_samples": "a rollout that failed never trains",
    "env.nemo_gym.effort_levels": "rewards are used as verify() gives them",
    "env.nemo_gym.num_gpu_nodes": "no GPUs are set apart for servers; a judge model is one that runs already",
    "env.nemo_gym.pad_dynamic_image_shapes": "images, video and audio are not available yet",
    "env.nemo_gym.require_routed_experts": "mixture-of-experts routers are not replayed",
    "env.nemo_gym.routed_experts_dtype": "mixture-of-experts routers are not replayed",
    "env.nemo_gym.tokenizer_config": "the tokenizer is policy.tokenizer",
    "env.nemo_gym.use_fastokens": "the tokenizer is policy.tokenizer",
    "env.*": "environments are given under env.environments, by entrypoint or url, or by env.nemo_gym",
    # logger
    "logger.gpu_monitoring": "devices are not monitored",
    "logger.mlflow": _METRICS,
    "logger.mlflow_enabled": _METRICS,
    "logger.monitor_gpus": "devices are not monitored",
    "logger.num_val_samples_to_print": "every conversation is written under trajectories/",
    "logger.swanlab": _METRICS,
    "logger.swanlab_enabled": _METRICS,
    "logger.tensorboard": "use logger.tensorboard_enabled",
    "logger.wandb": _METRICS,
    "logger.wandb_enabled": _METRICS,
    # cluster
    "cluster.master_port_range_high": "ports are policy.generation.port_range_low and _high",
    "cluster.master_port_range_low": "ports are policy.generation.port_range_low and _high",
    "cluster.segment_size": "nodes are not chosen by how they are connected; see cluster.num_nodes",
} | {
    f"data.{part}.{key}": _ROWS
    for part in ("train", "validation")
    for key in (
        "answer_key", "dataset_name", "env_name", "filter_dataset", "input_key", "output_key", "processor",
        "prompt_file", "split", "split_validation_size", "subset", "system_prompt_file",
    )
}  # fmt: skip
"""By dotted key: what to do instead, or why not; ``*`` is a key that nothing else explains."""


def not_yet(path: Sequence[str | int]) -> str | None:
    """The sentence for a key of NeMo RL that is not supported, or None for a key nobody knows."""
    instead = NOT_YET.get(".".join(map(str, path)))
    return None if instead is None else f"a key of NeMo RL that gymloop does not have: {instead}"
