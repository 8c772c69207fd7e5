"""Token ids ride on output items as NeMo Gym has it: one bundle per model call, on the last item of the call.

The bundle is three fields that come together or not at all. In this process they are tuples held by reference, and they
are left out of what a server need not see.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymloop.errors import DataError, InfraError
from gymloop.gym.model_client import read_reply
from gymloop.rollouts.trajectory import FinishReason, Turn

BUNDLE = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")

_GIVEN = {"function_call_output"}
"""Items that no model call makes, besides messages of another role than ``assistant``."""


def without_tokens(output: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The items without their bundles; items that have none are the same objects."""
    return [
        {key: value for key, value in item.items() if key not in BUNDLE} if BUNDLE[0] in item else item
        for item in output
    ]


def whole_response(row: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """A response with every field that a Responses body must have; ``response`` may hold some of them already."""
    params = row["responses_create_params"]
    parallel = params.get("parallel_tool_calls")
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": params.get("model") or "policy",
        "tools": params.get("tools") or [],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": True if parallel is None else parallel,
        **response,
    }


def read_turns(output: Sequence[Mapping[str, Any]], *, cut: bool, versions: tuple[int, int], url: str) -> list[Turn]:
    """The model calls of a finished conversation, from the bundles on its items.

    A prompt that does not begin with the tokens of the turn before it begins a new segment and says where it departs.

    Args:
        output: items of ``response.output``.
        cut: the response is incomplete, so its last turn ended by ``length``.
        versions: weight versions between which every token was sampled.
        url: for messages.

    Raises:
        InfraError: a model call has no bundle, or one that is incomplete or contradicts itself.
        DataError: the first prompt was already too long: an incomplete response without any model call.
    """
    turns: list[Turn] = []
    call: list[Mapping[str, Any]] = []  # items of the model call that is being read
    for index, item in enumerate(output):
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise InfraError(f"{url}: response.output[{index}] has type {kind!r:.80}; expected text", cause="bad_reply")
        if kind in _GIVEN or (kind == "message" and item.get("role") != "assistant"):
            if call:
                raise _no_bundle(index - 1, call[-1], url)
            continue
        call.append(item)
        present = [key for key in BUNDLE if item.get(key) is not None]
        if not present:
            continue
        if len(present) < len(BUNDLE):
            raise InfraError(
                f"{url}: response.output[{index}] has {present[0]} but not all of {', '.join(BUNDLE)}",
                cause="bad_reply",
            )
        if wrong := next((key for key in BUNDLE if not isinstance(item[key], list)), None):
            raise InfraError(f"{url}: response.output[{index}].{wrong} is no list", cause="bad_reply")
        last = index == len(output) - 1
        turns.append(_turn(call, turns, cut and last, versions, f"{url}: response.output[{index}]"))
        call = []
    if call and not (cut and _is_empty(call)):
        raise _no_bundle(len(output) - 1, call[-1], url)
    if not turns:
        if cut:
            raise DataError(f"{url}: the row's first prompt is longer than the model's context", cause="too_long")
        raise InfraError(f"{url}: response.output has no model call", cause="bad_reply")
    return turns


def _turn(
    call: Sequence[Mapping[str, Any]], before: Sequence[Turn], cut: bool, versions: tuple[int, int], where: str
) -> Turn:
    """Checked as a reply of the generation server is."""
    finish: FinishReason = "tool_calls" if any(item.get("type") == "function_call" for item in call) else "stop"
    if cut or any(item.get("status") == "incomplete" for item in call):
        finish = "length"
    message = {"content": "", **{key: call[-1][key] for key in BUNDLE}}
    choice = {
        "message": message,
        "finish_reason": finish,
        "weight_versions": list(versions),
        "new_segment_reason": "the agent server's prompt is not the exact continuation of the turn before",
    }
    prefix = before[-1].prompt_ids + before[-1].sampled_ids if before else ()
    return read_reply({"choices": [choice]}, prefix, where).turn


def _is_empty(call: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the items say nothing, as a call does that found the context full."""
    return all(item.get("type", "message") == "message" and not _said(item.get("content")) for item in call)


def _said(content: Any) -> bool:
    """Whether content, text or a list of parts, holds any text or refusal."""
    if not isinstance(content, list):
        return bool(content)
    return any(part.get("text") or part.get("refusal") if isinstance(part, dict) else part for part in content)


def _no_bundle(index: int, item: Mapping[str, Any], url: str) -> InfraError:
    return InfraError(
        f"{url}: response.output[{index}] ({item.get('type', 'message')}) ends a model call and has no "
        f"{', '.join(BUNDLE)}; let the agent's model server return token ids (return_token_id_information: true)",
        cause="bad_reply",
    )
