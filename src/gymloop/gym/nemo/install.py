"""One environment for all of NeMo Gym's servers, in the user's cache: complete, or not there.

Its folder is named after everything that decides its content (version, extra packages, Ray, interpreter), so a second
call finds it and two recipes may want different ones. It is built where it will stay, since an environment cannot be
moved, under a lock, and counts once its marker is written, which happens last: what a killed installation left behind
has no marker and is removed by the next one.

NeMo Gym asks for a Python that few machines have. It is plain Python that runs on older ones: there, its distribution
is installed without asking what it requires of Python, and then everything else that it requires. Its vendor does not
support that.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import filelock

from gymloop.errors import ConfigError, InfraError
from gymloop.files import fsync, replace_text
from gymloop.models.store import cache_root

VERSION = "0.7.0"
"""The version that gymloop is tested with."""
SUPPORTED_FROM = (3, 13, 14)
"""The Python that NeMo Gym 0.7 asks for."""
MARKER = "complete.json"
_RECIPE = 1
"""Raise when the way of installing changes what is installed."""
_LOCK_S = 1800.0
_STEP_S = 1500.0
_TAIL_LINES = 15
OF_THIS_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX")
"""Variables that another one does without: it has a place of its own for what it imports and compiles."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an environment holds.

    Attributes:
        version: of NeMo Gym.
        extras: further requirements, as pip takes them, for servers that need them.
        ray: version of the run's Ray; None leaves it to NeMo Gym.
        python: the interpreter; its version decides the wheels.
    """

    version: str = VERSION
    extras: tuple[str, ...] = ()
    ray: str | None = None
    python: str = sys.executable

    @property
    def key(self) -> str:
        """Name of the folder: equal for equal content."""
        identity = json.dumps(
            [_RECIPE, self.version, sorted(self.extras), self.ray, _python_version(self.python), platform.machine()]
        )
        return f"{self.version}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment with NeMo Gym in it."""

    folder: Path
    python: Path
    site_packages: Path
    version: str

    @classmethod
    def at(cls, folder: Path) -> Installation:
        """Any virtual environment that has NeMo Gym, also one that gymloop did not make.

        Raises:
            ConfigError: it is none.
        """
        found = sorted(folder.glob("lib/python3.*/site-packages/nemo_gym-*.dist-info"))
        python = folder / "bin" / "python"
        if not found or not python.exists():
            raise ConfigError(
                f"{folder} is not a virtual environment with nemo-gym; make one with `gymloop gym install`"
            )
        version = found[0].name.removeprefix("nemo_gym-").removesuffix(".dist-info")
        return cls(folder, python, found[0].parent, version)


def run_ray() -> str | None:
    """Version of the Ray that runs use; NeMo Gym's servers must have the same to join them."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def root() -> Path:
    """Where environments lie."""
    return cache_root() / "nemo-gym"


def installed(wanted: Wanted) -> Installation | None:
    """The environment, if it is complete."""
    folder = root() / wanted.key
    return Installation.at(folder) if (folder / MARKER).is_file() else None


def install(wanted: Wanted, say: Say) -> Installation:
    """The environment, made if it is not there. Several processes may call this at once: one makes it.

    Args:
        wanted: what to install.
        say: takes a line of progress.

    Raises:
        ConfigError: the interpreter is too old, or a package cannot be had.
        InfraError: another process has been at it for half an hour, or a step did not end.
    """
    if (ready := installed(wanted)) is not None:
        return ready
    version = _python_version(wanted.python)
    if version < (3, 11):
        raise ConfigError(f"NeMo Gym's servers need Python 3.11 or newer; {wanted.python} is {_dotted(version)}")
    folder = root() / wanted.key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.parent / f".{wanted.key}.lock", timeout=_LOCK_S):
            if (ready := installed(wanted)) is not None:
                return ready
            if folder.exists():
                say(f"{folder} is not complete; making it again")
                shutil.rmtree(folder)
            _build(wanted, folder, version, say)
            return Installation.at(folder)
    except filelock.Timeout:
        raise InfraError(
            f"another process has been installing {folder} for {_LOCK_S / 60:.0f} minutes; wait for it or end it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}); free space there or set GYMLOOP_CACHE"
        ) from error


def _build(wanted: Wanted, folder: Path, version: tuple[int, ...], say: Say) -> None:
    if version < SUPPORTED_FROM:
        say(
            f"nemo-gym {wanted.version} asks for Python {_dotted(SUPPORTED_FROM)} or newer and this is "
            f"{_dotted(version)}: its servers run, but NVIDIA does not support them here"
        )
    say(f"making {folder}")
    _step([wanted.python, "-m", "venv", str(folder)], "making a virtual environment")
    python = str(folder / "bin" / "python")
    # Without its dependencies first: which Python it asks for would be asked of each resolver in its own way.
    alone = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
    _step([*alone, f"nemo-gym=={wanted.version}"], f"getting nemo-gym {wanted.version}")
    gym = Installation.at(folder)
    needed = requirements(_requires(gym), wanted)
    say(f"installing {len(needed)} requirements and what they need")
    # All in one resolution, so that packages that exclude each other are told before a server meets them.
    _step([*_installer(python), *needed], "installing what nemo-gym requires")
    for path in (gym.site_packages, folder):
        fsync(path)
    replace_text(folder / MARKER, json.dumps({"version": wanted.version, "requirements": needed}, indent=2) + "\n")
    fsync(folder)


def requirements(required: Sequence[str], wanted: Wanted) -> list[str]:
    """What to install beside NeMo Gym itself.

    Args:
        required: ``Requires-Dist`` lines; those of its optional extras are left out.
        wanted: adds further packages and the version of Ray.
    """
    core = [line for line in required if not re.search(r";.*\bextra\s*==", line)]
    if wanted.ray is not None:
        core = [_pinned_ray(line, wanted.ray) for line in core]
    return [*core, *wanted.extras]


def _pinned_ray(line: str, version: str) -> str:
    match = re.match(r"ray(\[[^\]]*\])?(?![\w.-])", line)
    return f"ray{match[1] or ''}=={version}" if match else line


def _requires(gym: Installation) -> list[str]:
    info = gym.site_packages / f"nemo_gym-{gym.version}.dist-info"
    return metadata.PathDistribution(info).requires or []


def _installer(python: str) -> list[str]:
    """uv where there is one, several times faster; else the environment's own pip."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", python]
    return [python, "-m", "pip", "install", "--quiet"]


def _step(command: Sequence[str], what: str) -> None:
    # Not in the folder of the caller: a uv.toml or pyproject.toml above it would be obeyed.
    environ = {name: value for name, value in os.environ.items() if name not in OF_THIS_INTERPRETER}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_STEP_S, cwd=root(), env=environ, check=False
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"{what} did not end within {_STEP_S / 60:.0f} minutes", cause="timeout") from None
    if done.returncode != 0:
        said = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-_TAIL_LINES:])
        raise ConfigError(f"{what} failed:\n  {said}")


def _python_version(python: str) -> tuple[int, ...]:
    if python == sys.executable:
        return tuple(sys.version_info[:3])
    try:
        said = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:3])"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} is no Python interpreter that runs here: {error}") from error
    return tuple(int(part) for part in said.split())


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
