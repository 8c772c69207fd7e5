"""Metrics files: each step once, also after a crash and a resume."""

import json
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gymloop.errors import InfraError
from gymloop.observe.sinks import JsonlSink, TensorBoardSink, read_steps


def test_a_step_is_one_line_and_lies_in_the_file_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5, "mismatch/kl": None})
    assert path.read_text() == '{"step": 1, "reward/mean": 0.5, "mismatch/kl": null}\n'
    sink.write(2, {"reward/mean": 0.75})
    sink.close()
    assert [entry["step"] for entry in read_steps(path)] == [1, 2]


def test_a_resumed_file_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(1, 6):
        first.write(step, {"reward/mean": float(step)})
    first.close()
    resumed = JsonlSink(path, resume_step=3)
    for step in range(4, 8):
        resumed.write(step, {"reward/mean": step + 0.5})
    resumed.close()
    assert [(entry["step"], entry["reward/mean"]) for entry in read_steps(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.5),
        (5, 5.5),
        (6, 6.5),
        (7, 7.5),
    ]


def test_a_half_written_line_is_named_and_dropped(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert [entry["step"] for entry in read_steps(path)] == [1]
    JsonlSink(path, resume_step=2).close()
    assert path.read_text() == '{"step": 1}\n'
    assert [record.getMessage() for record in caplog.records] == [f"{path} line 2 is not a whole step and was dropped"]


def test_without_a_resume_step_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlSink(path).close()
    assert path.read_text() == ""


def test_resuming_without_a_file_starts_one(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=3)
    sink.write(4, {})
    sink.close()
    assert [entry["step"] for entry in read_steps(tmp_path / "metrics.jsonl")] == [4]


def test_a_step_that_was_written_is_not_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n')
    sink = JsonlSink(path, resume_step=2)
    with pytest.raises(ValueError, match="metrics of step 2 come after those of step 2"):
        sink.write(2, {})
    sink.close()


def test_nan_never_reaches_the_file(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write(1, {"reward/mean": float("nan")})
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InfraError, match="cannot write metrics to"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(InfraError, match="cannot write TensorBoard events to"):
        TensorBoardSink(tmp_path / "file" / "tb")
    with pytest.raises(InfraError, match="cannot read metrics from"):
        read_steps(tmp_path / "none.jsonl")


def scalars(folder, tag):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_itself_reads_the_scalars_and_a_null_is_a_gap(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write(1, {"reward/mean": 0.5, "mismatch/kl": 0.25})
    sink.write(2, {"reward/mean": 0.75, "mismatch/kl": None})
    assert scalars(tmp_path / "tb", "reward/mean") == [(1, 0.5), (2, 0.75)]  # without closing: it is flushed
    sink.close()
    assert scalars(tmp_path / "tb", "mismatch/kl") == [(1, 0.25)]


def test_tensorboard_shows_a_resumed_run_with_each_step_once(tmp_path):
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": float(step)})
    first.close()
    resumed = TensorBoardSink(tmp_path, resume_step=1)
    resumed.write(2, {"reward/mean": 20.0})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 20.0)]


def test_the_driver_imports_no_heavy_library_for_any_of_it(tmp_path):
    program = """
import json, pathlib, sys
from gymloop.observe import JsonlSink, TensorBoardSink
from gymloop.observe.curve import draw_png, draw_text
from gymloop.observe.progress import Progress
import gymloop.startup, gymloop.training.checkpoint
folder = pathlib.Path(sys.argv[1])
TensorBoardSink(folder).write(1, {"reward/mean": 0.5})
draw_png([(1, 0.5), (2, 0.75)], "reward/mean", folder / "curve.png")
print(json.dumps([name for name in ("torch", "ray", "transformers", "vllm", "tensorflow") if name in sys.modules]))
"""
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(out.stdout) == []
