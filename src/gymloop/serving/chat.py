"""``/v1/chat/completions``: what a request may ask and what the reply says, whole or in chunks.

The reply is the OpenAI shape with the tokens in it. A streamed reply says the same as a whole one: its deltas, joined,
are the message, and the token bundle comes with the final chunk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.serving.call import Piece, Said
from gymloop.serving.fields import Fields, Form, objects, positive, typed
from gymloop.serving.guard import SURFACE, Wish, read_wish
from gymloop.serving.refusal import ApiError, token_ids
from gymloop.serving.turn import Terms, Turn, finish_reason

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import Reply
    from gymloop.tokens.tool_calls import ToolCall

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


def completion(request_id: str, model_name: str, request: ChatRequest, turn: Turn, said: Sequence[Said]) -> Any:
    """The body of a chat completion.

    A turn that the token limit cut is ``length`` and shows no tool call, even where a whole one stands in it: the model
    had not finished. ``new_segment`` is true where the history has an assistant turn that the prompt does not continue.
    """
    body = {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [_choice(index, request, turn, one) for index, one in enumerate(said)],
        "usage": usage(turn, said),
    }
    return body | ({"prompt_token_ids": turn.prompt_json} if request.return_token_ids else {})


def _choice(index: int, request: ChatRequest, turn: Turn, said: Said) -> dict[str, Any]:
    reply, sample = turn.read(said), said.sample
    logprobs = None
    if request.logprobs:
        logprobs = {"content": token_logprobs(turn.renderer, sample.token_ids, sample.logprobs, request.tokens_as_ids)}
    choice = {
        "index": index,
        "message": message_of(reply) | turn.token_fields(sample),
        "finish_reason": finish_reason(sample, bool(reply.tool_calls)),
        "logprobs": logprobs,
        **turn.facts(sample, reply.malformed),
    }
    return choice | ({"token_ids": sample.token_ids} if request.return_token_ids else {})


def message_of(reply: Reply) -> dict[str, Any]:
    """A reply as a chat message. Reasoning has two names among clients, and both are given."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message |= dict.fromkeys(("reasoning_content", "reasoning"), reply.reasoning)
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [chat_call(call) for call in reply.tool_calls]
    return message


def chat_call(call: ToolCall) -> dict[str, Any]:
    """One entry of ``tool_calls``."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(turn: Turn, said: Sequence[Said]) -> dict[str, int]:
    """Token counts; a prompt counts once, however many samples it has."""
    counts = len(turn.prompt.ids), sum(len(one.sample.token_ids) for one in said)
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def token_logprobs(
    renderer: Renderer, ids: Sequence[int], logprobs: Sequence[float], as_ids: bool
) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``: the sampled tokens only."""
    content = []
    for index, logprob in zip(ids, logprobs, strict=True):
        token = f"token_id:{index}" if as_ids else renderer.decode((index,))
        content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return content


class ChatChunks:
    """The chunks of a streamed reply."""

    def __init__(self, request_id: str, model_name: str, request: ChatRequest, turn: Turn):
        self._request = request
        self._turn = turn
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model_name,
        }
        self._streams = [turn.stream() for _ in range(request.wish.n)]
        self._begun: set[int] = set()
        self._untold: list[list[dict[str, Any]]] = [[] for _ in range(request.wish.n)]  # logprobs
        self._said: list[Said] = []

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks that tell ``piece``; the first of a choice gives the role, the last its end and its tokens."""
        index, chunks = piece.index, []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, told=False))
            if self._request.return_token_ids:
                chunks[0]["prompt_token_ids"] = self._turn.prompt_json
        if self._request.logprobs:
            self._untold[index] += token_logprobs(
                self._turn.renderer, piece.token_ids, piece.logprobs, self._request.tokens_as_ids
            )
        deltas = [(delta.kind, delta.text) for delta in self._streams[index].feed(piece.text)]
        if piece.said is None:
            return chunks + [self._chunk(index, _delta(*delta)) for delta in deltas]
        self._said.append(piece.said)
        sample = piece.said.sample
        rest = self._streams[index].end(self._turn.shows_calls(sample))
        deltas += [("reasoning", rest.reasoning or ""), ("content", rest.content)]
        chunks += [self._chunk(index, _delta(kind, text)) for kind, text in deltas if text]
        for place, call in enumerate(rest.tool_calls):
            whole = chat_call(call)
            arguments = whole["function"].pop("arguments")
            whole["function"]["arguments"] = ""
            chunks.append(self._chunk(index, {"tool_calls": [{"index": place, **whole}]}))
            chunks.append(self._chunk(index, {"tool_calls": [{"index": place, "function": {"arguments": arguments}}]}))
        last = self._chunk(index, self._turn.token_fields(sample), finish_reason(sample, bool(rest.tool_calls)))
        last["choices"][0] |= self._turn.facts(sample, rest.malformed)
        if self._request.return_token_ids:
            last["choices"][0]["token_ids"] = sample.token_ids
        return [*chunks, last]

    def closing(self) -> list[dict[str, Any]]:
        """What follows the last choice's end."""
        counts = {"choices": [], "usage": usage(self._turn, self._said)}
        return [self._head | counts] if self._request.include_usage else []

    def failure(self, refusal: ApiError) -> dict[str, Any]:
        """What is told when the stream cannot go on."""
        return refusal.body

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, told: bool = True) -> dict[str, Any]:
        logprobs = None
        if told and self._untold[index]:
            logprobs, self._untold[index] = {"content": self._untold[index]}, []
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._head | {"choices": [choice]} | ({"usage": None} if self._request.include_usage else {})


def _delta(kind: str, text: str) -> dict[str, str]:
    return {"content": text} if kind == "content" else {"reasoning_content": text, "reasoning": text}
