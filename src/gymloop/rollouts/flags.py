"""What a turn did wrong in form: a tool call that nobody could run, thinking where no thinking belongs.

A well-formed call leaves the text and becomes an item of its own, and thinking leaves it for a ``reasoning`` item. What
still stands in a text, in tags, was therefore never run, or leaked into the answer. As in NeMo RL, but in every part of
every text, where that looks at the first part of a turn's last item; and an empty list of patterns finds nothing:

| in                                        | invalid tool call                 | malformed thinking    |
| ----------------------------------------- | --------------------------------- | --------------------- |
| a message                                 | a pattern                         | a tag                 |
| reasoning that the turn ends with         | a pattern                         | a tag more than once  |
| reasoning that something follows          | no: a thought about calls is none | a tag more than once  |
| what the tool parser could not read       | yes, whatever its text            |                       |

Flags are per turn. They cost a turn its advantage where the recipe says so (``algorithms.penalties``), nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymloop.config.schema import Recipe

INVALID_TOOL_CALL_PATTERNS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
"""NeMo RL's, for tool parsers whose envelopes are such tags."""
THINKING_TAGS = ("<think>", "</think>")
"""NeMo RL's."""

_ENDS = "generation_token_ids"
"""The token bundle rides on the last item of a model call."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """What is looked for; an empty tuple looks for nothing.

    Attributes:
        invalid_tool_call: texts that only a tool call has.
        thinking: tags around thinking.
    """

    invalid_tool_call: tuple[str, ...] = INVALID_TOOL_CALL_PATTERNS
    thinking: tuple[str, ...] = THINKING_TAGS


NEMO_RL = Patterns()
"""What NeMo RL looks for where its recipe names nothing."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What was found in one turn.

    Attributes:
        invalid_tool_call: the model wrote a call that could not be run.
        malformed_thinking: thinking stands in the answer, or its tags inside thinking are repeated.
    """

    invalid_tool_call: bool = False
    malformed_thinking: bool = False


def patterns_of(recipe: Recipe) -> Patterns:
    """Those of the recipe, under gymloop's keys or NeMo RL's; the rules see to it that they are not both given."""
    own, gym = recipe.rollouts, recipe.env.nemo_gym
    calls, tags = own.invalid_tool_call_patterns, own.thinking_tags
    if gym is not None:
        calls = gym.invalid_tool_call_patterns if calls is None else calls
        tags = gym.thinking_tags if tags is None else tags
    return Patterns(
        INVALID_TOOL_CALL_PATTERNS if calls is None else calls,
        THINKING_TAGS if tags is None else tags,
    )


def flag_turns(output: Sequence[Mapping[str, Any]], malformed: Sequence[int], patterns: Patterns) -> tuple[Flags, ...]:
    """The flags of every turn of a conversation.

    Args:
        output: its items, as in ``response.output``.
        malformed: for each turn, the calls in it that the tool parser could not read.
        patterns: what to look for.

    Returns:
        As many as ``malformed`` has; a turn without an item of its own (the context was full) has no flag.
    """
    calls = list(model_calls(output))
    return tuple(
        turn_flags(calls[index] if index < len(calls) else (), count, patterns) for index, count in enumerate(malformed)
    )


def turn_flags(items: Sequence[Mapping[str, Any]], malformed: int, patterns: Patterns) -> Flags:
    """The flags of one turn.

    Args:
        items: of one model call, in order.
        malformed: calls in it that the tool parser could not read.
        patterns: what to look for.
    """
    invalid = bool(patterns.invalid_tool_call) and malformed > 0
    thinking = False
    for index, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                for text in texts(item.get("content")):
                    invalid |= any(pattern in text for pattern in patterns.invalid_tool_call)
                    thinking |= any(tag in text for tag in patterns.thinking)
            case "reasoning":
                last = index == len(items) - 1
                for text in (*texts(item.get("summary")), *texts(item.get("content"))):
                    invalid |= last and any(pattern in text for pattern in patterns.invalid_tool_call)
                    thinking |= any(text.count(tag) > 1 for tag in patterns.thinking)
    return Flags(invalid, thinking)


def texts(content: Any) -> Iterator[str]:
    """Every text of a content: text itself, or the text parts of a list, a refusal's among them."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple):
        for part in content:
            text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def model_calls(output: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The items of each model call: up to the one with the token bundle, or, without bundles, up to a given item.

    Items that nobody sampled, such as tool results and the environment's messages, belong to none.
    """
    call: list[Mapping[str, Any]] = []
    for item in output:
        kind = item.get("type", "message")
        if kind == "function_call_output" or (kind == "message" and item.get("role", "assistant") != "assistant"):
            if call:
                yield call
            call = []
            continue
        call.append(item)
        if item.get(_ENDS) is not None:
            yield call
            call = []
    if call:
        yield call
