"""A path in a recipe is relative to the file that says it, also when another recipe inherits it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gymloop.config.document import Document
from gymloop.config.problems import KeyPath

TEMPLATE_SUFFIX = ".jinja"

TEMPLATE: KeyPath = ("policy", "tokenizer", "chat_template")
FILES: tuple[KeyPath, ...] = (
    TEMPLATE,
    ("policy", "tokenizer", "tool_parser_plugin"),
    ("policy", "generation", "vllm_cfg", "tool_parser_plugin"),
    ("policy", "generation", "vllm_cfg", "reasoning_parser_plugin"),
    ("policy", "tokenizer", "reasoning_parser_plugin"),
    ("data", "train", "data_path"),
    ("data", "validation", "data_path"),
    ("sft_warmup", "data_path"),
    ("env", "nemo_gym_installation"),
)
"""Keys that name files (one names a folder); folders that a run writes to are relative to where it is started."""

GYM_CONFIGS: KeyPath = ("env", "nemo_gym", "config_paths")
"""Names of NeMo Gym's config files; one that is no file beside its recipe is one of the installed NeMo Gym."""


def is_template_file(chat_template: str) -> bool:
    """Whether ``policy.tokenizer.chat_template`` is a path; anything else is the template itself."""
    return chat_template.endswith(TEMPLATE_SUFFIX) and "\n" not in chat_template and "{" not in chat_template


def rebase(document: Document, folder: Path) -> None:
    """Make paths that other files of the chain gave relative to ``folder``, that of the recipe itself."""
    for key in FILES:
        block: Any = document.value
        for part in key[:-1]:
            block = block.get(part) if isinstance(block, dict) else None
        name = block.get(key[-1]) if isinstance(block, dict) else None
        source = document.file_of(key)
        if not isinstance(name, str) or source is None or (key == TEMPLATE and not is_template_file(name)):
            continue
        there = Path(source).parent
        if there.absolute() == folder.absolute() or Path(name).expanduser().is_absolute():
            continue
        prefix = os.path.relpath(there.absolute(), folder.absolute())
        block[key[-1]] = os.path.join(prefix, name)
        if key in document.from_environment:
            document.from_environment[key] = os.path.join(prefix, document.from_environment[key])
    _rebase_gym_configs(document, folder)


def _rebase_gym_configs(document: Document, folder: Path) -> None:
    names: Any = document.value
    for part in GYM_CONFIGS:
        names = names.get(part) if isinstance(names, dict) else None
    for index, name in enumerate(names if isinstance(names, list) else ()):
        source = document.file_of((*GYM_CONFIGS, index))
        there = None if source is None else Path(source).parent.absolute()
        if isinstance(name, str) and there is not None and there != folder.absolute() and (there / name).is_file():
            names[index] = os.path.join(os.path.relpath(there, folder.absolute()), name)
