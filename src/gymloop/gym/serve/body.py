"""What a request may carry: JSON of a bounded size that arrives in a bounded time, checked as far as it is read here.

A row is an object with ``responses_create_params``; whatever else it holds is the environment's own. The items of
``response.output`` have the fields by which an environment reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from gymloop.errors import GymloopError
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.items import chat_messages, chat_tools
from gymloop.gym.serve.refusal import Refusal, malformed

_FIELDS = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str},
}
"""By the item's type: fields that environments rely on."""


async def read_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body's JSON object; an empty body is an empty one.

    Raises:
        Refusal: 413, 408 or 422.
        ClientDisconnect: of starlette, the client went away before the body's end.
    """
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise Refusal(408, f"the request body did not arrive within {timeout_s:g} s") from None
    if not raw.strip():
        return {}
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise malformed([error.pos], f"the body is not JSON: {error.msg}", "json_invalid") from error
    if not isinstance(value, dict):
        raise malformed([], f"the body is a JSON {_kind(value)}; expected an object", "dict_type")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = Refusal(413, f"the request body is larger than {max_bytes} bytes, the most this server takes")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def check_seed(row: Mapping[str, Any]) -> None:
    """Refuse a seed that is no integer.

    Raises:
        Refusal: 422.
    """
    seed = row.get(ROLLOUT_SEED, 0)
    if type(seed) is not int:
        raise malformed([ROLLOUT_SEED], f"expected an integer, got {_shown(seed)}", "int_type")


def check_params(body: Mapping[str, Any], place: tuple[str, ...] = ()) -> dict[str, Any]:
    """``responses_create_params`` of a row, an object.

    Raises:
        Refusal: 422.
    """
    key = "responses_create_params"
    if key not in body:
        raise malformed([*place, key], "Field required", "missing")
    params = body[key]
    if not isinstance(params, dict):
        raise malformed([*place, key], f"expected an object, got {_shown(params)}", "dict_type")
    if "input" not in params:
        raise malformed([*place, key, "input"], "Field required", "missing")
    return params


def check_row(row: Mapping[str, Any], place: tuple[str, ...] = ()) -> None:
    """Refuse what an agent could not play.

    Raises:
        Refusal: 422.
    """
    check_seed(row)
    params, key = check_params(row, place), "responses_create_params"
    try:
        messages = chat_messages(params["input"], params.get("instructions"))
        chat_tools(params.get("tools") or ())
        names = [tool["name"] for tool in params.get("tools") or ()]
    except (GymloopError, KeyError, TypeError, AttributeError) as error:
        why = f"{error}" if isinstance(error, GymloopError) else f"{type(error).__name__}: {error}"
        raise malformed([*place, key], f"input or tools cannot be read: {why}") from error
    if not messages:
        raise malformed([*place, key, "input"], "expected at least one message, got none")
    if not all(isinstance(name, str) for name in names):
        raise malformed([*place, key, "tools"], "expected tools with a name", "string_type")
    limit = params.get(name := "max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise malformed([*place, key, name], f"expected a whole number above 0, got {_shown(limit)}", "int_type")


def read_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """``response`` of a request to ``/verify``, each item with its ``type``.

    Raises:
        Refusal: 422.
    """
    if "response" not in body:
        raise malformed(["response"], "Field required", "missing")
    response = body["response"]
    if not isinstance(response, dict):
        raise malformed(["response"], f"expected an object, got {_shown(response)}", "dict_type")
    if not isinstance(output := response.get("output"), list):
        raise malformed(["response", "output"], f"expected a list of items, got {_shown(output)}", "list_type")
    items = [_item(item, ("response", "output", index)) for index, item in enumerate(output)]
    return {**response, "output": items}


def _item(item: Any, place: tuple[str | int, ...]) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise malformed(place, f"expected an object, got {_shown(item)}", "dict_type")
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise malformed([*place, "type"], f"expected text, got {_shown(kind)}", "string_type")
    for name, expected in _FIELDS.get(kind, {}).items():
        if not isinstance(item.get(name), expected):
            raise malformed([*place, name], f"expected text, got {_shown(item.get(name))}", "string_type")
    if kind == "message":
        content = item.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list) or not all(_is_part(part) for part in parts):
            raise malformed([*place, "content"], "expected text or a list of text parts", "string_type")
    return item if "type" in item else {"type": kind, **item}


def _is_part(part: Any) -> bool:
    """A refusal is a part with ``refusal`` instead of ``text``."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _kind(value: Any) -> str:
    return {"list": "array", "str": "string", "NoneType": "null", "bool": "boolean"}.get(type(value).__name__, "number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
