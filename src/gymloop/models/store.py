"""The user's cache of converted models: a folder in it is complete and as it was written, or it is not there.

An entry is built aside, fsynced, and renamed into place under a lock, so a killed conversion leaves nothing that looks
finished and two at once do the work once. A manifest names every file; sizes are compared at every use, hashes at the
first one and whenever a file was touched since.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gymloop.errors import ConfigError, InfraError
from gymloop.files import fsync, sha256

MANIFEST = "manifest.json"
_VERIFIED = ".verified.json"
_ASIDE = ".aside-"


def cache_root() -> Path:
    """``$GYMLOOP_CACHE``, else ``$XDG_CACHE_HOME/gymloop``, else ``~/.cache/gymloop``.

    Absolute: processes that are started in other folders use it too.
    """
    if own := os.environ.get("GYMLOOP_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "gymloop"
    return Path.home() / ".cache" / "gymloop"


def fault(entry: Path) -> str | None:
    """What is wrong with an entry, one clause, or None when every file is as its manifest says."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): (int(part["size"]), str(part["sha256"])) for name, part in manifest["files"].items()}
    except FileNotFoundError:
        return f"{entry / MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{entry / MANIFEST} cannot be read ({error!r})"

    touched = _touched(entry)
    stamps: dict[str, int] = {}
    for name, (size, digest) in expected.items():
        path = entry / name
        if not path.is_file():
            return f"{path} is missing"
        stat = path.stat()
        if stat.st_size != size:
            return f"{path} has {stat.st_size} bytes where {size} were written"
        if touched.get(name) != stat.st_mtime_ns and sha256(path) != digest:
            return f"{path} does not have the sha256 it was written with"
        stamps[name] = stat.st_mtime_ns
    if stamps != touched:
        _remember(entry, stamps)
    return None


def _touched(entry: Path) -> dict[str, int]:
    """Modification time in nanoseconds of each file when its hash was last compared."""
    try:
        stamps = json.loads((entry / _VERIFIED).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _remember(entry: Path, stamps: dict[str, int]) -> None:
    """Best effort: a cache that cannot be written (read-only mount) is hashed at every use instead."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=entry, prefix=".verified-", delete=False) as file:
            json.dump(stamps, file)
        os.replace(file.name, entry / _VERIFIED)
    except OSError as error:
        print(f"gymloop: {entry} is not writable ({error}); its files are hashed at every use", file=sys.stderr)


def publish(entry: Path, build: Callable[[Path], None], *, wait_s: float = 900.0) -> Path:
    """Return a sound entry, building it unless it, or another process, has it already.

    Args:
        entry: where it belongs; its parent is made.
        build: fills an empty folder.
        wait_s: how long another process may take over the same entry, seconds.

    Raises:
        InfraError: another process still holds the lock after ``wait_s``.
        ConfigError: the cache cannot be written.
    """
    if entry.is_dir() and fault(entry) is None:
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f".{entry.name}.lock", wait_s):
            return _publish_locked(entry, build)
    except OSError as error:
        raise ConfigError(
            f"the model cache {entry.parent} cannot be written ({error.strerror or error}); "
            "free space there or set GYMLOOP_CACHE to another folder"
        ) from error


def _publish_locked(entry: Path, build: Callable[[Path], None]) -> Path:
    if entry.is_dir():
        what = fault(entry)
        if what is None:
            return entry
        print(f"gymloop: {what}; making it again", file=sys.stderr)
        shutil.rmtree(entry)
    for left in entry.parent.glob(f"{_ASIDE}{entry.name}-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f"{_ASIDE}{entry.name}-"))
    try:
        aside.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from its other users
        build(aside)
        files = {
            path.relative_to(aside).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        }
        for name in files:  # savers differ: safetensors writes 0600
            (aside / name).chmod(0o644)
        (aside / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        for path in (*(path for path in aside.rglob("*") if path.is_file()), aside):
            fsync(path)
        os.rename(aside, entry)
        fsync(entry.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return entry


@contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it when its process ends, however it ends."""
    end = time.monotonic() + wait_s
    told = False
    with path.open("a") as file:
        while True:  # bounded: by ``wait_s``
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise InfraError(
                        f"another process has held {path} for {wait_s:.0f} s; "
                        "end it, or set GYMLOOP_CACHE to another folder"
                    ) from None
                if not told:
                    print(f"gymloop: another process is making {path.parent.name}; waiting for it", file=sys.stderr)
                    told = True
                time.sleep(0.2)
        yield
