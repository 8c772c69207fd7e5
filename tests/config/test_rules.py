import pytest

from gymloop.config.notes import notes

MUST = "checkpointing.checkpoint_must_save_by"
GYM = "{config_paths: [a.yaml]}"
VALIDATION = "+data.validation={environment: sums, num_tasks: 2}"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["cluster.gpus_per_node=2"], "cluster.gpus_per_node", "leaves the policy 2 GPUs, all but one of them idle"),
        (["policy.train_global_batch_size=3"], "policy.train_global_batch_size", "does not divide the 8"),
        (
            ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=9"],
            "policy.train_micro_batch_size",
            "9 sequences are more than an optimizer step has (8)",
        ),
        (
            ["rollouts.on_short_group=refill", "data.train.num_tasks=2"],
            "rollouts.on_short_group",
            "so there is no next one",
        ),
        (["loss_fn.ratio_clip_c=1.1"], "loss_fn.ratio_clip_c", "is inside the clip range"),
        (["~env.environments.sums.entrypoint"], "env.environments.sums", "exactly one; neither is given"),
        (["+env.environments.sums.url=http://h:1"], "env.environments.sums", "exactly one; both are given"),
        (["+env.environments.sums.agent=remote"], "env.environments.sums.agent", "'remote' plays on a server"),
        (
            ["+env.environments.far={url: 'http://h:1', kwargs: {a: 1}}"],
            "env.environments.far.kwargs",
            "a server with url is configured where it is started",
        ),
        (["+env.environments.far={url: 'h:1'}"], "env.environments.far.url", "is not an address of a server"),
        (["+env.environments.far={url: 'http://me@h:1'}"], "env.environments.far.url", "without a password"),
        (
            ["+env.environments.far={url: 'http://h:1'}", "data.train.environment=far"],
            "data.train.environment",
            "a server generates no tasks; expected data.train.data_path",
        ),
        (
            ["~env.environments.sums.entrypoint", "+env.environments.sums.url=http://h:1", "+sft_warmup.steps=1"],
            "sft_warmup.data_path",
            "a server has no solver to learn from",
        ),
        (
            ["+env.environments.far={url: 'http://h:1', agent: remote}", VALIDATION, "grpo.val_at_end=true",
             "policy.generation.val_temperature=0.5"],
            "policy.generation.val_temperature",
            "the calls of the remote agent 'far' sample as in training",
        ),
        (["health.check_period_s=60"], "health.unresponsive_after_s", "before the second look"),
        (["deterministic=true", "cluster.gpus_per_node=1"], "deterministic", "equal bits are proven on the CPU only"),
        (["checkpointing.keep_top_k=2"], "checkpointing.keep_top_k", "which is missing"),
        (["checkpointing.metric_name=reward/mean"], "checkpointing.metric_name", "does not say how many to keep"),
        (
            [VALIDATION, "grpo.val_period=1", "checkpointing.metric_name=val:accuracy", "checkpointing.keep_top_k=1"],
            "checkpointing.metric_name",
            "'val:accuracy' is a name of NeMo RL; expected one of metrics.jsonl, such as 'validation/reward/mean'",
        ),
        (
            ["checkpointing.metric_name=validation/reward/mean", "checkpointing.keep_top_k=1"],
            "checkpointing.metric_name",
            "comes from validation, and data.validation is missing",
        ),
        (
            [VALIDATION, "checkpointing.metric_name=validation/reward/mean", "checkpointing.keep_top_k=1"],
            "checkpointing.metric_name",
            "none follows a step",
        ),
        (
            [VALIDATION, "grpo.val_period=10", "grpo.max_num_steps=29", "checkpointing.save_period=6",
             "checkpointing.metric_name=validation/reward/mean", "checkpointing.keep_top_k=1"],
            "checkpointing.metric_name",
            "no step is both validated (every 10) and saved (every 6) within 29 steps",
        ),
        (
            ["checkpointing.enabled=false", "checkpointing.checkpoint_must_save_by='00:01:00:00'"],
            "checkpointing.checkpoint_must_save_by",
            "has no effect while checkpointing.enabled is false",
        ),
        (["checkpointing.checkpoint_must_save_by='4h'"], "checkpointing.checkpoint_must_save_by", "DD:HH:MM:SS"),
        (["checkpointing.checkpoint_must_save_by='00:25:00:00'"], MUST, "is no time"),
        (["checkpointing.checkpoint_must_save_by='00:00:00:00'"], MUST, "is over when"),
        (["policy.tokenizer.tool_parser=hermez"], "policy.tokenizer.tool_parser", "did you mean 'hermes'?"),
        (["policy.tokenizer.reasoning_parser=thinks"], "policy.tokenizer.reasoning_parser", "did you mean 'think'?"),
        (
            ["policy.tokenizer.tool_parser=mine", "policy.tokenizer.tool_parser_plugin=mine.py"],
            "policy.tokenizer.tool_parser_plugin",
            "there is no file",
        ),
        (["policy.tokenizer.tool_parser_plugin=a.yaml"], "policy.tokenizer.tool_parser_plugin", "is no Python file"),
        (
            ["policy.tokenizer.reasoning_parser_plugin=mine.py"],
            "policy.tokenizer.reasoning_parser_plugin",
            "and policy.tokenizer.reasoning_parser names none of them",
        ),
        (["+env.should_use_nemo_gym=true"], "env.should_use_nemo_gym", "is true, and env.nemo_gym is missing"),
        ([f"+env.nemo_gym={GYM}", "+env.should_use_nemo_gym=false"], "env.should_use_nemo_gym", "remove one of the"),
        (["+env.nemo_gym_extra=[a]"], "env.nemo_gym_extra", "has no effect without env.nemo_gym"),
        (["+env.nemo_gym_installation=a"], "env.nemo_gym_installation", "has no effect without env.nemo_gym"),
        (
            [f"+env.nemo_gym={GYM}", "+env.nemo_gym_extra=[a]", "+env.nemo_gym_installation=a"],
            "env.nemo_gym_extra",
            "chooses an installation, and so does env.nemo_gym_installation",
        ),
        (["+env.nemo_gym={}"], "env.nemo_gym", "exactly one; neither is given"),
        (["+env.nemo_gym={config_paths: []}"], "env.nemo_gym.config_paths", "is empty, so no server starts"),
        (
            ["+env.nemo_gym={config_paths: [a.yaml], head_server_url: 'http://h:1'}"],
            "env.nemo_gym",
            "exactly one; both are given",
        ),
        (["+env.nemo_gym={head_server_url: 'h:1'}"], "env.nemo_gym.head_server_url", "is not an address of a server"),
        (
            ["+env.nemo_gym={head_server_url: 'http://h:1', shop: {a: 1}}"],
            "env.nemo_gym.shop",
            "the servers run already",
        ),
        (
            ["+env.nemo_gym={config_paths: [a.yaml], is_trajectory_collection: true}"],
            "env.nemo_gym.is_trajectory_collection",
            "`gymloop collect` plays rollouts without training",
        ),
        (
            ["+env.nemo_gym={config_paths: [a.yaml], tokenizer_config: {}}"],
            "env.nemo_gym.tokenizer_config",
            "the tokenizer is policy.tokenizer",
        ),
        (
            ["+env.nemo_gym={config_paths: [a.yaml], port_range_low: 6000, port_range_high: 5000}"],
            "env.nemo_gym.port_range_low",
            "6000 is above port_range_high",
        ),
        (
            [f"+env.nemo_gym={GYM}", "~env.environments.sums", "data={train: {data_path: a.jsonl}}",
             "~data.train.environment", "~data.train.num_tasks", "+sft_warmup.steps=1"],
            "sft_warmup.data_path",
            "a server has no solver",
        ),
        (["env.environments={}", "~env.environments.sums"], "env.environments", "nothing gives a reward"),
    ],
)  # fmt: skip
def test_a_rule_between_keys_gives_its_reason(files, overrides, key, reason):
    said = files.said("base.yaml", *overrides)
    assert any(f": {key}: " in line and reason in line for line in said), said


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.ratio_clip_c=3"],
        ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=9"],
        ["rollouts.on_short_group=refill", "data.train.num_tasks=2", "grpo.max_num_epochs=2"],
        [VALIDATION, "grpo.val_period=10", "grpo.max_num_steps=30", "checkpointing.save_period=6",
         "checkpointing.metric_name=validation/reward/mean", "checkpointing.keep_top_k=1"],
        [VALIDATION, "grpo.val_at_end=true", "checkpointing.metric_name=validation/reward/mean",
         "checkpointing.keep_top_k=1"],
        ["checkpointing.checkpoint_must_save_by='00:03:45:00'"],
        ["policy.tokenizer.tool_parser=mine", "policy.tokenizer.tool_parser_plugin=mine.py"],
        ["deterministic=true"],
    ],
)  # fmt: skip
def test_what_the_rules_allow_passes(files, overrides):
    files.write("mine.py", "")
    files.load("base.yaml", *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["grpo.num_generations_per_prompt=2"], "grpo.normalize_rewards has no effect"),
        ([VALIDATION, "grpo.val_period=4"], "grpo.val_period 4 is past the last step, 3"),
        (["checkpointing.save_period=4"], "only the last step, 3, is saved"),
        (["policy.generation.torch_cfg.max_batch_size=4"], "8 rollouts are in flight and the engine decodes 4 at once"),
        (["policy.generation.backend=vllm", "policy.generation.torch_cfg.max_batch_size=4"], None),
        (["policy.generation.backend=vllm", "+policy.generation.vllm_cfg.max_num_seqs=3"],
         "decodes 3 at once (policy.generation.vllm_cfg.max_num_seqs)"),
        (["policy.generation.torch_cfg.max_batch_size=4", "policy.generation.replicas=2"], None),
        (["policy.generation.torch_cfg.max_batch_size=3", "policy.generation.replicas=2"],
         "8 rollouts are in flight and the 2 engine replicas decode 6 at once "
         "(policy.generation.torch_cfg.max_batch_size, 3 each): the others wait"),
        (["policy.generation.backend=vllm", "cluster.gpus_per_node=8", "policy.generation.colocated.enabled=false",
          "policy.generation.colocated.resources.gpus_per_node=7", "grpo.num_prompts_per_step=128",
          "data.train.num_tasks=128", "rollouts.max_concurrency=1024"], None),
        (["policy.generation.backend=vllm", "cluster.gpus_per_node=1", "grpo.max_num_steps=100"],
         "policy.generation.vllm_cfg.compile is false"),
        (["policy.generation.backend=vllm", "cluster.gpus_per_node=1", "grpo.max_num_steps=99"], None),
        (["policy.generation.backend=vllm", "cluster.gpus_per_node=1", "grpo.max_num_steps=100",
          "+policy.generation.vllm_cfg.compile=true"], None),
        ([VALIDATION, "grpo.val_period=2", "checkpointing.save_period=3", "grpo.max_num_steps=6",
          "checkpointing.metric_name=validation/reward/mean", "checkpointing.keep_top_k=1"],
         "checkpoints between validations have no validation/reward/mean"),
    ],
)  # fmt: skip
def test_what_is_allowed_and_perhaps_not_meant_is_a_note(files, overrides, said):
    found = list(notes(files.load("base.yaml", "checkpointing.save_period=3", *overrides).recipe))
    assert (not found) if said is None else (len(found) == 1 and said in found[0])
