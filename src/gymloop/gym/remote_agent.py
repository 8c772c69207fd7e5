"""The ``remote`` agent: an agent server plays the whole rollout behind ``POST /run``, and its reply is the record.

The reply is NeMo Gym's: ``response.output`` with a token bundle on the last item of every model call, ``reward`` and
perhaps ``reward_components``. Turns are read from the bundles; a call without its bundle is an error, since it could
not be trained and could not be left out. The bundle does not carry weight versions, so the version is asked for before
and after: every token was sampled between the two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gymloop.errors import InfraError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Terms, seeded
from gymloop.gym.bundle import read_turns
from gymloop.gym.contract import Row, Verdict
from gymloop.gym.http import Cookies, HttpServer
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.verdict import read_verdict


class RemoteAgent:
    """Plays by one agent server, which somebody else opens and closes.

    Args:
        name: as rows carry it in ``agent_ref.name``.
        server: with ``/run``.
        version: the weight version that the engines sample with now.
        sampling: for each profile the fields of ``responses_create_params`` that it fixes, such as ``temperature`` and
            ``top_p``; the agent's model calls carry them, where this process cannot.
    """

    def __init__(
        self,
        name: str,
        server: HttpServer,
        version: Callable[[], Awaitable[int]],
        sampling: Mapping[Profile, Mapping[str, Any]],
    ) -> None:
        self.name = name
        self.server = server
        self._version = version
        self._sampling = sampling

    async def play(self, row: Row, model: ModelClient, conversation: Conversation, terms: Terms) -> Verdict:
        """See ``gym.agents.Agent``; the agent server has a model client of its own."""
        conversation.where = f"environment {self.name}, run"
        params = {**row["responses_create_params"], **self._sampling[terms.profile]}
        limit = params.get("max_output_tokens") or terms.max_tokens
        params["max_output_tokens"] = min(terms.max_tokens, limit)
        body = {**seeded(row, terms), "responses_create_params": params}
        first = await self._version()
        reply = await self.server.post("/run", body, Cookies(), opens=True, timeout_s=terms.deadline_s)
        if not 200 <= reply.status < 300:
            raise reply.error()
        value = reply.json()
        if failure := value.get("failure"):
            raise InfraError(f"{reply.url}: {failure!r:.300}", cause="server_error")
        verdict = read_verdict(value, reply.url, row)
        response = value.get("response")
        output = response.get("output") if isinstance(response, Mapping) else None
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            raise InfraError(f"{reply.url}: the reply has no response.output", cause="bad_reply")
        cut = bool(response.get("incomplete_details"))  # type: ignore[union-attr]
        conversation.turns += read_turns(output, cut=cut, versions=(first, await self._version()), url=reply.url)
        conversation.output += output
        conversation.new_segments += sum(turn.divergence is not None for turn in conversation.turns)
        conversation.tool_calls += sum(item.get("type") == "function_call_output" for item in output)
        conversation.cut = cut
        conversation.truncated = cut or any(turn.finish_reason == "length" for turn in conversation.turns)
        return verdict
