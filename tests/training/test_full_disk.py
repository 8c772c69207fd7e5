"""A disk that is really full: a file system of its own, a megabyte large, in a namespace of its own."""

import subprocess
import sys

import pytest

FULL = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace

import torch

from gymloop.files import UnwritableError
from gymloop.policy import state
from gymloop.policy.optimizer import MasterAdamW
from gymloop.training.checkpoint import CheckpointStore
from gymloop.training.retention import Retention

folder = Path(sys.argv[1])
store = CheckpointStore(folder, Retention(2))


class Model(torch.nn.Linear):
    config = SimpleNamespace(dtype=None, save_pretrained=lambda path: None)


def save(step, floats):
    model = Model(floats, 1, bias=False)
    optimizer = SimpleNamespace(
        masters={"weight": model.weight}, adamw=SimpleNamespace(state={}), schedule_step=step
    )
    aside = store.begin(step)
    try:
        state.save(aside / "policy", model, optimizer, folder)
        store.commit(aside, {"step": step}, model={}, metrics={})
    except UnwritableError as error:
        store.discard(aside)
        print(f"{step}: {error}")


save(1, 10)
save(2, 400_000)  # the weights are larger than what is left
(folder / "filler").write_bytes(bytes(900_000))
save(3, 30_000)  # they fit by a little, with what is beside them they do not
(folder / "filler").unlink()
save(4, 10)
print("left", sorted(path.name for path in folder.iterdir()))
print("latest", store.latest().step)
"""


def in_small_disk(folder, script):
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(folder), sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_f14_a_full_disk_costs_the_saves_that_meet_it_and_nothing_else(tmp_path):
    try:
        possible = in_small_disk(tmp_path, "").returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no file system of one's own can be mounted here")
    done = in_small_disk(tmp_path, FULL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:-2]] == ["2", "3"]
    assert all("was not written: " in line and "No space left on device" in line for line in lines[:-2])
    assert lines[-2:] == ["left ['step_1', 'step_4']", "latest 4"]
