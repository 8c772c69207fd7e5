"""``gymloop check --deep`` on a toy model: the tokenizer, the environments and every row."""

import json
import sys

import pytest

from gymloop.cli import main as cli
from gymloop.gym.rows import rows_beyond_context
from toys import build_toy

GYM = '''\
from gymloop.gym import Environment, tool


class Toy(Environment):
    """Says things."""

    def __init__(self, words: int = 3):
        self.words = words

    def tasks(self, rng):
        while True:
            yield {"prompt": "a " * self.words}

    @tool
    def say(self, text: str) -> str:
        """Say it."""
        return text

    def verify(self, response):
        return 1.0
'''
RECIPE = """\
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 3}
policy:
  model_name: MODEL
  max_total_sequence_length: 512
  optimizer: {kwargs: {lr: 1e-5}}
  generation: {max_new_tokens: 16}
data: {train: {environment: toy, num_tasks: 4}}
env: {environments: {toy: {entrypoint: "deep_toy_gym:Toy"}}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "deep_toy_gym.py").write_text(GYM)
    monkeypatch.delitem(sys.modules, "deep_toy_gym", raising=False)

    def write(family: str) -> str:
        folder = build_toy(tmp_path / "model", family)
        (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(folder)))
        return str(tmp_path / "r.yaml")

    return write


def test_deep_renders_all_rows_and_says_what_fits(recipe, capsys):
    assert cli.main(["check", recipe("q"), "--deep"]) == 0
    said = capsys.readouterr().out
    assert "4 training and 0 validation rows rendered, 0 errors" in said


def test_deep_takes_a_vllm_that_is_not_here_for_an_error(recipe, capsys, builds):
    argv = ["check", recipe("q"), "--deep", "policy.generation.backend=vllm"]
    builds()
    assert cli.main(argv) == 2
    said = capsys.readouterr().out
    assert "  error       policy.generation.backend is 'vllm' and no vLLM is installed for this Python" in said
    assert "rows rendered, 1 errors" in said
    assert said.count("no vLLM is installed") == 1, "and not a note as well"
    builds(vllm="0.33.1")
    assert cli.main(argv) == 2
    assert "  error       vLLM 0.33.1 is installed" in capsys.readouterr().out
    builds(vllm="0.32.0")
    assert cli.main(argv) == 0


def test_deep_names_rows_beyond_the_context_and_exits_2(recipe, capsys):
    argv = ["check", recipe("q"), "--deep", "+env.environments.toy.kwargs={words: 400}", "data.train.num_tasks=7"]
    assert cli.main(argv) == 2
    said = capsys.readouterr().out
    assert "error       data.train: row 1: its first prompt has" in said
    assert "policy.max_total_sequence_length is 512" in said
    assert "data.train: and 2 of 7 rows more" in said


def test_deep_says_what_template_and_parser_do_not_agree_on(recipe, capsys):
    assert cli.main(["check", recipe("l"), "--deep"]) == 2, "the llama toy's template shows no tools"
    said = capsys.readouterr().out
    assert "tools" in said
    assert "  error  " in said


def test_deep_checks_the_tools_that_rows_name_against_the_environments(recipe, tmp_path, capsys):
    path = recipe("q")
    row = {
        "responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "sai"}]},
        "agent_ref": {"name": "toy"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    argv = ["check", path, "~data.train", "+data.train.data_path=rows.jsonl"]
    assert cli.main(argv) == 0, "plain check imports no environment"
    assert cli.main([*argv, "--deep"]) == 2
    assert "has no tool 'sai' (did you mean 'say'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "beyond"), [(10, []), (4, []), (3, [0]), (2, [0, 1]), (1, [0, 1, 2])], ids=lambda value: str(value)
)
def test_a_row_is_beyond_the_context_when_no_token_is_left_for_an_answer(limit, beyond):
    said = list(rows_beyond_context([{}, {"id": "two"}, {}], [3, 2, 1], limit))
    what = [f"row 1: its first prompt has 3 tokens; policy.max_total_sequence_length is {limit}"]
    what += [f"row 2 (id 'two'): its first prompt has 2 tokens; policy.max_total_sequence_length is {limit}"]
    what += [f"row 3: its first prompt has 1 tokens; policy.max_total_sequence_length is {limit}"]
    assert said == [what[index] for index in beyond]


def test_a_row_that_cannot_be_rendered_is_told_too():
    said = list(rows_beyond_context([{}] * 8, [1, *["the template cannot render this"] * 7], 9))
    assert said[0] == "row 2: the template cannot render this"
    assert len(said) == 6
    assert said[5] == "and 2 of 8 rows more"
