"""The worker's loss, gradients and weights are those of the definition, whatever the cut, the packing and the type."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.algorithms.weighting import weigh
from gymloop.config.schema import Loss, OptimizerKwargs
from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.files import UnwritableError
from gymloop.models.load import load_causal_lm
from gymloop.policy.optimizer import NonFiniteError
from gymloop.policy.spec import PolicySpec
from gymloop.policy.worker import PolicyWorker

Tiny = Callable[[str], Path]


def worker_of(folder: Path, **changes) -> PolicyWorker:
    lr = changes.pop("lr", 1e-2)
    spec = PolicySpec(
        model_folder=str(folder),
        temperature=1.0,
        loss=changes.pop("loss", Loss()),
        optimizer=OptimizerKwargs(lr=lr, weight_decay=changes.pop("weight_decay", 0.0)),
        precision=changes.pop("precision", "float32"),
        max_grad_norm=changes.pop("max_grad_norm", None),
        **changes,
    )
    worker = PolicyWorker(spec)
    worker.load()
    return worker


def batch_of(trained: list[int], advantages: list[float], *, token_level: bool = True, groups: str = "aabb"):
    """One sequence per entry: a prompt per group, then ``trained[i]`` sampled tokens of advantage ``advantages[i]``."""
    rng = np.random.default_rng(7)
    prompts = {group: rng.integers(2, 61, 9) for group in sorted(set(groups))}
    sequences = []
    for sample, (count, advantage, group) in enumerate(zip(trained, advantages, groups, strict=True)):
        ids = np.concatenate([prompts[group], rng.integers(2, 61, count)])
        fill = np.full(count, advantage, dtype=np.float32)
        sequences.append(TrainSequence(group, sample, ids, np.arange(9, 9 + count), fill, fill, fill * np.nan))
    return TrainBatch(weigh(sequences, token_level=token_level))


F08 = ([2, 4, 1, 3], [1.0, -0.5, 2.0, -1.0])


def with_engine(batch: TrainBatch, logprobs: list[np.ndarray]) -> TrainBatch:
    pairs = zip(batch.sequences, logprobs, strict=True)
    return TrainBatch(tuple(dataclasses.replace(sequence, engine_logprobs=own) for sequence, own in pairs))


def gradient_of_first_step(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """AdamW's first moment after one step is (1 - 0.9) times the gradient."""
    assert worker._optimizer is not None
    state = worker._optimizer.adamw.state
    return {name: state[master]["exp_avg"] / 0.1 for name, master in worker._optimizer.masters.items()}


def gradient_by_definition(folder: Path, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Of -sum w A logprob, sequence by sequence, by a plain forward (ratio 1: the gradient of the clipped loss)."""
    model = load_causal_lm(folder, "float32", "cpu")
    for one in batch.sequences:
        logprobs = model(input_ids=torch.from_numpy(one.ids)[None]).logits[0].log_softmax(-1)
        taken = logprobs[one.sampled - 1, one.ids[one.sampled]]
        (-(torch.from_numpy(one.weights * one.advantages) * taken).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        limit = tolerance * max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(got[name], expected[name], atol=limit, rtol=0, msg=name)


CUTS = [
    {"train_mb_tokens": 1024},
    {"train_mb_tokens": 14},
    {"train_mb_tokens": 1},
    *({"packing": False, "train_micro_batch_size": size} for size in (4, 3, 2, 1)),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("token_level", "loss"), [(True, 0.1), (False, -0.375)])
def test_f08_loss_and_gradient_do_not_depend_on_the_cut(cut: dict, token_level: bool, loss: float, tiny: Tiny):
    batch = batch_of(*F08, token_level=token_level)
    worker = worker_of(tiny("llama"), **cut)
    metrics = worker.train(batch)
    assert abs(metrics["loss"] - loss) < 1e-6
    expected = gradient_by_definition(tiny("llama"), batch)
    assert_gradients_close(gradient_of_first_step(worker), expected)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("name", "tolerance"), [("llama-untied", 1e-5), ("qwen3", 1e-5), ("mamba", 2e-4)])
def test_other_models_have_the_gradient_of_the_definition(name: str, tolerance: float, tiny: Tiny):
    batch = batch_of(*F08)
    worker = worker_of(tiny(name), train_micro_batch_size=3)
    assert abs(worker.train(batch)["loss"] - 0.1) < 1e-6
    assert_gradients_close(gradient_of_first_step(worker), gradient_by_definition(tiny(name), batch), tolerance)


def test_f08_as_two_optimizer_steps_divides_by_the_tokens_of_each(tiny: Tiny):
    batch = batch_of(*F08)
    worker = worker_of(tiny("llama"), lr=0.0, rollouts_per_optimizer_step=2)
    metrics = worker.train(batch)
    assert metrics["optimizer_steps"] == 2
    assert metrics["loss"] == pytest.approx((0.0 + 0.25) / 2, abs=1e-6)
    halves = [TrainBatch(weigh(batch.sequences[cut], token_level=True)) for cut in (slice(2), slice(2, 4))]
    first, second = (gradient_by_definition(tiny("llama"), half) for half in halves)
    moment = {name: (0.9 * first[name] + second[name]) for name in first}  # 10 times exp_avg after two steps
    assert_gradients_close(gradient_of_first_step(worker), moment)


def test_old_logprobs_of_several_steps_are_from_before_the_first(tiny: Tiny):
    worker = worker_of(
        tiny("llama"), rollouts_per_optimizer_step=2, loss=Loss(ratio_clip_min=1.0, ratio_clip_max=100.0)
    )
    batch = batch_of(*F08)
    assert worker.train(batch)["ratio/max"] > 1.0001  # the second step no longer has ratio 1
    once = worker_of(tiny("llama"))
    metrics = once.train(batch)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def test_groups_without_signal_cost_no_backward_and_change_nothing(tiny: Tiny):
    batch = batch_of([2, 4, 1, 3], [1.0, -0.5, 0.0, 0.0])
    worker = worker_of(tiny("llama"))
    trains = [microbatch.trains for microbatch in worker._microbatches(batch.sequences, worker._feels)]
    assert trains == [True, False]
    metrics = worker.train(batch)
    assert_gradients_close(gradient_of_first_step(worker), gradient_by_definition(tiny("llama"), batch))
    assert metrics["ratio/mean"] == pytest.approx(1.0)  # of all tokens


def test_a_batch_without_any_signal_still_makes_its_step(tiny: Tiny):
    worker = worker_of(tiny("llama"), weight_decay=0.1, lr=0.5)
    before = {name: tensor.clone() for name, tensor in worker.snapshot().tensors()}
    metrics = worker.train(batch_of([2, 2, 1, 3], [0.0, 0.0, 0.0, 0.0]))
    assert metrics["grad_norm"] == 0.0
    for name, after in worker.snapshot().tensors():
        torch.testing.assert_close(after, before[name] * 0.95, msg=name)


def test_lr_zero_leaves_every_bit_of_the_weights(tiny: Tiny):
    worker = worker_of(tiny("llama"), lr=0.0, weight_decay=0.1)
    before = worker.snapshot()
    worker.train(batch_of(*F08))
    worker.sft(batch_of(*F08), lr=0.0)
    assert worker.snapshot().buffer.tobytes() == before.buffer.tobytes()


def test_training_raises_what_had_a_positive_advantage(tiny: Tiny):
    worker = worker_of(tiny("llama"), lr=3e-3)
    batch = batch_of([4, 4, 4, 4], [1.0, -1.0, 1.0, -1.0])
    before = [float(own.mean()) for own in worker.logprobs(batch)]
    for _ in range(5):
        worker.train(batch)
    after = [float(own.mean()) for own in worker.logprobs(batch)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert after[2] > before[2]
    assert after[3] < before[3]


def test_mismatch_is_the_engine_against_the_trainer_before_the_update(tiny: Tiny):
    worker = worker_of(tiny("llama"))
    batch = batch_of(*F08)
    logprobs = worker.logprobs(batch)
    engine = [own + np.float32(0.1) for own in logprobs]
    engine[1][0] = np.nan  # not sampled by the engine
    metrics = worker.train(with_engine(batch, engine))
    assert metrics["mismatch/kl"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-3)
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0.1, rel=1e-4)
    assert metrics["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.1, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(-np.concatenate(logprobs).mean(), rel=1e-5)


def test_metrics_count_what_packing_saved(tiny: Tiny):
    metrics = worker_of(tiny("llama")).train(batch_of(*F08))
    assert metrics["tokens/unpacked"] == 4 * 9 + 10
    assert metrics["tokens/packed"] == 2 * 9 + 10
    assert {"timing/forward_s", "timing/backward_s", "timing/optimizer_s"} <= metrics.keys()


def test_the_reference_is_the_policy_before_training(tiny: Tiny):
    worker = worker_of(tiny("llama"), loss=Loss(reference_policy_kl_penalty=0.1), lr=3e-3)
    batch = batch_of(*F08)
    assert worker.train(batch)["kl"] == pytest.approx(0.0, abs=1e-6)
    assert worker.train(batch)["kl"] > 1e-6


def test_correction_uses_the_engine_logprobs(tiny: Tiny):
    settings = Loss(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1.5)
    worker = worker_of(tiny("llama"), loss=settings)
    batch = batch_of(*F08)
    engine = [own - np.float32(math.log(1.2)) for own in worker.logprobs(batch)]
    metrics = worker.train(with_engine(batch, engine))
    assert metrics["correction/mean"] == pytest.approx(1.2, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.12, rel=1e-4)


def test_gradient_is_clipped_to_its_global_norm(tiny: Tiny):
    batch = batch_of(*F08)
    free, clipped = worker_of(tiny("llama")), worker_of(tiny("llama"), max_grad_norm=0.01)
    norm = free.train(batch)["grad_norm"]
    assert clipped.train(batch)["grad_norm"] == norm > 0.01  # reported before clipping
    expected = {name: gradient * (0.01 / norm) for name, gradient in gradient_of_first_step(free).items()}
    for name, gradient in gradient_of_first_step(clipped).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-8, rtol=1e-4)


def test_lr_rises_linearly_over_training_steps_only(tiny: Tiny):
    worker = worker_of(tiny("llama"), lr=0.1, lr_warmup_steps=4)
    batch = batch_of(*F08)
    assert worker.sft(batch)["lr"] == 0.1
    assert worker.sft(batch, lr=0.02)["lr"] == 0.02
    rates = [worker.train(batch)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_sft_lowers_the_loss_of_its_demonstrations(tiny: Tiny):
    worker = worker_of(tiny("llama"), lr=3e-3)
    batch = batch_of([4, 4, 4, 4], [1.0] * 4)
    first = worker.sft(batch)["loss"]
    assert first == pytest.approx(-np.concatenate(worker_of(tiny("llama")).logprobs(batch)).mean(), rel=1e-5)
    for _ in range(5):
        last = worker.sft(batch)["loss"]
    assert last < first - 0.1


def test_logprobs_come_in_the_order_of_the_batch(tiny: Tiny):
    worker = worker_of(tiny("llama"), train_mb_tokens=14)
    batch = batch_of([2, 4, 1, 3], [0.0] * 4, groups="abab")
    together = worker.logprobs(batch)
    for own, sequence in zip(together, batch.sequences, strict=True):
        assert own.dtype == np.float32
        np.testing.assert_allclose(worker.logprobs(TrainBatch((sequence,)))[0], own, atol=1e-5)


def test_greedy_training_counts_as_temperature_one(tiny: Tiny):
    batch = batch_of(*F08)
    greedy = worker_of(tiny("llama"))
    greedy = PolicyWorker(dataclasses.replace(greedy.spec, temperature=0.0))
    greedy.load()
    for own, expected in zip(greedy.logprobs(batch), worker_of(tiny("llama")).logprobs(batch), strict=True):
        assert own.tolist() == expected.tolist()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_restored_worker_makes_the_same_next_steps_bit_by_bit(precision: str, tiny: Tiny, tmp_path: Path):
    batch = batch_of(*F08)
    whole = worker_of(tiny("qwen3"), precision=precision, lr_warmup_steps=5)
    whole.sft(batch)
    for _ in range(2):
        whole.train(batch)
    torch.rand(5)  # a generator that stands where a new worker's does would hide that it was not put back
    whole.save(tmp_path / "saved")
    draws = torch.rand(3)
    expected = [whole.train(batch)["loss"] for _ in range(2)]

    resumed = worker_of(tiny("qwen3"), precision=precision, lr_warmup_steps=5)
    resumed.restore(tmp_path / "saved")
    assert torch.equal(torch.rand(3), draws)
    assert [resumed.train(batch)["loss"] for _ in range(2)] == expected
    assert resumed.snapshot().buffer.tobytes() == whole.snapshot().buffer.tobytes()
    assert whole._optimizer is not None
    assert resumed._optimizer is not None
    for name, master in whole._optimizer.masters.items():
        assert torch.equal(master, resumed._optimizer.masters[name]), name


STEPS_IN_A_PROCESS = """
import hashlib, sys
sys.path[:0] = [{tests!r}]
import test_worker
worker = test_worker.worker_of({folder!r}, precision="bfloat16", deterministic=True, threads=2)
batch = test_worker.batch_of([40, 90, 20, 60], [1.0, -0.5, 2.0, -1.0])
said = [worker.sft(batch)["loss"]] + [worker.train(batch)[name] for _ in range(3) for name in ("loss", "grad_norm")]
print(said, hashlib.sha256(worker.snapshot().buffer.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_deterministic_bfloat16_steps_repeat_bit_by_bit_across_processes(tiny: Tiny):
    program = STEPS_IN_A_PROCESS.format(tests=str(Path(__file__).parent), folder=str(tiny("qwen3")))
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert first
    assert first == second


def test_deterministic_refuses_what_has_no_repeatable_kernel_and_fixes_the_threads(tiny: Tiny):
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        facts_of = PolicyWorker(dataclasses.replace(worker_of(tiny("llama")).spec, deterministic=True, threads=1))
        assert facts_of.load()["threads"] == 1
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])


def test_the_generators_of_every_rank_are_saved(tiny: Tiny, tmp_path: Path):
    worker_of(tiny("llama")).save(tmp_path)
    (rank,) = json.loads((tmp_path / "state.json").read_text())["generators"]
    assert base64.b64decode(rank["cpu"]) == torch.get_rng_state().numpy().tobytes()


def test_a_save_that_the_disk_refuses_is_one_sentence(tiny: Tiny, tmp_path: Path):
    (tmp_path / "weights").write_text("a file where a folder belongs")
    with pytest.raises(UnwritableError, match=r"^the policy was not written: File exists \(.*\)$"):
        worker_of(tiny("llama")).save(tmp_path)


def test_a_closed_worker_has_let_go_of_its_model(tiny: Tiny):
    worker = worker_of(tiny("llama"))
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="load"):
        worker.snapshot()


def test_saved_weights_are_a_model_folder(tiny: Tiny, tmp_path: Path):
    worker = worker_of(tiny("llama"), precision="bfloat16")
    worker.train(batch_of(*F08))
    worker.save(tmp_path)
    assert worker._optimizer is not None
    model = load_causal_lm(tmp_path / "weights", "float32", "cpu")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, worker._optimizer.masters[name]), name
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["model_type"] == "llama"
    assert not list(tmp_path.rglob("*.pt"))
    again = worker_of(tmp_path / "weights", precision="bfloat16")
    assert again.snapshot().buffer.tobytes() == worker.snapshot().buffer.tobytes()


def test_a_worker_can_be_saved_before_its_first_step(tiny: Tiny, tmp_path: Path):
    worker_of(tiny("llama")).save(tmp_path)
    worker = worker_of(tiny("llama"))
    worker.restore(tmp_path)
    assert worker.train(batch_of(*F08))["loss"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("lost", ["state.json", "optimizer.safetensors", "weights/model.safetensors"])
def test_an_incomplete_or_damaged_state_is_named_and_changes_nothing(lost: str, tiny: Tiny, tmp_path: Path):
    worker = worker_of(tiny("llama"))
    worker.train(batch_of(*F08))
    worker.save(tmp_path)
    fresh = worker_of(tiny("llama"))
    before = fresh.snapshot().buffer.tobytes()
    file = tmp_path / lost
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=file.name):
        fresh.restore(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=file.name):
        fresh.restore(tmp_path)
    assert fresh.snapshot().buffer.tobytes() == before


def test_the_state_of_another_model_is_refused(tiny: Tiny, tmp_path: Path):
    worker_of(tiny("llama")).save(tmp_path)
    with pytest.raises(ConfigError, match=r"another model: it lacks .*norm"):
        worker_of(tiny("qwen3")).restore(tmp_path)


def test_bfloat16_computes_on_a_copy_and_moves_float32_masters(tiny: Tiny):
    batch = batch_of(*F08)
    worker = worker_of(tiny("llama"), precision="bfloat16", lr=1e-6, train_mb_tokens=14)
    assert worker._optimizer is not None
    masters = worker._optimizer.masters
    before = {name: master.detach().clone() for name, master in masters.items()}
    assert {entry.dtype for entry in worker.snapshot().manifest} == {"bfloat16"}
    metrics = worker.train(batch)
    assert metrics["loss"] == pytest.approx(0.1, abs=1e-6)  # ratios are 1 in any precision
    gradients, exact = gradient_of_first_step(worker), gradient_by_definition(tiny("llama"), batch)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
        assert cosine > 0.98, name
    for name, tensor in worker.snapshot().tensors():
        assert masters[name].dtype == torch.float32
        assert not torch.equal(masters[name], before[name]), name  # moved by less than bfloat16 resolves
        assert torch.equal(tensor, masters[name].to(torch.bfloat16)), name


def test_a_nan_weight_stops_before_the_step_and_names_the_rollout(tiny: Tiny):
    worker = worker_of(tiny("llama"))
    with torch.no_grad():
        worker._model.lm_head.weight[5, 0] = torch.nan
    before = worker.snapshot().buffer.tobytes()
    with pytest.raises(NonFiniteError, match="group 'a', sample 0 is nan"):
        worker.train(batch_of(*F08))
    assert worker.snapshot().buffer.tobytes() == before


def test_a_non_finite_gradient_stops_before_the_step_and_leaves_the_worker_usable(tiny: Tiny):
    batch = batch_of(*F08)
    worker = worker_of(tiny("llama"))
    before = worker.snapshot().buffer.tobytes()
    name, parameter = next(iter(worker._model.named_parameters()))
    hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(InfraError, match=f"1 of .* parameters have such gradients, the first is {name}"):
        worker.train(batch)
    hook.remove()
    assert worker.snapshot().buffer.tobytes() == before
    worker.train(batch)
    assert_gradients_close(gradient_of_first_step(worker), gradient_by_definition(tiny("llama"), batch))


def test_an_empty_batch_is_an_error(tiny: Tiny):
    worker = worker_of(tiny("llama"))
    for call in (worker.train, worker.sft):
        with pytest.raises(DataError, match="empty"):
            call(TrainBatch(()))
    assert worker.logprobs(TrainBatch(())) == []


def test_load_says_what_it_settled(tiny: Tiny):
    def info(name: str, **changes):
        return PolicyWorker(dataclasses.replace(worker_of(tiny(name)).spec, **changes)).load()

    packed = info("llama")
    assert packed["packing"]
    assert packed["packing_reason"] is None
    assert packed["precision"] == "float32"
    assert packed["params"] == sum(p.numel() for p in load_causal_lm(tiny("llama"), "float32", "cpu").parameters())
    off = info("llama", packing=False)
    assert not off["packing"]
    assert off["packing_reason"] == "policy.sequence_packing.enabled is false"
    mamba = info("mamba")
    assert not mamba["packing"]
    assert mamba["packing_reason"]
    assert info("llama", precision="auto")["precision"] in ("float32", "bfloat16")
