"""Finds NeMo Gym's config files and server folders: beside the recipe, where its configs lie, in the installed Gym."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import KINDS, Block
from gymloop.gym.nemo.configs import Source, parse

_NO_RAY = re.compile(r"ray_enabled\b[^=\n]*=\s*False")


def find(name: str, roots: Sequence[Path]) -> Path:
    """The first ``root / name`` that exists.

    Raises:
        ConfigError: none does.
    """
    for root in roots:
        if (root / name).exists():  # an absolute name stays itself
            return root / name
    looked = ", ".join(str(root) for root in roots)
    raise ConfigError(f"NeMo Gym has no {name}; looked in {looked}")


def home(config: Path) -> Path | None:
    """The folder that holds ``resources_servers`` and its like, of a config file that lies in one of these."""
    found = next((index for index, part in enumerate(config.parts) if part in KINDS), None)
    return None if found is None else Path(*config.parts[:found])


def read(paths: Sequence[str], roots: list[Path]) -> list[Source]:
    """The files of ``paths`` and all that they pull in by ``config_paths``, each once; those of ``paths`` first.

    Args:
        paths: of config files.
        roots: where they are looked for, the installed NeMo Gym last; the ``home`` of each file comes in before it.

    Raises:
        ConfigError: a file is missing or is not a mapping.
    """
    names = list(dict.fromkeys(paths))
    sources: list[Source] = []
    for name in names:  # grows while it is walked
        path = find(name, roots)
        if (root := home(path)) is not None and root not in roots:
            roots.insert(-1, root)
        try:
            content = parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"NeMo Gym config {path} cannot be read: {error}") from error
        included = content.get("config_paths") or []
        if not isinstance(included, list) or not all(isinstance(one, str) for one in included):
            raise ConfigError(f"{path}: config_paths is a list of files, got {included!r}")
        fresh = [one for one in dict.fromkeys(included) if one not in names]
        sources.append(Source(str(path), content, tuple(range(len(names), len(names) + len(fresh)))))
        names.extend(fresh)
    return sources


def server_folder(block: Block, roots: Sequence[Path]) -> Path:
    """The folder with a server's entrypoint.

    Raises:
        ConfigError: there is none.
    """
    return find(f"{block.kind}/{block.type}/{block.settings['entrypoint']}", roots).parent


def uses_ray(app: Path) -> bool:
    """Whether a server of NeMo Gym's starts or joins Ray: its class does so unless it says otherwise."""
    return not _NO_RAY.search(app.read_text(encoding="utf-8", errors="replace"))


def unread(block: Block, given: Mapping[str, Any], folder: Path, site: Path) -> Iterator[str]:
    """Settings that a recipe gives a server and that no line of its code names, nor of what all servers are built on.

    What a server reads is known for certain only when it runs; a name that its source does not contain is a slip.

    Args:
        block: the server.
        given: ``env.nemo_gym``.
        folder: of the server.
        site: where the installed NeMo Gym lies.
    """
    override = given.get(block.name)
    types: Any = override.get(block.kind) if isinstance(override, Mapping) else None
    settings = types.get(block.type) if isinstance(types, Mapping) else None
    if isinstance(settings, Mapping) and settings:
        sources = [*folder.rglob("*.py"), *(site / "nemo_gym").glob("*.py")]
        words = {word for path in sources for word in re.findall(r"\w+", path.read_text("utf-8", errors="replace"))}
        yield from (str(name) for name in settings if name not in words)
