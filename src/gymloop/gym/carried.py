"""A conversation's tokens on the wire: written once and read once, however many turns repeat them.

Each request names the exact tokens of the turn before, and each reply begins its prompt with them: thousands of ids
that both sides know. They are kept here as ids and as the JSON text that was sent. Where a reply's prompt begins with
that very text, byte for byte, those ids need not be read again; where it does not, all of it is read and compared.
"""

from __future__ import annotations

import orjson

from gymloop.rollouts.trajectory import Turn

_KEY = b'"prompt_token_ids":'


class CarriedTokens:
    """Prompt and sampled tokens of the last turn of one conversation."""

    def __init__(self) -> None:
        self._turn: Turn | None = None
        self._length = 0
        self._text = b"["  # JSON of the ids without the bracket that closes it
        self._continued: tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The carried tokens."""
        return () if self._turn is None else self._turn.prompt_ids + self._turn.sampled_ids

    def follow(self, turn: Turn) -> None:
        """Carry the tokens of this turn, which mostly continues the one that was carried."""
        known = self._length
        if turn.prompt_ids is not self._continued and turn.prompt_ids[:known] != self.ids:
            known, self._text = 0, b"["
        new = orjson.dumps(turn.prompt_ids[known:] + turn.sampled_ids)[1:-1]
        self._text += (b"," if known and new else b"") + new
        self._turn = turn
        self._length = len(turn.prompt_ids) + len(turn.sampled_ids)

    def continued_by(self, new: list[int]) -> tuple[int, ...]:
        """The carried tokens and those behind them, as the prompt of the next turn."""
        if self._turn is None:
            self._continued = tuple(new)
        else:  # the long part is copied once, and not through a list
            behind = (*self._turn.sampled_ids, *new)
            self._continued = self._turn.prompt_ids + behind
        return self._continued

    def json(self) -> tuple[bytes, bytes]:
        """The ids as JSON, in two pieces that need not be joined."""
        return self._text, b"]"

    def cut(self, reply: bytes) -> bytes | None:
        """The reply with ``prompt_token_ids`` lacking the carried tokens at its beginning.

        None where it does not begin with them as they were sent, or where more than one field has that name. These
        bytes can only be a field's name: inside a string the quotes would be escaped.
        """
        start = reply.find(_KEY) + len(_KEY)
        end = start + len(self._text)
        if not self._length or start < len(_KEY) or not reply.startswith(self._text, start):
            return None
        if reply.find(_KEY, end) >= 0:
            return None
        match reply[end : end + 1]:
            case b",":
                return reply[:start] + b"[" + reply[end + 1 :]
            case b"]":
                return reply[:start] + b"[" + reply[end:]
        return None
