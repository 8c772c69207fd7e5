"""``/v1/responses``: a chat request in items, and its reply in items. Nothing is stored: the client sends the history.

The last output item of a reply carries the token bundle. A client that sends the items back unchanged continues exactly
those tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymloop.serving.call import Said
from gymloop.serving.chat_reply import message_of, usage
from gymloop.serving.chat_request import INERT, TEMPLATE_ONLY, TEXT_ONLY, ChatRequest, Conversation
from gymloop.serving.fields import Fields, Form, objects, positive, typed
from gymloop.serving.guard import SURFACE, Wish, check_off, read_wish
from gymloop.serving.refusal import ApiError, token_ids
from gymloop.serving.response_items import chat_messages, output_items
from gymloop.serving.turn import Terms, Turn
from gymloop.tokens.conversation import MAX_DEPTH, nested_beyond

FORM = Form(
    reads=frozenset(
        {
            "model",
            "input",
            "instructions",
            "tools",
            "text",
            "reasoning",
            "include",
            "metadata",
            "seed",
            "max_output_tokens",
            "required_prefix_token_ids",
            "chat_template_kwargs",
            "stream",
            "stream_options",
        }
    ),
    inert=INERT,
    only={
        **{name: values for name, values in TEXT_ONLY.items() if name != "include_reasoning"},
        **TEMPLATE_ONLY,
        "previous_response_id": (),  # there is no server-side session
        "conversation": (),
        "background": (False,),
        "truncation": ("disabled",),
        "prompt": (),
        "context_management": (),
        "max_tool_calls": (),
    },
)
_INCLUDE = {"reasoning.encrypted_content"}  # reasoning is in the reply as plain text, nothing is encrypted
_TEXT = Form(reads=frozenset({"format"}), only={"verbosity": ("medium",)})
_REASONING = Form(reads=frozenset(), inert=frozenset({"summary", "generate_summary"}), only={"effort": ()})


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A checked request: its chat form, and what the reply repeats of it."""

    chat: ChatRequest
    echo: Mapping[str, Any]


def read_responses(body: Any, terms: Terms) -> ResponsesRequest:
    """Check the body of ``/v1/responses``.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    given = FORM.read(body, SURFACE)
    terms.check_model(given)
    terms.check_template_kwargs(given)
    text = _TEXT.read(typed(given, "text", dict, {}), where="text.")
    if "format" in text:
        check_off("text.format", text["format"], ({"type": "text"},), locked=terms.profile is not None)
    _REASONING.read(typed(given, "reasoning", dict, {}), where="reasoning.")
    wish = _wish(given, terms)
    _check_include(given)
    instructions = typed(given, "instructions", str)
    metadata = typed(given, "metadata", dict, {})
    if nested_beyond(metadata, MAX_DEPTH):
        message = f"metadata is nested deeper than {MAX_DEPTH} levels; a reply could not repeat it"
        raise ApiError(400, "invalid_value", message, "metadata")
    conversation = Conversation(
        chat_messages(given.get("input"), instructions, terms.limits.max_messages),
        _tools(given, terms.limits.max_tools),
        token_ids(given, "required_prefix_token_ids", terms.vocab_size),
    )
    options = typed(given, "stream_options", dict, {})
    Form(frozenset(), only={"include_obfuscation": (False,)}).read(options, where="stream_options.")
    chat = ChatRequest(
        conversation=conversation,
        wish=wish,
        max_tokens=positive(given, "max_output_tokens"),
        parse_tools=given.get("tool_choice") != "none",
        stream=typed(given, "stream", bool, False),
        include_usage=True,
        logprobs=False,
        tokens_as_ids=False,
        return_token_ids=False,
    )
    echo = {
        "instructions": instructions,
        "tools": given.get("tools", []),
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": typed(given, "parallel_tool_calls", bool, True),
        "metadata": metadata,
        "temperature": wish.temperature,
        "top_p": wish.top_p,
        "max_output_tokens": chat.max_tokens,
        "truncation": "disabled",
        "previous_response_id": None,
        "reasoning": given.get("reasoning"),
        "text": {"format": {"type": "text"}},
        "store": False,
        "background": False,
    }
    return ResponsesRequest(chat, echo)


def _wish(given: Fields, terms: Terms) -> Wish:
    wish = read_wish(given, terms.profile, terms.vocab_size, terms.limits)
    if wish.n != 1:
        raise ApiError(400, "unsupported_field", f"n is {wish.n}; a response is one sample", "n")
    return wish


def _check_include(given: Fields) -> None:
    for name in typed(given, "include", list, []):
        if name not in _INCLUDE:
            known = ", ".join(sorted(_INCLUDE))
            raise ApiError(400, "unsupported_field", f"include has {name!r}; only {known} is supported", "include")


def _tools(given: Fields, limit: int) -> list[dict[str, Any]]:
    """Flat function tools as chat tools; ``strict`` is dropped, since decoding is never constrained."""
    if not given.get("tools"):
        return []
    tools = []
    for index, tool in enumerate(objects(given, "tools", limit)):
        where = f"tools[{index}]"
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            message = f'{where} is no function; expected {{"type": "function", "name": ..., "parameters": ...}}'
            raise ApiError(400, "invalid_value", message, where)
        keys = ("name", "description", "parameters")
        tools.append({"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}})
    return tools


def response_body(
    response_id: str, model_name: str, request: ResponsesRequest, turn: Turn, said: Sequence[Said]
) -> dict[str, Any]:
    """The body of a finished response. A turn that the limit cut is ``incomplete``, and shows no call."""
    (one,) = said
    reply = turn.read(one)
    message = message_of(reply) | turn.token_fields(one.sample)
    items = output_items(message, status_of(one))
    return finished(response_head(response_id, model_name, request), turn, one, items, reply.malformed)


def response_head(response_id: str, model_name: str, request: ResponsesRequest) -> dict[str, Any]:
    """A response that has begun."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model_name,
        "output": [],
        "usage": None,
        **request.echo,
    }


def finished(
    head: Mapping[str, Any], turn: Turn, said: Said, items: Sequence[Mapping[str, Any]], malformed: int
) -> dict[str, Any]:
    """A response that has ended."""
    counts = usage(turn, [said])
    status = status_of(said)
    return {
        **head,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
        **turn.facts(said.sample, malformed),
    }


def status_of(said: Said) -> str:
    """``completed``, or ``incomplete`` for a turn that was cut."""
    return "completed" if said.sample.finish_reason == "stop" else "incomplete"
