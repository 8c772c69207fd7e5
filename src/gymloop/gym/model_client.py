"""One model call over HTTP: messages in, the reply and its exact tokens out, or an error that says whose fault it is.

A reply without its whole token bundle is an error: no id, logprob or version is ever made up. Every call has a
deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast, get_args
from urllib.parse import quote

import aiohttp
import orjson

from gymloop.errors import Cause, ConfigError, DataError, InfraError
from gymloop.gym.deadline import retry_after_s
from gymloop.gym.items import Message
from gymloop.rollouts.trajectory import FinishReason, Turn
from gymloop.tokens.divergence import Divergence, diverge, first_difference, read_divergence
from gymloop.tokens.provenance import Run

PROFILE_HEADER = "x-gymloop-profile"
NOISE_HEADER = "x-gymloop-noise-key"
"""Names the noise of this call, ``<group>/<sample>/<turn>``, for engines whose draws are repeatable."""
Profile = Literal["train", "validation"]

_CONTEXT_CODES = {"context_length_exceeded", "prompt_too_long"}
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
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self.model = model
        self._max_concurrency = max_concurrency
        self._call_timeout_s = call_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._provenance = provenance
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ModelClient:
        self._http = aiohttp.ClientSession(
            # Idle connections are dropped before the server drops them (uvicorn: 5 s), else a request can meet a
            # closing one, and a POST is not repeated.
            connector=aiohttp.TCPConnector(limit=self._max_concurrency, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=self._call_timeout_s, sock_connect=min(30.0, self._call_timeout_s)),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        previous: Turn | None = None,
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
        prefix: tuple[int, ...] = ()
        if previous is not None:
            prefix = previous.prompt_ids + previous.sampled_ids
            body["required_prefix_token_ids"] = prefix
        if self._provenance:
            body["return_token_provenance"] = True
        headers = {"content-type": "application/json"}
        if noise_key is not None:
            headers[NOISE_HEADER] = quote(noise_key)  # a group id may hold what a header may not
        if profile == "validation":
            headers[PROFILE_HEADER] = profile
        return read_reply(await self._post(orjson.dumps(body), headers), prefix, self.url)

    async def weight_version(self) -> int:
        """The version of the weights that the engine samples with now.

        Raises:
            InfraError: no reply in time, a lost connection, a 5xx, or a reply without a version.
            ConfigError: there is no such route.
        """
        if self._http is None:
            raise RuntimeError("the model client is not open; use it as 'async with ModelClient(...)'")
        url = f"{self.url.removesuffix('/chat/completions')}/models"
        try:
            async with self._http.get(url) as response:
                raw = await response.read()
                status, kind = response.status, response.content_type
        except TimeoutError as error:
            raise InfraError(f"{url}: no reply within {self._call_timeout_s:g} s", cause="timeout") from error
        except aiohttp.ClientError as error:
            raise InfraError(f"{url}: {type(error).__name__}: {error}", cause="disconnect") from error
        if status != 200:
            raise refusal(status, raw, url)
        reply = parse_json(raw, kind, url)
        models = reply.get("data") if isinstance(reply, dict) else None
        card = models[0] if isinstance(models, list) and len(models) == 1 else None
        version = card.get("weight_version") if isinstance(card, dict) else None
        if type(version) is not int or version < 0:
            raise InfraError(f"{url}: has weight_version {version!r}; expected that of one model", cause="bad_reply")
        return version

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> Any:
        if self._http is None:
            raise RuntimeError("the model client is not open; use it as 'async with ModelClient(...)'")
        give_up = time.monotonic() + self._ready_timeout_s
        while True:  # bounded: each post has a time, and ``give_up`` ends the attempts
            try:
                async with self._http.post(self.url, data=body, headers=headers) as response:
                    raw = await response.read()
                    status, kind = response.status, response.content_type
                    retry_after = response.headers.get("retry-after")
            except TimeoutError as error:
                raise InfraError(f"{self.url}: no reply within {self._call_timeout_s:g} s", cause="timeout") from error
            except aiohttp.ClientError as error:
                raise InfraError(f"{self.url}: {type(error).__name__}: {error}", cause="disconnect") from error
            if status == 200:
                return parse_json(raw, kind, self.url)
            wait = retry_after_s(retry_after)
            if status in _BUSY and wait is not None:
                # Nothing was sampled, so asking again is safe. A deadline of the rollout also ends this.
                if time.monotonic() + wait > give_up:
                    raise InfraError(
                        f"{self.url}: still {status} after {self._ready_timeout_s:g} s: {_said(raw)[1]}", cause="busy"
                    )
                await asyncio.sleep(wait)
                continue
            raise refusal(status, raw, self.url)


def refusal(status: int, raw: bytes, url: str) -> Exception:
    """The error that a status other than 200 stands for."""
    code, text = _said(raw)
    said = f"{url}: {status}{f' {code}' if code else ''}: {text}"
    if status >= 500 or status < 400 or status in _BUSY or status == 408:
        return InfraError(said, cause="busy" if status in _BUSY else "server_error")
    if status in _WRONG_ADDRESS:
        return ConfigError(said)
    if code in _CONTEXT_CODES:
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


def read_reply(reply: Any, prefix: tuple[int, ...], url: str) -> ChatReply:
    """Check a chat completion and its token bundle.

    Raises:
        InfraError: something is missing, of a wrong type, or contradicts itself.
    """

    def demand(good: bool, what: str, cause: Cause = "bad_reply") -> None:
        if not good:
            raise InfraError(f"{url}: reply {what}", cause=cause)

    choices = reply.get("choices") if isinstance(reply, dict) else None
    demand(isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict), "has not one choice")
    choice = reply["choices"][0]
    message = choice.get("message")
    demand(isinstance(message, dict), "has no message")
    finish_reason = choice.get("finish_reason")
    demand(finish_reason in get_args(FinishReason), f"has finish_reason {finish_reason!r}")
    demand(finish_reason != "abort", "was aborted by the engine", "aborted")

    prompt_ids, sampled_ids = message.get("prompt_token_ids"), message.get("generation_token_ids")
    logprobs, versions = message.get("generation_log_probs"), choice.get("weight_versions")
    demand(_are_ids(prompt_ids) and len(prompt_ids) > 0, "has no prompt_token_ids")
    demand(_are_ids(sampled_ids), "has no generation_token_ids")
    demand(isinstance(logprobs, list), "has no generation_log_probs")
    demand(
        len(logprobs) == len(sampled_ids),
        f"has {len(sampled_ids)} generation_token_ids but {len(logprobs)} generation_log_probs",
    )
    bad = next((i for i, value in enumerate(logprobs) if not _is_logprob(value)), None)
    demand(bad is None, f"has generation_log_probs[{bad}] = {logprobs[bad or 0] if logprobs else None!r}")
    demand(_are_ids(versions) and len(versions) == 2, "has no weight_versions [first, last]")

    content = message.get("content")
    demand(content is None or isinstance(content, str), "has content that is not text")
    calls = message.get("tool_calls") or []
    demand(isinstance(calls, list) and all(_is_call(call) for call in calls), "has unreadable tool_calls")
    malformed = choice.get("malformed_tool_calls", 0)
    demand(type(malformed) is int and malformed >= 0, f"has malformed_tool_calls = {malformed!r}")

    reasoning = message.get("reasoning_content") or message.get("reasoning")
    demand(reasoning is None or isinstance(reasoning, str), "has reasoning that is not text")
    runs = choice.get("prompt_provenance")
    demand(runs is None or _are_runs(runs), "has unreadable prompt_provenance")

    sent_back: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        sent_back["reasoning_content"] = reasoning
    if calls:
        sent_back["tool_calls"] = calls
    turn = Turn(
        tuple(prompt_ids),
        tuple(sampled_ids),
        tuple(map(float, logprobs)),
        finish_reason,
        versions[0],
        versions[1],
        divergence=_divergence(choice, prefix, tuple(prompt_ids)),
        provenance=None if runs is None else tuple(cast(Run, tuple(run)) for run in runs),
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
    # Without a loop in Python: this runs over every prompt id of every turn.
    return isinstance(value, list) and (not value or (set(map(type, value)) == {int} and min(value) >= 0))


def _are_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(run, list) and len(run) == 2 and run[0] in ("template", "environment") and _are_ids(run[1:])
        for run in value
    )


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
