"""Rules about what lies outside the recipe: files, parsers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.nearest import did_you_mean
from gymloop.config.parsers import settled_parsers
from gymloop.config.paths import is_template_file
from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import REASONING_PARSERS, TOOL_PARSERS, DataSource, Recipe


def _data(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    for key, source in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if source is not None:
            yield from _data_source(key, source, recipe, folder)
    yield from _file("sft_warmup.data_path", recipe.sft_warmup.data_path, folder)


def _data_source(key: str, source: DataSource, recipe: Recipe, folder: Path) -> Iterator[Violation]:
    path_key, environment_key, tasks_key = f"{key}.data_path", f"{key}.environment", f"{key}.num_tasks"
    if _left_to_gym(source, recipe):
        return
    if (source.data_path is None) == (source.environment is None):
        given = "neither is given" if source.data_path is None else "both are given"
        yield Violation((key, path_key, environment_key), f"expected data_path or environment, exactly one; {given}")
        return
    if source.data_path is not None:
        if source.num_tasks is not None:
            yield Violation((tasks_key, path_key), "counts generated tasks; with data_path the file has the rows")
        if not _hosts_gym(recipe):  # else it may lie in the installation, which ``gym.nemo.recipe`` looks into
            yield from _file(path_key, source.data_path, folder)
        return
    known = recipe.env.environments
    if source.environment is not None and source.environment not in known:
        names = ", ".join(sorted(known)) or "none"
        yield Violation(
            (environment_key, "env.environments"),
            f"{source.environment!r} is not under env.environments, which has {names}"
            f"{did_you_mean(source.environment, known)}",
        )
    if source.num_tasks is None:
        yield Violation((tasks_key, environment_key), "missing; with environment, the number of tasks to generate")


def _left_to_gym(source: DataSource, recipe: Recipe) -> bool:
    """Whether NeMo Gym's configs are to name the file: ``gym.nemo.recipe`` reads them, and refuses with its name."""
    return _hosts_gym(recipe) and source.data_path is None and source.environment is None


def _hosts_gym(recipe: Recipe) -> bool:
    """Whether the run starts servers of NeMo Gym."""
    return recipe.env.nemo_gym is not None and bool(recipe.env.nemo_gym.config_paths)


def _template(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    template = recipe.policy.tokenizer.chat_template
    if template is not None and is_template_file(template):
        yield from _file("policy.tokenizer.chat_template", template, folder)


def _parsers(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    parsers = settled_parsers(recipe)
    with_vllm = recipe.policy.generation.backend == "vllm"  # which has parsers of its own; their names show at the load
    for key, name, plugin, known in (
        ("tool_parser", parsers.tool_parser, parsers.tool_parser_plugin, TOOL_PARSERS),
        ("reasoning_parser", parsers.reasoning_parser, parsers.reasoning_parser_plugin, REASONING_PARSERS),
    ):
        full = f"policy.tokenizer.{key}"
        plugin_key = f"{full}_plugin"
        if name is None and plugin is not None:
            yield Violation((plugin_key, full), f"defines parsers, and {full} names none of them")
        if name is not None and plugin is None and name not in known and not with_vllm:
            yield Violation(
                (full, plugin_key),
                f"there is no parser {name!r}; expected one of {', '.join(known)}, or a name that the file in "
                f"{plugin_key} defines{did_you_mean(name, known)}",
            )
        if plugin is not None and not plugin.endswith(".py"):
            yield Violation((plugin_key,), f"{plugin!r} is no Python file; expected a path ending in .py")
        else:
            yield from _file(plugin_key, plugin, folder)


def _file(key: str, name: str | None, folder: Path) -> Iterator[Violation]:
    """The file must be there, relative to the recipe."""
    if name is None:
        return
    path = folder / Path(name).expanduser()
    if path.is_file():
        return
    if not path.parent.is_dir():
        yield Violation((key,), f"{path} does not exist, nor does its folder")
        return
    siblings = [sibling.name for sibling in path.parent.iterdir()]
    yield Violation((key,), f"there is no file {path}{did_you_mean(path.name, siblings)}")


RULES: tuple[Rule, ...] = (_data, _template, _parsers)
