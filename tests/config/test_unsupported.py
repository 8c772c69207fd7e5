"""A recipe of NeMo RL, as it is: every key is taken or refused with a reason, none is ignored and none is a riddle."""

import re
from pathlib import Path

import pytest
import yaml

from gymloop.config.keys import fields_at, type_at
from gymloop.config.load import load
from gymloop.config.unsupported import NOT_YET
from gymloop.errors import ConfigError

RECIPE = Path(__file__).parent / "data" / "nemo_rl_grpo.yaml"


@pytest.fixture(scope="module")
def said() -> str:
    with pytest.raises(ConfigError) as caught:
        load(RECIPE, (), {})
    return str(caught.value)


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


@pytest.mark.parametrize("path", list(leaves(yaml.safe_load(RECIPE.read_text()))), ids=".".join)
def test_every_key_of_nemo_rl_is_taken_or_refused_with_a_reason(said, path):
    known = all(part in fields_at(path[:depth]) for depth, part in enumerate(path))
    around = [".".join(path[: depth + 1]) for depth in range(len(path))]
    refusals = [line for line in said.splitlines() for key in around if f": {key}: " in line]
    assert known or refusals
    if not known:
        assert all("unknown key" not in line for line in refusals), refusals
        assert any(len(line.partition("gymloop does not have: ")[2]) > 10 for line in refusals), refusals


@pytest.mark.parametrize(
    "sentence",
    [
        r":\d+: grpo\.async_grpo: .*asynchronous training is not available yet",
        r":\d+: policy\.megatron_cfg: .*Megatron backend is not available",
        r":\d+: policy\.dtensor_cfg: .*LoRA are not available yet",
        r":\d+: policy\.generation\.vllm_cfg\.pipeline_parallel_size: .*tensor_parallel_size only",
        r":\d+: env\.nemo_gym\.effort_levels: .*rewards are used as verify\(\) gives them",
        r":\d+: env\.nemo_gym\.num_gpu_nodes: .*no GPUs are set apart for servers",
        r":\d+: env\.math: .*environments are given under env\.environments, by entrypoint",
        r":\d+: data\.train\.dataset_name: .*data\.train\.data_path",
        r":\d+: grpo\.use_dynamic_sampling: .*dynamic sampling is not available yet",
        r":\d+: on_policy_distillation: .*distillation is not available yet",
    ],
)
def test_a_feature_that_is_lacking_is_named_with_its_line(said, sentence):
    assert re.search(sentence, said), said


def test_expressions_of_nemo_rl_recipes_have_values_so_none_is_told_as_a_problem(said):
    assert "${" not in said


def test_the_table_names_no_key_that_the_schema_has():
    for key in NOT_YET:
        *block, name = key.split(".")
        assert name not in fields_at(tuple(block)), key
        assert type_at(tuple(block)) is not None, f"{key} would never be looked up"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("policy.generation_batch_size", "policy.generation.vllm_cfg.max_num_seqs with backend 'vllm'"),
        ("cluster.segment_size", "nodes are not chosen by how they are connected; see cluster.num_nodes"),
    ],
)
def test_a_hint_names_what_does_it_here(files, key, reason):
    said = files.said("base.yaml", f"+{key}=4")
    assert any(f"{key}: a key of NeMo RL that gymloop does not have: " in line and reason in line for line in said)
