"""What is read beside the tokenizer: the template's text, end tokens, the size of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError


def template_text(chat_template: str | None) -> str | None:
    """Jinja text from Jinja text or a path that ends in ``.jinja``.

    Raises:
        ConfigError: there is no such file.
    """
    if chat_template is None or not chat_template.endswith(".jinja") or "\n" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise ConfigError(f"policy.tokenizer.chat_template: the file {chat_template} does not exist")
    return path.read_text(encoding="utf-8")


def generation_end_ids(folder: str | Path) -> tuple[int, ...]:
    """``eos_token_id`` of the folder's generation config, one or several; empty if there is none.

    Raises:
        ConfigError: the file is not JSON or the value is not made of token ids.
    """
    value = _json_object(Path(folder) / "generation_config.json").get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(end) is int for end in ends):
        raise ConfigError(
            f"{folder}/generation_config.json: eos_token_id is {value!r}; expected a token id or a list of them"
        )
    return tuple(ends)


def model_vocab_size(folder: str | Path) -> int:
    """``vocab_size`` of the folder's model config; 0 if there is none."""
    config = _json_object(Path(folder) / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if type(size) is int else 0


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value
