"""``gymloop gym list``: what an installation offers, what each server needs, and one of them in full."""

from __future__ import annotations

import pytest
import yaml

from gymloop.cli import main as cli

from ..gym.nemo.stand_in import make


@pytest.fixture
def folder(tmp_path):
    """An installation with two servers: the calculator, and one that needs much."""
    made = make(tmp_path / "gym")
    server = next(made.glob("lib/*/site-packages/resources_servers")) / "riddles"
    (server / "configs").mkdir(parents=True)
    (server / "data").mkdir()
    (server / "app.py").write_text("class Riddles:\n    pass\n")
    (server / "requirements.txt").write_text("sphinx-riddles>=2\n")
    (server / "data" / "example.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    judge = {"type": "responses_api_models", "name": "judge_model"}
    settings = {"entrypoint": "app.py", "description": "Riddles,\n judged", "judge_model_server": judge}
    config = {
        "riddles": {"resources_servers": {"riddles": settings}},
        "oracle": {"responses_api_agents": {"oracle_agent": {"entrypoint": "app.py"}}},
    }
    for name in ("riddles", "hard"):
        (server / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return made


def test_every_server_is_a_line_and_what_it_needs_another(folder, capsys):
    assert cli.main(["gym", "list", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"NeMo Gym 0.7.0 in {folder}: 2 resources servers",
        "calculator  (no description)",
        "riddles     Riddles, judged",
        "            needs --extra 'sphinx-riddles>=2', a judge model, Ray, the agent oracle_agent",
    ]


def test_one_server_is_told_in_full(folder, capsys):
    assert cli.main(["gym", "list", "riddles", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "riddles: Riddles, judged",
        "needs: --extra 'sphinx-riddles>=2', a judge model, Ray, the agent oracle_agent",
        "agents: oracle_agent",
        "rows that come with it: 2",
        "config: resources_servers/riddles/configs/riddles.yaml",
        "config: resources_servers/riddles/configs/hard.yaml",
    ]


def test_a_server_that_is_not_there_and_a_folder_that_is_none_are_said(folder, capsys):
    assert cli.main(["gym", "list", "ridles", "--folder", str(folder)]) == 2
    assert "NeMo Gym 0.7.0 has no 'ridles'; did you mean 'riddles'" in capsys.readouterr().err
    assert cli.main(["gym", "list", "--folder", str(folder.parent)]) == 2
    assert "is not a virtual environment with nemo-gym" in capsys.readouterr().err
