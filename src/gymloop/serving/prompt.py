"""Which ids a request's prompt has: the exact continuation of the last turn, or a new segment with a reason.

A client continues a turn by naming its exact ids (``required_prefix_token_ids``) or by echoing the token fields on its
assistant messages. Echoed ids are taken only where they say what the messages say: each turn's ids must parse to its
message, and its prompt must be the one that the messages before it give. Anything else was edited, and a prompt is
then rendered from the messages alone. Nothing is kept between requests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gymloop.serving.refusal import ApiError, token_ids
from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import Message, Tool, last_assistant, normalise
from gymloop.tokens.divergence import Divergence, diverge, first_difference
from gymloop.tokens.provenance import Run
from gymloop.tokens.reply import Reply

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids for the engine.

    Attributes:
        ids: all of them.
        new_segment: why the ids do not continue the last assistant turn; None where they do, or where there is none.
        provenance: of the last so many ids, at least those behind the turn that is continued; None where nobody
            asked, or where it cannot be told.
    """

    ids: tuple[int, ...]
    new_segment: Divergence | None = None
    provenance: tuple[Run, ...] | None = None


def build_prompt(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    prefix_ids: Sequence[int] | None = None,
    *,
    provenance: bool = False,
) -> Prompt:
    """The prompt of a request.

    Args:
        renderer: of the served model.
        messages: the conversation.
        tools: its tools.
        prefix_ids: prompt and sampled ids of the last assistant turn, exact. Messages without any assistant message
            are then all new. None or no ids is a request for no prefix.
        provenance: tell message text from template, at the price of a second rendering.

    Raises:
        ApiError: token fields are malformed, or exact ids cannot be continued and there is no history to render.
        DataError: the conversation cannot be rendered.
    """
    make = _Maker(renderer, messages, tools, provenance)
    prompt = make.from_prefix(tuple(prefix_ids)) if prefix_ids else make.from_messages()
    if prompt.new_segment is not None:
        log.debug("a prompt of %d tokens begins a new segment: %s", len(prompt.ids), prompt.new_segment)
    return prompt


@dataclass(frozen=True, slots=True)
class _Maker:
    renderer: Renderer
    messages: Sequence[Message]
    tools: Sequence[Tool]
    provenance: bool

    def from_prefix(self, prefix: tuple[int, ...]) -> Prompt:
        last = last_assistant(self.messages)
        try:
            return self._extended(prefix, 0 if last is None else last + 1)
        except BridgeError as error:
            if last is None:
                message = f"the required prefix cannot be continued and no history was sent to render instead: {error}"
                raise ApiError(400, "cannot_continue", message, "required_prefix_token_ids") from error
            return self._unbridged(error, prefix)

    def from_messages(self) -> Prompt:
        """Walk the assistant turns in order, and know after each whether its exact ids stand."""
        exact: tuple[int, ...] | None = None
        left: tuple[int, ...] = ()  # the exact ids that were there last
        reason: str | None = None
        start = 0
        for index, message in enumerate(self.messages):
            if message.get("role") != "assistant":
                continue
            carried = _bundle(message, index, self.renderer.vocab_size)
            if carried is None:
                exact, reason = None, f"messages[{index}], an assistant message, carries no token ids"
            elif index == 0:
                exact, reason = None, "messages[0] is an assistant message, with no prompt before it"
            else:
                left = (*carried[0], *carried[1])
                reason = self._disagreement(message, index, self._expected(exact, start, index), *carried)
                exact = None if reason else left
            start = index + 1
        if reason is not None:
            return self._rendered(reason, left)
        if exact is None:
            return self._plain()
        try:
            return self._extended(exact, start)
        except BridgeError as error:
            return self._unbridged(error, exact)

    def _extended(self, exact: tuple[int, ...], start: int) -> Prompt:
        new = self.messages[start:]
        ids = self.renderer.extend(exact, new, self.tools)
        if not self.provenance:
            return Prompt(ids)
        return Prompt(ids, None, self.renderer.provenance(ids, new, self.tools, continued=len(exact)))

    def _plain(self) -> Prompt:
        ids = self.renderer.render(self.messages, self.tools)
        return Prompt(ids, None, self.renderer.provenance(ids, self.messages, self.tools) if self.provenance else None)

    def _unbridged(self, error: BridgeError, exact: tuple[int, ...]) -> Prompt:
        """From the messages, where the template has no bridge; they may begin with the exact ids all the same."""
        prompt = self._plain()
        if first_difference(exact, prompt.ids) is None:
            return prompt
        return replace(prompt, new_segment=diverge(str(error), exact, prompt.ids, self.renderer.decode))

    def _rendered(self, reason: str, carried: tuple[int, ...]) -> Prompt:
        """From the messages alone, with where that departs from the ids that were carried."""
        prompt = self._plain()
        return replace(prompt, new_segment=diverge(reason, carried, prompt.ids, self.renderer.decode))

    def _expected(self, exact: tuple[int, ...] | None, start: int, index: int) -> tuple[int, ...]:
        """The prompt that the messages before ``index`` give."""
        if exact is None:
            return self.renderer.render(self.messages[:index], self.tools)
        try:
            return self.renderer.extend(exact, self.messages[start:index], self.tools)
        except BridgeError:
            return self.renderer.render(self.messages[:index], self.tools)

    def _disagreement(
        self,
        message: Message,
        index: int,
        expected: tuple[int, ...],
        prompt: tuple[int, ...],
        sampled: tuple[int, ...],
    ) -> str | None:
        """Why carried ids are not those of the messages, or None."""
        if not self._says(message, prompt, sampled):
            return f"messages[{index}] was edited: its text is not what its generation_token_ids say"
        if prompt == expected:
            return None
        found = diverge("", prompt, expected, self.renderer.decode)
        if found.carried is None or found.rendered is None:
            return f"the history before messages[{index}] is longer than its {len(prompt)} prompt_token_ids"
        return (
            f"the history before messages[{index}] was edited: at token {found.index} its prompt_token_ids say "
            f"{found.carried.text!r}, the messages {found.rendered.text!r}"
        )

    def _says(self, message: Message, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> bool:
        """Whether a message is what sampled ids say, read for calls or, where none were wanted or finished, as text."""
        text = self.renderer.said(sampled)
        opened = self.renderer.opens_reasoning(prompt)
        shown = normalise([message])[0]
        reader = self.renderer.reader
        return any(
            _same(reader.read(text, tools=self.tools, opened_reasoning=opened, whole=whole), shown)
            for whole in (True, False)
        )


def _bundle(message: Message, index: int, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    where = f"messages[{index}]."
    prompt = token_ids(message, "prompt_token_ids", vocab_size, where)
    sampled = token_ids(message, "generation_token_ids", vocab_size, where)
    logprobs = message.get("generation_log_probs")
    if prompt is None and sampled is None and logprobs is None:
        return None
    if not prompt or sampled is None:
        missing = "prompt_token_ids" if not prompt else "generation_token_ids"
        sentence = f"{where}{missing} is missing beside the other token fields of its message"
        raise ApiError(400, "partial_token_fields", sentence, f"{where}{missing}")
    if logprobs is not None and (not isinstance(logprobs, list) or len(logprobs) != len(sampled)):
        param = f"{where}generation_log_probs"
        raise ApiError(
            400, "invalid_value", f"{param} must be one number for each of {len(sampled)} sampled ids", param
        )
    return prompt, sampled


def _same(said: Reply, told: Mapping[str, Any]) -> bool:
    """Whether a reply and a message are the same, whichever way a client split it into fields.

    Reasoning is compared only where the message has some: many clients drop it, and the ids still hold what was said.
    White space at the borders of fields is lost by parsers and does not count.
    """
    reasoning, answer = _split_reasoning(said.content) if said.reasoning is None else (said.reasoning, said.content)
    told_reasoning, told_answer = _split_reasoning(told["content"])
    told_reasoning = told.get("reasoning_content") or told_reasoning
    if told_reasoning.strip() and told_reasoning.strip() != reasoning.strip():
        return False
    calls = [_call({"name": call.name, "arguments": call.arguments}) for call in said.tool_calls]
    told_calls = [_call(call["function"]) for call in told.get("tool_calls", ())]
    return calls == told_calls and answer.strip() == told_answer.strip()


def _split_reasoning(text: str) -> tuple[str, str]:
    reasoning, mark, answer = text.partition("</think>")
    return (reasoning.strip().removeprefix("<think>"), answer) if mark else ("", text)


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    """Name and canonical arguments, so that key order and spacing do not count."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return function["name"], arguments
    return function["name"], json.dumps(arguments, sort_keys=True)
