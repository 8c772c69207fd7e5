"""One model call over HTTP: messages in, the reply and its exact tokens out, or an error that says whose fault it is.

A reply without its whole token bundle is an error: no id, logprob or version is ever made up. Every call has a
deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast, get_args
from urllib.parse import quote

import orjson

from gymloop.errors import Cause, ConfigError, DataError, InfraError
from gymloop.gym.carried import CarriedTokens
from gymloop.gym.connections import Answer, Connections, LostConnection, NoConnection, TooLarge
from gymloop.gym.deadline import retry_after_s
from gymloop.gym.items import Message
from gymloop.rollouts.trajectory import FinishReason, Turn
from gymloop.tokens.divergence import Divergence, diverge, first_difference, read_divergence
from gymloop.tokens.provenance import Run

PROFILE_HEADER = "x-gymloop-profile"
NOISE_HEADER = "x-gymloop-noise-key"
"""Names the noise of this call, ``<group>/<sample>/<turn>``, for engines whose draws are repeatable."""
Profile = Literal["train", "validation"]

_ROUTE = "/chat/completions"
_LARGEST_REPLY = 256 * 2**20
"""Bytes: the tokens of a million positions, several times over."""
_CONTEXT_CODES = {"context_length_exceeded", "prompt_too_long"}
_CONTEXT_WORDS = "maximum context length"  # vLLM's, whose code is 400
_FINISH_REASONS = get_args(FinishReason)
_BUSY = {429, 503}
_WRONG_ADDRESS = {401, 403, 404, 405}
# Rounding of a float32 log-softmax; anything above is not a log-probability.
_LOGPROB_ROUNDING = 1e-4


class ContextFull(DataError):
    """The server refused the prompt for its length instead of replying with ``finish_reason: "length"``."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One assistant message.

    Attributes:
        message: ``role``, ``content`` and perhaps ``reasoning_content`` and ``tool_calls``, as the next request sends
            it back.
        turn: its tokens.
        finish_reason: of the turn.
        new_segment: the prompt does not begin with the exact tokens of the turn before it; ``turn.divergence`` says
            why.
        malformed_tool_calls: calls that the server saw in the text and could not read.
    """

    message: Message
    turn: Turn
    finish_reason: FinishReason
    new_segment: bool
    malformed_tool_calls: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the model said nothing at all."""
        if self.turn.has_tokens:
            return not self.turn.sampled_ids
        return not (self.message["content"] or self.message.get("tool_calls"))


class ModelClient:
    """A client of one generation server, for one event loop. Use it as an async context manager.

    Args:
        base_url: such as ``http://127.0.0.1:3000/v1``.
        model: the name that the server gives the model.
        max_concurrency: connections at most.
        call_timeout_s: wall time of one call; seconds.
        ready_timeout_s: how long a server that answers 503 or 429 with ``Retry-After`` is waited for; seconds.
        provenance: ask for the provenance of prompt tokens, which costs the server a second rendering.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        max_concurrency: int,
        call_timeout_s: float,
        ready_timeout_s: float,
        provenance: bool = False,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self.url = f"{self._base_url}{_ROUTE}"
        self.model = model
        self._max_concurrency = max_concurrency
        self._call_timeout_s = call_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._provenance = provenance
        self._connections: Connections | None = None
        self._gone: str | None = None
        self.on_lost: Callable[[], None] | None = None
        """Told of every connection that was refused or lost."""
        self.on_sampled: Callable[[], None] | None = None
        """Told of every reply with sampled tokens."""

    async def __aenter__(self) -> ModelClient:
        self._connections = Connections(self._base_url, limit=self._max_concurrency, max_answer_bytes=_LARGEST_REPLY)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return 0 if self._connections is None else self._connections.open

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def abandon(self, why: str) -> None:
        """The server is gone: calls in progress and all later ones raise InfraError with ``why``."""
        self._gone = why
        await self.close()

    @contextmanager
    def lease(self, failed_at: Collection[str] = ()) -> Iterator[ModelClient]:
        """Of one server there is one to lease, whatever failed there; see ``Replicas.lease``."""
        yield self

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        previous: Turn | None = None,
        carried: CarriedTokens | None = None,
        profile: Profile = "train",
        extra: Mapping[str, Any] | None = None,
        noise_key: str | None = None,
    ) -> ChatReply:
        """Ask for one assistant message.

        Args:
            messages: the whole conversation in chat form.
            tools: chat tools.
            max_tokens: tokens to sample at most.
            previous: the turn that produced the last assistant message of ``messages``; the server continues from
                exactly its tokens.
            carried: of this conversation, the same object in each of its calls; without it every turn's tokens are
                written and read anew.
            profile: sampling profile; the server fills in its values.
            extra: further request fields, such as the sampling fields of a row.
            noise_key: see ``NOISE_HEADER``; None leaves the draw to the engine's own stream.

        Raises:
            InfraError: no reply in time, a lost connection, a 5xx, or a reply that lacks part of its tokens.
            ContextFull: the conversation is longer than the model's context.
            DataError: the server refuses this request.
            ConfigError: there is no such model or route.
        """
        body = {**(extra or {}), "model": self.model, "messages": list(messages), "max_tokens": max_tokens}
        if tools:
            body["tools"] = list(tools)
        carried = CarriedTokens() if carried is None else carried
        if previous is not None:
            carried.follow(previous)
        if self._provenance:
            body["return_token_provenance"] = True
        headers = {"content-type": "application/json"}
        if noise_key is not None:
            headers[NOISE_HEADER] = quote(noise_key)  # a group id may hold what a header may not
        if profile == "validation":
            headers[PROFILE_HEADER] = profile
        pieces = [orjson.dumps(body)]
        if previous is not None:
            pieces = [pieces[0][:-1], b',"required_prefix_token_ids":', *carried.json(), b"}"]
        answer = await self._answered(pieces, headers)
        cut = carried.cut(answer.body)
        value = parse_json(answer.body if cut is None else cut, answer.content_type, self.url)
        reply = read_reply(value, carried.ids if cut is None else (), self.url, None if cut is None else carried)
        if self.on_sampled is not None and reply.turn.sampled_ids:
            self.on_sampled()
        return reply

    async def weight_version(self) -> int:
        """The version of the weights that the engine samples with now.

        Raises:
            InfraError: no reply in time, a lost connection, a 5xx, or a reply without a version.
            ConfigError: there is no such route.
        """
        url = f"{self._base_url}/models"
        answer = await self._asked(url, self._open().request("GET", "/models", b"", self._call_timeout_s))
        if answer.status != 200:
            raise refusal(answer.status, answer.body, url)
        reply = parse_json(answer.body, answer.content_type, url)
        models = reply.get("data") if isinstance(reply, dict) else None
        card = models[0] if isinstance(models, list) and len(models) == 1 else None
        version = card.get("weight_version") if isinstance(card, dict) else None
        if type(version) is not int or version < 0:
            raise InfraError(f"{url}: has weight_version {version!r}; expected that of one model", cause="bad_reply")
        return version

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> Any:
        """The JSON value of the reply."""
        answer = await self._answered([body], headers)
        return parse_json(answer.body, answer.content_type, self.url)

    async def _answered(self, body: Sequence[bytes], headers: Mapping[str, str]) -> Answer:
        """The reply with status 200."""
        give_up = time.monotonic() + self._ready_timeout_s
        while True:  # bounded: each post has a time, and ``give_up`` ends the attempts
            answer = await self._asked(
                self.url, self._open().request("POST", _ROUTE, body, self._call_timeout_s, headers.items())
            )
            if answer.status == 200:
                return answer
            wait = retry_after_s(answer.retry_after)
            if answer.status not in _BUSY or wait is None:
                raise refusal(answer.status, answer.body, self.url)
            # Nothing was sampled, so asking again is safe. A deadline of the rollout also ends this.
            if time.monotonic() + wait > give_up:
                raise InfraError(
                    f"{self.url}: still {answer.status} after {self._ready_timeout_s:g} s: {_said(answer.body)[1]}",
                    cause="busy",
                )
            await asyncio.sleep(wait)

    async def _asked(self, url: str, request: Awaitable[Answer]) -> Answer:
        try:
            return await request  # bounded: by the call's time
        except TimeoutError as error:
            raise InfraError(f"{url}: no reply within {self._call_timeout_s:g} s", cause="timeout") from error
        except (NoConnection, LostConnection) as error:
            raise self._lost(url, error) from error
        except TooLarge as error:
            raise InfraError(f"{url}: {error}", cause="bad_reply") from error

    def _open(self) -> Connections:
        if self._gone is not None:
            raise InfraError(f"{self.url}: {self._gone}", cause="disconnect")
        if self._connections is None:
            raise RuntimeError("the model client is not open; use it as 'async with ModelClient(...)'")
        return self._connections

    def _lost(self, url: str, error: OSError) -> InfraError:
        if self._gone is not None:
            return InfraError(f"{url}: {self._gone}", cause="disconnect")
        if self.on_lost is not None:
            self.on_lost()
        what = "no connection" if isinstance(error, NoConnection) else "lost the connection"
        return InfraError(f"{url}: {what}: {error}", cause="disconnect")


def refusal(status: int, raw: bytes, url: str) -> Exception:
    """The error that a status other than 200 stands for."""
    code, text = _said(raw)
    said = f"{url}: {status}{f' {code}' if code else ''}: {text}"
    if status >= 500 or status < 400 or status in _BUSY or status == 408:
        return InfraError(said, cause="busy" if status in _BUSY else "server_error")
    if status in _WRONG_ADDRESS:
        return ConfigError(said)
    if code in _CONTEXT_CODES or _CONTEXT_WORDS in text:
        return ContextFull(said, cause="too_long")
    return DataError(said, cause="refused")


def parse_json(raw: bytes, content_type: str, url: str) -> Any:
    """The body of a reply.

    Raises:
        InfraError: it is not JSON, such as a proxy's login page.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        start = raw[:60].decode(errors="replace")
        raise InfraError(f"{url}: replied with {content_type}, not JSON: {start!r}", cause="bad_reply") from error


def read_reply(reply: Any, prefix: tuple[int, ...], url: str, cut: CarriedTokens | None = None) -> ChatReply:
    """Check a chat completion and its token bundle.

    Args:
        reply: the JSON value.
        prefix: tokens that the prompt should begin with; not needed with ``cut``.
        url: for messages.
        cut: the tokens with which the prompt began, which the reply no longer holds.

    Raises:
        InfraError: something is missing, of a wrong type, or contradicts itself.
    """

    def wrong(what: str, cause: Cause = "bad_reply") -> InfraError:
        return InfraError(f"{url}: reply {what}", cause=cause)

    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise wrong("has not one choice")
    choice: Any = choices[0]
    message: Any = choice.get("message")
    if not isinstance(message, dict):
        raise wrong("has no message")
    finish_reason = choice.get("finish_reason")
    if finish_reason not in _FINISH_REASONS:
        raise wrong(f"has finish_reason {finish_reason!r}")
    if finish_reason == "abort":
        raise wrong("was aborted by the engine", "aborted")

    prompt_ids: Any = message.get("prompt_token_ids")
    sampled_ids: Any = message.get("generation_token_ids")
    logprobs: Any = message.get("generation_log_probs")
    versions: Any = choice.get("weight_versions")
    if not _are_ids(prompt_ids) or not (prompt_ids or cut is not None):
        raise wrong("has no prompt_token_ids")
    if not _are_ids(sampled_ids):
        raise wrong("has no generation_token_ids")
    if not isinstance(logprobs, list):
        raise wrong("has no generation_log_probs")
    if len(logprobs) != len(sampled_ids):
        raise wrong(f"has {len(sampled_ids)} generation_token_ids but {len(logprobs)} generation_log_probs")
    if not _are_logprobs(logprobs):
        bad = next(i for i, value in enumerate(logprobs) if not _is_logprob(value))
        raise wrong(f"has generation_log_probs[{bad}] = {logprobs[bad]!r}")
    if not _are_ids(versions) or len(versions) != 2:
        raise wrong("has no weight_versions [first, last]")

    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise wrong("has content that is not text")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise wrong("has unreadable tool_calls")
    malformed = choice.get("malformed_tool_calls", 0)
    if type(malformed) is not int or malformed < 0:
        raise wrong(f"has malformed_tool_calls = {malformed!r}")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise wrong("has reasoning that is not text")
    runs = choice.get("prompt_provenance")
    if runs is not None and not _are_runs(runs):
        raise wrong("has unreadable prompt_provenance")

    sent_back: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        sent_back["reasoning_content"] = reasoning
    if calls:
        sent_back["tool_calls"] = calls
    prompt = tuple(prompt_ids) if cut is None else cut.continued_by(prompt_ids)
    turn = Turn(
        prompt,
        tuple(sampled_ids),
        tuple(map(float, logprobs)),
        finish_reason,
        versions[0],
        versions[1],
        divergence=None if cut is not None else _divergence(choice, prefix, prompt),
        provenance=None if runs is None else tuple(cast(Run, tuple(run)) for run in runs),
        malformed_calls=malformed,
    )
    return ChatReply(sent_back, turn, finish_reason, turn.divergence is not None, malformed)


def _divergence(choice: Mapping[str, Any], prefix: tuple[int, ...], prompt_ids: tuple[int, ...]) -> Divergence | None:
    """Why the prompt does not begin with ``prefix``; the ids decide whether, the server can only say why."""
    if first_difference(prefix, prompt_ids) is None:
        return None
    told = read_divergence(choice.get("divergence"))
    if told is not None and told.index is not None:
        return told
    reason = told.reason if told else choice.get("new_segment_reason")
    if not isinstance(reason, str):
        reason = "the server rendered another prompt than the exact continuation, and did not say why"
    return diverge(reason, prefix, prompt_ids)


def _are_ids(value: Any) -> bool:
    # Without a loop in Python, since this runs over every prompt: as JSON, whole numbers that are not negative have
    # digits only, and nothing else has.
    if not isinstance(value, list):
        return False
    try:
        text = orjson.dumps(value)
    except TypeError:
        return False
    return text.count(b"[") == 1 and not text.translate(None, b"0123456789,[]")


def _are_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(run, list) and len(run) == 2 and run[0] in ("template", "environment") and _are_ids(run[1:])
        for run in value
    )


def _are_logprobs(values: list[Any]) -> bool:
    # Likewise without a loop. Not a number would slip past min and max, and makes the sum unequal to itself.
    if not values:
        return True
    if not set(map(type, values)) <= {int, float}:
        return False
    total = sum(values)
    return total == total and min(values) > -math.inf and max(values) <= _LOGPROB_ROUNDING


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= _LOGPROB_ROUNDING


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )


def _said(raw: bytes) -> tuple[str, str]:
    """Code and message of an error body, whichever of the common shapes it has."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "", raw[:200].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return "", str(error)[:200]
    code = error.get("code")
    return code if isinstance(code, str) else "", str(error.get("message", error))[:500]
