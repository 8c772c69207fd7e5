"""What a request to ``/v1/chat/completions`` may ask, and the fields that other routes share with it.

Every field is read, known to change nothing, held to the one thing that this server does, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymloop.serving.fields import Fields, Form, objects, positive, typed
from gymloop.serving.guard import SURFACE, Wish, read_wish
from gymloop.serving.refusal import ApiError, token_ids
from gymloop.serving.turn import Terms

INERT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # a wish to the model; what it wrote is shown as it is
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields that common clients send to every route and that change nothing here."""
TEXT_ONLY: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (False,),  # text shows every token but the end token
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
}
TEMPLATE_ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "reasoning_effort": (),
}
PROMPT_FIELDS = frozenset(
    {
        "model",
        "messages",
        "tools",
        "required_prefix_token_ids",
        "return_token_provenance",
        "chat_template_kwargs",
    }
)
FORM = Form(
    reads=PROMPT_FIELDS
    | {
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "stream",
        "stream_options",
    },
    inert=INERT,
    only={
        **TEXT_ONLY,
        **TEMPLATE_ONLY,
        "echo": (False,),
        "modalities": (["text"],),
        "audio": (),
        "functions": ([],),
        "verbosity": (),
        "web_search_options": (),
    },
)
_STREAM_OPTIONS = Form(
    frozenset({"include_usage"}), only={"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is made of.

    Attributes:
        messages: objects; their inner shape is checked when they are rendered.
        tools: OpenAI function tools.
        prefix_ids: exact ids that the prompt must begin with, when the client gave them itself.
        provenance: tell which tokens of the prompt are text of messages.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    prefix_ids: tuple[int, ...] | None
    provenance: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request.

    Attributes:
        max_tokens: tokens to sample at most; None leaves it to the server.
        parse_tools: False for ``tool_choice: "none"``.
        logprobs: fill ``choices[].logprobs``; ``tokens_as_ids`` writes its tokens as ``token_id:<int>``.
        return_token_ids: also give ids as vLLM does, ``prompt_token_ids`` on top and ``token_ids`` in the choice.
        include_usage: end a stream with a chunk of token counts.
    """

    conversation: Conversation
    wish: Wish
    max_tokens: int | None
    parse_tools: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    tokens_as_ids: bool
    return_token_ids: bool


def read_chat(body: Any, terms: Terms) -> ChatRequest:
    """Check the body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    given = FORM.read(body, SURFACE)
    terms.check_model(given)
    wish = read_wish(given, terms.profile, terms.vocab_size, terms.limits)
    return ChatRequest(
        conversation=read_conversation(given, terms),
        wish=wish,
        max_tokens=positive(given, "max_completion_tokens", "max_tokens"),  # as in the OpenAI API, the newer name wins
        parse_tools=given.get("tool_choice") != "none",
        stream=typed(given, "stream", bool, False),
        include_usage=read_include_usage(given),
        logprobs=typed(given, "logprobs", bool, False),
        tokens_as_ids=typed(given, "return_tokens_as_token_ids", bool, False),
        return_token_ids=typed(given, "return_token_ids", bool, False),
    )


def read_conversation(given: Fields, terms: Terms) -> Conversation:
    """The fields that make a prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    terms.check_template_kwargs(given)
    return Conversation(
        objects(given, "messages", terms.limits.max_messages),
        _tools(given, terms.limits.max_tools),
        token_ids(given, "required_prefix_token_ids", terms.vocab_size),
        typed(given, "return_token_provenance", bool, False),
    )


def read_include_usage(given: Fields) -> bool:
    """``stream_options.include_usage``.

    Raises:
        ApiError: 400: the options have another field, or go with a request that does not stream.
    """
    options = typed(given, "stream_options", dict, {})
    if options and not given.get("stream"):
        raise ApiError(400, "invalid_value", "stream_options is only for a request with stream true", "stream_options")
    return typed(_STREAM_OPTIONS.read(options, where="stream_options."), "include_usage", bool, False)


def _tools(given: Fields, limit: int) -> list[Mapping[str, Any]]:
    if not given.get("tools"):
        return []
    tools = objects(given, "tools", limit)
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            message = (
                f'tools[{index}] has no function.name; expected {{"type": "function", "function": {{"name": ...}}}}'
            )
            raise ApiError(400, "invalid_value", message, f"tools[{index}]")
    return tools
