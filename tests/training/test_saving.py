"""A save that fails costs itself; a worker that dies ends the run; another model's checkpoint is refused."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from gymloop.cluster.remote import InlineRemote
from gymloop.errors import ConfigError, InfraError
from gymloop.files import UnwritableError
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.retention import Retention
from gymloop.training.run import Saves
from gymloop.training.saving import check_model, save

MODEL = {"name": "toy", "architecture": "a1", "weights": "w1"}


class Policy:
    """A policy's worker whose disk, or life, can be made to fail."""

    def __init__(self):
        self.error = None

    def save(self, folder):
        Path(folder).mkdir()
        (Path(folder) / "weights").write_text("w")
        if self.error is not None:
            raise self.error

    def close(self): ...


@pytest.fixture
def run(tmp_path):
    policy = Policy()
    remote = InlineRemote("policy", lambda: policy)
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    async def watched(work):
        return await work

    said = []
    yield SimpleNamespace(
        step=1,
        version=2,
        skipped_in_a_row=0,
        recorded={"reward/mean": 0.5},
        saves=Saves(CheckpointStore(tmp_path / "checkpoints", Retention(2)), MODEL),
        policy=remote,
        worker=policy,
        watched=watched,
        loader=SimpleNamespace(state_dict=lambda: {"step": 1}),
        plan=SimpleNamespace(run_dir=tmp_path, recipe=SimpleNamespace(policy=SimpleNamespace(call_timeout_s=30.0))),
        progress=SimpleNamespace(say=said.append),
        said=said,
    )
    remote.kill()


def found(run):
    return run.saves.store.latest()


def test_a_checkpoint_holds_position_model_and_metrics(run):
    asyncio.run(save(run))
    assert found(run).state == {"step": 1, "version": 2, "skipped_in_a_row": 0, "loader": {"step": 1}}
    assert found(run).model == MODEL
    assert found(run).part("policy").is_dir()
    assert run.saves.step == 1
    assert run.saves.take_news().keys() == {"time/save", "checkpoint/failed"}
    assert run.saves.take_news() == {}, "told once"


def test_the_same_step_is_not_saved_twice(run):
    asyncio.run(save(run))
    run.worker.error = UnwritableError("full")
    asyncio.run(save(run))
    assert run.saves.failure is None


def test_a_disk_that_refuses_is_told_counted_and_tried_again(run):
    asyncio.run(save(run))
    run.step, run.worker.error = 2, UnwritableError("the policy was not written: No space left on device (x)")
    asyncio.run(save(run))
    assert found(run).step == 1
    assert [path.name for path in (run.plan.run_dir / "checkpoints").iterdir()] == ["step_1"]
    assert run.said[0].startswith("WARNING: the policy was not written: No space left on device (x); the run goes on")
    assert run.saves.failure is not None
    assert run.saves.take_news()["checkpoint/failed"] == 1
    run.step, run.worker.error = 3, None
    asyncio.run(save(run))
    assert found(run).step == 3
    assert run.saves.failure is None
    assert run.saves.take_news()["checkpoint/failed"] == 0


def test_a_worker_that_dies_while_saving_ends_the_run_and_leaves_nothing(run):
    run.worker.error = InfraError("policy died during save")
    with pytest.raises(InfraError, match="policy died"):
        asyncio.run(save(run))
    assert list((run.plan.run_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"architecture": "a2"}, "has another architecture"), ({"weights": "w2"}, "has other weights to start from")],
)
def test_another_model_is_refused_by_what_it_is(tmp_path, changed, said):
    checkpoint = Checkpoint(3, tmp_path / "step_3", {}, MODEL)
    check_model(checkpoint, MODEL | {"name": "/moved/elsewhere"})
    with pytest.raises(ConfigError, match=f"step_3 belongs to model 'toy', and .* 'other' {said}"):
        check_model(checkpoint, MODEL | {"name": "other"} | changed)
