import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.models import store


def build(folder: Path) -> None:
    (folder / "weights").write_bytes(b"abc")
    (folder / "config.json").write_text("{}")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("GYMLOOP_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_root() == tmp_path / "own"
    monkeypatch.delenv("GYMLOOP_CACHE")
    assert store.cache_root() == tmp_path / "xdg" / "gymloop"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_root() == Path.home() / ".cache" / "gymloop"


def test_an_entry_is_built_once_and_has_a_manifest(tmp_path):
    entry = store.publish(tmp_path / "m" / "1", build)
    manifest = json.loads((entry / store.MANIFEST).read_text())
    # sha256("abc"), FIPS 180-2 appendix B.1
    assert manifest["files"]["weights"] == {
        "size": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert store.fault(entry) is None
    assert store.publish(entry, lambda folder: pytest.fail("built twice")) == entry


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda entry: (entry / "weights").unlink(), "is missing"),
        (lambda entry: (entry / "weights").write_bytes(b"ab"), "has 2 bytes where 3 were written"),
        (lambda entry: (entry / "weights").write_bytes(b"abd"), "does not have the sha256"),
        (lambda entry: (entry / store.MANIFEST).unlink(), "manifest.json is missing"),
        (lambda entry: (entry / store.MANIFEST).write_text("[]"), "cannot be read"),
    ],
)
def test_a_damaged_entry_is_named_and_made_again(tmp_path, capsys, damage, sentence):
    entry = store.publish(tmp_path / "m", build)
    assert store.fault(entry) is None
    time.sleep(0.01)  # so that a rewritten file has another modification time on any file system
    damage(entry)
    assert sentence in (store.fault(entry) or "")
    store.publish(entry, build)
    assert sentence in capsys.readouterr().err
    assert store.fault(entry) is None


def test_hashes_are_compared_once_until_a_file_is_touched(tmp_path, monkeypatch):
    entry = store.publish(tmp_path / "m", build)
    hashed: list[str] = []
    real = store.sha256
    monkeypatch.setattr(store, "sha256", lambda path: hashed.append(path.name) or real(path))
    assert store.fault(entry) is None
    assert sorted(hashed) == ["config.json", "weights"]
    assert store.fault(entry) is None
    assert len(hashed) == 2
    os.utime(entry / "weights", ns=(1, 1))
    assert store.fault(entry) is None
    assert hashed[2:] == ["weights"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        build(folder)
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        store.publish(tmp_path / "m", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_a_killed_build_left_is_cleared(tmp_path):
    left = tmp_path / ".aside-m-dead"
    left.mkdir()
    (left / "weights").write_bytes(b"half")
    store.publish(tmp_path / "m", build)
    assert not left.exists()


def _slow_publish(entry: Path, log: Path) -> None:
    def slow(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        build(folder)

    store.publish(entry, slow)


def test_two_at_once_build_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")  # a fork would hold whatever locks other threads hold now
    both = [spawn.Process(target=_slow_publish, args=(tmp_path / "m", tmp_path / "log")) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"


def test_waiting_for_another_process_is_bounded(tmp_path):
    import fcntl

    with (tmp_path / ".m.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InfraError, match="another process has held"):
            store.publish(tmp_path / "m", build, wait_s=0.3)


def test_a_cache_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="GYMLOOP_CACHE"):
        store.publish(tmp_path / "file" / "m", build)
