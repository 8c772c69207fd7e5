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

_MAX_SHIELDS = 4
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
        begin, end: stand around text of a message where its tokens are to be told apart (see ``provenance``).
    """

    guard: str
    fence: str
    slot: str
    begin: str
    end: str

    @property
    def invisible(self) -> str:
        """Those that leave no token."""
        return self.guard + self.begin + self.end


class _Control:
    """A set of control tokens, and where a text spells one or begins to."""

    def __init__(self, tokens: Iterable[str], template: str):
        self.tokens = frozenset(tokens)
        longest_first = sorted(self.tokens, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.pattern = re.compile(alternatives)
        # Every start, overlapping ones too: breaking one match must not leave another.
        self._starts = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._prefixes = frozenset(token[:end] for token in self.tokens for end in range(1, len(token)))
        self._longest = max(map(len, self.tokens), default=0)
        self._rests = frozenset(
            token[end:] for token in self.tokens for end in range(1, len(token)) if _leads_in(token[:end], template)
        )

    def break_in(self, text: str, guard: str) -> str:
        """``text`` with every token broken after its first character.

        So are a beginning of a token at the end of the text, which the template could finish, and what would finish
        a token that the template begins just before it inserts a text.
        """
        if self._rests:
            start = len(text) - len(text.lstrip())
            rest = text[start:].rstrip()
            if rest and any(known.startswith(rest) or rest.startswith(known) for known in self._rests):
                text = text[: start + 1] + guard + text[start + 1 :]
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
        self._every = _Control(self.control, template)
        self._special = _Control(special, template)
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
            return Marks(next(free), next(free), next(free), next(free), next(free))
        except StopIteration:
            raise ControlTokenInInput(
                "the conversation uses every private-use character; none is left to mark it"
            ) from None

    def break_message(self, message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
        """A copy of ``message`` whose strings spell no control token."""
        said = ("content", "reasoning_content") if message.get("role") == "assistant" else ()
        return {
            # A template compares roles, and may spell control tokens with them.
            key: value if key == "role" else self._break(value, self._special if key in said else self._every, marks)
            for key, value in message.items()
        }

    def break_value(self, value: Any, marks: Marks) -> Any:
        """A copy of a JSON value whose strings, keys included, spell no control token."""
        return self._break(value, self._every, marks)

    def encode(self, rendered: str, marks: Marks) -> tuple[int, ...]:
        """Ids of a rendered text, without the tokens a post-processor would add.

        Raises:
            ControlTokenInInput: a control id comes out that the template did not write.
        """
        text = unescape(rendered, marks.guard)
        if marks.guard not in text:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        wanted = Counter(self.control[match.group()] for match in self._written(text, marks))
        renamed = self._renamed(text, marks)
        ids = self._shielded(renamed.replace(marks.guard, ""), marks.fence)
        if self._forged(ids, wanted):
            # The model's own vocabulary spells the token (unigram models do): keep its two halves apart.
            pieces = [piece for piece in renamed.split(marks.guard) if piece]
            ids = tuple(index for piece in pieces for index in self._shielded(piece, marks.fence))
        if forged := self._forged(ids, wanted):
            names = ", ".join(sorted(text for text, index in self.control.items() if index in forged))
            raise ControlTokenInInput(f"this tokenizer turns text of a message into the control token {names}")
        return ids

    def trace(self, rendered: str, marks: Marks) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a rendered text whose message texts stand between ``begin`` and ``end``, and which of them are those.

        Returns:
            The ids that ``encode`` gives without those marks, and for each whether any of its characters is a
            message's. A vocabulary that forces ``encode`` to keep halves of a token apart gives other ids here.
        """
        text = unescape(rendered, marks.invisible)
        renamed = self._renamed(text, marks) if marks.guard in text else text
        plain: list[str] = []
        inside: list[bool] = []
        within = False
        for char in renamed:
            if char == marks.begin or char == marks.end:
                within = char == marks.begin
            elif char != marks.guard:
                plain.append(char)
                inside.append(within)
        whole = "".join(plain)
        if renamed is text:
            encoding = self._backend.encode(whole, add_special_tokens=False)
            original: Mapping[int, int] = {}
        else:
            shield, original = self._shield_of(marks.fence)
            encoding = shield.encode(whole, add_special_tokens=False)
        ids = tuple(original.get(index, index) for index in encoding.ids)
        return ids, tuple(any(inside[start:end]) for start, end in encoding.offsets)

    def _written(self, text: str, marks: Marks) -> Iterator[re.Match[str]]:
        """The control tokens that the template wrote."""
        return (match for match in self._every.pattern.finditer(text) if not self._broken(text, match, marks))

    def _renamed(self, text: str, marks: Marks) -> str:
        """``text`` with those tokens under the names that the shield knows."""
        pieces: list[str] = []
        end = 0
        for match in self._written(text, marks):
            pieces += (text[end : match.start()], marks.fence, match.group(), marks.fence)
            end = match.end()
        return "".join((*pieces, text[end:]))

    def _break(self, value: Any, control: _Control, marks: Marks) -> Any:
        if isinstance(value, str):
            text = control.break_in(value, marks.guard)
            return self._break_normalised(text, control, marks.guard) if self._normalises else text
        if isinstance(value, Mapping):
            return {self._break(k, control, marks): self._break(v, control, marks) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._break(item, control, marks) for item in value]
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

    def _shield_of(self, fence: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        if fence not in self._shields:
            if len(self._shields) >= _MAX_SHIELDS:  # conversations choose the fence; each shield is a whole tokenizer
                self._shields.clear()
            self._shields[fence] = _shield(self._backend, self.control, fence)
        return self._shields[fence]

    @staticmethod
    def _broken(text: str, match: re.Match[str], marks: Marks) -> bool:
        """A token of one character has no inside: its guard follows it."""
        return len(match.group()) == 1 and text.startswith(marks.guard, match.end())

    def _forged(self, ids: Sequence[int], wanted: Counter[int]) -> set[int]:
        seen = Counter(index for index in ids if index in self._ids)
        return {index for index, count in seen.items() if count > wanted[index]}

    def _shielded(self, text: str, fence: str) -> tuple[int, ...]:
        shield, original = self._shield_of(fence)
        return tuple(original.get(index, index) for index in shield.encode(text, add_special_tokens=False).ids)


def unescape(text: str, characters: str) -> str:
    """``text`` with ``characters`` as themselves where a template wrote them as JSON escapes."""
    for char in characters:
        text = re.sub(rf"\\u{ord(char):04x}", char, text, flags=re.IGNORECASE)
    return text


def _leads_in(beginning: str, template: str) -> bool:
    """Whether a template may write the beginning of a control token and then a text that is not its own."""
    if "\\x" in template or "\\u" in template:
        return True  # its strings may spell anything
    return re.search(re.escape(beginning) + r"(?:['\"]|\s*\{[{%#])", template) is not None


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
