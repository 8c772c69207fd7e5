"""What the vLLM engine decides by itself, without a vLLM: versions, seeds, memory, arguments, errors, shared bytes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from gymloop.config.schema import KvCacheDtype
from gymloop.errors import ConfigError, InfraError
from gymloop.generation import vllm_engine
from gymloop.generation.engine import Sampling
from gymloop.generation.vllm import core, memory, support
from gymloop.generation.vllm.caches import compile_cache
from gymloop.generation.vllm.extension import as_its_loader_names_them, unknown_names_told
from gymloop.generation.vllm.request import draw_seed
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.generation.vllm.shared_bytes import SharedBytes
from gymloop.models.load import tensor_bytes
from gymloop.serving import engines
from gymloop.serving.engine_spec import EngineSpec


@pytest.mark.parametrize("version", ["0.25.0", "0.25", "0.32.0", "0.32.1.dev3+cpu"])
def test_a_version_in_the_range_passes(version):
    support.require_supported(version)


@pytest.mark.parametrize("version", ["0.24.9", "0.33.0", "1.0.0", "unknown"])
def test_a_version_outside_the_range_is_one_sentence_with_both(version):
    with pytest.raises(ConfigError) as caught:
        support.require_supported(version)
    assert version in str(caught.value)
    assert support.SUPPORTED in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_vllm_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(support, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ConfigError, match=r"no vLLM is installed .*pip install -e '\.\[vllm\]'"):
        support.installed_version()


def test_a_missing_call_or_argument_is_named():
    class Old:
        def generate(self, prompt, sampling_params): ...

    missing = list(support._missing_calls(Old))
    assert "the argument 'request_id' of AsyncLLM.generate" in missing
    assert "AsyncLLM.pause_generation" in missing
    assert list(support._missing_of(Old().generate, "there", ("prompt", "seed"))) == ["the argument 'seed' of there"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whatever_the_engine_may_set_is_probed(device):
    settings = [VllmSettings(compile=compiled, enforce_eager=eager) for compiled in (0, 1) for eager in (0, 1, None)]
    assert set().union(*(given.arguments(device, 1, 64) for given in settings)) <= set(support.ARGUMENTS)


def test_an_argument_that_vllm_does_not_know_is_named_with_its_key_and_the_nearest():
    support._require_known(["seed"], {"seed", "dtype"}, "0.32.0")
    with pytest.raises(ConfigError) as caught:
        support._require_known(["seed", "gpu_memory_utilisation"], {"seed", "gpu_memory_utilization"}, "0.32.0")
    assert str(caught.value) == (
        "policy.generation.vllm_kwargs.gpu_memory_utilisation: vLLM 0.32.0 has no such engine argument; "
        "did you mean 'gpu_memory_utilization'?"
    )


def test_a_type_of_cache_that_the_installed_vllm_does_not_know_is_refused_with_those_it_does():
    support._require_cache("fp8", ("auto", "fp8"), "0.25.0")
    with pytest.raises(ConfigError, match=r"is 'nvfp4_4over6', which vLLM 0\.25\.0 does not know; .* of auto, fp8"):
        support._require_cache("nvfp4_4over6", ("auto", "fp8"), "0.25.0")


def test_a_draw_follows_from_seed_and_key_and_only_from_them():
    plain, keyed = Sampling(4), Sampling(4, noise_key="g/0/0")
    assert draw_seed(plain, 1) is None
    assert draw_seed(Sampling(4, seed=7), 1) == 7
    assert draw_seed(keyed, 1) == draw_seed(keyed, 1) != draw_seed(keyed, 2)
    assert draw_seed(keyed, 1) != draw_seed(Sampling(4, noise_key="g/1/0"), 1)
    assert draw_seed(Sampling(4, seed=3, noise_key="g/0/0"), 1) == draw_seed(Sampling(4, seed=3, noise_key="g/0/0"), 2)
    assert all(0 <= draw_seed(keyed, seed) < 2**63 for seed in range(50))


CONFIG = SimpleNamespace(
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, hidden_size=512, num_hidden_layers=3
)
TOKEN = 2 * 3 * 2 * 64 * 2
"""Keys and values, layers, heads, size, bytes of bfloat16."""


def test_the_cache_holds_every_row_full_and_whole_blocks():
    found = memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 200, 4, 1 << 40, "cpu")
    assert found == (4 * 256 + 2 * 128) * TOKEN


def test_the_cache_takes_what_there_is_and_halves_with_fp8_and_two_ranks():
    assert memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 200, 400, 10**6, "cpu") == 10**6
    whole = memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 256, 4, 1 << 40, "cpu")
    assert memory.kv_cache_bytes(CONFIG, "bfloat16", "fp8", 256, 4, 1 << 40, "cpu") * 2 == whole
    assert memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 256, 4, 1 << 40, "cpu", ranks=2) * 2 == whole


def test_weights_are_counted_as_they_will_be_held_whatever_the_config_says_of_their_type(toy, tmp_path):
    folder = shutil.copytree(toy("q"), tmp_path / "model")
    whole = sum(tensor_bytes(folder).values())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert memory.weight_bytes(folder, "float32") == whole, "the file holds float32"
    assert memory.weight_bytes(folder, "bfloat16") * 2 == whole


@pytest.mark.parametrize(
    ("device", "more"),
    [
        ("cuda", "raise policy.generation.vllm_cfg.gpu_memory_utilization"),
        (
            "cpu",
            "free memory, of which half is planned with, or set policy.generation.vllm_cfg.kv_cache_memory_bytes to "
            f"{(4096 + 2 * 128) * TOKEN}",
        ),
    ],
)
def test_a_cache_without_room_for_one_row_is_refused_with_what_helps_there(device, more):
    needed = (4096 + 2 * 128) * TOKEN
    with pytest.raises(ConfigError) as caught:
        memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 4096, 4, needed - 1, device)
    assert str(caught.value).endswith(f"; lower policy.max_total_sequence_length, or {more}")
    assert memory.kv_cache_bytes(CONFIG, "bfloat16", "auto", 4096, 4, needed, device) == needed


def test_on_a_cpu_half_of_the_free_memory_beside_the_weights_is_planned_with_whatever_the_share(monkeypatch):
    monkeypatch.setattr(memory.capacity, "free_bytes", lambda device: 1000)
    assert memory.room_for_cache(200, "cpu", 0.1) == memory.room_for_cache(200, "cpu", 0.9) == 400


@pytest.mark.parametrize("small", sorted(set(get_args(KvCacheDtype)) - {"auto", "float16", "bfloat16"}))
def test_whatever_vllm_keeps_in_fewer_bits_is_planned_as_one_byte(small):
    one, two = (memory.kv_cache_bytes(CONFIG, "bfloat16", kind, 256, 4, 1 << 40, "cpu") for kind in (small, "float16"))
    assert one * 2 == two


@pytest.mark.parametrize(
    ("settings", "device", "eager", "config"),
    [
        ({}, "cuda", False, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
        ({}, "cpu", True, None),
        ({"compile": True}, "cuda", False, None),
        ({"compile": True}, "cpu", False, None),
        ({"enforce_eager": True}, "cuda", True, None),
        ({"enforce_eager": False}, "cpu", False, {"mode": 0, "cudagraph_mode": "NONE"}),
        ({"kwargs": {"compilation_config": {"mode": 3}}}, "cuda", False, {"mode": 3}),
    ],
)
def test_a_gpu_captures_graphs_a_cpu_none_and_neither_compiles_unless_asked(settings, device, eager, config):
    arguments = VllmSettings(**settings).arguments(device, 1, 64)
    assert (arguments["enforce_eager"], arguments.get("compilation_config")) == (eager, config)


def test_prompts_stay_whole_on_a_cpu_and_kwargs_have_the_last_word():
    long = VllmSettings().arguments("cpu", 1, 9000)
    assert (long["enable_chunked_prefill"], long["max_num_batched_tokens"]) == (False, 9000)
    assert "enable_chunked_prefill" not in VllmSettings().arguments("cuda", 1, 9000)
    assert VllmSettings(kwargs={"max_num_batched_tokens": 5}).arguments("cpu", 1, 64)["max_num_batched_tokens"] == 5
    assert VllmSettings(load_format="dummy").waits_for_weights


def test_a_compile_cache_is_hit_by_the_same_start_only(tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    arguments = VllmSettings(compile=True).arguments("cpu", 1, 64)
    first = compile_cache(tmp_path, arguments, "0.32.0", "cpu")
    assert first.found == "miss"
    assert first.environment["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "vllm" / "triton")
    first.prepare()
    first.mark()
    assert compile_cache(tmp_path, {**arguments, "seed": 3, "kv_cache_memory_bytes": 5}, "0.32.0", "cpu").found == "hit"
    other = compile_cache(tmp_path, arguments, "0.31.0", "cpu")
    other.prepare()
    (first.folder / "modelinfos" / "a.json").write_text("{}")
    assert (other.folder / "modelinfos" / "a.json").is_file(), "what is known of a model's class is known to all"
    other.prepare()
    assert compile_cache(tmp_path, arguments, "0.31.0", "cpu").found == "miss"
    assert compile_cache(tmp_path, {**arguments, "max_num_seqs": 9}, "0.32.0", "cpu").found == "miss"
    assert compile_cache(tmp_path, {**arguments, "enforce_eager": True}, "0.32.0", "cpu").found == "off"
    graphs_alone = VllmSettings().arguments("cuda", 1, 64)
    assert compile_cache(tmp_path, graphs_alone, "0.32.0", "cpu").found == "miss", "kernels are compiled in any case"


def test_a_cache_folder_of_the_users_serves_all_starts_and_hits_are_still_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "own"))
    (tmp_path / "config.json").write_text("{}")
    arguments = VllmSettings(compile=True).arguments("cpu", 1, 64)
    first = compile_cache(tmp_path, arguments, "0.32.0", "cpu")
    assert (first.folder, first.found) == (tmp_path / "own", "miss")
    first.prepare()
    first.mark()
    assert not first.folder.exists(), "the user's folder is vLLM's alone: it may be one that cannot be written"
    assert compile_cache(tmp_path, arguments, "0.32.0", "cpu").found == "miss", "what was compiled is gone"
    first.folder.mkdir()
    assert compile_cache(tmp_path, arguments, "0.32.0", "cpu").found == "hit"
    other = compile_cache(tmp_path, arguments, "0.31.0", "cpu")
    assert (other.folder, other.found) == (tmp_path / "own", "miss")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/own")
    elsewhere = compile_cache(tmp_path, arguments, "0.32.0", "cpu")
    assert (elsewhere.folder, elsewhere.found) == (Path.home() / "own", "miss")
    assert first.environment == {
        "VLLM_CACHE_ROOT": str(tmp_path / "own"), "TRITON_CACHE_DIR": str(tmp_path / "cache" / "vllm" / "triton"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"precision": "float32"}, {"max_model_len": 128}, {"rows": 9}, {"version": "0.31.0"}]
)
def test_an_engine_of_another_size_or_precision_has_another_cache(other, tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    (tmp_path / "config.json").write_text("{}")
    started = []
    monkeypatch.setattr(engines, "VllmEngine", lambda *_, **given: started.append(given["environment"]))

    def start(precision="bfloat16", max_model_len=64, rows=8, version="0.32.0"):
        monkeypatch.setattr(support, "installed_version", lambda: version)
        spec = EngineSpec(
            "toy", None, (0, 0), None, None, 1.0, threads=1, vllm=VllmSettings(compile=True, kv_cache_memory_bytes=1)
        )
        return engines._vllm(spec, spec.vllm, tmp_path, "cpu", precision, max_model_len, rows, print, print)[1][
            "compile_cache"
        ]

    assert (start(), start(), start(**other), start(**other)) == ("miss", "hit", "miss", "hit")
    assert started[0] == started[1] != started[2] == started[3]


def test_what_another_process_writes_by_the_path_is_read_here_and_outlives_it():
    shared = SharedBytes("test")
    code = "import sys; open(sys.argv[1], 'ab').write(bytes.fromhex(sys.argv[2]))"
    try:
        for piece in ("6f6e6520", "74776fff"):
            subprocess.run([sys.executable, "-c", code, shared.path, piece], timeout=60, check=True)
        assert shared.read_text() == "one two\ufffd"
    finally:
        shared.close()
        shared.close()


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: Head size 24 is not supported", "ValueError: Head size 24 is not supported"),
        ("(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("EngineCore failed to start.", None),
        ("  File 'x.py', line 3, in f", None),
    ],
)
def test_the_last_line_of_a_traceback_is_found(line, cause):
    match = core._ERROR_LINE.match(line)
    assert (match and match[1]) == cause


GONE = "Worker proc VllmWorker-0 died unexpectedly (exit code: {}), shutting down executor.\n"
SILENT = "Exception: WorkerProc initialization failed due to an exception ... See stack trace for root cause.\n"


@pytest.mark.parametrize(
    ("logged", "cause"),
    [
        ("EngineCore failed\nTraceback\nValueError: no room\nRuntimeError: cancelled\n", "ValueError: no room"),
        (GONE.format(-9) + "RuntimeError: cancelled\n", "its worker VllmWorker-0 was killed by SIGKILL"),
        (GONE.format(0) + "ValueError: no room\n", "ValueError: no room"),
        (SILENT, "a worker of vLLM's ended without a word; the kernel kills one that there is too little memory for"),
        ("", None),
    ],
)
def test_the_cause_of_a_death_is_its_first_reason_and_not_what_follows_from_it(logged, cause):
    vllm = core.EngineCore()
    try:
        Path(vllm._errors.path).write_text(logged)
        assert vllm.cause() == cause
    finally:
        vllm.close()


WARM = """
import multiprocessing, os, threading, time
from gymloop.generation.vllm import warm

def told(answers):
    child_of_another = os.getppid() != int(os.environ["MAKER"])
    answers.put((os.environ.get("SET_LATER"), os.environ.get("OMP_NUM_THREADS"), child_of_another))

if __name__ == "__main__":
    warm.begin({"OMP_NUM_THREADS": "3"})
    os.environ |= {"SET_LATER": "yes", "MAKER": str(os.getpid())}
    with warm.forked():
        context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=told, args=(answers,))
    process.start()
    print(answers.get(), type(multiprocessing.get_context("spawn")).__name__)
    process.join(60)
    print(process.exitcode)

    victim, found = context.Process(target=time.sleep, args=(60,)), []
    victim.start()

    def ask():
        while (code := victim.exitcode) is None:
            pass
        found.append(code)

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    victim.kill()
    for thread in asking:
        thread.join(60)
    print(set(found))
"""


def test_a_fork_of_the_warm_server_has_the_environment_of_who_asked_for_it(tmp_path):
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.splitlines() == ["('yes', None, True) SpawnContext", "0", "{-9}"], (
        "its end is known to all who ask"
    )


def test_the_last_piece_of_an_aborted_request_repeats_no_logprobs():
    again = {7: SimpleNamespace(logprob=-0.5)}
    assert vllm_engine._logprobs(SimpleNamespace(token_ids=[], logprobs=[again])) == []
    assert vllm_engine._logprobs(SimpleNamespace(token_ids=[7], logprobs=[again])) == [-0.5]
    with pytest.raises(InfraError, match="sampled 2 tokens and gave 1 logprobs"):
        vllm_engine._logprobs(SimpleNamespace(token_ids=[7, 7], logprobs=[again]))


class OneByOne:
    """A model of vLLM's that knows each expert by its own name."""

    def get_expert_mapping(self):
        for expert in range(2):
            yield ("experts.w13_", f"experts.{expert}.gate_proj.", expert, "w1")
            yield ("experts.w2_", f"experts.{expert}.down_proj.", expert, "w2")
            yield ("experts.w13_", f"experts.{expert}.up_proj.", expert, "w3")


def test_experts_come_one_by_one_where_vllm_knows_them_so():
    both = torch.arange(2 * 6 * 4).reshape(2, 6, 4)  # experts, gate and up, hidden
    down = torch.arange(2 * 4 * 3).reshape(2, 4, 3)
    layer = "model.layers.1.mlp."
    tensors = [
        (f"{layer}gate.weight", both[0]),
        (f"{layer}experts.gate_up_proj", both),
        (f"{layer}experts.down_proj", down),
        (f"{layer}shared_experts.down_proj.weight", down[0]),
    ]
    named = dict(as_its_loader_names_them(OneByOne(), 4, tensors))
    expected = {f"{layer}gate.weight": both[0]}
    for expert in range(2):
        expected[f"{layer}experts.{expert}.gate_proj.weight"] = both[expert, :3]
        expected[f"{layer}experts.{expert}.up_proj.weight"] = both[expert, 3:]
        expected[f"{layer}experts.{expert}.down_proj.weight"] = down[expert]
    expected[f"{layer}shared_experts.down_proj.weight"] = down[0]
    assert set(named) == set(expected)
    assert all(torch.equal(named[name], expected[name]) for name in expected)


def test_experts_stay_together_where_vllm_does_not_say_that_it_knows_them_one_by_one():
    tensors = [("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(2, 6, 4))]
    other = SimpleNamespace(get_expert_mapping=lambda: [("experts.w13_", "experts.0.w1.", 0, "w1")])
    for model in (SimpleNamespace(), other):
        assert [name for name, _ in as_its_loader_names_them(model, 4, tensors)] == [tensors[0][0]]


def test_experts_that_are_held_transposed_stay_together():
    names = [f"language_model.model.layers.1.feed_forward.experts.{kind}" for kind in ("gate_up_proj", "down_proj")]
    tensors = list(zip(names, (torch.zeros(2, 4, 6), torch.zeros(2, 3, 4)), strict=True))
    assert [name for name, _ in as_its_loader_names_them(OneByOne(), 4, tensors)] == names


def test_a_name_that_vllms_loader_does_not_know_is_said():
    with pytest.raises(InfraError) as caught, unknown_names_told(OneByOne()):
        raise KeyError("layers.1.experts.w")
    assert str(caught.value) == "this build of vLLM has no place for 'layers.1.experts.w' in its OneByOne"
