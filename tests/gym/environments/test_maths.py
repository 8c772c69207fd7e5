"""The math environment as a rollout meets it: which answer counts, what it pays, and which rows it takes."""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.gym.environments import Math
from gymloop.gym.environments.math_tasks import KINDS
from gymloop.gym.environments.maths import MAX_ANSWER, bare, gold_of, last_boxed
from gymloop.gym.items import message_item
from gymloop.gym.rows import read_rows
from gymloop.gym.session import InProcessSource, demonstrate

SOURCE = InProcessSource("math", Math, {"time_limit_s": 0.5})
ANYWHERE = InProcessSource("math", Math, {"time_limit_s": 0.5, "boxed": False})


def score(row, text: str, source=SOURCE) -> float:
    """The reward of one final message, asked for twice."""

    async def rollout():
        session = await source.seed_session(row)
        response = {"output": [message_item("m", text, "completed")]}
        rewards = [(await session.verify(response)).reward for _ in range(2)]
        assert rewards[0] == rewards[1]
        return rewards[0]

    return asyncio.run(rollout())


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("12", "\\boxed{12}", 1.0),
        ("12", "First \\boxed{11}, no: \\boxed{12}", 1.0),
        ("12", "First \\boxed{12}, no: \\boxed{11}", 0.0),
        ("12", "\\boxed{12", 0.0),
        ("12", "12", 0.0),  # not in a box
        ("12", "", 0.0),
        ("12", "\\boxed{}", 0.0),
        ("12", "\\boxed{ 12 }", 1.0),
        ("12", "\\boxed{+12}", 1.0),
        ("12", "\\boxed{13}", 0.0),
        ("1/2", "\\boxed{0.5}", 1.0),
        ("\\frac{1}{2}", "Hence $x = \\boxed{\\frac{2}{4}}$.", 1.0),
        ("$\\{1,2\\}$", "\\boxed{\\{2, 1\\}}", 1.0),
        ("1, 2", "\\boxed{1}", 0.0),
        ("7", "\\boxed{1, 2, 3, 4, 5, 6, 7, 8}", 0.0),  # all of them is not the right one
    ],
)
def test_the_last_box_counts_in_whatever_form(gold, text, reward):
    assert score({"expected_answer": gold}, text) == reward


def test_without_a_box_the_end_of_the_text_counts_where_that_is_asked_for():
    assert score({"expected_answer": "12"}, "3 and 9 make 12.", ANYWHERE) == 1.0
    assert score({"expected_answer": "12"}, "12 or \\boxed{13}", ANYWHERE) == 0.0
    assert score({"expected_answer": "12"}, " ", ANYWHERE) == 0.0
    assert score({"expected_answer": "12"}, "12" + " " * MAX_ANSWER, ANYWHERE) == 0.0


def test_a_hostile_answer_is_scored_zero_and_is_no_failure():
    assert score({"expected_answer": "7"}, "\\boxed{9^{9^{9^{9}}}}") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" + "7" * 1_000_000 + "}",
        "\\boxed{" * 150_000,
        "{" * 1_000_000,
        "\\boxed{" * 70_000 + "}" * 70_000,
        "}" * 1_000_000 + "\\boxed{8}",
    ],
    ids=["digits", "boxes", "braces", "boxes in boxes", "closed"],
)
def test_a_megabyte_is_read_in_no_time(text):
    begun = time.process_time()
    assert score({"expected_answer": "7"}, text) == 0.0
    assert time.process_time() - begun < 10


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=st.sampled_from("\\boxed{}1 $"), max_size=60))
def test_the_last_box_is_what_a_search_by_hand_finds(text):
    def by_hand():
        for start in range(len(text) - 1, -1, -1):
            if not text.startswith("\\boxed{", start):
                continue
            depth, at = 0, start + len("\\boxed")
            while at < len(text):
                if text[at] == "\\":
                    at += 2
                    continue
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                if depth == 0:
                    return text[start + len("\\boxed{") : at]
                at += 1
        return None

    if "\\\\" not in text:  # after an escaped backslash the two read differently where a box may begin
        assert last_boxed(text) == by_hand()


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=200))
def test_whatever_the_text_the_reward_is_nought_or_one(text):
    assert score({"expected_answer": "7"}, text) in (0.0, 1.0)
    assert score({"expected_answer": "7"}, f"\\boxed{{{text[:12]}}}") in (0.0, 1.0)


# ---- rows ----


@pytest.mark.parametrize(
    ("given_answer", "gold"),
    [
        ("$12$", "12"),
        ("$$12$$", "12"),
        ("\\(\\frac{1}{2}\\)", "\\frac{1}{2}"),
        ("\\[x\\]", "x"),
        ("\\boxed{12}", "12"),
        ("$\\boxed{12}$", "12"),
        (" 12 ", "12"),
        ("$", "$"),
        ("\\boxed{1} + \\boxed{2}", "\\boxed{1} + \\boxed{2}"),
    ],
)
def test_delimiters_are_not_part_of_an_answer(given_answer, gold):
    assert bare(given_answer) == gold


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"expected_answer": "1"}, "1"),
        ({"ground_truth": "1"}, "1"),
        ({"ground_truth": 1}, "1"),
        ({"ground_truth": 0.5, "expected_answer": None}, "0.5"),
        ({"ground_truth": "$1$", "expected_answer": "1"}, "1"),
    ],
)
def test_rows_of_nemo_gym_and_of_nemo_rl_both_name_their_answer(row, gold):
    assert gold_of(row) == gold


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "the row has no expected_answer or ground_truth"),
        ({"ground_truth": ["1"]}, "ground_truth is .'1'.; expected text or a number"),
        ({"ground_truth": True}, "ground_truth is True"),
        ({"ground_truth": "1", "expected_answer": "2"}, "differ: 1 and 2"),
        ({"expected_answer": "$$"}, "differ|has 0 characters|cannot be read"),
        ({"expected_answer": " "}, "has 0 characters"),
        ({"expected_answer": "1" * 3000}, "has 3000 characters; expected 1 to 2000"),
    ],
)
def test_a_row_without_a_usable_answer_costs_the_row(row, said):
    with pytest.raises(DataError, match=said):
        score(row, "\\boxed{1}")


def test_rows_come_from_a_file_as_nemo_gym_has_them(tmp_path):
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": "1+1? Put it in \\boxed{}."}]},
            "question": "1+1?",
            "expected_answer": "\\(\\frac{4}{2}\\)",
            "agent_ref": {"type": "responses_api_agents", "name": "math"},
        }
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = read_rows(tmp_path / "rows.jsonl", {"math": SOURCE.tools})
    assert score(row, "\\boxed{2}") == 1.0
    assert not row["responses_create_params"].get("tools")


# ---- generated problems ----


def test_the_same_seed_gives_the_same_problems_of_the_kinds_asked_for():
    assert SOURCE.generate(50, seed=1) == SOURCE.generate(50, seed=1)
    assert SOURCE.generate(50, seed=1) != SOURCE.generate(50, seed=2)
    sums = InProcessSource("math", Math, {"kinds": ["addition"], "largest": 9}).generate(30, seed=0)
    assert all(" + " in row["responses_create_params"]["input"][0]["content"] for row in sums)
    assert all(2 <= int(row["expected_answer"]) <= 18 for row in sums)


@pytest.mark.parametrize("kind", KINDS)
def test_the_solver_gets_the_whole_reward_and_its_answer_in_other_words_too(kind):
    source = InProcessSource("math", Math, {"kinds": [kind], "largest": 30})
    for row in source.generate(5, seed=3):
        conversation = asyncio.run(demonstrate(source, row))  # raises unless verify gives it the whole reward
        assert conversation["messages"][-1]["content"] == f"\\boxed{{{row['expected_answer']}}}"
        assert score(row, f"It is $\\boxed{{ {row['expected_answer']}\\text{{ }} }}$.", source) == 1.0


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"kinds": ["adition"]}, "kinds has 'adition' .did you mean 'addition'.."),
        ({"kinds": []}, "kinds has ''"),
        ({"largest": 0}, "largest is 0"),
        ({"time_limit_s": 0}, "time_limit_s is 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        Math(**kwargs)


def test_a_comparison_that_could_not_be_made_is_a_failure_and_no_reward(monkeypatch):
    async def rollout():
        session = await SOURCE.seed_session({"expected_answer": "7"})

        def lost(*_args, **_kwargs):
            raise InfraError("no process", cause="busy")

        monkeypatch.setattr(session.environment.judge, "compare", lost)
        return await session.verify({"output": [message_item("m", "\\boxed{x}", "completed")]})

    with pytest.raises(InfraError, match="environment math, verify: no process"):
        asyncio.run(rollout())
