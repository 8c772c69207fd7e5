"""Loading tells of its progress in bytes, by thread, and refuses damaged weights in one sentence."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from gymloop.errors import ConfigError
from gymloop.models.load import load_causal_lm, tensor_bytes, tensor_elements


def test_sizes_come_from_the_files_headers(toy):
    sizes = tensor_bytes(toy("q"))
    model = load_causal_lm(toy("q"), "float32", "cpu")
    assert sizes == {name: tensor.numel() * 4 for name, tensor in model.state_dict().items()}
    assert tensor_elements(toy("q")) == {name: tensor.numel() for name, tensor in model.state_dict().items()}


def test_an_unreadable_file_has_no_sizes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert tensor_bytes(tmp_path) == tensor_elements(tmp_path) == {}


def test_progress_rises_from_nothing_to_all_bytes(toy):
    told: list[tuple[int, int]] = []
    load_causal_lm(toy("q"), "float32", "cpu", lambda done, total: told.append((done, total)))
    whole = sum(tensor_bytes(toy("q")).values())
    assert told[0] == (0, whole)
    assert told[-1] == (whole, whole)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({done for done, _ in told}) > 5


def test_progress_ends_at_the_whole_where_the_checkpoint_has_other_names(toy, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(toy("q"), tmp_path / "renamed")
    tensors = load_file(folder / "model.safetensors")
    # A checkpoint of the bare decoder, as transformers accepts it: names without "model.", and no head.
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    told: list[tuple[int, int]] = []
    load_causal_lm(folder, "float32", "cpu", lambda done, total: told.append((done, total)))
    whole = sum(tensor_bytes(folder).values())
    assert told[-1] == (whole, whole)
    assert len(told) > 5


def test_each_thread_hears_of_its_own_load_only(toy):
    told: dict[str, list[tuple[int, int]]] = {"q": [], "l": []}

    def load(family: str) -> None:
        load_causal_lm(toy(family), "float32", "cpu", lambda done, total: told[family].append((done, total)))

    toy("q"), toy("l")
    threads = [threading.Thread(target=load, args=(family,)) for family in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for family, heard in told.items():
        whole = sum(tensor_bytes(toy(family)).values())
        assert heard[0] == (0, whole)
        assert heard[-1] == (whole, whole)
        assert [done for done, _ in heard] == sorted(done for done, _ in heard)


def test_loads_of_different_types_at_once_do_not_mix(toy):
    wrong: list[str] = []

    def load(dtype: str) -> None:
        for _ in range(10):
            types = {parameter.dtype for parameter in load_causal_lm(toy("q"), dtype, "cpu").parameters()}
            if types != {getattr(torch, dtype)}:
                wrong.append(f"{dtype}: {types}")

    toy("q")
    before = torch.get_default_dtype()
    threads = [threading.Thread(target=load, args=(dtype,)) for dtype in ("float32", "bfloat16") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert not wrong
        assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)


def test_attention_scores_are_capped_where_the_model_asks_for_it(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=31, num_key_value_heads=1, head_dim=8, initializer_range=2.0, **shape)
    ids = torch.arange(9)[None]
    logits = []
    for cap in (None, 1.0):
        config.attn_logit_softcapping = cap
        torch.manual_seed(0)
        Gemma2ForCausalLM(config).save_pretrained(tmp_path)
        with torch.no_grad():
            logits.append(load_causal_lm(tmp_path, "float32", "cpu")(ids, use_cache=False).logits)
    assert not torch.allclose(*logits, atol=1e-2)


def test_damaged_weights_are_one_sentence(toy, tmp_path):
    folder = shutil.copytree(toy("q"), tmp_path / "damaged")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load_causal_lm(folder, "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_causal_lm(tmp_path, "float32", "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_causal_lm(tmp_path, "float32", "cpu")
