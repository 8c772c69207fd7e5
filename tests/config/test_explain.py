import pytest

from gymloop.config.explain import derived, origin
from gymloop.config.keys import all_keys, description, reference
from gymloop.config.plan import compile_plan


def test_a_derived_value_names_its_keys_their_values_and_the_lines_that_set_them(files):
    files.write(
        "child.yaml",
        "defaults: base.yaml\n\ngrpo:\n  num_prompts_per_step: ${.max_num_steps}\n  val_at_end: true\n"
        "data: {validation: {environment: sums, num_tasks: 2}}\n",
    )
    loaded = files.load("child.yaml", "grpo.max_num_steps=4", "policy.generation.val_temperature=0")
    plan = compile_plan(loaded.recipe, files.folder / "child.yaml", "run")
    found = {one.name: one for one in derived(loaded, plan)}
    place = str(files.folder)
    assert found["rollouts_per_step"].value == "16"
    assert found["rollouts_per_step"].because == (
        f"grpo.num_prompts_per_step 4 ({place}/child.yaml:4, ${{.max_num_steps}}) x "
        f"grpo.num_generations_per_prompt 4 ({place}/base.yaml:3)"
    )
    assert found["steps_bound"].value == "2"
    assert "grpo.max_num_steps 4 (override 'grpo.max_num_steps=4')" in found["steps_bound"].because
    assert "grpo.max_num_epochs 1 (default)" in found["steps_bound"].because
    assert "policy.generation.val_temperature 0 (override" in found["validation_sampling"].because.replace("0.0", "0")
    assert "policy.generation.top_p 1.0 (default)" in found["validation_sampling"].because
    assert found["optimizer_steps_per_batch"].because.startswith("policy.train_global_batch_size null (default)")


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("grpo.max_num_steps", "base.yaml:4"),
        ("grpo.seed", "default"),
        ("policy.optimizer.kwargs.lr", "base.yaml:11"),
    ],
)
def test_origin_is_a_line_or_default(files, path, where):
    document = files.load("base.yaml").document
    assert origin(document, tuple(path.split("."))).replace(f"{files.folder}/", "") == where


def test_every_key_of_the_schema_is_described_and_listed_with_type_and_default():
    text = reference()
    for path, field in all_keys():
        assert description(path) or field.annotation, path
    assert "grpo.num_prompts_per_step  integer  required\n    Groups per training step." in text
    assert "policy.optimizer.kwargs.lr  number  required" in text
    assert "policy.optimizer.kwargs.betas  list of number  default [0.9, 0.999]" in text
    assert "env.environments.*.entrypoint  text or null  default null" in text
    assert "rollouts.on_short_group  'skip' or 'refill'  default skip" in text
    assert "data.validation  block  optional" in text
    assert "policy.generation.top_k  integer or null  default null" in text
    undescribed = [line for line, following in zip(text.splitlines(), [*text.splitlines()[1:], ""], strict=True)
                   if not line.startswith(" ") and not following.startswith(" ")]  # fmt: skip
    assert undescribed == []
