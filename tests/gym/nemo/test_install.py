"""What an environment is named after and holds; that it is whole or absent is shown on real installations."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.nemo.install import MARKER, Installation, Wanted, install, installed, requirements, root

REQUIRES = [
    "openai==2.44.0",
    "ray[default]>=2.58.0",
    "raylib",
    'vllm==0.29.0; extra == "vllm"',
    "tomli; python_version<'3.11'",
]


def test_ray_is_the_runs_and_optional_extras_stay_out():
    wanted = Wanted(ray="2.60.0", extras=("math-verify",))
    assert requirements(REQUIRES, wanted) == [
        "openai==2.44.0", "ray[default]==2.60.0", "raylib", "tomli; python_version<'3.11'", "math-verify",
    ]  # fmt: skip
    assert requirements(REQUIRES[1:2], Wanted()) == ["ray[default]>=2.58.0"]


def test_the_name_follows_the_content():
    base = Wanted(ray="2.60.0", extras=("a", "b"))
    assert base.key == dataclasses.replace(base, extras=("b", "a")).key
    changed = [{"version": "0.6.0"}, {"extras": ("a",)}, {"ray": "2.59.0"}]
    assert len({base.key} | {dataclasses.replace(base, **change).key for change in changed}) == 4


def test_a_folder_without_its_marker_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path))
    wanted = Wanted()
    (root() / wanted.key / "bin").mkdir(parents=True)
    assert installed(wanted) is None


def test_any_environment_with_nemo_gym_will_do(tmp_path):
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "nemo_gym-0.7.0.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert Installation.at(tmp_path) == Installation(tmp_path, tmp_path / "bin" / "python", site, "0.7.0")
    with pytest.raises(ConfigError, match="is not a virtual environment with nemo-gym"):
        Installation.at(tmp_path / "bin")


def test_an_interpreter_that_does_not_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no-python is no Python interpreter that runs here"):
        install(Wanted(python=str(tmp_path / "no-python")), print)


@pytest.mark.integration
def test_a_version_that_does_not_exist_is_said_and_leaves_nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path))
    wanted = Wanted(version="0.0.0.dev1")
    with pytest.raises(ConfigError, match=r"(?s)getting nemo-gym 0\.0\.0\.dev1 failed:.*No matching distribution"):
        install(wanted, lambda _: None)
    assert installed(wanted) is None


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_killed_then_two_at_once_make_one_whole_environment(tmp_path):
    environ = {**os.environ, "GYMLOOP_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "gymloop.cli.main", "gym", "install"]
    pipes = {"env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    killed = subprocess.Popen(command, **pipes, start_new_session=True)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("nemo-gym/*/lib/python3*/site-packages/nemo_gym")) and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    assert not list(tmp_path.glob(f"nemo-gym/*/{MARKER}"))

    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=700) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    folders = {out.strip() for out, _ in said}
    assert len(folders) == 1
    assert sum("making it again" in err for _, err in said) == 1
    assert sum("installing" in err for _, err in said) == 1
    (folder,) = map(Path, folders)
    pins = json.loads((folder / MARKER).read_text())["requirements"]
    assert any(pin.startswith("ray[default]==") for pin in pins)

    begun = time.monotonic()
    again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout.strip() == str(folder)
    assert time.monotonic() - begun < 5
