"""From the recipe's ``env`` and ``data`` blocks to environments and rows; mistakes are found before anything starts."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gymloop.config.plan import RowSource
from gymloop.config.schema import DataSource, Env, EnvironmentSpec
from gymloop.errors import ConfigError
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.contract import Row
from gymloop.gym.environment import Environment
from gymloop.gym.rows import read_rows
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import nearest

Source: TypeAlias = InProcessSource | AttachedEnvironment


def build_sources(env: Env, base_dir: Path | None = None) -> dict[str, Source]:
    """Import every environment of the recipe that is a class; a server is not yet asked for anything.

    Args:
        env: the recipe's block.
        base_dir: folder of the recipe; modules beside it can be imported (it is searched last).

    Raises:
        ConfigError: an entrypoint does not lead to a usable ``Environment``, or its kwargs do not fit; a url is no
            address.
    """
    if base_dir is not None and str(base_dir.resolve()) not in sys.path:
        sys.path.append(str(base_dir.resolve()))
    return {name: _source(name, spec) for name, spec in env.environments.items()}


def _source(name: str, spec: EnvironmentSpec) -> Source:
    where = f"env.environments.{name}"
    if spec.url is not None:
        return AttachedEnvironment(name, spec.url, spec.agent)
    if spec.entrypoint is None:
        raise ConfigError(f"{where}: expected entrypoint or url")
    return InProcessSource(name, load_environment(spec.entrypoint, f"{where}.entrypoint"), spec.kwargs)


def shown_tools(sources: Mapping[str, Source], rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """Every flat tool that the model will see, by name: of the classes, and of the rows, which name a server's."""
    of_rows = (tool for row in rows for tool in row["responses_create_params"].get("tools") or ())
    of_classes = (tool for source in sources.values() for tool in source.tools or ())
    return list({tool["name"]: tool for tool in itertools.chain(of_rows, of_classes)}.values())


def solver(sources: Mapping[str, Source], name: str) -> InProcessSource:
    """The environment that plays demonstrations of its rows.

    Raises:
        ConfigError: it is a server.
    """
    source = sources[name]
    if not isinstance(source, InProcessSource):
        raise ConfigError(f"sft_warmup: '{name}' is a server, and a server has no solver; give sft_warmup.data_path")
    return source


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


def load_source_rows(source: DataSource | RowSource, sources: Mapping[str, Source], base_dir: Path) -> list[Row]:
    """Rows of ``data.train`` or ``data.validation``, from the file or from the environment's generator.

    Raises:
        ConfigError: not exactly one of the two is named, the environment is unknown, or the rows are unusable.
    """
    if (source.data_path is None) == (source.environment is None):
        raise ConfigError("data: a source needs exactly one of data_path and environment")
    if source.data_path is not None:
        agent = source.agent if isinstance(source, RowSource) else None
        return read_rows(base_dir / source.data_path, {name: known.tools for name, known in sources.items()}, agent)
    name = source.environment or ""
    if name not in sources:
        raise ConfigError(f"data: '{name}' is not under env.environments{nearest(name, sources)}")
    if source.num_tasks is None:
        raise ConfigError(f"data: environment '{name}' generates tasks without end; say how many with num_tasks")
    generator = sources[name]
    if not isinstance(generator, InProcessSource):
        raise ConfigError(f"data: '{name}' is a server, and a server generates no tasks; give data_path instead")
    return generator.generate(source.num_tasks, source.seed)
