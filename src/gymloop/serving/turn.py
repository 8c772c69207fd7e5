"""What every route says of a model call: its tokens, the weights that sampled them, how it ended, what was read in it.

NeMo Gym's bundle stands once in a reply, with the message or the last item of the call it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from gymloop.config.plan import SamplingProfile
from gymloop.generation.engine import Sample
from gymloop.serving.call import Said
from gymloop.serving.fields import Fields
from gymloop.serving.limits import Limits
from gymloop.serving.refusal import ApiError
from gymloop.tokens.conversation import TOKEN_FIELDS

if TYPE_CHECKING:
    from gymloop.serving.prompt import Prompt
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import Reply, ReplyStream


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is checked against.

    Attributes:
        model_name: the one model that is served.
        profile: what sampling must be; None accepts whatever the engine can do.
        template_kwargs: of the server's renderer; a request may repeat them.
        vocab_size: token ids are below it.
        limits: sizes and counts.
    """

    model_name: str
    profile: SamplingProfile | None
    template_kwargs: Mapping[str, Any]
    vocab_size: int
    limits: Limits

    def check_model(self, given: Fields) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if given.get("model", self.model_name) != self.model_name:
            message = f"model {given['model']!r} is not served; {self.model_name!r} is"
            raise ApiError(404, "model_not_found", message, "model")

    def check_template_kwargs(self, given: Fields) -> None:
        """Refuse template arguments that are not the server's.

        Raises:
            ApiError: 400.
        """
        if given.get("chat_template_kwargs", {}) not in ({}, self.template_kwargs):
            message = "chat_template_kwargs differ from the run's; set policy.tokenizer.chat_template_kwargs instead"
            raise ApiError(400, "unsupported_field", message, "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's prompt, and how to read what is said to it.

    Attributes:
        prompt_json: its ids as JSON, written once however often a reply holds them.
        opened_reasoning: the prompt ends inside reasoning.
        parse_tools: False leaves calls in the text.
    """

    renderer: Renderer
    prompt: Prompt
    tools: Sequence[Mapping[str, Any]]
    parse_tools: bool
    prompt_json: orjson.Fragment
    opened_reasoning: bool

    @classmethod
    def of(
        cls, renderer: Renderer, prompt: Prompt, tools: Sequence[Mapping[str, Any]], parse_tools: bool = True
    ) -> Turn:
        """The turn that ``prompt`` asks for."""
        ids = orjson.Fragment(orjson.dumps(prompt.ids))
        return cls(renderer, prompt, tools, parse_tools, ids, renderer.opens_reasoning(prompt.ids))

    def read(self, said: Said) -> Reply:
        """Reasoning, content and calls of a finished sample."""
        return self.renderer.reader.read(
            said.text, tools=self.tools, opened_reasoning=self.opened_reasoning, whole=self.shows_calls(said.sample)
        )

    def stream(self) -> ReplyStream:
        """A reader of a sample that comes in pieces."""
        return self.renderer.reader.stream(self.tools, self.opened_reasoning)

    def shows_calls(self, sample: Sample) -> bool:
        """Whether calls are read: not in a turn that was cut, even where a whole one stands in it."""
        return self.parse_tools and sample.finish_reason == "stop"

    def token_fields(self, sample: Sample) -> dict[str, Any]:
        """NeMo Gym's bundle."""
        return dict(zip(TOKEN_FIELDS, (self.prompt_json, sample.token_ids, sample.logprobs), strict=True))

    def facts(self, sample: Sample, malformed: int) -> dict[str, Any]:
        """What gymloop's own clients read beside the bundle."""
        segment = self.prompt.new_segment
        return {
            "weight_versions": [sample.first_version, sample.last_version],
            "malformed_tool_calls": malformed,
            "new_segment": segment is not None,
            "new_segment_reason": None if segment is None else segment.reason,
            "new_segment_index": None if segment is None else segment.index,
            "divergence": None if segment is None else segment.as_record(),
            **({} if self.prompt.provenance is None else {"prompt_provenance": self.prompt.provenance}),
        }


def finish_reason(sample: Sample, calls: bool) -> str:
    """Of a choice: ``tool_calls`` where the turn shows calls, else the engine's."""
    return "tool_calls" if calls else sample.finish_reason
