"""Context and rows are what the model has and the memory holds."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from gymloop import compat
from gymloop.errors import ConfigError
from gymloop.generation import capacity


def test_the_context_is_the_models_own(toy):
    assert capacity.context_length(capacity.text_config(toy("q"))) == 4096


def test_a_configuration_that_does_not_say_is_refused():
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        capacity.context_length(object())


def test_an_unreadable_configuration_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        capacity.text_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_reading_a_configuration_imports_no_models_code(toy):
    code = (
        "import sys; from gymloop.generation.capacity import text_config; text_config(sys.argv[1]); "
        "print({'transformers.modeling_utils', 'transformers.generation.utils'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, toy("q")], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


@pytest.mark.parametrize(
    ("version", "skips"), [("5.17.0", True), ("5.20.1", True), ("5.21.0", False), ("5.24.0", False)]
)
def test_docstrings_are_skipped_where_they_need_a_models_code(monkeypatch, version, skips):
    writer = importlib.import_module("transformers.utils.auto_docstring")
    before = writer.auto_class_docstring
    monkeypatch.setattr(writer, "auto_class_docstring", before)  # put back afterwards
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    compat.skip_docstrings()
    assert (writer.auto_class_docstring is not before) is skips

    class Documented:
        pass

    assert not skips or writer.auto_docstring(Documented) is Documented


def test_a_row_is_keys_and_values_of_all_layers(toy):
    # one layer, one key-value head of 16, float32: 2 * 1 * 1 * 16 * 4 bytes a token
    assert capacity.row_bytes(capacity.text_config(toy("q")), "float32", 100) == 128 * 100
    assert capacity.row_bytes(capacity.text_config(toy("q")), "bfloat16", 100) == 64 * 100


@pytest.mark.parametrize(
    ("row", "weights", "free", "rows"),
    [(10, 0, 200, 10), (10, 100, 200, 5), (10, 0, 10**9, 64), (10, 500, 200, 1), (0, 0, 1000, 64)],
)
def test_rows_take_half_of_what_is_free_beside_the_weights(row, weights, free, rows):
    assert capacity.rows_that_fit(row, weights, free) == rows


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    without = capacity.free_bytes("cpu")
    assert without > 0
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert capacity.free_bytes("cpu") == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.free_bytes("cpu") > 2000


def test_a_system_without_meminfo_counts_half_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(capacity, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    assert capacity.free_bytes("cpu") > 10**8
