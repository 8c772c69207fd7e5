"""``/v1/completions``: a prompt as it is, text or token ids, is continued; no template, no calls, no reasoning.

Control tokens that the prompt's text spells are control tokens: here the client writes the whole prompt itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.serving.call import Piece, Said
from gymloop.serving.chat_reply import usage
from gymloop.serving.chat_request import INERT, TEXT_ONLY, read_include_usage
from gymloop.serving.fields import Fields, Form, positive, show, typed
from gymloop.serving.guard import SURFACE, Wish, read_wish
from gymloop.serving.refusal import ApiError, token_ids
from gymloop.serving.turn import Terms, Turn

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

DEFAULT_MAX_TOKENS = 16
"""Where neither the request nor the server sets a limit; the OpenAI API's."""
FORM = Form(
    reads=frozenset(
        {
            "model",
            "prompt",
            "seed",
            "max_tokens",
            "add_special_tokens",
            "return_tokens_as_token_ids",
            "return_token_ids",
            "stream",
            "stream_options",
        }
    ),
    inert=INERT,
    # The engine gives the logprob of the sampled token only, and none of the prompt's.
    only={**TEXT_ONLY, "logprobs": (0,), "echo": (False,), "suffix": ("",), "prompt_embeds": ()},
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request; see ``ChatRequest`` for the fields of the same name."""

    prompt_ids: tuple[int, ...]
    wish: Wish
    max_tokens: int
    stream: bool
    include_usage: bool
    logprobs: bool
    tokens_as_ids: bool
    return_token_ids: bool


def read_completion(body: Any, terms: Terms, renderer: Renderer, default_max_tokens: int | None) -> CompletionRequest:
    """Check the body of ``/v1/completions``.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    given = FORM.read(body, SURFACE)
    terms.check_model(given)
    wish = read_wish(given, terms.profile, terms.vocab_size, terms.limits)
    ids = read_prompt(given, terms, renderer)
    if not ids:
        raise ApiError(400, "invalid_value", "prompt is empty; at least one token is needed to continue", "prompt")
    return CompletionRequest(
        prompt_ids=ids,
        wish=wish,
        max_tokens=positive(given, "max_tokens") or default_max_tokens or DEFAULT_MAX_TOKENS,
        stream=typed(given, "stream", bool, False),
        include_usage=read_include_usage(given),
        logprobs="logprobs" in given,
        tokens_as_ids=typed(given, "return_tokens_as_token_ids", bool, False),
        return_token_ids=typed(given, "return_token_ids", bool, False),
    )


def read_prompt(given: Fields, terms: Terms, renderer: Renderer) -> tuple[int, ...]:
    """Field ``prompt`` as ids: text, ids, or a list of one of these.

    Raises:
        ApiError: 400.
    """
    value = given.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return renderer.tokenize(value, typed(given, "add_special_tokens", bool, True))
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise ApiError(400, "unsupported_field", f"prompt has {len(value)} prompts; send one a request", "prompt")
    ids = token_ids({"prompt": value}, "prompt", terms.vocab_size)
    if ids is None:
        raise ApiError(400, "invalid_type", f"prompt is {show(value)}; expected text or a list of token ids", "prompt")
    return ids


def text_completion(
    request_id: str, model_name: str, request: CompletionRequest, turn: Turn, said: Sequence[Said]
) -> dict[str, Any]:
    """The body of a completion."""
    choices = [
        _choice(index, request, turn, one.text, one.sample.token_ids, one.sample.logprobs, 0)
        | _ending(request, turn, one)
        for index, one in enumerate(said)
    ]
    return _head(request_id, model_name) | {"choices": choices, "usage": usage(turn, said)}


def _head(request_id: str, model_name: str) -> dict[str, Any]:
    return {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model_name}


def _choice(
    index: int,
    request: CompletionRequest,
    turn: Turn,
    text: str,
    ids: Sequence[int],
    logprobs: Sequence[float],
    offset: int,
) -> dict[str, Any]:
    shown = None
    if request.logprobs:
        pieces = [turn.renderer.decode((token,)) for token in ids]
        offsets = [offset]
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece))
        shown = {
            "tokens": [f"token_id:{token}" for token in ids] if request.tokens_as_ids else pieces,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }
    return {"index": index, "text": text, "finish_reason": None, "logprobs": shown}


def _ending(request: CompletionRequest, turn: Turn, said: Said) -> dict[str, Any]:
    sample = said.sample
    end = {
        "finish_reason": sample.finish_reason,
        **turn.token_fields(sample),
        "weight_versions": [sample.first_version, sample.last_version],
    }
    return end | ({"token_ids": sample.token_ids} if request.return_token_ids else {})


class CompletionChunks:
    """The chunks of a streamed completion."""

    def __init__(self, request_id: str, model_name: str, request: CompletionRequest, turn: Turn):
        self._request = request
        self._turn = turn
        self._head = _head(request_id, model_name)
        self._offsets = [0] * request.wish.n
        self._untold: list[tuple[list[int], list[float]]] = [([], []) for _ in range(request.wish.n)]
        self._said: list[Said] = []

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks that tell ``piece``; the last of a choice has its end and its tokens."""
        ids, logprobs = self._untold[piece.index]
        ids += piece.token_ids
        logprobs += piece.logprobs
        if not piece.text and piece.said is None:
            return []  # half a character
        self._untold[piece.index] = ([], [])
        choice = _choice(piece.index, self._request, self._turn, piece.text, ids, logprobs, self._offsets[piece.index])
        self._offsets[piece.index] += len(piece.text)
        if piece.said is not None:
            self._said.append(piece.said)
            choice |= _ending(self._request, self._turn, piece.said)
        return [self._head | {"choices": [choice]} | ({"usage": None} if self._request.include_usage else {})]

    def closing(self) -> list[dict[str, Any]]:
        """What follows the last choice's end."""
        counts = {"choices": [], "usage": usage(self._turn, self._said)}
        return [self._head | counts] if self._request.include_usage else []

    def failure(self, refusal: ApiError) -> dict[str, Any]:
        """What is told when the stream cannot go on."""
        return refusal.body
