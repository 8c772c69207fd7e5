"""What an installed NeMo Gym offers and what each environment needs, read from its files; nothing of it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import NATIVE_AGENTS
from gymloop.gym.nemo.configs import parse
from gymloop.gym.nemo.files import uses_ray
from gymloop.gym.nemo.install import Installation

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Offer:
    """One resources server.

    Attributes:
        name: its folder.
        description: its own words.
        configs: files for ``env.nemo_gym.config_paths``.
        missing: packages that it asks for and the environment lacks; for ``gymloop gym install --extra``.
        agents: types of agent that its configs use; those of NeMo Gym's that gymloop does not play get a process.
        judges: it calls a model of its own.
        ray: it starts or joins Ray.
        rows: rows that come with it.
    """

    name: str
    description: str
    configs: tuple[str, ...]
    missing: tuple[str, ...]
    agents: tuple[str, ...]
    judges: bool
    ray: bool
    rows: int

    @property
    def needs(self) -> str:
        """In a few words, empty when the environment is enough."""
        parts = [f"--extra '{package}'" for package in self.missing]
        parts += ["a judge model"] if self.judges else []
        parts += ["Ray"] if self.ray else []
        if self.agents and not set(self.agents) & set(NATIVE_AGENTS):
            parts += [f"the agent {' or '.join(self.agents)}"]
        return ", ".join(parts)


def offers(installation: Installation) -> Iterator[Offer]:
    """Every resources server with a config, by name."""
    site = installation.site_packages
    have = _distributions(site)
    for folder in sorted((site / "resources_servers").iterdir()):
        if (folder / "app.py").is_file() and (configs := _configs(folder)):
            yield _offer(folder, configs, site, have)


def missing(installation: Installation, folders: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """By server, what its requirements ask for and the environment lacks; only servers that lack something.

    Args:
        installation: the environment.
        folders: of each server's code.
    """
    asked = {name: _asked(folder) for name, folder in folders.items()}
    have = _distributions(installation.site_packages) if any(asked.values()) else set()
    found = {name: tuple(one for one in lines if _package(one) not in have) for name, lines in asked.items()}
    return {name: lacking for name, lacking in found.items() if lacking}


def _distributions(site: Path) -> set[str]:
    return {_plain(name) for found in metadata.distributions(path=[str(site)]) if (name := found.metadata["Name"])}


def _offer(folder: Path, configs: list[Path], site: Path, have: set[str]) -> Offer:
    description, agents, judges = "", set(), False
    for path in configs:
        try:
            content = parse(path.read_text(encoding="utf-8"), str(path))
        except (ConfigError, UnicodeDecodeError):
            continue  # one that cannot be read is told when it is used
        for value in content.values():
            if not isinstance(value, dict):
                continue
            agents |= set(value.get("responses_api_agents") or {})
            for settings in (value.get("resources_servers") or {}).values():
                if isinstance(settings, dict):
                    description = description or str(settings.get("description") or "")
                    judges |= any(
                        isinstance(one, dict) and one.get("type") == "responses_api_models" for one in settings.values()
                    )
    example = folder / "data" / "example.jsonl"
    return Offer(
        folder.name,
        " ".join(description.split()),
        tuple(path.relative_to(site).as_posix() for path in configs),
        tuple(requirement for requirement in _asked(folder) if _package(requirement) not in have),
        tuple(sorted(agents)),
        judges,
        uses_ray(folder / "app.py"),
        sum(1 for line in example.open("rb") if line.strip()) if example.is_file() else 0,
    )


def _configs(folder: Path) -> list[Path]:
    """Config files, the one that is called as the server before its variants."""
    return sorted(folder.glob("configs/*.yaml"), key=lambda path: (path.stem != folder.name, path.name))


def _asked(folder: Path) -> list[str]:
    """Requirements beside NeMo Gym itself."""
    try:
        lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    plain = (line.partition(" #")[0].strip() for line in lines)
    return [line for line in plain if line and not line.startswith(("#", "-", "nemo-gym"))]


def _package(requirement: str) -> str:
    match = _NAME.match(requirement)
    return _plain(match[0]) if match else requirement


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
