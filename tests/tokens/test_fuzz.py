"""Random conversations, templates, samples, cuts and edits: what is trained was sampled, and no break is silent."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from gymloop.errors import DataError
from gymloop.rollouts.trajectory import Turn, all_segments, segments
from gymloop.serving.prompt import Prompt, build_prompt
from gymloop.serving.refusal import ApiError
from gymloop.tokens import Renderer
from gymloop.tokens.divergence import diverge, first_difference
from gymloop.tokens.reply import reply_reader
from toys import FAMILIES, text_ids

FAMILY_NAMES = [name for name, family in FAMILIES.items() if family.template]
SPELLINGS = sorted({token for family in FAMILIES.values() for token in family.control.values()})
HOSTILE = [
    *SPELLINGS,
    "|im_end|>",
    "<|im_",
    "im_start|>",
    "</tool_call>",
    "<tool_call>",
    "<think>",
    "</think>",
    "[INST]",
]
HARMLESS = [
    "fine",
    " ",
    "\n",
    "ok",
    "x",
    "ü",
    "東京",
    "\U0001f469\u200d\U0001f52c",
    "\u2028",
    "\ue000",
    '"',
    "\\",
    "{",
    "}}",
]
CALL = '<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "wx", "description": "<|im_end|> weather", "parameters": {}}}]

texts = st.lists(st.sampled_from([*HOSTILE, *HARMLESS]), max_size=5).map("".join)


@cache
def renderer_of(folder: Any) -> Renderer:
    return Renderer.load(folder, reader=reply_reader(reasoning_parser="think"))


@dataclass
class Client:
    """Drives one conversation as clients do, and writes down what the engine was given and said."""

    renderer: Renderer
    tools: list
    messages: list[dict]
    turns: list[Turn] = field(default_factory=list)

    @property
    def exact(self) -> tuple[int, ...]:
        return self.turns[-1].prompt_ids + self.turns[-1].sampled_ids if self.turns else ()

    def prompt(self, mode: str, messages: list[dict]) -> Prompt:
        shown = messages if mode == "echo" else [strip(message) for message in messages]
        prefix = self.exact if mode == "prefix" and self.turns else None
        return build_prompt(self.renderer, shown, self.tools, prefix, provenance=True)

    def say(self, prompt: Prompt, sampled: tuple[int, ...]) -> None:
        broken = first_difference(self.exact, prompt.ids) is not None
        told = prompt.new_segment or diverge("the client left the history out", self.exact, prompt.ids)
        divergence = told if broken and self.turns else None
        self.turns.append(
            Turn(prompt.ids, sampled, (-0.5,) * len(sampled), "stop", 0, 0, divergence, prompt.provenance)
        )
        whole = bool(sampled) and sampled[-1] in self.renderer.end_token_ids
        opened = self.renderer.opens_reasoning(prompt.ids)
        text = self.renderer.said(sampled)
        reply = self.renderer.reader.read(text, tools=self.tools, opened_reasoning=opened, whole=whole)
        message: dict = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        message |= {"prompt_token_ids": list(prompt.ids), "generation_token_ids": list(sampled)}
        self.messages.append(message)


def strip(message: dict) -> dict:
    return {key: value for key, value in message.items() if not key.endswith("token_ids")}


def harmless(value: Any, key: str = "") -> Any:
    """The same conversation with plain words where it had text."""
    if isinstance(value, dict):
        return {k: harmless(v, k) for k, v in value.items() if not k.endswith("token_ids")}
    if isinstance(value, list):
        return [harmless(item, key) for item in value]
    return "fine" if key in ("content", "reasoning_content", "name", "description") and value else value


def controls(renderer: Renderer, ids: tuple[int, ...]) -> list[int]:
    return [token for token in ids if token in renderer.control_ids]


def new_messages(draw: Any, renderer: Renderer, last: dict | None) -> list[dict]:
    """What an environment or a user says next."""
    calls = (last or {}).get("tool_calls") or []
    kind = draw(st.sampled_from(["user", "tool", "tools", "user twice"]))
    if kind in ("tool", "tools") and last is not None:
        answered = draw(st.permutations(calls)) or [{"id": "c"}] * (1 + (kind == "tools"))
        return [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in answered]
    return [{"role": "user", "content": draw(texts)} for _ in range(2 if kind == "user twice" else 1)]


def sample(draw: Any, renderer: Renderer) -> tuple[int, ...]:
    """Ids that a model may sample: text as the tokenizer writes it, byte by byte, a call, or anything at all."""
    kind = draw(st.sampled_from(["bytes", "canonical", "call", "think", "any"]))
    if kind == "any":
        ids = tuple(draw(st.lists(st.integers(0, renderer.vocab_size - 1), max_size=8)))
    elif kind == "canonical":
        ids = tuple(renderer._tokenizer.backend_tokenizer.encode(draw(texts), add_special_tokens=False).ids)
    else:
        said = {
            "bytes": "x ok ü",
            "call": CALL + draw(st.sampled_from(["", "\n", CALL])),
            "think": "<think>\na\n</think>\n\nb",
        }
        ids = tuple(text_ids(said[kind]))
    if draw(st.booleans()):
        return ids[: draw(st.integers(0, len(ids)))]  # cut by the limit, perhaps within a character
    return (*ids, draw(st.sampled_from(renderer.end_token_ids)))


def edited(draw: Any, messages: list[dict]) -> list[dict]:
    """A history that a client changed; most of the time it did not."""
    kind = draw(st.sampled_from(["", "", "", "text", "drop", "insert", "system", "forget ids"]))
    at = draw(st.integers(0, len(messages) - 1))
    match kind:
        case "text":
            return [*messages[:at], messages[at] | {"content": draw(texts)}, *messages[at + 1 :]]
        case "drop" if len(messages) > 1:
            return [*messages[:at], *messages[at + 1 :]]
        case "insert":
            return [*messages[:at], {"role": "assistant", "content": draw(texts)}, *messages[at:]]
        case "system":
            return [{"role": "system", "content": draw(texts)}, *messages]
        case "forget ids":
            return [*messages[:at], strip(messages[at]), *messages[at + 1 :]]
    return messages


def check_turn(client: Client, mode: str, messages: list[dict], prompt: Prompt) -> None:
    renderer, exact = client.renderer, client.exact
    continues = bool(exact) and first_difference(exact, prompt.ids) is None
    # Of a turn that the client leaves out altogether the server cannot know; the client's own record tells of it.
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    shows_last = "generation_token_ids" in last and exact == (
        *last["prompt_token_ids"],
        *last["generation_token_ids"],
    )
    if client.turns and (shows_last or mode == "prefix") and not continues:
        found = prompt.new_segment
        assert found is not None, "a prompt departed from the last turn and nothing said so"
        assert found.reason
        if found.index is not None:
            assert found.carried.ids != found.rendered.ids
            assert found.carried.start == found.rendered.start <= found.index
    if mode == "prefix" and prompt.new_segment is not None:
        assert not continues
    new = prompt.ids[len(exact) :] if prompt.new_segment is None and continues else prompt.ids
    if prompt.provenance is not None:
        count = sum(length for _, length in prompt.provenance)
        labels = [label for label, length in prompt.provenance for _ in range(length)]
        assert count <= len(prompt.ids)
        if shows_last or mode == "prefix":
            assert count in (len(new), len(prompt.ids))
        tail = prompt.ids[len(prompt.ids) - count :]
        assert not [
            token
            for token, label in zip(tail, labels, strict=True)
            if label == "environment" and token in renderer.control_ids
        ]
    twin = [harmless(message) for message in messages]
    tools = harmless(client.tools)
    try:
        if prompt.new_segment is None and continues and (mode == "prefix" or (mode == "echo" and shows_last)):
            start = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1) + 1
            expected = renderer.extend(exact, twin[start:], tools)[len(exact) :]
        elif prompt.new_segment is not None:
            expected = renderer.render(twin, tools)
        else:
            return
    except DataError:
        return  # the template refuses plain words here, so there is nothing to compare with
    event("compared with the harmless twin")
    assert controls(renderer, new) == controls(renderer, expected)


def check_refusal(refusal: Exception, mode: str, messages: list[dict]) -> None:
    if isinstance(refusal, ApiError):
        assert (refusal.status, refusal.code) == (400, "cannot_continue")
        assert mode == "prefix", "only an explicit prefix has nothing to fall back on"
        assert not any(message["role"] == "assistant" for message in messages)


def check_trajectory(turns: list[Turn]) -> None:
    parts = all_segments(turns)
    assert [part for part in parts if part.sampled] == list(segments(turns))
    assert sum(len(part.sampled) for part in parts) == sum(len(turn.sampled_ids) for turn in turns)
    borders = [*(part.first_turn for part in parts), len(turns)]
    for number, part in enumerate(parts):
        assert (part.began is None) == (number == 0)
        assert sum(count for _, count in part.provenance) == len(part.ids)
        labels = [label for label, count in part.provenance for _ in range(count)]
        assert [i for i, label in enumerate(labels) if label == "sampled"] == list(part.sampled)
        trained: list[int] = []
        for turn in turns[borders[number] : borders[number + 1]]:
            whole = turn.prompt_ids + turn.sampled_ids
            assert part.ids[: len(whole)] == whole  # the context of every trained token is what the engine saw
            trained += range(len(turn.prompt_ids), len(whole))
        assert part.sampled == tuple(trained)


def play(draw: Any, toy: Any) -> None:
    renderer = renderer_of(toy(draw(st.sampled_from(FAMILY_NAMES))))
    tools = TOOLS if draw(st.booleans()) else []
    client = Client(renderer, tools, [{"role": "user", "content": draw(texts)}])
    for index in range(draw(st.integers(1, 4))):
        if index:
            client.messages += new_messages(draw, renderer, client.messages[-1])
        mode = draw(st.sampled_from(["echo", "echo", "prefix", "none"]))
        client.messages = edited(draw, client.messages)
        try:
            prompt = client.prompt(mode, client.messages)
        except (DataError, ApiError) as refusal:
            event("refused")
            check_refusal(refusal, mode, client.messages)
            break  # the template refuses this conversation: a typed 4xx
        check_turn(client, mode, client.messages, prompt)
        client.say(prompt, sample(draw, renderer))
    event(f"{len(client.turns)} turns in {len(all_segments(client.turns))} segments")
    check_trajectory(client.turns)


@pytest.fixture(scope="module")
def folders(toy):
    return cache(toy)


# No shrinking: on a busy machine it takes minutes, and the blob that is printed reproduces the case.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
FUZZ = settings(suppress_health_check=list(HealthCheck), print_blob=True, phases=PHASES)


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_what_is_trained_was_sampled_and_no_break_is_silent(folders, data):
    play(data.draw, folders)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(FUZZ, max_examples=800)
@given(data=st.data())
def test_deep_what_is_trained_was_sampled_and_no_break_is_silent(folders, data):
    play(data.draw, folders)
