"""What a recipe's engine is started with, where it depends on who brings it weights."""

import pytest

from gymloop.config.schema import Generation, VllmCfg
from gymloop.errors import ConfigError
from gymloop.training.tasks.engine import _engine_settings


def vllm(**cfg):
    return Generation(backend="vllm", max_new_tokens=8, vllm_cfg=VllmCfg(**cfg))


@pytest.mark.parametrize(
    ("asked", "syncs", "expected"),
    [(None, True, "auto"), (None, False, "auto"), ("auto", True, "auto"), ("dummy", True, "dummy")],
)
def test_weights_are_read_unless_the_recipe_says_otherwise(asked, syncs, expected):
    settings, rows = _engine_settings(vllm(load_format=asked, max_num_seqs=7), syncs)
    assert (settings.load_format, rows) == (expected, 7)
    assert settings.waits_for_weights == (expected == "dummy")


def test_an_engine_that_nobody_brings_weights_is_refused():
    with pytest.raises(ConfigError, match=r"vllm_cfg.load_format is 'dummy', .*expected null, 'auto' or 'safetensors'"):
        _engine_settings(vllm(load_format="dummy"), syncs=False)


def test_the_default_is_spelled_as_vllm_spells_it():
    assert VllmCfg().load_format == "auto"


def test_the_embedded_engine_has_no_such_settings():
    assert _engine_settings(Generation(max_new_tokens=8), syncs=True)[0] is None
