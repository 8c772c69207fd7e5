"""A recipe as YAML that reads back as the same recipe: complete with defaults, without any value of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gymloop.config.document import IMPLICIT_RESOLVERS
from gymloop.config.expression import escape
from gymloop.config.paths import FILES, GYM_CONFIGS, TEMPLATE, is_template_file
from gymloop.config.problems import KeyPath
from gymloop.config.schema import Recipe


class _Dumper(yaml.SafeDumper):
    """Quotes whatever this or any other YAML reader would take for something else than text."""

    yaml_implicit_resolvers: dict[str, Any] = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *IMPLICIT_RESOLVERS.get(first, [])]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *IMPLICIT_RESOLVERS}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(recipe: Recipe, folder: Path | None = None) -> str:
    """The recipe with everything settled, in the order of the schema; what the environment gave as its reference.

    Args:
        recipe: from ``load_recipe``.
        folder: the recipe's, which its paths are relative to: given, they are written absolute, so that the text means
            the same wherever it is saved.
    """
    tree = _plain(recipe.model_dump(mode="python"), (), recipe.from_environment)
    if folder is not None:
        _make_absolute(tree, recipe, folder)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _make_absolute(tree: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    for key in FILES:
        block: Any = tree
        for part in key[:-1]:
            block = (block or {}).get(part)
        name = (block or {}).get(key[-1])
        if isinstance(name, str) and (key != TEMPLATE or is_template_file(name)) and key not in recipe.from_environment:
            block[key[-1]] = str((folder / Path(name).expanduser()).absolute())
    gym = tree["env"].get("nemo_gym") or {}
    for index, name in enumerate(gym.get(GYM_CONFIGS[-1]) or ()):
        if (*GYM_CONFIGS, index) not in recipe.from_environment and (folder / name).is_file():
            gym[GYM_CONFIGS[-1]][index] = str((folder / name).absolute())


def _plain(value: Any, path: KeyPath, references: Mapping[KeyPath, str]) -> Any:
    if path in references:
        return references[path]
    if isinstance(value, dict):
        return {key: _plain(inner, (*path, key), references) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index), references) for index, inner in enumerate(value)]
    if isinstance(value, str) and path != TEMPLATE:
        return escape(value)
    return value
