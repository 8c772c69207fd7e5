"""Responses items and chat messages say the same conversation; these functions translate and nothing else.

One model call is one assistant message, and one run of items: reasoning, then text, then every function call. Items of
a run join one message; a run ends with the item that carries the token fields, or with an item that is not the model's.
Chat to items and back gives an equal message.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from gymloop.serving.fields import kind_of
from gymloop.serving.refusal import ApiError
from gymloop.tokens.conversation import TOKEN_FIELDS

Item = Mapping[str, Any]
Message = dict[str, Any]
_ROLES = ("user", "system", "developer")


def output_items(message: Mapping[str, Any], status: str) -> list[dict[str, Any]]:
    """An assistant message as output items; its token fields go to the last. A silent message is one empty item."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content") is not None:
        items.append(reasoning_item(new_id("rs"), message["reasoning_content"], status))
    calls = message.get("tool_calls") or []
    if message.get("content") or not (items or calls):
        items.append(message_item(new_id("msg"), message.get("content") or "", status))
    for call in calls:
        function = call["function"]
        items.append(call_item(new_id("fc"), call["id"], function["name"], function["arguments"], status))
    items[-1] |= {name: message[name] for name in TOKEN_FIELDS if name in message}
    return items


def new_id(kind: str) -> str:
    """An id that no other item has."""
    return f"{kind}_{uuid.uuid4().hex}"


def reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Reasoning as an item; None is an item whose text is still to come."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}


def message_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Text as an item; None is an item whose text is still to come."""
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def text_part(text: str) -> dict[str, Any]:
    """The content of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """A function call as an item."""
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def chat_messages(value: Any, instructions: str | None, limit: int) -> list[Message]:
    """The input of a Responses request as chat messages.

    Args:
        value: field ``input``.
        instructions: become the system message in front.
        limit: items at most.

    Raises:
        ApiError: 400, naming the item.
    """
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ApiError(400, "invalid_type", "input must be text or a list of items, at least one", "input")
    if len(value) > limit:
        raise ApiError(400, "too_many", f"input has {len(value)} items; this server takes {limit} at most", "input")
    open_turn = False  # the last message is an assistant's, and further items of its run join it
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
            open_turn = False
        elif kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            if role not in _ROLES:
                message = f"{where}.role is {role!r}; expected one of {', '.join(_ROLES)} or assistant"
                raise ApiError(400, "invalid_value", message, f"{where}.role")
            messages.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
            open_turn = False
        else:
            if not open_turn:
                messages.append({"role": "assistant", "content": ""})
            _join(messages[-1], item, kind, where)
            carried = {name: item[name] for name in TOKEN_FIELDS if item.get(name) is not None}
            messages[-1] |= carried
            open_turn = not carried
    return messages


def _join(message: Message, item: Item, kind: Any, where: str) -> None:
    match kind:
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            said = _text(parts, f"{where}.content")
            message["reasoning_content"] = message.get("reasoning_content", "") + said
        case "message":
            message["content"] += _text(item.get("content"), f"{where}.content")
        case "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        case _:
            known = "message, reasoning, function_call or function_call_output"
            raise ApiError(400, "unsupported_item", f"{where} has type {kind!r}; expected {known}", f"{where}.type")


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, "invalid_type", f"{where}.{name} is {kind_of(value)}; expected text", f"{where}.{name}")
    return value


def _text(value: Any, where: str) -> str:
    """Text, or the joined text of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, "invalid_type", f"{where} is {kind_of(value)}; expected text or a list of parts", where)
    texts = []
    for part in value:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise ApiError(400, "unsupported_item", f"{where} has a part of type {kind!r}; only text is known", where)
        texts.append(text)
    return "".join(texts)
