import dataclasses
import os
import pickle
from pathlib import Path

import pytest

from gymloop.config.load import load_recipe
from gymloop.config.plan import SamplingProfile, compile_plan
from gymloop.errors import ConfigError

RECIPE = Path(__file__).parent / "data" / "complete.yaml"


def plan(*overrides: str, run: str | None = "r"):
    return compile_plan(load_recipe(RECIPE, overrides), RECIPE, run)


def test_sizes_are_derived_once():
    made = plan("policy.train_global_batch_size=8")
    assert made.rollouts_per_step == 4 * 8
    assert made.optimizer_steps_per_batch == 4
    assert plan().optimizer_steps_per_batch == 1


def test_the_step_bound_is_the_smaller_of_steps_and_epochs():
    assert plan().steps_bound == 10
    # 10 tasks are two whole steps of 4 prompts an epoch.
    assert plan("grpo.max_num_epochs=2", "data.train.num_tasks=10").steps_bound == 4


def test_the_validation_profile_falls_back_field_by_field():
    made = plan("policy.generation.val_temperature=0", "policy.generation.temperature=0.8")
    assert made.train_sampling == SamplingProfile(0.8, 1.0, None)
    assert made.validation_sampling == SamplingProfile(0, 1.0, None)
    assert plan("~data.validation", "~grpo.val_at_end", "~grpo.max_val_samples").validation_sampling is None


def test_engine_and_policy_each_get_all_cores_that_the_process_may_use():
    cores = len(os.sched_getaffinity(0))
    made = plan()
    assert made.engine.threads == made.policy.threads == made.cores == cores
    assert made.policy.env["OMP_NUM_THREADS"] == made.policy.env["MKL_NUM_THREADS"] == str(cores)


def test_the_run_folder_is_log_dir_recipe_run(tmp_path):
    assert plan(f"logger.log_dir={tmp_path}", run="lr-1e-5").run_dir == tmp_path / "complete" / "lr-1e-5"
    assert plan(run=None).run_name


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_run_name_is_one_plain_path_component(name):
    with pytest.raises(ConfigError, match="run name"):
        plan(run=name)


def test_the_chat_template_is_read_from_beside_the_recipe():
    made = plan()
    assert made.chat_template == (RECIPE.parent / "template.jinja").read_text(encoding="utf-8")
    inline = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    given = compile_plan(load_recipe(RECIPE, [f"policy.tokenizer.chat_template='{inline}'"]), RECIPE)
    assert given.chat_template == inline


def test_a_broken_template_is_found_with_its_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.read_text().replace("template.jinja", "broken.jinja"))
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }}\n{% endfro %}\n")
    with pytest.raises(ConfigError, match=r"broken\.jinja line 3"):
        compile_plan(load_recipe(path), path)


def test_a_missing_template_is_a_problem_of_the_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.read_text())
    (tmp_path / "templates.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template: .*did you mean 'templates\.jinja'"):
        load_recipe(path)


def test_data_paths_are_relative_to_the_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.read_text().replace("template.jinja", "'{{ messages }}'"))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    recipe = load_recipe(path, ["~data.train", "+data.train={data_path: rows.jsonl}"])
    made = compile_plan(recipe, path)
    assert made.train.data_path == tmp_path / "rows.jsonl"
    assert made.steps_bound == 10


def test_a_plan_is_frozen_and_travels_to_other_processes():
    made = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.cores = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == made
