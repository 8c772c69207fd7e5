"""A model is known by what it is, wherever it lies."""

import json
import os
import shutil

import pytest

from gymloop.errors import ConfigError
from gymloop.models import identity
from gymloop.models.identity import model_identity


@pytest.fixture
def model(toy, tmp_path):
    return shutil.copytree(toy("q"), tmp_path / "model")


def test_place_and_incidental_keys_have_no_effect(model, toy):
    config = json.loads((model / "config.json").read_text())
    config |= {"transformers_version": "0", "_name_or_path": "elsewhere", "dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config, indent=7))
    assert model_identity(model) == model_identity(toy("q"))


def test_another_configuration_is_another_architecture(model):
    before = model_identity(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    after = model_identity(model)
    assert after["architecture"] != before["architecture"]
    assert after["weights"] == before["weights"]


def test_other_values_are_other_weights_of_the_same_architecture(model):
    before = model_identity(model)
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    after = model_identity(model)
    assert after["architecture"] == before["architecture"]
    assert after["weights"] != before["weights"]


def test_a_tensor_of_another_name_is_another_architecture(model):
    before = model_identity(model)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content.replace(b"q_proj", b"x_proj"))
    assert model_identity(model)["architecture"] != before["architecture"]


def test_of_a_large_file_evenly_spaced_blocks_are_read(model, monkeypatch):
    monkeypatch.setattr(identity, "BLOCK", 16)
    monkeypatch.setattr(identity, "BLOCKS", 5)
    path = model / "pytorch_model.bin"
    (model / "model.safetensors").unlink()
    path.write_bytes(bytes(1016))  # blocks at 0, 250, 500, 750, 1000
    before = model_identity(model)["weights"]
    for offset, seen in ((1015, True), (1000, True), (250, True), (265, True), (266, False), (999, False)):
        path.write_bytes(bytes(offset) + b"x" + bytes(1015 - offset))
        assert (model_identity(model)["weights"] != before) is seen, offset
    path.write_bytes(bytes(1017))
    assert model_identity(model)["weights"] != before, "the size counts"


def cut(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot be read: .*config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: os.truncate(folder / "model.safetensors", 4), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 9), "is not a safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(bytes(4096)), "cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((15).to_bytes(8, "little") + b'{"a": {"b": 1}}'),
            "cannot be read: .*data_offsets",
        ),
        (cut, r"model\.safetensors is cut off: \d+ of \d+ bytes are there"),
    ],
)
def test_what_is_no_model_folder_is_one_sentence(model, spoil, message):
    spoil(model)
    with pytest.raises(ConfigError, match=message):
        model_identity(model)
