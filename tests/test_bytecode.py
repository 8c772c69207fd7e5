import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gymloop
from gymloop import bytecode

SOURCES = Path(gymloop.__file__).parent.parent
RUN = """
import os, subprocess, sys
from gymloop import bytecode
from gymloop.cli.main import main
bytecode.LARGEST = "large"
sys.argv[1:] = ["check", "no.yaml"]
assert main() == 2
print(sys.pycache_prefix)
import large
subprocess.run([sys.executable, "-c", "import other"], check=True)
"""


@pytest.fixture
def library(tmp_path):
    """Two modules, installed without bytecode."""
    folder = tmp_path / "site"
    (folder / "large").mkdir(parents=True)
    (folder / "large" / "__init__.py").write_text("x = 1\n")
    (folder / "other.py").write_text("x = 2\n")
    return folder


def run(library, cache, **environment):
    """A process whose cache folder this is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"GYMLOOP_CACHE": str(cache), "PYTHONPATH": f"{library}:{SOURCES}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env={**kept, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names(folder):
    return {path.name.partition(".")[0] for path in folder.rglob("*.pyc")}


def test_a_library_that_may_get_no_bytecode_has_it_in_the_cache_of_this_process_and_its_children(library, tmp_path):
    cache = tmp_path / "cache"
    kept = Path(run(library, cache, PYTHONDONTWRITEBYTECODE="1"))
    assert kept.parent == cache / "bytecode"
    assert not names(library)
    assert {"__init__", "other"} <= names(kept)
    assert run(library, cache, PYTHONDONTWRITEBYTECODE="1") == str(kept)
    (library / "large-2.dist-info").mkdir()
    assert run(library, cache, PYTHONDONTWRITEBYTECODE="1") != str(kept), "another installation keeps its own"


def test_what_no_command_has_used_for_a_month_is_removed(library, tmp_path):
    kept = Path(run(library, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1"))
    unused, used = kept.parent / "unused", kept.parent / "used"
    for folder, days in ((unused, 31), (used, 29), (kept, 31)):
        (folder / "deep").mkdir(parents=True)
        os.utime(folder, times=(time.time() - days * 86400,) * 2)
    run(library, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert set(kept.parent.iterdir()) == {kept, used}


def test_an_unwritable_cache_changes_nothing(library, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert run(library, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == "None"


def test_a_relative_cache_is_the_same_for_processes_in_other_folders(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Path(run(library, "cache", PYTHONDONTWRITEBYTECODE="1"))
    assert kept.parent == tmp_path / "cache" / "bytecode"


def test_python_puts_bytecode_where_it_always_does(library, tmp_path):
    assert run(library, tmp_path / "cache") == "None"
    assert names(library) == {"__init__", "other"}
    assert not (tmp_path / "cache").exists()


def test_bytecode_that_is_there_is_used(library, tmp_path):
    run(library, tmp_path / "cache")
    assert run(library, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == "None"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_somebody_chose_stays(library, tmp_path):
    assert run(library, tmp_path / "cache", PYTHONPYCACHEPREFIX=str(tmp_path / "chosen")) == str(tmp_path / "chosen")
    assert {"__init__", "other"} <= names(tmp_path / "chosen")


def test_what_cannot_be_written_beside_the_library_is_lost(library, monkeypatch):
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr(bytecode, "LARGEST", "large")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert bytecode.lost() is None
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))  # root may write anywhere
    assert bytecode.lost() == library
    assert asked == [(library / "large", os.W_OK)]
