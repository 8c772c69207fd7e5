"""What is written is there whole or not at all."""

import pytest

from gymloop.files import fsync, replace_text, sha256, write_synced


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
