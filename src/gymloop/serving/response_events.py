"""The events of a streamed response: each item is added, grows, and is done; the last event holds the whole response.

Items come in the order of a turn: reasoning, message, function calls. Which item a call is, is known only at the
turn's end, for a turn that was cut shows none.
"""

from __future__ import annotations

from typing import Any

from gymloop.serving.call import Piece
from gymloop.serving.refusal import ApiError
from gymloop.serving.response_items import (
    call_item,
    message_item,
    new_id,
    reasoning_item,
    text_part,
)
from gymloop.serving.responses import ResponsesRequest, finished, response_head, status_of
from gymloop.serving.turn import Turn

Event = dict[str, Any]


class ResponseEvents:
    """The events of one response."""

    def __init__(self, response_id: str, model_name: str, request: ResponsesRequest, turn: Turn):
        self._turn = turn
        self._stream = turn.stream()
        self._head = response_head(response_id, model_name, request)
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the item that grows
        self._text: list[str] = []

    def of(self, piece: Piece) -> list[Event]:
        """The events that tell ``piece``."""
        events: list[Event] = []
        if not self._sequence:
            events += [self._event(f"response.{name}", response=self._head) for name in ("created", "in_progress")]
        for delta in self._stream.feed(piece.text):
            events += self._grow(delta.kind, delta.text)
        if piece.said is None:
            return events
        rest = self._stream.end(self._turn.shows_calls(piece.said.sample))
        status = status_of(piece.said)
        if rest.reasoning:
            events += self._grow("reasoning", rest.reasoning)
        if rest.content or not (self._items or rest.tool_calls):
            events += self._grow("content", rest.content)
        fields = self._turn.token_fields(piece.said.sample)
        events += self._close(status, fields if not rest.tool_calls else {})
        for index, call in enumerate(rest.tool_calls):
            last = index == len(rest.tool_calls) - 1
            events += self._call(call.id, call.name, call.arguments, status, fields if last else {})
        whole = finished(self._head, self._turn, piece.said, self._items, rest.malformed)
        return [*events, self._event(f"response.{status}", response=whole)]

    def closing(self) -> list[Event]:
        """Nothing: the last event is the response."""
        return []

    def failure(self, refusal: ApiError) -> Event:
        """What is told when the stream cannot go on."""
        return self._event("error", code=refusal.code, message=refusal.message, param=refusal.param)

    def _grow(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            events += self._close("completed", {})
            self._open = kind
            make, prefix = (reasoning_item, "rs") if kind == "reasoning" else (message_item, "msg")
            self._items.append(make(new_id(prefix), None, "in_progress"))
            events.append(self._event("response.output_item.added", item=dict(self._items[-1]), **self._place(False)))
            events.append(self._event("response.content_part.added", part=self._part(""), **self._place()))
        self._text.append(text)
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, self._event(f"response.{name}.delta", delta=text, **more, **self._place())]

    def _close(self, status: str, fields: dict[str, Any]) -> list[Event]:
        """End the item that grows; it may be the last and carry the token fields."""
        if self._open is None:
            return []
        item, text = self._items[-1], "".join(self._text)
        name = "reasoning_text" if self._open == "reasoning" else "output_text"
        more: dict[str, Any] = {} if self._open == "reasoning" else {"logprobs": []}
        item |= {"content": [self._part(text)], "status": status, **fields}
        events = [
            self._event(f"response.{name}.done", text=text, **more, **self._place()),
            self._event("response.content_part.done", part=self._part(text), **self._place()),
            self._event("response.output_item.done", item=item, **self._place(False)),
        ]
        self._open = None
        self._text.clear()
        return events

    def _call(self, call_id: str, name: str, arguments: str, status: str, fields: dict[str, Any]) -> list[Event]:
        item_id = new_id("fc")
        self._items.append(call_item(item_id, call_id, name, arguments, status) | fields)
        begun = call_item(item_id, call_id, name, "", "in_progress")
        place = self._place(False)
        at = {"item_id": item_id, **place}
        return [
            self._event("response.output_item.added", item=begun, **place),
            self._event("response.function_call_arguments.delta", delta=arguments, **at),
            self._event("response.function_call_arguments.done", arguments=arguments, name=name, **at),
            self._event("response.output_item.done", item=self._items[-1], **place),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else text_part(text)

    def _place(self, part: bool = True) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self._items) - 1}
        return place | ({"item_id": self._items[-1]["id"], "content_index": 0} if part else {})

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event
