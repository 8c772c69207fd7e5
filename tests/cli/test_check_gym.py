"""``gymloop check`` of a recipe with NeMo Gym's servers: what is said of them, where, and how soon."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from gymloop.cli import main as cli

from ..gym.nemo.stand_in import AGENT, CONFIG, make
from .test_check import SOUND

SECRET = "hunter2-hunter2"


@pytest.fixture
def recipe(tmp_path):
    make(tmp_path / "gym")
    row = {"responses_create_params": {"input": "hi"}, "agent_ref": {"name": AGENT}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    content = yaml.safe_load(SOUND) | {
        "data": {"train": {"data_path": "rows.jsonl"}},
        "env": {"nemo_gym_installation": "gym", "nemo_gym": {"config_paths": [CONFIG]}},
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def said(recipe, capsys):
    """``said(*overrides)`` is what a check that fails prints."""

    def check(*overrides):
        assert cli.main(["check", str(recipe), *overrides]) == 2
        return capsys.readouterr().err.replace(f"{recipe.parent}/", "")

    return check


def test_the_agents_and_where_they_play_are_in_the_summary(recipe, capsys):
    assert cli.main(["check", str(recipe)]) == 0
    printed = capsys.readouterr().out
    assert f"{AGENT} (tool_calling agent on NeMo Gym's calculator, at most 1 model calls)" in printed


def test_explain_names_servers_agents_ports_and_their_tasks(recipe, capsys, monkeypatch):
    monkeypatch.setenv("CALCULATOR_JUDGE_KEY", SECRET)
    assert cli.main(["check", str(recipe), "--explain"]) == 0
    printed = capsys.readouterr().out
    assert f"NeMo Gym 0.7.0 in {recipe.parent / 'gym'}" in printed
    assert re.search(r"server calculator: .*/resources_servers/calculator/app\.py on a port of 10001-20000", printed)
    assert f"rows of {AGENT} (tool_calling agent" in printed
    assert re.search(r"^  gym +at once", printed, re.MULTILINE)
    assert re.search(r"^  gym\.calculator +after gym;", printed, re.MULTILINE)
    assert SECRET not in printed


def test_what_is_wrong_is_told_with_its_line_beside_the_other_problems(said):
    text = said("+checkpointing={metric_name: rewrd, keep_top_k: 1}", "+env.nemo_gym.calculatr={a: 1}")
    assert re.search(r"r\.yaml:\d+: env\.nemo_gym: calculatr: nothing reads it; did you mean 'calculator'", text)
    assert "checkpointing.metric_name" in text


def test_a_row_of_an_agent_that_the_configs_lack_is_named_with_the_nearest(recipe, said):
    rows = recipe.parent / "rows.jsonl"
    rows.write_text(rows.read_text().replace(AGENT, AGENT[:-1]))
    text = said()
    assert f"rows.jsonl, line 1: agent_ref.name '{AGENT[:-1]}' is not an environment of this run" in text
    assert f"'{AGENT}'" in text


def test_rows_of_a_head_servers_agents_are_not_judged_by_name(recipe, capsys):
    overrides = ["~env.nemo_gym_installation", "~env.nemo_gym.config_paths", "+env.nemo_gym.head_server_url=http://h:1"]
    assert cli.main(["check", str(recipe), *overrides]) == 0


def test_a_missing_installation_names_its_command(said, monkeypatch, tmp_path):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    text = said("~env.nemo_gym_installation")
    assert "NeMo Gym is not installed for this Python and Ray; run `gymloop gym install`" in text


def test_the_resolved_recipe_has_no_secret(recipe, capsys, monkeypatch):
    monkeypatch.setenv("KEY", SECRET)
    override = "+env.nemo_gym.calculator={resources_servers: {calculator: {judge_key: '${oc.env:KEY}'}}}"
    assert cli.main(["check", str(recipe), override, "--resolved"]) == 0
    printed = capsys.readouterr().out
    assert SECRET not in printed
    assert "judge_key: ${oc.env:KEY}" in printed


def test_a_check_takes_little_time_and_loads_nothing_heavy(recipe):
    code = (
        "import sys, time\n"
        "from gymloop.cli.main import main\n"
        f"assert main(['check', {str(recipe)!r}]) == 0\n"
        "print(sorted({'torch', 'ray', 'transformers', 'aiohttp'} & set(sys.modules)), time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 2.0


def test_deep_renders_the_rows_of_the_agents(recipe, capsys, toy):
    assert cli.main(["check", str(recipe), "--deep", f"policy.model_name={toy('q')}"]) == 0
    assert "1 training and 0 validation rows rendered, 0 errors" in capsys.readouterr().out
