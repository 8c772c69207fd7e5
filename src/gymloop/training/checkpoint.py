"""A checkpoint is whole or it is not there.

Every file is written aside in ``tmp_step_N`` and flushed to the disk; a manifest then names each with its size and
hash; only then is the folder renamed to ``step_N``, and only after that are older checkpoints removed. The newest
checkpoint is found by looking, never through a pointer file, so nothing can name one that is not complete. Reading
verifies every hash: what was damaged later is named and passed over, never loaded. Nothing is pickled.

    begin(N) ── tmp_step_N ── parts written, by any process ── commit ── step_N ── retention

A process killed at any point leaves at most a ``tmp_`` folder, which the next ``begin`` removes. A step saved for the
second time replaces the first: the old folder moves to ``replaced_step_N``, which still counts until the new one is in
place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gymloop.errors import ConfigError, InfraError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_NAME = re.compile(r"(?P<replaced>replaced_)?step_(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        step: the training step after which it was written.
        folder: where its parts lie.
        state: what the run needs besides the parts, as it was given to ``commit``.
    """

    step: int
    folder: Path
    state: Mapping[str, Any]

    def part(self, name: str) -> Path:
        """The file or folder of one part.

        Raises:
            ConfigError: the checkpoint has no such part.
        """
        path = self.folder / name
        if not path.exists():
            raise ConfigError(f"checkpoint {self.folder} has no part {name!r}")
        return path


class CheckpointStore:
    """The checkpoints of one run. One process commits at a time; others may write into the folder ``begin`` returns.

    Args:
        folder: made when the first checkpoint begins.
        keep_latest_k: complete checkpoints kept, at least 1.
        model: what the weights belong to, as JSON values, e.g. name and hash; a checkpoint of another model is refused.
    """

    def __init__(self, folder: Path, keep_latest_k: int, *, model: Mapping[str, Any]) -> None:
        if keep_latest_k < 1:
            raise ConfigError(f"checkpointing.keep_latest_k is {keep_latest_k}, expected at least 1")
        self.folder = Path(folder)
        self._keep = keep_latest_k
        self._committing = threading.Lock()
        self._model = json.loads(_json(dict(model), "model"))

    def write(self, step: int, parts: Mapping[str, Callable[[Path], object]], state: Mapping[str, Any]) -> Checkpoint:
        """Save a step whole: call each part's function with the path it shall create, a file or a folder; then commit.

        Raises:
            InfraError: a file cannot be written (disk full, read-only, ...); nothing of this step remains and earlier
                checkpoints are untouched. Whatever else a part raises passes through, with the same effect.
            ValueError: ``state`` is not JSON, or a part created nothing.
        """
        aside = self.begin(step)
        try:
            for name, create in parts.items():
                create(aside / name)
                if not (aside / name).exists():
                    raise ValueError(f"part {name!r} of checkpoint step {step} created nothing")
        except OSError as error:
            self.discard(aside)
            raise self._unwritable(step, error) from error
        except BaseException:
            self.discard(aside)
            raise
        return self.commit(aside, state)

    def begin(self, step: int) -> Path:
        """An empty folder for the parts of this step; end it with ``commit`` or ``discard``.

        Raises:
            InfraError: it cannot be made.
        """
        aside = self.folder / f"tmp_step_{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob("tmp_step_*"):
                shutil.rmtree(unfinished)
            aside.mkdir()
        except OSError as error:
            raise self._unwritable(step, error) from error
        return aside

    def discard(self, aside: Path) -> None:
        """Give up a checkpoint that was begun; one that is being committed in another thread is let through first."""
        with self._committing:
            shutil.rmtree(aside, ignore_errors=True)

    def commit(self, aside: Path, state: Mapping[str, Any]) -> Checkpoint:
        """Make what lies in the folder from ``begin`` the checkpoint of its step.

        Args:
            aside: the folder; every file in it becomes part of the checkpoint.
            state: JSON values, small: counters, random states, loader position.

        Raises:
            InfraError: the disk refused; the folder is gone and earlier checkpoints are untouched.
            ValueError: ``state`` is not JSON, a file is a link or is called ``manifest.json``; likewise.
        """
        step = int(aside.name.removeprefix("tmp_step_"))
        with self._committing:
            try:
                final = self._complete(aside, step, state)
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise self._unwritable(step, error) from error
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            self._retain(step)
        return Checkpoint(step, final, dict(state))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose every file is there and has its hash; None when there is none.

        Each unfinished or damaged one that was passed over is named in a warning. Folders without content are ignored.

        Raises:
            ConfigError: the newest complete one is of another model, or of a format this version does not read.
            InfraError: the folder cannot be listed.
        """
        for unfinished in sorted(self.folder.glob("tmp_step_*")):
            logger.warning("checkpoint %s was never finished and is ignored", unfinished)
        for step, folder in self._folders():
            try:
                if not any(folder.iterdir()):
                    continue
                manifest = _verified(folder, step)
            except _Damage as damage:
                logger.warning("checkpoint %s is damaged and is ignored: %s", folder, damage)
                continue
            except OSError as error:
                logger.warning("checkpoint %s cannot be read and is ignored: %s", folder, error)
                continue
            if manifest["model"] != self._model:
                raise ConfigError(
                    f"checkpoint {folder} belongs to model {json.dumps(manifest['model'])}, "
                    f"this run trains {json.dumps(self._model)}"
                )
            return Checkpoint(step, folder, manifest["state"])
        return None

    def _folders(self) -> list[tuple[int, Path]]:
        """Everything named like a checkpoint, newest step first, of one step the replaced one last."""
        if not self.folder.exists():
            return []
        found = []
        try:
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and path.is_dir():
                    found.append((int(match["step"]), match["replaced"] is None, path))
        except OSError as error:
            raise InfraError(f"cannot look for checkpoints in {self.folder}: {error.strerror}") from error
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _complete(self, aside: Path, step: int, state: Mapping[str, Any]) -> Path:
        """Flush and hash every file, write the manifest, rename; in this order."""
        _json(dict(state), "state")
        if (aside / MANIFEST).exists():
            raise ValueError(f"a checkpoint part may not be called {MANIFEST}")
        files = {}
        for path in _files(aside):
            size, digest = _flush_and_hash(path)
            files[path.relative_to(aside).as_posix()] = {"size": size, "sha256": digest}
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "model": self._model,
            "state": dict(state),
            "files": files,
        }
        _write(aside / MANIFEST, _json(manifest, "manifest"))
        for path in aside.rglob("*"):
            if path.is_dir():
                _flush_folder(path)
        _flush_folder(aside)
        return self._rename(aside, step)

    def _rename(self, aside: Path, step: int) -> Path:
        final = self.folder / f"step_{step}"
        replaced = self.folder / f"replaced_step_{step}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        _flush_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _retain(self, newest: int) -> None:
        """Remove complete checkpoints beyond the ones to keep; the one just written always stays, damaged ones too."""
        kept = {newest: self.folder / f"step_{newest}"}
        for step, folder in self._folders():
            if not (folder / MANIFEST).is_file():
                continue
            if len(kept) < self._keep:
                kept.setdefault(step, folder)
            if kept.get(step) == folder:
                continue
            try:
                # A folder half removed must not look like a checkpoint.
                doomed = folder.rename(self.folder / f"tmp_{folder.name.removeprefix('replaced_')}")
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("old checkpoint %s cannot be removed: %s", folder, error)

    def _unwritable(self, step: int, error: OSError) -> InfraError:
        where = error.filename or self.folder
        return InfraError(
            f"checkpoint of step {step} was not written: {error.strerror or error} ({where}); "
            f"earlier checkpoints in {self.folder} are untouched"
        )


class _Damage(Exception):
    """Why a folder is no complete checkpoint, as the end of a sentence."""


def _verified(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a folder all of whose files are as it says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _Damage(f"it has no {MANIFEST}") from None
    except ValueError as error:
        raise _Damage(f"{MANIFEST} is not JSON: {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        if not isinstance(version, int):
            raise _Damage(f"{MANIFEST} has no format_version")
        raise ConfigError(f"checkpoint {folder} has format {version}, this version of gymloop reads {FORMAT_VERSION}")
    missing = {"step", "model", "state", "files"} - manifest.keys()
    if missing:
        raise _Damage(f"{MANIFEST} has no {sorted(missing)[0]}")
    if manifest["step"] != step:
        raise _Damage(f"{MANIFEST} says step {manifest['step']}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise _Damage(f"{MANIFEST} names {name}, which lies outside")
        if not path.is_file():
            raise _Damage(f"{name} is missing")
        if path.stat().st_size != expected["size"]:
            raise _Damage(f"{name} has {path.stat().st_size} bytes instead of {expected['size']}")
        if _hash(path) != expected["sha256"]:
            raise _Damage(f"{name} does not have its hash")
    return manifest


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"checkpoint part {path} is a link; a checkpoint holds its own files")
        if path.is_file():
            yield path


def _flush_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json(value: Any, what: str) -> str:
    """JSON text that reads back as the same value: json would turn other keys into strings without a word."""
    for key, where in _keys(value, what):
        if not isinstance(key, str):
            raise ValueError(f"checkpoint {where} has the key {key!r}; JSON keys are strings")
    try:
        return json.dumps(value, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {what} is not JSON: {error}") from error


def _keys(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key, where
            yield from _keys(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _keys(inner, f"{where}[{index}]")
