"""A model behind any OpenAI-compatible URL: rollouts can be played with it, and mostly not trained.

Such a server knows no sampling profile, so each request carries the recipe's, and no ``required_prefix_token_ids``, so
that is sent only once the server has shown token ids of its own. A reply without them is a turn without tokens: no id,
logprob or version is made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError, InfraError
from gymloop.gym.bundle import BUNDLE
from gymloop.gym.carried import CarriedTokens
from gymloop.gym.items import Message
from gymloop.gym.model_client import ChatReply, ModelClient, Profile, parse_json, read_reply, refusal
from gymloop.rollouts.trajectory import Turn

NO_LISTING = {404, 405, 501}


class ForeignModel(ModelClient):
    """A client of a server that need not be gymloop's; otherwise as ``ModelClient``.

    Args:
        base_url: such as ``https://host/v1``.
        model: the name that the server gives the model.
        sampling: fields of every request, such as ``temperature``.
        api_key: sent as a bearer token; None sends none.
        max_concurrency: connections at most.
        call_timeout_s: wall time of one call; seconds.
        ready_timeout_s: see ``ModelClient``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        sampling: Mapping[str, Any],
        api_key: str | None,
        max_concurrency: int,
        call_timeout_s: float,
        ready_timeout_s: float,
    ) -> None:
        super().__init__(
            base_url,
            model,
            max_concurrency=max_concurrency,
            call_timeout_s=call_timeout_s,
            ready_timeout_s=ready_timeout_s,
        )
        self.sampled_tokens = 0
        """As its replies count them, in all of them so far."""
        self._sampling = dict(sampling)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

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
        """See ``ModelClient.chat``; ``profile`` and ``noise_key`` are words that the server does not know."""
        body = {
            **(extra or {}),
            **self._sampling,
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
        }
        if tools:
            body["tools"] = list(tools)
        prefix: tuple[int, ...] = ()
        if previous is not None and previous.has_tokens:
            prefix = previous.prompt_ids + previous.sampled_ids
            body["required_prefix_token_ids"] = prefix
        reply = await self._post(orjson.dumps(body), self._headers)
        usage = reply.get("usage") if isinstance(reply, dict) else None
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        self.sampled_tokens += counted if isinstance(counted, int) else 0
        return read_foreign_reply(reply, prefix, self.url)

    async def weight_version(self) -> int:
        """There is none.

        Raises:
            InfraError: always.
        """
        raise InfraError(f"{self.url}: a server of another kind has no weight version")

    async def ready(self) -> None:
        """Return once the server has answered and is known to have the model; one that lists no models is believed.

        Raises:
            InfraError: it does not answer, or with a 5xx.
            ConfigError: it takes no request of this caller, or has no such model.
        """
        url = f"{self.url.removesuffix('/chat/completions')}/models"
        request = self._open().request("GET", "/models", b"", self._call_timeout_s, self._headers.items())
        answer = await self._asked(url, request)
        if answer.status in NO_LISTING:
            return
        if answer.status != 200:
            raise refusal(answer.status, answer.body, url)
        listed = parse_json(answer.body, answer.content_type, url)
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry]
        if names and self.model not in names:
            near = did_you_mean(self.model, names) or f"; it has {', '.join(names[:5])}"
            raise ConfigError(f"--model: {url} has no model {self.model!r}{near}")


def read_foreign_reply(reply: Any, prefix: tuple[int, ...], url: str) -> ChatReply:
    """Check a chat completion; token ids are read where there are any.

    Raises:
        InfraError: as ``model_client.read_reply``, but for a token bundle or versions that are not there at all.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choices = choices if isinstance(choices, list) else []
    choice = choices[0] if choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return read_reply(reply, prefix, url)  # which says what is wrong
    bare = all(message.get(key) is None for key in BUNDLE)
    versioned = choice.get("weight_versions") is not None
    if bare:  # all else is checked as ever; what stands in for tokens goes no further than the next lines
        message = {**message, "prompt_token_ids": [0], "generation_token_ids": [], "generation_log_probs": []}
        prefix = ()
    given = {**choice, "message": message, "weight_versions": choice["weight_versions"] if versioned else [0, 0]}
    read = read_reply({**reply, "choices": [given, *choices[1:]]}, prefix, url)
    turn = read.turn
    if bare:
        turn = replace(turn, prompt_ids=(), first_version=None, last_version=None)
    elif not versioned:
        turn = replace(turn, first_version=None, last_version=None)
    return replace(read, turn=turn)
