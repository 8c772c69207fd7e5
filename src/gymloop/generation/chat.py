"""What a chat request may ask and what the reply says: the OpenAI shape, with the tokens in it.

The guard: within a run the server is locked to a sampling profile. A field that changes the distribution must be absent
or equal to the profile, else the request is refused; an absent field takes the profile's value, never the model
folder's. A field that this server does not know is refused too, for it may change the distribution.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.config.plan import SamplingProfile
from gymloop.errors import InfraError
from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.refusal import ApiError, token_ids
from gymloop.tokens.conversation import TOKEN_FIELDS
from gymloop.tokens.tool_calls import ParsedReply, parse

if TYPE_CHECKING:
    from gymloop.generation.prompt import Prompt
    from gymloop.tokens.renderer import Renderer

PROFILE_HEADER = "x-gymloop-profile"
UNCHANGED = SamplingProfile(temperature=1.0, top_p=1.0, top_k=None)
"""The model's own distribution."""


@dataclass(frozen=True, slots=True)
class SamplingProfiles:
    """The profiles of a run; ``validation`` None means that validation samples as training does."""

    train: SamplingProfile
    validation: SamplingProfile | None = None

    def select(self, mark: str | None) -> SamplingProfile:
        """The profile of a request, by its ``x-gymloop-profile`` header.

        Raises:
            ApiError: the header names no profile.
        """
        if mark in (None, "train"):
            return self.train
        if mark == "validation":
            return self.validation or self.train
        raise ApiError(400, "unknown_profile", f"{PROFILE_HEADER} is {mark!r}; expected train or validation")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request.

    Attributes:
        messages: objects; their inner shape is checked when they are rendered.
        tools: OpenAI function tools.
        prefix_ids: exact ids that the prompt must begin with, when the client gave them itself.
        max_tokens: tokens to sample at most; None leaves it to the server.
        temperature, top_p, top_k, seed: see ``Sampling``.
        parse_tools: False for ``tool_choice: "none"``.
        logprobs: fill ``choices[0].logprobs``; ``tokens_as_ids`` writes its tokens as ``token_id:<int>``.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    prefix_ids: tuple[int, ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None
    parse_tools: bool
    logprobs: bool
    tokens_as_ids: bool

    def sampling(self, room: int, stop_token_ids: tuple[int, ...], default_max_tokens: int | None) -> Sampling:
        """How to sample with ``room`` tokens left in the context."""
        wanted = self.max_tokens if self.max_tokens is not None else default_max_tokens
        limit = room if wanted is None else min(wanted, room)
        return Sampling(limit, self.temperature, self.top_p, self.top_k, stop_token_ids, self.seed)


# Fields that say nothing about the distribution. Those without effect are here because common clients send them.
_NEUTRAL = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "required_prefix_token_ids",
        "chat_template_kwargs",
        "request_id",
        "priority",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "include_reasoning",
    }
)
# Fields that must have this one value where they are given: (accepts, what was expected).
_FIXED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_p": (lambda value: value == 0, "0"),
    "typical_p": (lambda value: value == 1, "1"),
    "presence_penalty": (lambda value: value == 0, "0"),
    "frequency_penalty": (lambda value: value == 0, "0"),
    "repetition_penalty": (lambda value: value == 1, "1"),
    "length_penalty": (lambda value: value == 1, "1"),
    "no_repeat_ngram_size": (lambda value: value == 0, "0"),
    "min_tokens": (lambda value: value == 0, "0"),
    "logit_bias": (lambda value: value == {}, "no bias"),
    "bad_words": (lambda value: value == [], "none"),
    "allowed_token_ids": (lambda value: value == [], "none"),
    "logits_processors": (lambda value: value == [], "none"),
    "n": (lambda value: value == 1, "1"),
    "best_of": (lambda value: value == 1, "1"),
    "use_beam_search": (lambda value: value is False, "false"),
    "ignore_eos": (lambda value: value is False, "false"),
    "stop": (lambda value: value in ([], ""), "no stop strings"),
    "stop_token_ids": (lambda value: value == [], "no stop tokens but the model's"),
    "response_format": (lambda value: value == {"type": "text"}, '{"type": "text"}'),
    "guided_json": (lambda value: False, "no guided decoding"),
    "guided_regex": (lambda value: False, "no guided decoding"),
    "guided_choice": (lambda value: False, "no guided decoding"),
    "guided_grammar": (lambda value: False, "no guided decoding"),
    "structured_outputs": (lambda value: False, "no guided decoding"),
    "tool_choice": (lambda value: value in ("auto", "none"), "auto or none"),
}
# Fields whose other values exist elsewhere but change nothing about the distribution: (accepts, what was expected).
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stream": (lambda value: value is False, "false"),
    "top_logprobs": (lambda value: value == 0, "0"),
    "echo": (lambda value: value is False, "false"),
    "add_generation_prompt": (lambda value: value is True, "true"),
    "continue_final_message": (lambda value: value is False, "false"),
    "add_special_tokens": (lambda value: value is False, "false"),
    "mm_processor_kwargs": (lambda value: value == {}, "none"),
    "reasoning_effort": (lambda value: False, "none"),
    "modalities": (lambda value: value == ["text"], '["text"]'),
}
_SAMPLED = frozenset({"temperature", "top_p", "top_k"})
_NUMBERS = frozenset({"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "n"})
_KNOWN = _NEUTRAL | _FIXED.keys() | _UNSUPPORTED.keys() | _SAMPLED


def read_request(
    body: Any, model_name: str, profile: SamplingProfile | None, template_kwargs: Mapping[str, Any], vocab_size: int
) -> ChatRequest:
    """Check the body of ``/v1/chat/completions`` or ``/tokenize``.

    Args:
        body: decoded JSON.
        model_name: the one model that is served.
        profile: what sampling must be; None accepts any.
        template_kwargs: of the server's renderer; a request may repeat them.
        vocab_size: token ids are below it.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "invalid_type", f"the request body is {_kind(body)}; expected a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    for name in given.keys() - _KNOWN:
        near = difflib.get_close_matches(name, _KNOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ApiError(400, "unknown_field", f"{name} is not a field of this server{hint}", name)
    if given.get("model", model_name) != model_name:
        raise ApiError(404, "model_not_found", f"model {given['model']!r} is not served; {model_name!r} is", "model")
    for name, (accepts, expected) in _UNSUPPORTED.items():
        if name in given and not accepts(given[name]):
            raise ApiError(400, "unsupported_field", f"{name} is {given[name]!r}; only {expected} is supported", name)
    if given.get("chat_template_kwargs", {}) not in ({}, template_kwargs):
        message = "chat_template_kwargs differ from the run's; set policy.tokenizer.chat_template_kwargs instead"
        raise ApiError(400, "unsupported_field", message, "chat_template_kwargs")
    temperature, top_p, top_k = _guard(given, profile)
    return ChatRequest(
        messages=_objects(given, "messages"),
        tools=_tools(given),
        prefix_ids=token_ids(given, "required_prefix_token_ids", vocab_size),
        max_tokens=_max_tokens(given),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=_typed(given, "seed", int, None),
        parse_tools=given.get("tool_choice") != "none",
        logprobs=_typed(given, "logprobs", bool, False),
        tokens_as_ids=_typed(given, "return_tokens_as_token_ids", bool, False),
    )


def _guard(given: Mapping[str, Any], profile: SamplingProfile | None) -> tuple[float, float, int | None]:
    base = profile or UNCHANGED
    temperature = float(_typed(given, "temperature", float, base.temperature))
    top_p = float(_typed(given, "top_p", float, base.top_p))
    top_k = _typed(given, "top_k", int, base.top_k)
    if "top_k" in given and top_k in (-1, 0):  # both mean "all tokens" in the APIs that clients know
        top_k = None
    for name in _NUMBERS & given.keys():
        _typed(given, name, float, None)
    if profile is not None:
        for name, value in {"temperature": temperature, "top_p": top_p, "top_k": top_k}.items():
            if value != getattr(profile, name):
                raise _off_profile(name, given[name], getattr(profile, name))
    _require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "0 or more")
    _require(0 < top_p <= 1, "top_p", top_p, "a number above 0 and at most 1")
    _require(top_k is None or top_k >= 1, "top_k", top_k, "at least 1, or -1 for all")
    for name, (accepts, expected) in _FIXED.items():
        if name in given and not accepts(given[name]):
            raise _off_profile(name, given[name], expected)
    return temperature, top_p, top_k


def _off_profile(name: str, value: Any, expected: Any) -> ApiError:
    shown = "all tokens (-1)" if expected is None else expected
    message = f"{name} is {value!r}, but this server samples with {name} {shown}; leave the field out"
    return ApiError(400, "off_profile", message, name)


def _require(good: bool, name: str, value: Any, expected: str) -> None:
    if not good:
        raise ApiError(400, "invalid_value", f"{name} is {value!r}; expected {expected}", name)


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of a type; an integer passes where a float is expected, a boolean never passes as a number."""
    if name not in given:
        return default
    value = given[name]
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        expected = {float: "a number", int: "an integer", bool: "true or false"}[kind]
        raise ApiError(400, "invalid_type", f"{name} is {value!r} ({_kind(value)}); expected {expected}", name)
    return value


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    # The newer name wins where a client sends both, as in the OpenAI API.
    for name in ("max_completion_tokens", "max_tokens"):
        value = _typed(given, name, int, None)
        if value is not None:
            _require(value >= 1, name, value, "at least 1")
            return value
    return None


def _objects(given: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = given.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise ApiError(400, "invalid_type", f"{name} must be a list of objects, at least one", name)
    return value


def _tools(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not given.get("tools"):
        return []
    tools = _objects(given, "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            message = (
                f'tools[{index}] has no function.name; expected {{"type": "function", "function": {{"name": ...}}}}'
            )
            raise ApiError(400, "invalid_value", message, f"tools[{index}]")
    return tools


def _kind(value: Any) -> str:
    return {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def completion(
    request_id: str, model_name: str, request: ChatRequest, prompt: Prompt, sample: Sample, renderer: Renderer
) -> dict[str, Any]:
    """The body of a chat completion.

    A turn that the token limit cut is ``length`` and shows no tool call, even where a whole one stands in it: the model
    had not finished. ``new_segment`` is true where the history has an assistant turn that the prompt does not continue.

    Raises:
        InfraError: the engine's sample lacks a logprob or has one that is not finite.
    """
    if len(sample.token_ids) != len(sample.logprobs) or not all(map(math.isfinite, sample.logprobs)):
        raise InfraError(
            f"the engine returned {len(sample.token_ids)} tokens and {len(sample.logprobs)} logprobs, "
            "which must be as many and finite"
        )
    text = renderer.said(sample.token_ids)
    whole = sample.finish_reason == "stop" and request.parse_tools
    reply = parse(text) if whole else ParsedReply(text, (), 0)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    message |= dict(zip(TOKEN_FIELDS, (prompt.ids, sample.token_ids, sample.logprobs), strict=True))
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if reply.tool_calls else sample.finish_reason,
        "logprobs": {"content": _token_logprobs(sample, renderer, request.tokens_as_ids)} if request.logprobs else None,
        "weight_versions": [sample.first_version, sample.last_version],
        "malformed_tool_calls": reply.malformed,
        "new_segment": prompt.new_segment is not None,
        "new_segment_reason": prompt.new_segment,
    }
    counts = len(prompt.ids), len(sample.token_ids)
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [choice],
        "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
    }


def _token_logprobs(sample: Sample, renderer: Renderer, as_ids: bool) -> list[dict[str, Any]]:
    content = []
    for index, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
        token = f"token_id:{index}" if as_ids else renderer.decode((index,))
        content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return content
