import pytest


def test_a_child_says_only_what_differs_and_blocks_merge_key_by_key(files):
    files.write("child.yaml", "defaults: base.yaml\ngrpo: {max_num_steps: 7}\nloss_fn: {ratio_clip_max: 0.3}\n")
    recipe = files.load("child.yaml").recipe
    assert (recipe.grpo.max_num_steps, recipe.grpo.num_prompts_per_step) == (7, 2)
    assert (recipe.loss_fn.ratio_clip_min, recipe.loss_fn.ratio_clip_max) == (0.2, 0.3)


def test_later_parents_win_over_earlier_and_the_child_over_all(files):
    files.write("a.yaml", "grpo: {max_num_steps: 10, seed: 1, max_num_epochs: 4}\n")
    files.write("b.yaml", "grpo: {max_num_steps: 20, seed: 2}\n")
    files.write("child.yaml", "defaults: [base.yaml, a.yaml, b.yaml]\ngrpo: {seed: 3}\n")
    grpo = files.load("child.yaml").recipe.grpo
    assert (grpo.max_num_epochs, grpo.max_num_steps, grpo.seed) == (4, 20, 3)


def test_lists_are_replaced_and_null_takes_an_inherited_block_away(files):
    files.write("more.yaml", "defaults: base.yaml\ndata: {validation: {environment: sums, num_tasks: 2}}\n")
    files.write(
        "child.yaml",
        "defaults: more.yaml\ndata: {validation: null}\npolicy: {optimizer: {kwargs: {betas: [0.5, 0.6]}}}\n",
    )
    recipe = files.load("child.yaml").recipe
    assert recipe.policy.optimizer.kwargs.betas == (0.5, 0.6)
    assert recipe.policy.optimizer.kwargs.lr == 1e-5
    assert recipe.data.validation is None


def test_override_true_replaces_an_inherited_block_as_in_nemo_rl(files):
    files.write(
        "child.yaml",
        'defaults: base.yaml\nenv:\n  environments:\n    _override_: true\n    other: {entrypoint: "m:C"}\n'
        "data: {train: {environment: other}}\n",
    )
    assert list(files.load("child.yaml").recipe.env.environments) == ["other"]


def test_grandparents_lie_relative_to_the_file_that_names_them_and_a_file_may_be_reached_twice(files):
    files.write("common/steps.yaml", "grpo: {max_num_steps: 9}\n")
    files.write("mid/a.yaml", "defaults: ../common/steps.yaml\ngrpo: {seed: 1}\n")
    files.write("mid/b.yaml", "defaults: ../common/steps.yaml\ngrpo: {max_num_epochs: 2}\n")
    files.write("child.yaml", "defaults: [base.yaml, mid/a.yaml, mid/b.yaml]\n")
    grpo = files.load("child.yaml").recipe.grpo
    assert (grpo.max_num_steps, grpo.seed, grpo.max_num_epochs) == (9, 1, 2)


def test_every_problem_names_the_file_and_line_that_set_the_value_through_the_chain(files):
    files.write("top/grand.yaml", "\n\nloss_fn: {ratio_clip_mx: 0.1}\ngrpo:\n  seed: 010\n")
    files.write("parent.yaml", "defaults: [base.yaml, top/grand.yaml]\ngrpo:\n  max_num_steps: many\n")
    files.write("child.yaml", "# a child\ndefaults: parent.yaml\ngrpo:\n  val_period: yes\n  seed: '7'\n")
    said = files.said("child.yaml", "grpo.max_num_epochs=0")
    assert [line.partition(": ")[0] for line in said] == [
        "child.yaml:4",
        "child.yaml:5",
        "parent.yaml:3",
        "top/grand.yaml:3",
        "override 'grpo.max_num_epochs=0'",
    ]
    assert "did you mean 'ratio_clip_max'?" in said[3]


def test_a_rule_between_keys_of_two_files_blames_the_line_that_set_the_key(files):
    files.write("child.yaml", "defaults: base.yaml\n\npolicy:\n  generation: {max_new_tokens: 500}\n")
    (said,) = files.said("child.yaml")
    assert said.startswith("child.yaml:4: policy.generation.max_new_tokens: 500 leaves no room")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: bas.yaml", "child.yaml:1: defaults: there is no recipe bas.yaml; did you mean 'base.yaml'? "
         "(inherited: child.yaml -> bas.yaml)"),
        ("defaults: child.yaml", "child.yaml:1: defaults: child.yaml inherits from itself "
         "(inherited: child.yaml -> child.yaml)"),
        ("defaults:", "child.yaml:1: defaults: is empty; expected a path, or a list of paths"),
        ("defaults: 3", "child.yaml:1: defaults: is 3; expected a path, or a list of paths"),
        ("defaults:\n - base.yaml\n - _self_", "child.yaml:3: defaults: '_self_' is Hydra's; a recipe"),
        ("defaults:\n - model: big", "child.yaml:2: defaults: is a config group of Hydra; expected a path"),
    ],
)  # fmt: skip
def test_what_defaults_cannot_hold_is_one_sentence_with_the_chain(files, text, said):
    files.write("child.yaml", text + "\n")
    assert any(line.startswith(said) for line in files.said("child.yaml")), files.said("child.yaml")


def test_a_cycle_is_told_with_all_of_it(files):
    files.write("a.yaml", "\ndefaults: b.yaml\n")
    files.write("b.yaml", "defaults: [base.yaml, c.yaml]\n")
    files.write("c.yaml", "defaults: a.yaml\n")
    (said,) = files.said("a.yaml")
    assert said == "c.yaml:1: defaults: a.yaml inherits from itself (inherited: a.yaml -> b.yaml -> c.yaml -> a.yaml)"


def test_broken_parents_are_all_told_and_keys_that_they_may_hold_are_not_called_missing(files):
    files.write("bad.yaml", "grpo: {a: [1\n")
    files.write("empty.yaml", "")
    files.write("list.yaml", "- 1\n")
    files.write("child.yaml", "defaults: [bad.yaml, empty.yaml, none.yaml, list.yaml]\ngrpo: {seed: 1, seed: 2}\n")
    said = files.said("child.yaml")
    assert len(said) == 5
    text = "\n".join(said)
    for part in (
        "bad.yaml:2: not valid YAML",
        "empty.yaml: is empty; a recipe is a block of keys (inherited: child.yaml -> empty.yaml)",
        "there is no recipe none.yaml",
        "list.yaml: holds a list",
        "child.yaml:2: grpo.seed: given twice",
    ):
        assert part in text
    assert "missing" not in text


def test_paths_are_relative_to_the_file_that_says_them(files):
    files.write("lib/chat.jinja", "{{ messages }}")
    files.write("lib/rows.jsonl", "{}\n")
    files.write(
        "lib/parent.yaml", "policy: {tokenizer: {chat_template: chat.jinja}}\nsft_warmup: {data_path: rows.jsonl}\n"
    )
    files.write("runs/child.yaml", "defaults: [../base.yaml, ../lib/parent.yaml]\n")
    recipe = files.load("runs/child.yaml").recipe
    assert recipe.policy.tokenizer.chat_template == "../lib/chat.jinja"
    assert recipe.sft_warmup.data_path == "../lib/rows.jsonl"


def test_a_value_that_is_to_be_given_elsewhere_may_be_given_by_a_child_or_an_override(files):
    files.write("open.yaml", "defaults: base.yaml\npolicy:\n  model_name: ???\n")
    (said,) = files.said("open.yaml")
    assert said.startswith("open.yaml:3: policy.model_name: ??? marks a value that is still to be given")
    files.write("child.yaml", "defaults: open.yaml\npolicy: {model_name: mine}\n")
    assert files.load("child.yaml").recipe.policy.model_name == "mine"
    assert files.load("open.yaml", "policy.model_name=other").recipe.policy.model_name == "other"
