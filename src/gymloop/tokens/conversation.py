"""What a template may be shown: plain messages of known roles, whatever shape the client sent.

Chat templates were written for plain data: no null values, text content as one string, tool arguments as an object.
Content parts are joined here, before anything is escaped, so that two parts cannot spell a control token together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gymloop.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
Tool = Mapping[str, Any]

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""NeMo Gym's bundle: what a message carries beside its text; no template sees it."""
MAX_DEPTH = 100
"""Levels of a tool's schema and of a call's arguments; templates walk them by recursion, and the stack is finite."""


class ConversationError(DataError):
    """These messages cannot be rendered by this template."""


def normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of ``messages`` in the one shape that templates are shown.

    Raises:
        ConversationError: there is no message, a role is unknown, or content is not text.
    """
    if not messages:
        raise ConversationError("messages is empty; at least one message was expected")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ConversationError(f"{where} is {type(message).__name__}; expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ConversationError(f"{where}.role is {role!r}; expected one of {', '.join(ROLES)}")
    result: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(f"{where}.content", message.get("content")),
    }
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            result["reasoning_content"] = _text(f"{where}.reasoning_content", reasoning)
        if (calls := message.get("tool_calls")) is not None:
            if not isinstance(calls, list | tuple):
                raise ConversationError(f"{where}.tool_calls is {type(calls).__name__}; expected a list")
            if calls:
                result["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            result[key] = _text(f"{where}.{key}", message[key])
    return result


def _text(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ConversationError(f"{where} is {type(content).__name__}; expected text")
    parts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConversationError(f"{where} has a part of type {kind!r}; only text is supported")
        parts.append(text)
    return "".join(parts)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{where} has no function.name; expected {{id, type, function: {{name, arguments}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Most templates write `arguments | tojson`: given text they would quote it a second time.
        with suppress(ValueError, RecursionError):  # what the model wrote badly is shown as it is
            value = json.loads(arguments)
            if isinstance(value, dict) and not nested_beyond(value, MAX_DEPTH):
                json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair, escaped, is no text
                arguments = value
    elif nested_beyond(arguments, MAX_DEPTH):
        raise ConversationError(f"{where}.function.arguments is nested deeper than {MAX_DEPTH} levels")
    shown: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return shown | ({"id": str(call["id"])} if call.get("id") else {})


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse tools that no template can walk.

    Raises:
        ConversationError: one is nested too deeply.
    """
    for index, tool in enumerate(tools):
        if nested_beyond(tool, MAX_DEPTH):
            raise ConversationError(f"tools[{index}] is nested deeper than {MAX_DEPTH} levels")


def nested_beyond(value: Any, levels: int) -> bool:
    """Whether objects and lists stand in each other more than ``levels`` deep."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [item for item in layer if isinstance(item, Mapping | list | tuple)]
        if not layer:
            return False
        layer = [item for held in layer for item in (held.values() if isinstance(held, Mapping) else held)]
    return True


def last_assistant(messages: Sequence[Message]) -> int | None:
    """Index of the last assistant message, or None."""
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), None)
