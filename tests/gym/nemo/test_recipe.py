"""From a recipe's ``env.nemo_gym`` to servers, on a stand-in installation; nothing is started."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import yaml

from gymloop.config.load import load
from gymloop.config.schema import Env
from gymloop.errors import ConfigError
from gymloop.gym.nemo import recipe as module
from gymloop.gym.nemo.blocks import Play
from gymloop.gym.nemo.recipe import hints, load_gym

from .stand_in import AGENT, CONFIG, SERVER, make

ROW = {"responses_create_params": {"input": "hi"}, "agent_ref": {"name": AGENT}}
ENV = {"nemo_gym_installation": "gym", "nemo_gym": {"config_paths": [CONFIG]}}


@pytest.fixture
def written(tmp_path):
    """``written(env=..., data=...)`` is a recipe's path, beside a stand-in installation called gym."""
    make(tmp_path / "gym")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")

    def write(env=ENV, data=None, **policy):
        recipe = {
            "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 4, "max_num_steps": 1, **policy},
            "policy": {
                "model_name": "some/model",
                "max_total_sequence_length": 128,
                "optimizer": {"kwargs": {"lr": 1e-5}},
                "generation": {"max_new_tokens": 16},
            },
            "data": data or {"train": {"data_path": "rows.jsonl"}},
            "env": env,
        }
        path = tmp_path / "r.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    return write


def gym_of(path, *overrides, environ=None):
    return load_gym(load(path, overrides, {}).recipe, path.parent, environ or {})


def test_the_recipes_block_becomes_servers_and_plays(written):
    gym = gym_of(written(), "env.nemo_gym.port_range_low=15000", "env.nemo_gym.server_spinup_timeout_seconds=7")
    assert list(gym.blocks.servers) == [SERVER]
    assert gym.plays == {AGENT: Play(SERVER, "tool_calling", 1)}
    assert gym.ports == (15000, 20000)
    assert gym.deadline_s == 7
    assert not gym.needs_model(SERVER)
    assert not gym.needs_ray(SERVER)


def test_without_a_server_to_start_nothing_is_read(written):
    assert gym_of(written({"environments": {"a": {"entrypoint": "m:C"}}})) is None
    assert gym_of(written({"nemo_gym": {"head_server_url": "http://h:1"}})) is None


def test_overrides_are_checked_like_config_files(written):
    path = written()
    agent = f"+env.nemo_gym.{AGENT}={{responses_api_agents: {{simple_agent: {{max_steps: 5}}}}}}"
    assert gym_of(path, agent).plays[AGENT].max_steps == 5
    with pytest.raises(ConfigError, match=r"^env\.nemo_gym: calculatr: nothing reads it; did you mean 'calculator'\?"):
        gym_of(path, "+env.nemo_gym.calculatr={a: 1}")
    with pytest.raises(
        ConfigError, match=r"env\.nemo_gym\.calculator\.resources_servers\.calculator\.colour: nothing in"
    ):
        gym_of(path, "+env.nemo_gym.calculator={resources_servers: {calculator: {colour: red}}}")
    with pytest.raises(ConfigError, match="uv_venv_dir: nothing reads it here, all servers share the environment"):
        gym_of(path, "+env.nemo_gym.uv_venv_dir=/tmp/x")
    with pytest.raises(ConfigError, match=r"policy_model: the policy is served by gymloop, see policy\.generation"):
        gym_of(path, "+env.nemo_gym.policy_model={responses_api_models: {vllm_model: {uses_reasoning_parser: false}}}")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([], r"^env\.nemo_gym: NeMo Gym is not installed for this Python and Ray; run `gymloop gym install`, or"),
        (
            ["a", "b>=1"],
            r"with the packages of env\.nemo_gym_extra; run `gymloop gym install --extra 'a' --extra 'b>=1'`",
        ),
    ],
)
def test_a_missing_installation_names_the_command_that_makes_it(written, monkeypatch, tmp_path, extra, said):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=said):
        gym_of(written({"nemo_gym": {"config_paths": [CONFIG]}, "nemo_gym_extra": extra}))


def test_a_folder_that_is_no_installation_is_said_under_its_key(written):
    with pytest.raises(ConfigError, match=r"^env\.nemo_gym_installation: .*nowhere is not a virtual environment with"):
        gym_of(written({**ENV, "nemo_gym_installation": "nowhere"}))


def test_a_name_that_two_could_answer_to_is_refused(written):
    env = {**ENV, "environments": {AGENT: {"entrypoint": "m:C"}}}
    with pytest.raises(
        ConfigError, match=rf"^env\.environments\.{AGENT}: NeMo Gym's configs have an agent of that name"
    ):
        gym_of(written(env))


def test_rows_that_the_configs_name_are_never_taken_in_silence(written, tmp_path):
    data = {"train": {}, "validation": {"data_path": "rows.jsonl"}}
    path = written(data=data)
    with pytest.raises(
        ConfigError, match=r"^data\.train\.data_path: missing; the configs name .*train\.jsonl, which is not"
    ):
        gym_of(path)
    there = tmp_path / "resources_servers" / "calculator" / "data" / "train.jsonl"
    there.parent.mkdir(parents=True)
    there.write_text("{}\n")
    with pytest.raises(
        ConfigError, match=rf"^data\.train\.data_path: missing; the configs name its rows, give {there}$"
    ):
        gym_of(path)


def test_packages_that_a_server_asks_for_are_named(written, tmp_path):
    gym = gym_of(written())
    assert list(hints(gym)) == []
    (gym.folders[SERVER] / "requirements.txt").write_text("-e nemo-gym\nmath-verify>=1.0\n")
    (said,) = hints(gym)
    assert said.startswith(f"server {SERVER} asks for packages that {tmp_path / 'gym'} lacks")
    assert "`gymloop gym install --extra 'math-verify>=1.0'`" in said
    assert said.endswith("give env.nemo_gym_extra: [math-verify>=1.0]")


def test_a_remote_agent_cannot_validate_with_another_temperature(written, tmp_path):
    config = tmp_path / "own.yaml"
    own = {"own": {"responses_api_agents": {"calculator_agent": {"entrypoint": "app.py"}}}}
    config.write_text(yaml.safe_dump(own))
    folder = tmp_path / "responses_api_agents" / "calculator_agent"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text("ray_enabled = False\n")
    env = {**ENV, "nemo_gym": {"config_paths": [CONFIG, "own.yaml"]}}
    data = {"train": {"data_path": "rows.jsonl"}, "validation": {"data_path": "rows.jsonl"}}
    path = written(env, data, val_at_end=True)
    assert gym_of(path).plays["own"] == Play("own", "remote")
    with pytest.raises(ConfigError, match=r"^policy\.generation\.val_temperature: the calls of NeMo Gym's agent own"):
        gym_of(path, "policy.generation.val_temperature=0")


def test_servers_of_a_config_elsewhere_are_found_beside_it(written, tmp_path):
    """As in the recipe that a run saves, whose paths are absolute."""
    far = tmp_path / "far" / "resources_servers" / "calculator"
    (far / "configs").mkdir(parents=True)
    (far / "app.py").write_text("ray_enabled = False\n")
    config = far / "configs" / "own.yaml"
    config.write_text("calculator: {resources_servers: {calculator: {entrypoint: app.py}}}\n")
    gym = gym_of(written({**ENV, "nemo_gym": {"config_paths": [str(config)]}}))
    assert gym.folders[SERVER] == far


def test_a_secret_of_nemo_gyms_configs_reaches_the_server_and_no_text(written):
    gym = gym_of(written(), environ={"CALCULATOR_JUDGE_KEY": "hunter2"})
    assert gym.blocks.servers[SERVER].settings["judge_key"] == "hunter2"
    assert "hunter2" not in repr(gym)


def test_the_installation_is_the_one_with_the_packages_that_the_recipe_names(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(module, "installed", lambda wanted: asked.append(wanted) or SimpleNamespace(folder=tmp_path))
    env = Env.model_validate({"nemo_gym": {"config_paths": ["a.yaml"]}, "nemo_gym_extra": ["reasoning-gym"]})
    assert module.find_installation(env, tmp_path).folder == tmp_path
    assert asked[0].extras == ("reasoning-gym",)
    assert asked[0].ray == module.run_ray()
