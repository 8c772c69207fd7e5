"""``env.nemo_gym`` in a recipe: what is taken, saved and shown of it."""

from __future__ import annotations

import pytest
import yaml

from gymloop.config.dump import as_yaml
from gymloop.config.load import load

GYM = """\
env:
  should_use_nemo_gym: true
  nemo_gym:
    config_paths: [own.yaml, resources_servers/shop/configs/shop.yaml]
    is_trajectory_collection: false
    port_range_low: 5000
    port_range_high: 5999
    judge_model:
      responses_api_models: {openai_model: {openai_api_key: "${oc.env:JUDGE_API_KEY}", max_concurrency: 1e1}}
"""


@pytest.fixture
def recipe(files, base):
    return files.write("r.yaml", base.partition("env:\n")[0] + GYM.replace("env:", "env:\n  environments: {}", 1))


@pytest.fixture
def rows(files):
    return files.write("rows.jsonl", "{}\n")


ROWS = ("~data.train.environment", "~data.train.num_tasks", "+data.train.data_path=rows.jsonl")
SECRET = {"JUDGE_API_KEY": "hunter2-hunter2"}


def test_further_keys_are_kept_as_they_are_and_the_known_ones_have_types(recipe, rows):
    gym = load(recipe, ROWS, SECRET).recipe.env.nemo_gym
    assert gym.config_paths == ("own.yaml", "resources_servers/shop/configs/shop.yaml")
    assert (gym.port_range_low, gym.port_range_high) == (5000, 5999)
    settings = {"openai_api_key": SECRET["JUDGE_API_KEY"], "max_concurrency": 10.0}
    assert gym.overrides == {"judge_model": {"responses_api_models": {"openai_model": settings}}}


def test_a_saved_recipe_reads_as_the_same_wherever_it_lies_and_has_no_secret(recipe, rows, files, tmp_path):
    files.write("own.yaml", "{}\n")
    loaded = load(recipe, ROWS, SECRET).recipe
    text = as_yaml(loaded, recipe.parent)
    assert SECRET["JUDGE_API_KEY"] not in text
    saved = files.write("elsewhere/saved.yaml", text)
    again = load(saved, (), SECRET).recipe
    own, shipped = again.env.nemo_gym.config_paths
    assert own == str(files.folder / "own.yaml")
    assert shipped == "resources_servers/shop/configs/shop.yaml", "nothing beside the recipe: the installed Gym's"
    assert again.env.nemo_gym.overrides == loaded.env.nemo_gym.overrides


def test_a_config_beside_an_inherited_recipe_is_found_from_the_one_that_inherits(recipe, rows, files):
    files.write("own.yaml", "{}\n")
    heir = files.write("heirs/h.yaml", yaml.safe_dump({"defaults": "../r.yaml"}))
    gym = load(heir, (*ROWS[:2], "+data.train.data_path=../rows.jsonl"), SECRET).recipe.env.nemo_gym
    assert gym.config_paths == ("../own.yaml", "resources_servers/shop/configs/shop.yaml")


def test_a_secret_that_is_written_out_is_refused(recipe, rows, files):
    (said,) = files.said(
        "r.yaml", *ROWS, "env.nemo_gym.judge_model.responses_api_models.openai_model.openai_api_key=sk-12345"
    )
    assert "looks like a secret" in said
    assert "sk-12345" not in said


def test_rows_may_be_left_to_nemo_gyms_configs_to_name(recipe):
    source = load(recipe, ROWS[:2], SECRET).recipe.data.train
    assert (source.data_path, source.environment) == (None, None), "gym.nemo.recipe says which file"


def test_a_type_that_does_not_fit_is_told_with_its_line(recipe, files):
    (said,) = files.said("r.yaml", *ROWS[:2], "env.nemo_gym.port_range_low=x", environ=SECRET)
    assert "env.nemo_gym.port_range_low: is the text 'x'; expected an integer" in said
