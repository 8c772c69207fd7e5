"""Rows are JSON Lines: LF ends a line and nothing else does, and a bad line is named by file and number.

Line numbers are 1-based and count LF. A byte-order mark and the CR of CRLF are not content; everything else, U+2028 and
U+0085 included, arrives as it was written. All bad lines are told together, up to five of them in full.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gymloop.errors import ConfigError
from gymloop.gym.contract import Row
from gymloop.gym.items import chat_messages, chat_tools
from gymloop.gym.tools import nearest

_NOT_TEXT = {
    b"\x1f\x8b": "is gzip-compressed",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed",
    b"BZh": "is bzip2-compressed",
    b"\xfd7zXZ": "is xz-compressed",
    b"PK\x03\x04": "is a zip archive",
    b"PAR1": "is a Parquet file",
    codecs.BOM_UTF16_LE: "is UTF-16",
    codecs.BOM_UTF16_BE: "is UTF-16",
}
"""By first bytes: files that go by the name of .jsonl and are none."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 5


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every object of a JSONL file with its line number.

    Raises:
        ConfigError: the file cannot be read, is compressed, has no rows, or has lines that are not JSON objects.
    """
    rows, problems = _read(path)
    _raise_all(path, problems)
    return rows


def _read(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    """The objects of a file, and what is wrong with its other lines; each with its line number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for magic, what in _NOT_TEXT.items():
        if data.startswith(magic):
            raise ConfigError(f"{path}: {what}; expected plain JSON Lines in UTF-8")
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line.removesuffix(b"\r"))
        except orjson.JSONDecodeError as error:
            problems.append((number, f"is not JSON: {error.msg}, column {error.colno}"))
            continue
        if isinstance(value, dict):
            rows.append((number, value))
        else:
            hint = " on a line of its own" if isinstance(value, list) else ""
            problems.append((number, f"is a JSON {type(value).__name__}; expected an object{hint}"))
    if not rows and not problems:
        raise ConfigError(f"{path}: no rows")
    return rows, problems


def read_rows(
    path: Path, tools: Mapping[str, Collection[Mapping[str, Any]] | None], agent: str | None = None
) -> list[Row]:
    """Rows of a file, each checked against the environments of the run.

    Args:
        path: the file.
        tools: for each environment name its flat tools, or None where they are not known. A row that names no tools
            gets its environment's.
        agent: environment of rows without ``agent_ref``; None refuses them.

    Raises:
        ConfigError: as ``read_jsonl``, or rows are not NeMo Gym rows for these environments, or two different rows
            have one id; up to five are named.
    """
    rows: list[Row] = []
    lines, problems = _read(path)
    seen: dict[Any, tuple[int, bytes]] = {}
    for number, row in lines:
        if agent is not None:
            row.setdefault("agent_ref", {"type": "responses_api_agents", "name": agent})
        problem = check_row(row, tools) or _repeated_id(number, row, seen)
        if problem is not None:
            problems.append((number, f": {problem}"))
            continue
        own = tools[row["agent_ref"]["name"]]
        if own and "tools" not in row["responses_create_params"]:
            row["responses_create_params"]["tools"] = list(own)
        rows.append(row)
    _raise_all(path, problems)
    return rows


def read_demonstrations(path: Path) -> list[dict[str, Any]]:
    """Conversations for the supervised warm-up, each with ``messages`` and perhaps ``tools``.

    Raises:
        ConfigError: as ``read_jsonl``, or a line has no list of messages; up to five are named.
    """
    lines, problems = _read(path)
    for number, conversation in lines:
        messages = conversation.get("messages")
        if not isinstance(messages, list) or not messages:
            problems.append((number, f": messages is {_shown(messages)}; expected a list of messages"))
    _raise_all(path, problems)
    return [conversation for _, conversation in lines]


def _repeated_id(number: int, row: Mapping[str, Any], seen: dict[Any, tuple[int, bytes]]) -> str | None:
    """Copies of a row are a way to repeat it; two rows of one name are a mistake, and would be one in every result."""
    name = row.get("id")
    if name is None:
        return None
    if not isinstance(name, str | int):
        return f"id is {_shown(name)}; expected text or a whole number"
    content = orjson.dumps({key: row[key] for key in sorted(row) if not key.startswith("_")})
    first, known = seen.setdefault(name, (number, content))
    if known == content:
        return None
    return f"id {name!r} is also that of line {first}, which is another row; ids have to differ"


def first_prompt(row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of the first model call of a checked row."""
    params = row["responses_create_params"]
    return chat_messages(params["input"], params.get("instructions")), chat_tools(params.get("tools") or ()) or None


def rows_beyond_context(rows: Sequence[Row], lengths: Sequence[int | str], limit: int) -> Iterator[str]:
    """Rows whose first prompt leaves no room for a token of an answer, or that the template cannot render.

    Args:
        rows: checked ones.
        lengths: for each row the tokens of its ``first_prompt``, or why the template cannot render it.
        limit: ``policy.max_total_sequence_length``, tokens of prompt and answer together.

    Returns:
        A sentence each for the first five, and one that counts the others.
    """
    found = [index for index, length in enumerate(lengths) if isinstance(length, str) or length >= limit]
    for index in found[:_SHOWN]:
        name, length = rows[index].get("id"), lengths[index]
        if not isinstance(length, str):
            length = f"its first prompt has {length} tokens; policy.max_total_sequence_length is {limit}"
        yield f"row {index + 1}{'' if name is None else f' (id {name!r})'}: {length}"
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} of {len(rows)} rows more"


def check_row(row: Mapping[str, Any], tools: Mapping[str, Collection[Mapping[str, Any]] | None]) -> str | None:
    """What is wrong with a row, or None."""
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return f"responses_create_params is {_shown(params)}; expected an object with 'input'"
    problem = _check_input(params.get("input"))
    if problem is not None:
        return f"responses_create_params.{problem}"
    limit = params.get("max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        return f"responses_create_params.max_output_tokens is {_shown(limit)}; expected a whole number of at least 1"
    metadata = params.get("metadata") or {}
    for key in ("chat_template_kwargs", "extra_body"):
        if isinstance(metadata, dict) and metadata.get(key) not in (None, "", "{}"):
            return f"responses_create_params.metadata.{key} is not supported; set it in the recipe for all rows"
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    if not isinstance(name, str):
        return f"agent_ref is {_shown(agent)}; expected an object with 'name'"
    if name not in tools:
        return f"agent_ref.name '{name}' is not an environment of this run{nearest(name, tools)}"
    return _check_tools(params.get("tools"), name, tools[name])


def _check_input(value: Any) -> str | None:
    if isinstance(value, str):
        return None if value else "input is empty"
    if not isinstance(value, list) or not value:
        return f"input is {_shown(value)}; expected text or a list of messages"
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            return f"{where} is {_shown(item)}; expected a message"
        kind = item.get("type", "message")
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }.get(kind)
        if needed is None:
            return f"{where}.type is {_shown(kind)}; expected message, reasoning, function_call or function_call_output"
        for key in needed:
            if key != "content" and not isinstance(item.get(key), str):
                return f"{where}.{key} is {_shown(item.get(key))}; expected text"
        if kind == "message":
            if item["role"] not in _ROLES:
                return f"{where}.role is {_shown(item['role'])}; expected one of {', '.join(_ROLES)}"
            content = item.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                return f"{where}.content is {_shown(content)}; expected text or a list of text parts"
    return None


def _check_tools(value: Any, name: str, own: Collection[Mapping[str, Any]] | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list):
        return f"responses_create_params.tools is {_shown(value)}; expected a list"
    for index, tool in enumerate(value):
        where = f"responses_create_params.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            return f"{where} is {_shown(tool)}; expected a flat function tool with 'type': 'function' and 'name'"
        known = None if own is None else [entry["name"] for entry in own]
        if known is not None and tool["name"] not in known:
            return f"{where}: environment '{name}' has no tool '{tool['name']}'{nearest(tool['name'], known)}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _raise_all(path: Path, problems: list[tuple[int, str]]) -> None:
    if not problems:
        return
    said = [f"line {number}{'' if text[0] == ':' else ' '}{text}" for number, text in sorted(problems)[:_SHOWN]]
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise ConfigError(f"{path}, {'; '.join(said)}{more}")
