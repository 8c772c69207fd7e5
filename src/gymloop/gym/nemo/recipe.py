"""From a recipe's ``env.nemo_gym`` to what its servers are; reads files and starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymloop.config.nearest import did_you_mean
from gymloop.config.plan import Plan, RowSource
from gymloop.config.schema import DataSource, Env, Recipe
from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import Block
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.nemo.install import Installation, Wanted, installed, run_ray

KEY = "env.nemo_gym"


def load_gym(recipe: Recipe, folder: Path, environ: Mapping[str, str] = os.environ) -> Gym | None:
    """What the recipe wants of NeMo Gym; None where it starts no server of it.

    Args:
        recipe: keeps the rules between keys.
        folder: of the recipe; searched for configs and servers before the installed NeMo Gym.
        environ: for ``${oc.env:NAME}`` in NeMo Gym's configs.

    Raises:
        ConfigError: NeMo Gym is not installed, or its configs and the recipe do not fit; begins with the key.
    """
    given = recipe.env.nemo_gym
    if given is None or given.config_paths is None:
        return None
    settings: dict[str, Any] = {
        **given.overrides,
        "config_paths": list(given.config_paths),
        "port_range_low": given.port_range_low,
        "port_range_high": given.port_range_high,
        "server_spinup_timeout_seconds": given.server_spinup_timeout_seconds,
    }
    gym = Gym.load(find_installation(recipe.env, folder), settings, [folder], environ)
    _refuse(gym, recipe)
    return gym


def find_installation(env: Env, folder: Path) -> Installation:
    """The environment that servers run in.

    Raises:
        ConfigError: there is none.
    """
    if env.nemo_gym_installation is not None:
        try:
            return Installation.at((folder / Path(env.nemo_gym_installation).expanduser()).absolute())
        except ConfigError as error:
            raise ConfigError(f"env.nemo_gym_installation: {error}") from error
    found = installed(Wanted(extras=env.nemo_gym_extra, ray=run_ray()))
    if found is None:
        options = "".join(f" --extra '{package}'" for package in env.nemo_gym_extra)
        what = "with the packages of env.nemo_gym_extra" if options else "for this Python and Ray"
        raise ConfigError(
            f"{KEY}: NeMo Gym is not installed {what}; run `gymloop gym install{options}`, or give the folder of an "
            "installation in env.nemo_gym_installation"
        )
    return found


def settle_rows(plan: Plan, gym: Gym | None) -> Plan:
    """The plan with its files of rows found, beside the recipe or in the installed NeMo Gym.

    Rows that come with NeMo Gym mostly name no agent; theirs is the one whose configs list the file, or the only one
    on the server in whose folder it lies.

    Args:
        plan: of the recipe.
        gym: what it starts of NeMo Gym; without, files lie beside the recipe and every row names its environment.

    Raises:
        ConfigError: a file is in neither place; begins with the key.
    """
    if gym is None:
        return plan
    data = plan.recipe.data
    train = _settled("train", plan.train, data.train, gym)
    validation = None if plan.validation is None else _settled("validation", plan.validation, data.validation, gym)
    return replace(plan, train=train, validation=validation)


def _settled(key: str, source: RowSource, given: DataSource | None, gym: Gym) -> RowSource:
    if given is None or given.data_path is None:
        return source
    name = Path(given.data_path).expanduser()
    path = next((root / name for root in gym.roots if (root / name).is_file()), None)
    if path is None:
        looked = " nor in ".join(str(root) for root in gym.roots)
        raise ConfigError(f"data.{key}.data_path: there is no file {name} in {looked}{_offered(gym, name)}")
    return replace(source, data_path=path, agent=_agent(gym, path))


def _offered(gym: Gym, name: Path) -> str:
    """A file of rows that a server of these configs does have, to follow a sentence."""
    there = {
        str(file.relative_to(root)): None
        for root in gym.roots
        for folder in gym.folders.values()
        if folder.is_relative_to(root)
        for file in sorted(folder.glob("data/*.jsonl"))
    }
    return did_you_mean(str(name), there)


def _agent(gym: Gym, path: Path) -> str | None:
    """The one agent whose configs list this file of rows, else the one that plays on the server whose rows they are."""
    blocks = (*gym.blocks.agents.values(), *gym.blocks.servers.values())
    listing = {
        block.name
        for block in blocks
        for name in _datasets(block)
        if block.name in gym.plays and any((root / name).resolve() == path.resolve() for root in gym.roots)
    }
    beside = {name for name, play in gym.plays.items() if path.is_relative_to(gym.folders[play.server])}
    found = listing or beside
    return found.pop() if len(found) == 1 else None


def hints(gym: Gym) -> Iterator[str]:
    """What the servers' own lists of requirements ask for and the installation lacks: a sentence for each server.

    Some serve without, so this is no reason to refuse a recipe; of one that ends at its start it is the likely reason.
    """
    from gymloop.gym.nemo.catalog import missing

    for name, lacking in missing(gym.installation, gym.folders).items():
        options = " ".join(f"--extra '{package}'" for package in lacking)
        packages = ", ".join(lacking)
        yield (
            f"server {name} asks for packages that {gym.installation.folder} lacks; if it does not start, run "
            f"`gymloop gym install {options}` and give env.nemo_gym_extra: [{packages}]"
        )


def _refuse(gym: Gym, recipe: Recipe) -> None:
    """What Gym's configs and the recipe each allow and the two together do not.

    Raises:
        ConfigError: the first such.
    """
    for name in gym.plays:
        if name in recipe.env.environments:
            raise ConfigError(
                f"env.environments.{name}: NeMo Gym's configs have an agent of that name, and rows could mean either; "
                "rename it here and in its rows"
            )
    for key, source in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        if source is not None and source.data_path is None and source.environment is None:
            raise ConfigError(f"data.{key}.data_path: missing; {_rows(gym, key)}")
    remote = next((name for name, play in gym.plays.items() if play.kind == "remote"), None)
    if remote is not None and recipe.data.validation is not None:
        generation = recipe.policy.generation
        for name in ("temperature", "top_p", "top_k"):
            own = getattr(generation, f"val_{name}")
            if own is not None and own != getattr(generation, name):
                raise ConfigError(
                    f"policy.generation.val_{name}: the calls of NeMo Gym's agent {remote} sample as in training; "
                    f"expected null or the value of policy.generation.{name}"
                )


def _rows(gym: Gym, kind: str) -> str:
    """Which file of rows NeMo Gym's configs have of this kind, to follow a sentence."""
    absent = ""
    for block in (*gym.blocks.agents.values(), *gym.blocks.servers.values()):
        for name in _datasets(block, kind):
            found = next((root / name for root in gym.roots if (root / name).is_file()), None)
            if found is not None:
                return f"the configs name its rows, give {found}"
            absent = (
                absent or f"the configs name {name}, which is not there and comes with no installation; get it, and "
            )
    return f"{absent}give a JSONL file of rows"


def _datasets(block: Block, kind: str | None = None) -> Iterator[str]:
    listed = block.settings.get("datasets")
    for entry in listed if isinstance(listed, list) else ():
        if (
            isinstance(entry, Mapping)
            and kind in (None, entry.get("type"))
            and isinstance(entry.get("jsonl_fpath"), str)
        ):
            yield entry["jsonl_fpath"]
