"""What a run wants of NeMo Gym, read from its configs and settled before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError
from gymloop.gym.nemo import files
from gymloop.gym.nemo.blocks import POLICY_MODEL, Blocks, Play, plays, select
from gymloop.gym.nemo.configs import merge
from gymloop.gym.nemo.install import Installation
from gymloop.models.store import cache_root

PORTS = (10001, 20000)
"""NeMo Gym's own default range."""
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Gym:
    """What a run wants of NeMo Gym, read and settled; nothing is started yet.

    Attributes:
        installation: the environment that the servers run in.
        roots: where configs and server folders are looked for, the first wins.
        blocks: servers and agents.
        folders: of each server's code, by instance.
        plays: how rows are played, by the name that they carry in ``agent_ref.name``.
        ports: first and last port that servers may take.
        deadline_s: time until every server must be ready, seconds.
    """

    installation: Installation
    roots: tuple[Path, ...]
    blocks: Blocks
    folders: Mapping[str, Path]
    plays: Mapping[str, Play]
    ports: tuple[int, int]
    deadline_s: float

    @classmethod
    def load(
        cls, installation: Installation, given: Mapping[str, Any], folders: Sequence[Path], environ: Mapping[str, str]
    ) -> Gym:
        """Read the configs of ``env.nemo_gym``.

        Args:
            installation: of `gymloop gym install`.
            given: the block ``env.nemo_gym``: ``config_paths``, and overrides of what the files say.
            folders: searched before the installed Gym, as a recipe's own folder.
            environ: for ``${oc.env:NAME}``.

        Raises:
            ConfigError: a file is missing, a value is, or a key that nothing reads is there.
        """
        paths = given.get("config_paths")
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"env.nemo_gym.config_paths: expected a list of NeMo Gym config files, got {paths!r}")
        roots = [*folders, installation.site_packages]
        sources = files.read(paths, roots)
        merged = merge(sources, len(dict.fromkeys(paths)), given)
        merged.setdefault("results_dir", str(Path("results").absolute()))
        merged.setdefault("cache_dir", str(cache_root() / "nemo-gym" / "downloads"))
        blocks = select(merged, given, environ)
        found = {name: files.server_folder(block, roots) for name, block in blocks.servers.items()}
        for name, block in blocks.servers.items():
            for key in files.unread(block, given, found[name], installation.site_packages):
                where = f"env.nemo_gym.{block.name}.{block.kind}.{block.type}.{key}"
                raise ConfigError(f"{where}: nothing in that server's code reads it; remove it, or check its name")
        ports = (_number(given, "port_range_low", PORTS[0]), _number(given, "port_range_high", PORTS[1]))
        deadline = float(_number(given, "server_spinup_timeout_seconds", DEADLINE_S))
        return cls(installation, tuple(roots), blocks, found, plays(blocks), (int(ports[0]), int(ports[1])), deadline)

    def needs_model(self, name: str) -> bool:
        """Whether a server calls the policy's own server, whose address it then has to know when it starts."""
        return any(to == POLICY_MODEL for _, to in self.blocks.servers[name].references())

    def needs_ray(self, name: str) -> bool:
        """Whether a server joins the run's Ray."""
        return files.uses_ray(self.folders[name] / self.blocks.servers[name].settings["entrypoint"])


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"env.nemo_gym.{key}: expected a number above 0, got {value!r}")
    return value
