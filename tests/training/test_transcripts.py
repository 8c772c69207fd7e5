"""Each step's rollouts are on the disk once, whole, and gone when the step is made again."""

import json

import pytest

from gymloop.errors import InfraError
from gymloop.rollouts.trajectory import Failure, Group, Trajectory
from gymloop.training.transcripts import Transcripts


def group(name):
    return Group(name, (Trajectory(name, 0, 0, (), 0.5),), (Failure(name, 1, 2, "infra", "gone", "environment x"),))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_rollout_a_line_failures_too(tmp_path):
    Transcripts(tmp_path / "t").write("step", 3, [group("a"), group("b")])
    lines = [json.loads(line) for line in (tmp_path / "t" / "step_00003.jsonl").read_text().splitlines()]
    assert [(line["group_id"], line["sample_id"]) for line in lines] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert lines[1]["failure"] == "infra"
    assert files(tmp_path / "t") == ["step_00003.jsonl"], "nothing is left aside"


def test_a_resume_drops_later_steps_and_what_was_half_written(tmp_path):
    transcripts = Transcripts(tmp_path)
    for step in (1, 2, 3):
        transcripts.write("step", step, [group("a")])
        transcripts.write("validation", step, [group("v")])
    (tmp_path / ".step_00002.jsonl.tmp").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    transcripts.drop_after(2)
    assert files(tmp_path) == [
        "notes.txt",
        "step_00001.jsonl",
        "step_00002.jsonl",
        "validation_00001.jsonl",
        "validation_00002.jsonl",
    ]
    transcripts.drop_after(None)
    assert files(tmp_path) == ["notes.txt"]


def test_no_folder_yet_is_nothing_to_drop(tmp_path):
    Transcripts(tmp_path / "never made").drop_after(1)


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "t").write_text("a file where a folder belongs")
    with pytest.raises(InfraError, match=r"cannot write .*step_00001\.jsonl: "):
        Transcripts(tmp_path / "t").write("step", 1, [])
