"""What a reasoning parser is, and the one for reasoning between tags.

Reasoning is told from the rest before tool calls are read, so a call spelled inside it is none. Nothing is lost but
the tags and the white space around the two parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from gymloop.tokens.parsers.gate import Gate


@dataclass(frozen=True, slots=True)
class Split:
    """A reply in two parts.

    Attributes:
        reasoning: None where there was none; a block that says nothing is ``""``.
        rest: content and tool calls.
    """

    reasoning: str | None
    rest: str


class Splitter:
    """Splits a reply that arrives in pieces. This one knows nothing before the end, so it passes nothing on."""

    def feed(self, piece: str) -> Split:
        """What is certain to come next in both parts of ``ReasoningParser.split`` of the whole text."""
        return Split(None, "")


class ReasoningParser(ABC):
    """How one family of models marks its reasoning. Holds no state: one object reads all replies."""

    @abstractmethod
    def split(self, text: str, opened: bool) -> Split:
        """Tell reasoning from the rest.

        Args:
            text: of a turn, control tokens included, end token excluded.
            opened: the prompt ends inside a block of reasoning already.
        """

    def splitter(self, opened: bool) -> Splitter:
        """For streaming: a fresh object that gives parts as soon as they are certain."""
        return Splitter()

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt that ends with this text leaves the model inside a block of reasoning."""
        return False


@dataclass(frozen=True)
class TaggedReasoning(ReasoningParser):
    """Reasoning between two tags, at the beginning of a reply. A block that is not closed goes to the end.

    Attributes:
        opener: begins reasoning; only at the beginning of a reply, behind white space.
        closer: ends it; the first one counts.
        implicit: the opener may be missing: a reply without it is reasoning up to the closer, or to the end.
    """

    opener: str
    closer: str
    implicit: bool = False

    def split(self, text: str, opened: bool) -> Split:
        """See ``ReasoningParser``. An opener is dropped even where the prompt has one already."""
        said = text.lstrip()
        if said.startswith(self.opener):
            said = said[len(self.opener) :]
        elif not (opened or self.implicit):
            return Split(None, text)
        reasoning, _, rest = said.partition(self.closer)
        return Split(reasoning.strip(), rest.lstrip())

    def splitter(self, opened: bool) -> Splitter:
        """See ``ReasoningParser``."""
        return TaggedSplitter(self.opener, (self.closer,), opened or self.implicit)

    def opened_by(self, prompt: str) -> bool:
        """See ``ReasoningParser``."""
        return prompt.rstrip().endswith(self.opener)


@dataclass
class TaggedSplitter(Splitter):
    """Splits at tags. Three phases: ``begin`` waits for the opener, ``reasoning`` for a closer, ``rest`` for nothing.

    Attributes:
        opener: begins reasoning, at the beginning of the reply.
        closers: the first of them ends it.
        opened: there may be no opener.
        drops_closer: the text behind the closer is passed on; otherwise nothing is, for it needs the whole reply.
    """

    opener: str
    closers: tuple[str, ...]
    opened: bool
    drops_closer: bool = True
    _phase: str = "begin"
    _held: list[str] = field(default_factory=list)
    _at_border: bool = True  # white space that comes now is dropped

    def __post_init__(self) -> None:
        self._gate = Gate(self.closers)

    def feed(self, piece: str) -> Split:
        """See ``Splitter``."""
        reasoning: str | None = None
        if self._phase == "begin":
            begun = self._begin(piece)
            if begun is None:
                return Split(None, "")
            piece = begun
        if self._phase == "reasoning":
            passed, found = self._gate.feed(piece)
            reasoning = self._without_border(passed)
            if not found:
                return Split(reasoning, "")
            self._phase, self._at_border = "rest", True
            held = self._gate.held().lstrip()
            piece = held[len(next(closer for closer in self.closers if held.startswith(closer))) :]
        return Split(reasoning, self._without_border(piece) if self.drops_closer else "")

    def _begin(self, piece: str) -> str | None:
        """What belongs to the next phase; None while that is not known."""
        self._held.append(piece)
        if piece.isspace():
            return None
        text = "".join(self._held)
        said = text.lstrip()
        if len(said) < len(self.opener) and self.opener.startswith(said):
            return None
        if said.startswith(self.opener):
            self._phase = "reasoning"
            return said[len(self.opener) :]
        self._phase = "reasoning" if self.opened else "rest"
        self._at_border = self.opened
        return text

    def _without_border(self, text: str) -> str:
        if self._at_border and text:
            text = text.lstrip()
            self._at_border = not text
        return text
