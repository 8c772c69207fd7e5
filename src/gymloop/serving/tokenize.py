"""``/tokenize`` and ``/detokenize``: the ids that chat would send to the engine, and the text of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymloop.serving.chat_request import PROMPT_FIELDS, TEMPLATE_ONLY, read_conversation
from gymloop.serving.completions import read_prompt
from gymloop.serving.fields import Form, typed
from gymloop.serving.prompt import build_prompt
from gymloop.serving.refusal import ApiError, token_ids
from gymloop.serving.turn import Terms

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

CHAT_FORM = Form(reads=PROMPT_FIELDS | {"return_token_strs"}, only=TEMPLATE_ONLY)
TEXT_FORM = Form(reads=frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}))
IDS_FORM = Form(reads=frozenset({"model", "tokens"}))


def tokenize(body: Any, terms: Terms, renderer: Renderer, max_model_len: int) -> dict[str, Any]:
    """The reply to ``/tokenize``.

    Raises:
        ApiError: 400 or 404, naming the field.
        DataError: the conversation cannot be rendered.
    """
    is_text = isinstance(body, dict) and body.get("prompt") is not None and body.get("messages") is None
    given = (TEXT_FORM if is_text else CHAT_FORM).read(body)
    terms.check_model(given)
    ids: Sequence[int]
    if is_text:
        ids = read_prompt(given, terms, renderer)
    else:
        asked = read_conversation(given, terms)
        ids = build_prompt(renderer, asked.messages, asked.tools, asked.prefix_ids).ids
    strings = [renderer.decode((token,)) for token in ids] if typed(given, "return_token_strs", bool, False) else None
    return {"tokens": ids, "count": len(ids), "max_model_len": max_model_len, "token_strs": strings}


def detokenize(body: Any, terms: Terms, renderer: Renderer) -> dict[str, Any]:
    """The reply to ``/detokenize``.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    given = IDS_FORM.read(body)
    terms.check_model(given)
    ids = token_ids(given, "tokens", terms.vocab_size)
    if ids is None:
        raise ApiError(400, "invalid_type", "tokens is missing; expected a list of token ids", "tokens")
    return {"prompt": renderer.decode(ids)}
