"""From recipe blocks to environments and rows."""

import json
import subprocess
import sys
import textwrap

import pytest

from gymloop.config.schema import DataSource, Env
from gymloop.errors import ConfigError
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.sources import build_sources, load_source_rows, shown_tools, solver


def env(entrypoint="gymloop.gym.calculator:Calculator", **kwargs) -> Env:
    return Env.model_validate({"environments": {"calculator": {"entrypoint": entrypoint, "kwargs": kwargs}}})


def test_the_calculator_by_name():
    sources = build_sources(env(two_step=1.0))
    rows = load_source_rows(DataSource(environment="calculator", num_tasks=4, seed=1), sources, base_dir=None)
    assert [len(row["steps"]) for row in rows] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("gymloop.gym.calculator", "is not of the form module:Class"),
        ("gymloop.gym.calculater:Calculator", "cannot import 'gymloop.gym.calculater': ModuleNotFoundError"),
        ("gymloop.gym.calculator:Calculater", r"has no 'Calculater' \(did you mean 'Calculator'\?\)"),
        ("gymloop.gym.calculator:Game", "its environments: Calculator"),
        ("gymloop.gym.calculator:evaluate", "not a subclass of gymloop.gym.Environment"),
        ("gymloop.gym.environment:Environment", "not a subclass of gymloop.gym.Environment"),
    ],
)
def test_a_wrong_entrypoint_is_named_with_the_nearest_right_one(entrypoint, said):
    with pytest.raises(ConfigError, match=f"env.environments.calculator.entrypoint: .*{said}"):
        build_sources(env(entrypoint))


def test_a_module_beside_the_recipe_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "my_own_environment.py").write_text(
        textwrap.dedent(
            """
            from gymloop.gym import Environment

            class Mine(Environment):
                def verify(self, response):
                    return 1.0
            """
        )
    )
    assert list(build_sources(env("my_own_environment:Mine"), tmp_path)) == ["calculator"]


def test_rows_come_from_a_file_or_a_generator(tmp_path):
    sources = build_sources(env())
    line = {
        "steps": ["1 + 2"],
        "responses_create_params": {"input": "What is 1 + 2?"},
        "agent_ref": {"name": "calculator"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    rows = load_source_rows(DataSource(data_path="rows.jsonl"), sources, tmp_path)
    assert rows[0]["responses_create_params"]["tools"] == sources["calculator"].tools
    for source, said in (
        (DataSource(), "exactly one of data_path and environment"),
        (DataSource(data_path="rows.jsonl", environment="calculator"), "exactly one"),
        (DataSource(environment="calculater", num_tasks=1), r"did you mean 'calculator'\?"),
        (DataSource(environment="calculator"), "num_tasks"),
        (DataSource(data_path="none.jsonl"), "none.jsonl: cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_source_rows(source, sources, tmp_path)


def test_the_gym_needs_no_torch():
    code = (
        "import sys, gymloop.gym.sources, gymloop.rollouts.collector;"
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_is_a_source_without_tools_of_its_own_and_rows_bring_them(tmp_path):
    sources = build_sources(
        Env.model_validate(
            {
                "environments": {
                    "calculator": {"entrypoint": "gymloop.gym.calculator:Calculator"},
                    "far": {"url": "http://127.0.0.1:9", "agent": "gymnasium"},
                }
            }
        )
    )
    assert isinstance(sources["far"], AttachedEnvironment)
    assert sources["far"].tools is None
    tool = {"type": "function", "name": "wx", "parameters": {"type": "object", "properties": {}}}
    line = {"responses_create_params": {"input": "hi", "tools": [tool]}, "agent_ref": {"name": "far"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    rows = load_source_rows(DataSource(data_path="rows.jsonl"), sources, tmp_path)
    assert [tool["name"] for tool in shown_tools(sources, rows)] == ["wx", "calculate"]
    with pytest.raises(ConfigError, match="'far' is a server, and a server generates no tasks; give data_path"):
        load_source_rows(DataSource(environment="far", num_tasks=1), sources, tmp_path)
    assert solver(sources, "calculator") is sources["calculator"]
    with pytest.raises(ConfigError, match=r"sft_warmup: 'far' is a server, and .* has no solver; give sft_warmup.data"):
        solver(sources, "far")
