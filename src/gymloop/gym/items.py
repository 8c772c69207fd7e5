"""A conversation has two spellings, Responses items and chat messages; these functions translate and nothing else.

Environments and rows speak items. The generation server speaks messages. One model call is one assistant message,
however many items it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymloop.errors import DataError

Item = Mapping[str, Any]
Message = dict[str, Any]


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flat function tools as chat tools; ``strict`` is dropped, since decoding is never constrained."""
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: tool[key] for key in keys if key in tool}} for tool in tools]


def chat_messages(value: str | Sequence[Item], instructions: str | None = None) -> list[Message]:
    """The input of a row as chat messages.

    Raises:
        DataError: an item has no counterpart in chat.
    """
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    open_turn = False  # the last message is an assistant's and further items of its turn join it
    for index, item in enumerate(value):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            open_turn = False
            continue
        if kind == "message" and item.get("role") != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": text_of(item)})
            open_turn = False
            continue
        if kind not in ("reasoning", "message", "function_call"):
            expected = "message, reasoning, function_call or function_call_output"
            raise DataError(f"input[{index}] has type '{kind}'; expected {expected}")
        if not open_turn:
            messages.append({"role": "assistant", "content": ""})
            open_turn = True
        if kind == "reasoning":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + _reasoning_of(item)
        elif kind == "message":
            messages[-1]["content"] += text_of(item)
        else:
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(chat_call(item["call_id"], item["name"], item["arguments"]))
    return messages


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """One entry of an assistant message's ``tool_calls``; ``arguments`` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(item: Item) -> str:
    """The text of a message item, whose content is text or a list of text parts."""
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _reasoning_of(item: Item) -> str:
    """The text of a reasoning item: its full content where it has one, else its summary."""
    return "".join(part["text"] for part in item.get("content") or item.get("summary") or ())


def reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    """An assistant's reasoning as an output item."""
    return {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": text}]}


def message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """An assistant's text as an output item."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def call_item(item_id: str, call: Mapping[str, Any], status: str) -> dict[str, Any]:
    """A chat tool call as an output item."""
    function = call["function"]
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": status,
    }


def output_item(call_id: str, text: str) -> dict[str, Any]:
    """A tool's result as an item."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def final_text(response: Mapping[str, Any]) -> str:
    """The assistant message that ends the conversation; empty when it ends in a tool call or its result."""
    output = response["output"]
    return text_of(output[-1]) if output and output[-1]["type"] == "message" else ""
