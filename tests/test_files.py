"""What is written is there whole or not at all."""

import os
import subprocess
import sys

import pytest

from gymloop.errors import ConfigError
from gymloop.files import fsync, held, remove, replace_text, sha256, write_synced


def test_sha256_is_the_files(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")  # FIPS 180-2 appendix B.1
    assert sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_replacing_leaves_the_old_content_when_it_fails(tmp_path):
    path = tmp_path / "x"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\ud800")
    assert path.read_text() == "old"
    replace_text(path, "new")
    assert path.read_text() == "new"


def test_nothing_is_left_aside_where_the_disk_refuses(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_text(tmp_path / "x", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_files_and_folders_are_handed_to_the_disk(tmp_path):
    write_synced(tmp_path / "x", "text\n")
    assert (tmp_path / "x").read_text() == "text\n"
    fsync(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync(tmp_path / "y")


def test_of_a_link_only_the_link_is_removed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("stays")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        remove(tmp_path / name)
    assert (tmp_path / "folder" / "x").read_text() == "stays"
    remove(tmp_path / "folder" / "x")
    remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys
from pathlib import Path
from gymloop.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_and_let_go_of_when_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"run is in use by process {holder.pid}$"), held(folder):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with held(folder):
        assert (folder / ".lock").read_text() == str(os.getpid())
