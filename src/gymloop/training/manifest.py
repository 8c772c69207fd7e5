"""A manifest names every file of a checkpoint with its size and hash, so reading can tell whole from damaged.

It is JSON, written last, and holds besides the files what the run needs to go on: ``state`` (counters, loader
position), ``model`` (what the weights belong to) and ``metrics`` (of the step, by which checkpoints are ranked). Its
own hash is the last thing in it: a counter that changed on the disk is damage like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gymloop.errors import ConfigError
from gymloop.files import fsync, sha256, write_synced

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
_SECTIONS = ("step", "model", "metrics", "state", "files")
_HASH = "sha256"


class DamageError(Exception):
    """Why a folder is no complete checkpoint, as the end of a sentence."""


def seal(folder: Path, step: int, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Hand every file of a folder to the disk, then write its manifest, then hand over the folders: in this order.

    Args:
        folder: holds the parts and nothing else.
        step: of the checkpoint.
        sections: ``model``, ``metrics`` and ``state``, each a mapping of JSON values.

    Raises:
        OSError: the disk refused.
        ValueError: a section is not JSON that reads back as the same value, or a file is a link or called like the
            manifest.
    """
    for name, section in sections.items():
        _json(dict(section), name)
    if (folder / MANIFEST).exists():
        raise ValueError(f"a checkpoint part may not be called {MANIFEST}")
    files = {}
    for path in _files(folder):
        fsync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256(path)}
    manifest = {"format_version": FORMAT_VERSION, "step": step, **sections, "files": files}
    write_synced(folder / MANIFEST, _json(manifest | {_HASH: _hash(manifest)}, "manifest"))
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        fsync(path)


def read(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a folder, its form checked; the files are not looked at.

    Raises:
        DamageError: there is none, or it is not one.
        ConfigError: it has a format that this version does not read.
        OSError: it cannot be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamageError(f"it has no {MANIFEST}") from None
    except ValueError as error:
        raise DamageError(f"{MANIFEST} is not JSON: {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise DamageError(f"{MANIFEST} has no format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(f"checkpoint {folder} has format {version}, this version of gymloop reads {FORMAT_VERSION}")
    missing = [section for section in _SECTIONS if section not in manifest]
    if missing:
        raise DamageError(f"{MANIFEST} has no {missing[0]}")
    if manifest.pop(_HASH, None) != _hash(manifest):
        raise DamageError(f"{MANIFEST} does not have its hash")
    if manifest["step"] != step:
        raise DamageError(f"{MANIFEST} says step {manifest['step']}")
    return manifest


def verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare every file with what the manifest says of it.

    Raises:
        DamageError: one is missing, or is not as it was written.
        OSError: one cannot be read.
    """
    for name, expected in manifest["files"].items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DamageError(f"{MANIFEST} names {name}, which lies outside")
        if not path.is_file():
            raise DamageError(f"{name} is missing")
        if path.stat().st_size != expected["size"]:
            raise DamageError(f"{name} has {path.stat().st_size} bytes instead of {expected['size']}")
        if sha256(path) != expected["sha256"]:
            raise DamageError(f"{name} does not have its hash")


def _hash(manifest: Mapping[str, Any]) -> str:
    """Of the manifest's values, however they are laid out as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"checkpoint part {path} is a link; a checkpoint holds its own files")
        if path.is_file():
            yield path


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
