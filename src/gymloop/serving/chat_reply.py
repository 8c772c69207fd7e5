"""What ``/v1/chat/completions`` says, whole or in chunks: the OpenAI shape with the tokens in it.

A streamed reply says the same as a whole one: its deltas, joined, are the message, and the token bundle comes with the
final chunk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymloop.serving.call import Piece, Said
from gymloop.serving.chat_request import ChatRequest
from gymloop.serving.refusal import ApiError
from gymloop.serving.turn import Turn, finish_reason

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import Reply
    from gymloop.tokens.tool_calls import ToolCall


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
