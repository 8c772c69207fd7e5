"""From the recipe's ``env`` and ``data`` blocks to environments and rows; mistakes are found before anything starts."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

from gymloop.config.schema import DataSource, Env
from gymloop.errors import ConfigError
from gymloop.gym.contract import Row
from gymloop.gym.environment import Environment
from gymloop.gym.rows import read_rows
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import nearest


def build_sources(env: Env, base_dir: Path | None = None) -> dict[str, InProcessSource]:
    """Import every environment of the recipe.

    Args:
        env: the recipe's block.
        base_dir: folder of the recipe; modules beside it can be imported (it is searched last).

    Raises:
        ConfigError: an entrypoint does not lead to a usable ``Environment``, or its kwargs do not fit.
    """
    if base_dir is not None and str(base_dir.resolve()) not in sys.path:
        sys.path.append(str(base_dir.resolve()))
    return {
        name: InProcessSource(
            name, load_environment(spec.entrypoint, f"env.environments.{name}.entrypoint"), spec.kwargs
        )
        for name, spec in env.environments.items()
    }


def load_environment(entrypoint: str, where: str) -> type[Environment]:
    """The class behind ``module:Class``.

    Raises:
        ConfigError: see ``build_sources``; the message begins with ``where``.
    """
    module_name, colon, class_name = entrypoint.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"{where}: '{entrypoint}' is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: cannot import '{module_name}': {type(error).__name__}: {error}") from error
    known = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Environment) and value is not Environment
    ]
    found = getattr(module, class_name, None)
    if found is None:
        hint = nearest(class_name, known) or f"; its environments: {', '.join(known) or 'none'}"
        raise ConfigError(f"{where}: module '{module_name}' has no '{class_name}'{hint}")
    if class_name not in known:
        raise ConfigError(f"{where}: '{entrypoint}' is {found!r}, not a subclass of gymloop.gym.Environment")
    return found


def load_source_rows(source: DataSource, sources: Mapping[str, InProcessSource], base_dir: Path) -> list[Row]:
    """Rows of ``data.train`` or ``data.validation``, from the file or from the environment's generator.

    Raises:
        ConfigError: not exactly one of the two is named, the environment is unknown, or the rows are unusable.
    """
    if (source.data_path is None) == (source.environment is None):
        raise ConfigError("data: a source needs exactly one of data_path and environment")
    if source.data_path is not None:
        return read_rows(base_dir / source.data_path, {name: known.tools for name, known in sources.items()})
    name = source.environment or ""
    if name not in sources:
        raise ConfigError(f"data: '{name}' is not under env.environments{nearest(name, sources)}")
    if source.num_tasks is None:
        raise ConfigError(f"data: environment '{name}' generates tasks without end; say how many with num_tasks")
    return sources[name].generate(source.num_tasks, source.seed)
