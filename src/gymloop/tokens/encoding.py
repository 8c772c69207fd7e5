"""Text of a message can never become a control token.

A tokenizer matches its control tokens in the rendered text, whoever wrote them. So each control token that stands in
a message is broken by a guard character before rendering (``<|im_end|>`` becomes ``<G|im_end|>``), and a rendered text
that holds a guard is encoded by a *shield*: a copy of the tokenizer that knows every control token under another name
only (``F<|im_end|>F``). The template's own tokens, still whole, are renamed; guards are dropped; what a message spelled
is then ordinary text to a tokenizer that has no such token, and every other rule of the tokenizer is untouched. Guard
and fence are private-use characters that occur nowhere in the conversation. Afterwards the ids are counted: a control
id that the template did not write is an error, never a prompt.

Control tokens are the special tokens, the added tokens that the template writes, and every added token spelled
``<|...|>``. Other added tokens (Gemma's runs of newlines, HTML tags) are vocabulary. In what an assistant said before,
only special tokens are broken: ``<think>`` or ``<tool_call>`` keep their ids there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_PRIVATE = range(0xE000, 0xF900)
_SUSPECT = re.compile("[\ue000-\uf8ff]|\\\\u[eEfF]")


class ControlTokenInInput(DataError):
    """This tokenizer makes a control token even of plain text, so the conversation cannot be encoded."""

    code = "control_token_in_input"


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters that occur nowhere in one conversation.

    Attributes:
        guard: stands inside every control token that a message spells.
        fence: stands around every control token that the template wrote.
        slot: stands for the text of an assistant turn (see ``bridge``).
    """

    guard: str
    fence: str
    slot: str


class _Control:
    """A set of control tokens, and where a text spells one or begins to."""

    def __init__(self, tokens: Iterable[str]):
        self.tokens = frozenset(tokens)
        longest_first = sorted(self.tokens, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.pattern = re.compile(alternatives)
        # Every start, overlapping ones too: breaking one match must not leave another.
        self._starts = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._prefixes = frozenset(token[:end] for token in self.tokens for end in range(1, len(token)))
        self._longest = max(map(len, self.tokens), default=0)

    def break_in(self, text: str, guard: str) -> str:
        """``text`` with every token, and every beginning of a token at its end, broken after its first character."""
        text = self._starts.sub(rf"\1{guard}", text)
        length = len(text)
        for size in range(1, min(self._longest, length + 1)):  # rightmost first: later insertions lie to the left
            if text[length - size : length] in self._prefixes:
                at = length - size + 1
                text = text[:at] + guard + text[at:]
        return text


class Encoder:
    """Text to ids for one tokenizer and one template; safe to use from one thread at a time."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str):
        """Take over ``backend`` (truncation and padding are switched off) and read its added tokens.

        Args:
            backend: the fast tokenizer.
            template: source of the chat template, to know which added tokens it writes.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        added = backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        self.control = special | {
            token.content: index
            for index, token in added.items()
            if token.content in template or (token.content.startswith("<|") and token.content.endswith("|>"))
        }
        """Id of each control token."""
        self._every = _Control(self.control)
        self._special = _Control(special)
        self._ids = frozenset(self.control.values())
        self.special_ids = frozenset(special.values())
        # Tokens matched in normalised text can hide from a search in the raw text.
        self._normalises = backend.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in self.control
        )
        self._shields: dict[str, tuple[tokenizers.Tokenizer, dict[int, int]]] = {}

    def marks(self, *values: Any) -> Marks:
        """Characters that occur in none of the strings in ``values``, nor in the template."""
        used = {match for text in _strings(values) for match in _private_in(text)} | set(_private_in(self._template))
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        try:
            return Marks(next(free), next(free), next(free))
        except StopIteration:
            raise ControlTokenInInput(
                "the conversation uses every private-use character; none is left to mark it"
            ) from None

    def break_message(self, message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
        """A copy of ``message`` whose strings spell no control token."""
        said = ("content", "reasoning_content") if message.get("role") == "assistant" else ()
        return {
            key: self._break(value, self._special if key in said else self._every, marks.guard)
            for key, value in message.items()
        }

    def break_value(self, value: Any, marks: Marks) -> Any:
        """A copy of a JSON value whose strings, keys included, spell no control token."""
        return self._break(value, self._every, marks.guard)

    def encode(self, rendered: str, marks: Marks) -> tuple[int, ...]:
        """Ids of a rendered text, without the tokens a post-processor would add.

        Raises:
            ControlTokenInInput: a control id comes out that the template did not write.
        """
        # A template may have written the guard as a JSON escape.
        text = re.sub(rf"\\u{ord(marks.guard):04x}", marks.guard, rendered, flags=re.IGNORECASE)
        if marks.guard not in text:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        wanted = Counter(
            self.control[match.group()]
            for match in self._every.pattern.finditer(text)
            if not self._broken(text, match, marks)
        )
        renamed = self._every.pattern.sub(
            lambda match: (
                match.group() if self._broken(text, match, marks) else f"{marks.fence}{match.group()}{marks.fence}"
            ),
            text,
        )
        ids = self._shielded(renamed.replace(marks.guard, ""), marks.fence)
        if self._forged(ids, wanted):
            # The model's own vocabulary spells the token (unigram models do): keep its two halves apart.
            pieces = [piece for piece in renamed.split(marks.guard) if piece]
            ids = tuple(index for piece in pieces for index in self._shielded(piece, marks.fence))
        if forged := self._forged(ids, wanted):
            names = ", ".join(sorted(text for text, index in self.control.items() if index in forged))
            raise ControlTokenInInput(f"this tokenizer turns text of a message into the control token {names}")
        return ids

    def _break(self, value: Any, control: _Control, guard: str) -> Any:
        if isinstance(value, str):
            text = control.break_in(value, guard)
            return self._break_normalised(text, control, guard) if self._normalises else text
        if isinstance(value, Mapping):
            return {self._break(k, control, guard): self._break(v, control, guard) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._break(item, control, guard) for item in value]
        return value

    def _break_normalised(self, text: str, control: _Control, guard: str) -> str:
        """Break what only the tokenizer's normaliser makes a control token, for example full-width letters."""
        ids = {self.control[token] for token in control.tokens}

        def found(text: str) -> list[int]:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return [start for index, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if index in ids]

        for start in reversed(found(text)):
            text = text[: start + 1] + guard + text[start + 1 :]
        if found(text):
            raise ControlTokenInInput("this tokenizer's normaliser turns text of a message into a control token")
        return text

    @staticmethod
    def _broken(text: str, match: re.Match[str], marks: Marks) -> bool:
        """A token of one character has no inside: its guard follows it."""
        return len(match.group()) == 1 and text.startswith(marks.guard, match.end())

    def _forged(self, ids: Sequence[int], wanted: Counter[int]) -> set[int]:
        seen = Counter(index for index in ids if index in self._ids)
        return {index for index, count in seen.items() if count > wanted[index]}

    def _shielded(self, text: str, fence: str) -> tuple[int, ...]:
        if fence not in self._shields:
            self._shields[fence] = _shield(self._backend, self.control, fence)
        shield, original = self._shields[fence]
        return tuple(original.get(index, index) for index in shield.encode(text, add_special_tokens=False).ids)


def _shield(
    backend: tokenizers.Tokenizer, control: Mapping[str, int], fence: str
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A copy of ``backend`` that knows control tokens by their fenced names, and its ids that differ from ours."""
    import tokenizers

    state = json.loads(backend.to_str())
    added = backend.get_added_tokens_decoder()
    for token in state["added_tokens"]:
        if token["content"] in control:
            token["content"] = f"{fence}{token['content']}{fence}"
            token["normalized"] = False  # a normaliser could drop the fence
    # Renamed tokens get new ids, counted from the size of the vocabulary; one with holes would reuse an id.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    holes = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
    filler = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    fillers = [{"id": 0, "content": f"{fence}{i}{fence}"} | filler for i in range(holes)]
    state["added_tokens"] = fillers + state["added_tokens"]
    shield = tokenizers.Tokenizer.from_str(json.dumps(state))
    original: dict[int, int] = {}
    for index, token in added.items():
        name = f"{fence}{token.content}{fence}" if token.content in control else token.content
        renamed = shield.token_to_id(name)
        if renamed is not None and renamed != index:
            original[renamed] = index
    return shield, original


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _private_in(text: str) -> Iterator[str]:
    """Private-use characters in ``text``, as such or as a JSON escape."""
    if not _SUSPECT.search(text):
        return
    yield from re.findall("[\ue000-\uf8ff]", text)
    for code in re.findall(r"\\u([0-9a-fA-F]{4})", text):
        yield chr(int(code, 16))
