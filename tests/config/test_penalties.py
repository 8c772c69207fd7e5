"""Patterns and penalties in a recipe: NeMo RL's keys and gymloop's, and what would never apply."""

import pytest

from gymloop.rollouts.flags import Patterns, patterns_of

GYM = "++env.nemo_gym.config_paths=[a.yaml]"


@pytest.mark.parametrize("key", ["rollouts", "env.nemo_gym"])
def test_patterns_go_by_either_key(files, key):
    texts = (f"++{key}.invalid_tool_call_patterns=['[CALL]']", f"++{key}.thinking_tags=[]")
    assert patterns_of(files.load("base.yaml", GYM, *texts).recipe) == Patterns(("[CALL]",), ())


def test_a_recipe_that_names_no_patterns_has_those_of_nemo_rl(files):
    for overrides in ((), (GYM,)):
        patterns = patterns_of(files.load("base.yaml", *overrides).recipe)
        assert patterns.invalid_tool_call == ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
        assert patterns.thinking == ("<think>", "</think>")


def test_the_values_of_nemo_rls_recipes_are_taken(files):
    loaded = files.load(
        "base.yaml", "+grpo.invalid_tool_call_advantage=-5.0", "+grpo.malformed_thinking_advantage=null"
    )
    assert loaded.recipe.grpo.invalid_tool_call_advantage == -5.0
    assert loaded.recipe.grpo.malformed_thinking_advantage is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+grpo.invalid_tool_call_advantage=0.5"], "grpo.invalid_tool_call_advantage: is 0.5; expected at most 0"),
        (["+rollouts.thinking_tags=['']"], "rollouts.thinking_tags"),
        (
            [GYM, "+env.nemo_gym.thinking_tags=['<t>']", "+rollouts.thinking_tags=['<think>']"],
            "rollouts.thinking_tags: is given here and as env.nemo_gym.thinking_tags",
        ),
        (
            ["+grpo.invalid_tool_call_advantage=-5.0", "+rollouts.invalid_tool_call_patterns=[]"],
            "grpo.invalid_tool_call_advantage: never applies, since rollouts.invalid_tool_call_patterns is empty",
        ),
        (
            [GYM, "+grpo.malformed_thinking_advantage=-5.0", "+env.nemo_gym.thinking_tags=[]"],
            "grpo.malformed_thinking_advantage: never applies, since env.nemo_gym.thinking_tags is empty",
        ),
        (
            ["++reward_penalties.penalize_unwanted_tokens=true"],
            "expected their ids in reward_penalties.token_ids.unwanted",
        ),
        (["++reward_penalties.token_ids={think_open: 12}"], "expected both or neither"),
        (
            ["++reward_penalties.penalize_malformed_think_tag=true", "+rollouts.thinking_tags=[]"],
            "reward_penalties.penalize_malformed_think_tag: never applies",
        ),
        (["++reward_penalties.thinking_tags=['<t>']"], "the tags are rollouts.thinking_tags"),
        (["+grpo.penalize_invalid_tool_call=true"], "set grpo.invalid_tool_call_advantage; null is off"),
    ],
)
def test_what_would_never_apply_or_reward_the_fault_is_refused(files, overrides, said):
    assert any(said in line for line in files.said("base.yaml", *overrides)), files.said("base.yaml", *overrides)


def test_the_reward_penalties_of_nemo_rls_recipes_are_taken(files):
    ids = "++reward_penalties.token_ids={unwanted: [2], think_open: 12, think_close: 13}"
    names = ("duplicated_reasoning", "empty_final_answer", "unwanted_tokens", "malformed_think_tag")
    on = [f"++reward_penalties.penalize_{name}=true" for name in names]
    penalties = files.load("base.yaml", ids, *on).recipe.reward_penalties
    assert all(getattr(penalties, f"penalize_{name}") for name in names)
    assert (penalties.token_ids.unwanted, penalties.token_ids.think_open) == ((2,), 12)
