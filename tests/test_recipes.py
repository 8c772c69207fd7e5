"""Every recipe that is shipped passes ``check``, and says with which commands it is run.

Recipes with servers of NeMo Gym's are checked against an installation that has the files they name and nothing else;
``tests/gym/nemo/test_real_recipes.py`` checks and runs them on the real one.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from gymloop.cli import main as cli
from gymloop.config.load import load_recipe

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in RECIPES}
GYM = [name for name, text in TEXTS.items() if "nemo_gym:" in text]
NANO = "workplace_assistant_nemotron_nano_v2_9b"

SERVERS = {
    "blackjack": ("gymnasium_agent", 5),
    "reasoning_gym": ("simple_agent", None),
    "example_tool_call_multireward": ("simple_agent", None),
    "workplace_assistant": ("simple_agent", 6),
}
"""By server, the type of its agent and the agent's limit of model calls."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory) -> Path:
    """A NeMo Gym with these servers' configs and rows."""
    folder = tmp_path_factory.mktemp("gym")
    site = folder / "lib" / "python3.13" / "site-packages"
    (site / "nemo_gym-0.7.0.dist-info").mkdir(parents=True)
    (site / "nemo_gym-0.7.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nemo-gym\nVersion: 0.7.0\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    model = site / "responses_api_models" / "vllm_model" / "configs"
    model.mkdir(parents=True)
    served = {"policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}}}
    (model / "vllm_model_for_training.yaml").write_text(yaml.safe_dump(served))
    for server, (agent, limit) in SERVERS.items():
        own = site / "resources_servers" / server
        (own / "configs").mkdir(parents=True)
        (own / "data").mkdir()
        (own / "app.py").write_text("ray_enabled = False\n")
        rows = f"resources_servers/{server}/data"
        settings = {
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": server},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
            "datasets": [
                {"name": name, "type": name, "jsonl_fpath": f"{rows}/{name}.jsonl"}
                for name in ("train", "validation", *(() if server == "reasoning_gym" else ("example",)))
            ],
        } | ({} if limit is None else {"max_steps": limit})
        blocks = {
            server: {"resources_servers": {server: {"entrypoint": "app.py", "domain": "agent"}}},
            f"{server}_{agent}": {"responses_api_agents": {agent: settings}},
        }
        (own / "configs" / f"{server}.yaml").write_text(yaml.safe_dump(blocks))
        row = {"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}}
        (own / "data" / "example.jsonl").write_text(5 * (json.dumps(row) + "\n"))
    return folder


def overrides(name: str, installation: Path) -> list[str]:
    """The installation, in place of the one that the recipe's packages choose; and rows that come with none."""
    given = [f"env.nemo_gym_installation={installation}"]
    if "nemo_gym_extra:" in TEXTS[name]:
        given.append("~env.nemo_gym_extra")
    if name == NANO:
        rows = "resources_servers/workplace_assistant/data/example.jsonl"
        given += [f"data.{part}.data_path={rows}" for part in ("train", "validation")]
    return given


@pytest.mark.parametrize("name", sorted(set(TEXTS) - set(GYM)))
def test_a25_a_recipe_with_environments_in_the_process_is_sound(capsys, name):
    assert cli.main(["check", str(ROOT / "recipes" / f"{name}.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", GYM)
def test_a25_a_recipe_with_servers_of_nemo_gym_is_sound(capsys, installation, name):
    code = cli.main(["check", str(ROOT / "recipes" / f"{name}.yaml"), *overrides(name, installation)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"{installation}/lib/python3.13/site-packages/resources_servers/" in said.out, "where the rows are"


@pytest.mark.parametrize("name", GYM)
def test_without_nemo_gym_the_one_thing_said_is_how_to_install_it(capsys, monkeypatch, tmp_path, name):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path))
    assert cli.main(["check", str(ROOT / "recipes" / f"{name}.yaml")]) == 2
    said = capsys.readouterr().err
    command = next(line for line in header(name) if line.startswith("gymloop gym install"))
    assert re.sub("'", "", said).count(f"run `{command}`") == 1, said
    assert "problems" not in said


def test_rows_that_are_nowhere_are_named_with_the_places_looked_in(capsys, installation):
    code = cli.main(["check", str(ROOT / "recipes" / f"{NANO}.yaml"), f"env.nemo_gym_installation={installation}"])
    said = capsys.readouterr().err
    assert code == 2
    assert re.search(
        rf"{NANO}\.yaml:\d+: data\.train\.data_path: there is no file \S+/train\.jsonl in \S+/recipes nor", said
    )


def test_rows_of_ones_own_that_name_no_agent_are_refused(capsys, tmp_path, installation):
    """Those that come with NeMo Gym take the agent of their server; a file from elsewhere could be anybody's."""
    row = {"responses_create_params": {"input": "hi"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    changed = [*overrides("multireward", installation), f"data.train.data_path={tmp_path / 'rows.jsonl'}"]
    assert cli.main(["check", str(ROOT / "recipes" / "multireward.yaml"), *changed]) == 2
    assert "rows.jsonl, line 1: agent_ref is None; expected an object with 'name'" in capsys.readouterr().err


@pytest.mark.slow
def test_deep_check_renders_the_rows_of_nemo_gym(capsys, installation):
    """With the tokenizer of SmolLM2."""
    argv = ["check", "--deep", str(ROOT / "recipes" / "multireward.yaml"), *overrides("multireward", installation)]
    assert cli.main(argv) == 0
    assert "5 training and 0 validation rows rendered, 0 errors" in capsys.readouterr().out


def header(name: str) -> list[str]:
    """The comment lines that a recipe begins with, without their marks."""
    lines = TEXTS[name].splitlines()
    until = next(at for at, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:until]]


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"quickstart"}))
def test_a_recipe_begins_with_its_commands(name):
    said = header(name)
    assert f"gymloop train recipes/{name}.yaml" in said
    recipe = yaml.safe_load(TEXTS[name])
    if name in GYM:
        extras = "".join(f" --extra {package}" for package in recipe["env"].get("nemo_gym_extra", ()))
        assert f"gymloop gym install{extras}" in said
    if "Math" in TEXTS[name]:
        assert any("pip install" in line and "[math]" in line for line in said)


def commands(name: str) -> list[list[str]]:
    """The arguments of the runs and checks that a recipe's header gives, with lines that end in a backslash joined."""
    lines = "\n".join(header(name)).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith(("gymloop train ", "gymloop check "))]


AGENTS = {"math": "math", "reasoning_gym": "reasoning_gym_simple_agent"}
"""Whom the rows name that a header's command brings."""


@pytest.mark.parametrize(("name", "given"), [(name, given) for name in TEXTS for given in commands(name)])
def test_every_run_that_a_recipe_begins_with_compiles(capsys, monkeypatch, tmp_path, installation, name, given):
    """As it stands, from the repository; rows that it wants beside the recipe are there."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"data_path=(\S+)", " ".join(given)):
        row = {
            "responses_create_params": {"input": [{"role": "user", "content": "hi"}]},
            "agent_ref": {"type": "responses_api_agents", "name": AGENTS[name]},
            "expected_answer": "2",
        }
        (tmp_path / "recipes" / file).write_text(8 * (json.dumps(row) + "\n"))
    assert given[0] == f"recipes/{name}.yaml"
    more = overrides(name, installation) if name in GYM else []
    assert cli.main(["check", *given, *more]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_of_a_recipe_is_commented_somewhere(name):
    assert TEXTS[name].count("#") >= 5


def test_the_tutorials_recipe_has_the_tutorials_values():
    """As far as gymloop has the keys; where a value differs, the recipe says so beside it."""
    recipe = load_recipe(ROOT / "recipes" / f"{NANO}.yaml")
    grpo, loss, policy, saved = recipe.grpo, recipe.loss_fn, recipe.policy, recipe.checkpointing
    generation = policy.generation
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.max_num_epochs) == (64, 16, 1)
    assert (grpo.max_num_steps, grpo.val_period, grpo.seed, grpo.max_val_samples) == (1_000_000, 10, 42, None)
    assert (grpo.val_at_start, grpo.val_at_end, grpo.overlong_filtering) == (True, False, False)
    assert (grpo.normalize_rewards, grpo.use_leave_one_out_baseline) == (True, True)
    assert (loss.reference_policy_kl_penalty, loss.ratio_clip_min, loss.ratio_clip_max, loss.ratio_clip_c) == (
        0.0,
        0.2,
        0.2,
        None,
    )
    assert (loss.kl_input_clamp_value, loss.kl_output_clamp_value, loss.token_level_loss) == (20.0, 10.0, True)
    assert (loss.use_importance_sampling_correction, loss.truncated_importance_sampling_ratio) == (False, None)
    assert policy.model_name == policy.tokenizer.name == "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    assert (policy.train_global_batch_size, policy.train_micro_batch_size) == (1024, 1)
    assert (policy.max_total_sequence_length, policy.precision, policy.max_grad_norm) == (8192, "bfloat16", 1.0)
    assert (policy.optimizer.kwargs.lr, policy.optimizer.kwargs.weight_decay) == (5e-6, 0.01)
    assert (policy.optimizer.kwargs.betas, policy.optimizer.kwargs.eps) == ((0.9, 0.999), 1e-8)
    assert policy.lr_warmup_steps == 13
    assert (generation.backend, generation.temperature, generation.top_p, generation.top_k) == ("vllm", 1.0, 1.0, None)
    assert (generation.val_temperature, generation.val_top_p, generation.val_top_k) == (1.0, 1.0, None)
    assert policy.tokenizer.tool_parser == "nemotron_json"
    assert generation.vllm_cfg is not None
    assert (generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.gpu_memory_utilization) == (1, 0.8)
    assert generation.vllm_kwargs["mamba_ssm_cache_dtype"] == "float32"
    assert (saved.keep_top_k, saved.higher_is_better, saved.enabled) == (3, True, True)
    assert recipe.env.nemo_gym is not None
    assert (recipe.env.nemo_gym.port_range_low, recipe.env.nemo_gym.port_range_high) == (5000, 5999)
    assert (recipe.cluster.gpus_per_node, recipe.cluster.num_nodes) == (8, 1)
