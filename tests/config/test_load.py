import re
import textwrap
from pathlib import Path

import pytest

from gymloop.config.load import load_recipe
from gymloop.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path, base: str):
    def write(*edits: tuple[str, str], overrides: tuple[str, ...] = ()):
        text = base
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} must stand once in the base recipe"
            text = text.replace(old, new)
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return write


def message(recipe, *edits, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe(*edits, overrides=overrides)
    return str(caught.value)


def test_a_sound_recipe_loads_with_defaults_and_exact_types(recipe):
    loaded = recipe()
    assert loaded.grpo.num_generations_per_prompt == 4
    assert loaded.grpo.use_leave_one_out_baseline is True
    kwargs = loaded.policy.optimizer.kwargs
    assert kwargs.lr == 1.0e-5
    assert type(kwargs.lr) is float
    assert kwargs.betas == (0.9, 0.95)


def test_stop_token_ids_come_from_a_yaml_list(recipe):
    loaded = recipe(("temperature: 1.0", "stop_token_ids: [2, 0]"))
    assert loaded.policy.generation.stop_token_ids == (2, 0)


def test_an_exponent_without_a_dot_is_a_number_and_octal_lookalikes_are_not(recipe):
    said = message(recipe, ("max_num_steps: 3", "max_num_steps: 1e2\n  seed: 010"))
    assert "r.yaml:4: grpo.max_num_steps: is 100.0; expected an integer: write 100" in said
    assert "r.yaml:5: grpo.seed: is the text '010'; expected an integer" in said
    assert "write 10" in said


def test_all_problems_of_a_recipe_come_at_once_in_file_order_with_lines(recipe):
    said = message(
        recipe,
        ("num_generations_per_prompt: 4", 'num_generations_per_prompt: "8"'),
        ("ratio_clip_min: 0.2", "ratio_clip_min: 0.2\n  ratio_clip_mx: 0.28"),
        ("temperature: 1.0", "temperature: 1.0\n    temperature: 0.7"),
        ("max_num_steps: 3", "max_num_steps: 3\n  val_at_end: yes"),
        overrides=("policy.optimizer.kwargs.lr=3e-6", "grpo.max_num_stepz=1"),
    )
    lines = [line.strip() for line in said.splitlines()]
    assert lines[0].endswith("r.yaml: 5 problems")
    wanted = (
        ("r.yaml:3: grpo.num_generations_per_prompt: is the text '8'", "remove the quotes"),
        ("r.yaml:5: grpo.val_at_end: is the text 'yes'", "write true"),
        ("r.yaml:8: loss_fn.ratio_clip_mx: unknown key", "did you mean 'ratio_clip_max'?"),
        ("r.yaml:17: policy.generation.temperature: given twice, first on line 16", "keep one"),
        ("override 'grpo.max_num_stepz=1': grpo.max_num_stepz: unknown key", "did you mean 'max_num_steps'?"),
    )
    assert len(lines) == 1 + len(wanted)
    for line, (start, end) in zip(lines[1:], wanted, strict=True):
        assert start in line
        assert end in line


def test_a_missing_key_says_what_it_is_and_where_its_block_begins(recipe):
    said = message(recipe, ("  num_prompts_per_step: 2\n", ""))
    assert "r.yaml:1: grpo.num_prompts_per_step: missing; expected: Groups per training step" in said


def test_an_unknown_key_is_found_in_another_block(recipe):
    said = message(recipe, ("max_num_steps: 3", "max_num_steps: 3\n  model_name: x"))
    assert "grpo.model_name: unknown key; did you mean 'policy.model_name'?" in said


@pytest.mark.parametrize(
    ("edit", "key", "sentence"),
    [
        (("max_num_steps: 3", "max_num_steps: 3\n  async_grpo: {enabled: false}"), "grpo.async_grpo", "asynchronous"),
        (("  model_name", "  megatron_cfg: {enabled: true}\n  model_name"), "policy.megatron_cfg", "not available"),
        (("  model_name", "  dtensor_cfg: {enabled: true}\n  model_name"), "policy.dtensor_cfg", "not available yet"),
        (
            ("temperature: 1.0", "backend: vllm\n    vllm_cfg: {use_deep_gemm: false}"),
            "policy.generation.vllm_cfg.use_deep_gemm",
            "one precision",
        ),
    ],
)
def test_what_nemo_rl_has_and_gymloop_does_not_is_said_so(recipe, edit, key, sentence):
    said = message(recipe, edit)
    assert f": {key}: " in said
    assert sentence in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("edit", "where", "sentence"),
    [
        (("temperature: 1.0", "temperature: 0"), "r.yaml:14: policy.generation.temperature", "greedy"),
        (("temperature: 1.0", "top_p: 0.9"), "r.yaml:14: policy.generation.top_p", "full vocabulary"),
        (("temperature: 1.0", "top_k: 20"), "r.yaml:14: policy.generation.top_k", "full vocabulary"),
        (("max_new_tokens: 16", "max_new_tokens: 128"), "r.yaml:13: policy.generation.max_new_tokens", "no room"),
        (
            ("temperature: 1.0", "port_range_low: 4000\n    port_range_high: 3000"),
            "r.yaml:14: policy.generation.port_range_low",
            "4000 is above port_range_high, which is 3000",
        ),
        (
            ("  model_name", "  train_global_batch_size: 3\n  model_name"),
            "r.yaml:8: policy.train_global_batch_size",
            "8",
        ),
        (("loss_fn:", "rollouts: {min_group_size: 5}\nloss_fn:"), "r.yaml:5: rollouts.min_group_size", "more than"),
        (("max_num_steps: 3", "max_num_steps: 3\n  val_period: 1"), "r.yaml:5: grpo.val_period", "data.validation"),
        (("environment: sums,", "environment: sum,"), "r.yaml:16: data.train.environment", "did you mean 'sums'?"),
        ((", num_tasks: 8", ""), "r.yaml:16: data.train.num_tasks", "missing"),
        (("num_tasks: 8", "num_tasks: 1"), "r.yaml:16: data.train.num_tasks", "at least"),
        (("environment: sums, num_tasks: 8", ""), "r.yaml:16: data.train", "neither is given"),
        (("environment: sums,", "environment: sums, data_path: a.jsonl,"), "r.yaml:16: data.train", "both are given"),
        (("{environment: sums, num_tasks: 8}", "{data_path: a.jsonl}"), "r.yaml:16: data.train.data_path", "no file"),
        (("my_gym.sums:Sums", "my_gym.sums"), "r.yaml:19: env.environments.sums.entrypoint", "module:Class"),
        (("loss_fn:", "cluster: {num_nodes: 2}\nloss_fn:"), "r.yaml:5: cluster.num_nodes", "a run has one node"),
        (
            ("ratio_clip_min: 0.2", "truncated_importance_sampling_ratio: 2.0"),
            "r.yaml:6: loss_fn.truncated_importance_sampling_ratio",
            "no effect",
        ),
    ],
)
def test_a_rule_between_keys_names_the_line_and_the_reason(recipe, edit, where, sentence):
    said = message(recipe, edit)
    assert f"{where}: " in said
    assert sentence in said
    assert "\n" not in said, "one fault, one problem"


def test_rules_still_judge_what_other_faults_leave_sound(recipe):
    said = message(
        recipe,
        ("ratio_clip_min: 0.2", "ratio_clip_mx: 0.2"),
        ("betas: [0.9, 0.95]", "betas: [0.9, 2]"),
        ("environment: sums,", "environment: sum,"),
    )
    assert "betas.1: is 2; expected less than 1" in said
    assert "ratio_clip_mx" in said
    assert "did you mean 'sums'?" in said


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_number_that_is_not_finite_is_refused(recipe, value):
    assert "expected" in message(recipe, ("temperature: 1.0", f"temperature: {value}"))


def test_a_boolean_is_no_integer_and_an_empty_block_is_no_default(recipe):
    assert "grpo.max_num_steps: is true; expected an integer" in message(
        recipe, ("max_num_steps: 3", "max_num_steps: true")
    )
    assert "loss_fn: is empty; expected a block of keys" in message(
        recipe, ("loss_fn:\n  ratio_clip_min: 0.2", "loss_fn:")
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"- 1\n", "holds a list"),
        (b"grpo: {a: [1\n", "not valid YAML"),
        (b"grpo: \xff\n", "not UTF-8"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"a: !!python/object:os.system {}\n", "has no meaning"),
        (b"a: &x [*x]\n", "refers to itself"),
    ],
)
def test_a_file_that_is_no_recipe_gets_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.yaml") as caught:
        load_recipe(path)
    assert sentence in str(caught.value)


def test_a_misspelt_file_name_gets_the_nearest(tmp_path, base):
    (tmp_path / "quickstart.yaml").write_text(base)
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart\.yaml'"):
        load_recipe(tmp_path / "quikstart.yaml")


def test_anchors_and_merge_keys_work_and_own_keys_win(tmp_path, base):
    path = tmp_path / "r.yaml"
    text = base.replace("grpo:", "grpo: &g").replace(
        "  train: {environment: sums, num_tasks: 8}",
        textwrap.indent(
            "train: &t {environment: sums, num_tasks: 8}\nvalidation: {<<: *t, num_tasks: 3, seed: 9}", "  "
        ),
    )
    path.write_text(text)
    loaded = load_recipe(path)
    assert loaded.data.validation is not None
    assert (loaded.data.validation.environment, loaded.data.validation.num_tasks) == ("sums", 3)


def test_rules_judge_the_rest_of_a_recipe_whose_required_keys_are_faulty(recipe):
    """Three faults of values, one of them in a key without a default, do not hide two of rules."""
    said = message(
        recipe,
        ("max_new_tokens: 16", "max_new_tokens: -4"),
        ("  num_prompts_per_step: 2\n", ""),
        ("model_name: some/model", "model_name: 7"),
        ("environment: sums,", "environment: sum,"),
        ("temperature: 1.0", "temperature: 0"),
    )
    assert "r.yaml: 5 problems" in said
    for part in (
        "grpo.num_prompts_per_step: missing",
        "policy.model_name: is 7; expected text",
        "policy.generation.max_new_tokens: is -4; expected at least 1",
        "policy.generation.temperature: 0 is greedy",
        "data.train.environment: 'sum' is not under env.environments",
    ):
        assert part in said


@pytest.mark.parametrize("block", ["grpo", "policy", "data", "env"])
def test_no_rule_judges_what_is_not_there(files, base, block):
    """What stands in for a missing block is looked at by nobody."""
    files.write("r.yaml", re.sub(rf"(?m)^{block}:\n(?: .*\n)+", "", base))
    assert files.said("r.yaml") == [f"r.yaml:1: {block}: missing"]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (("max_total_sequence_length: 128", f"max_total_sequence_length: 1{'0' * 40}"), "expected at most 2147483647"),
        (("max_num_steps: 3", f"max_num_steps: 3\n  seed: {2**63}"), "expected less than 9223372036854775808"),
        (("max_num_steps: 3", "max_num_steps: 3\n  seed: -1"), "expected at least 0"),
    ],
)
def test_numbers_that_nothing_can_be_counted_with_are_refused(recipe, edit, sentence):
    assert sentence in message(recipe, edit)


def test_a_value_without_a_meaning_is_told_once(recipe):
    said = message(recipe, ("max_num_steps: 3", "max_num_steps: !foo 3"))
    assert "tag '!foo' on '3' has no meaning" in said
    assert "problems" not in said


def test_a_misspelt_count_of_tokens_is_no_secret(recipe):
    said = message(recipe, ("max_new_tokens: 16", "max_new_tokens: 16\n    max_new_token: 5"))
    assert said.endswith("policy.generation.max_new_token: unknown key; did you mean 'max_new_tokens'?")


def test_the_very_word_in_another_block_is_nearer_than_a_like_one_in_this(recipe):
    said = message(recipe, ("max_num_steps: 3", "max_num_steps: 3\n  save_period: 1"))
    assert "grpo.save_period: unknown key; did you mean 'checkpointing.save_period'?" in said
