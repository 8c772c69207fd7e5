"""The one place where a conversation becomes a prompt.

``render`` writes a whole conversation, ``extend`` continues sampled ids, ``demonstration`` writes a conversation as if
the model had sampled it. All three encode by ``encoding.Encoder``, so text never becomes a control token, and all three
agree: for turns as the template writes them, extending equals rendering.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError, DataError
from gymloop.tokens import bridge
from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import ConversationError, Message, Tool, check_tools, normalise
from gymloop.tokens.encoding import Encoder, Marks, unescape
from gymloop.tokens.folder import generation_end_ids, model_vocab_size, template_text
from gymloop.tokens.provenance import Run, balance, mark_messages, mark_tools, runs, texts_of
from gymloop.tokens.reply import ReplyReader, reply_reader

_MAX_HEADER = 64  # tokens of a generation prompt
_MAX_CACHED_BASES = 64


@dataclass(frozen=True, slots=True)
class _Base:
    """The fixed base conversation under some tools.

    Attributes:
        before: text of its user message.
        closing: what follows the text of its assistant turn when nothing else does.
        closing_ids: its ids through the first end token; empty if there is none.
    """

    before: str
    closing: str
    closing_ids: tuple[int, ...]


class Renderer:
    """A tokenizer and its chat template. Use from one thread at a time.

    Attributes:
        end_token_ids: every token that ends a turn: those of the model's generation config, the tokenizer's own, and
            the one with which the template closes an assistant turn.
        tokenizer_end_id: the tokenizer's own.
        vocab_size: ids are below this number; a model's may be above its tokenizer's.
        control_ids: tokens that text of a message never becomes.
        reader: reads what the model said in the form that the template shows it.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_token_ids: Collection[int] = (),
        vocab_size: int = 0,
        reader: ReplyReader | None = None,
    ):
        """Wrap a fast tokenizer.

        Args:
            tokenizer: a transformers tokenizer with a ``tokenizers`` backend; no longer used by anyone else.
            chat_template: Jinja text; None takes the tokenizer's own.
            chat_template_kwargs: extra variables of the template.
            end_token_ids: tokens that end a turn beside the tokenizer's own and the template's.
            vocab_size: of the model, where it has more ids than the tokenizer.
            reader: None reads calls as Hermes and Qwen write them, and leaves reasoning in the content.

        Raises:
            ConfigError: there is no template, or no fast backend.
        """
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(f"{name} has no fast tokenizer (tokenizer.json), which rendering needs")
        own = tokenizer.chat_template
        if chat_template is None and not own:
            raise ConfigError(
                f"{name} has no chat template; give one in policy.tokenizer.chat_template (Jinja text or a .jinja path)"
            )
        self._tokenizer = tokenizer
        self._template = chat_template
        self.reader: ReplyReader = reader or reply_reader()
        self.chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
        sources = chat_template if chat_template is not None else own
        source = sources if isinstance(sources, str) else "\n".join(sources.values())
        self._encoder = Encoder(tokenizer.backend_tokenizer, source)
        self.control_ids: frozenset[int] = frozenset(self._encoder.control.values())
        self._bases: dict[tuple[str, Marks], _Base] = {}
        self.vocab_size: int = max(vocab_size, len(tokenizer))
        self.tokenizer_end_id: int | None = tokenizer.eos_token_id
        own_ends = (self.tokenizer_end_id,) if self.tokenizer_end_id is not None else ()
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*end_token_ids, *own_ends)))
        self.end_token_ids = tuple(dict.fromkeys((*self.end_token_ids, *self._template_end())))
        if not self.end_token_ids:
            raise ConfigError(f"{name} names no end token; set policy.generation.stop_token_ids")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_token_ids: Collection[int] | None = None,
        reader: ReplyReader | None = None,
    ) -> Renderer:
        """Read tokenizer, template and end tokens from a model folder, without any network.

        Args:
            folder: holds ``tokenizer.json`` and, if it has one, ``generation_config.json``.
            chat_template: Jinja text, or a path ending in ``.jinja``; None takes the tokenizer's own.
            chat_template_kwargs: extra variables of the template.
            end_token_ids: None takes those of the generation config.
            reader: see ``__init__``.

        Raises:
            ConfigError: the folder, the tokenizer or the template is missing.
        """
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ConfigError(f"tokenizer folder {folder} does not exist")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # a damaged tokenizer.json raises bare Exception
            raise ConfigError(f"no tokenizer can be loaded from {folder}: {error}") from error
        ends = generation_end_ids(folder) if end_token_ids is None else end_token_ids
        template = template_text(chat_template)
        return cls(tokenizer, template, chat_template_kwargs, ends, model_vocab_size(folder), reader)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids of a whole conversation as the template writes it.

        Raises:
            ConversationError: the template cannot render these messages.
            ControlTokenInInput: see ``encoding``.
        """
        plain = normalise(messages)
        marks = self._marks(plain, tools)
        text = self._text(self._shown(plain, marks), self._shown_tools(tools, marks), add_generation_prompt)
        return self._encoder.encode(text, marks)

    def extend(
        self, prefix_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[int, ...]:
        """``prefix_ids`` unchanged, then what the template writes between that turn and the next one.

        Args:
            prefix_ids: prompt and sampled ids of the last turn, its end token included if one was sampled.
            new_messages: the messages that follow that turn; none asks for another assistant turn.
            tools: the tools of the conversation.

        Raises:
            BridgeError: the template cannot continue sampled ids with these messages.
        """
        plain = normalise(new_messages) if new_messages else []
        marks = self._marks(plain, tools)
        shown = self._shown(plain, marks)
        shown_tools = self._shown_tools(tools, marks)
        tail_ids = self._encoder.encode(self._tail(shown, shown_tools, marks), marks)
        closing_ids = self._base_of(shown_tools, marks).closing_ids
        return bridge.join(prefix_ids, tail_ids, closing_ids, self.end_token_ids)

    def provenance(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        continued: int | None = None,
    ) -> tuple[Run, ...] | None:
        """Which tokens of a prompt are text of messages, and which are the template's; see ``provenance``.

        Args:
            ids: a prompt that ``render`` or ``extend`` gave.
            messages: those it was made from: the whole conversation, or the new messages.
            tools: of the conversation.
            continued: how many ids ``extend`` was given; None for ``render``.

        Returns:
            Runs of ``ids[continued:]``; None where the template treats marked texts differently.

        Raises:
            DataError: as ``render`` and ``extend``.
        """
        texts = normalise(messages) if messages else []
        marks = self._marks(texts, tools)
        shown, shown_tools = self._shown(texts, marks), self._shown_tools(tools, marks)
        marked, marked_tools = mark_messages(shown, marks), mark_tools(shown_tools, marks)
        try:
            if continued is None:
                plain = self._text(shown, shown_tools, add_generation_prompt=True)
                text = self._text(marked, marked_tools, add_generation_prompt=True)
            else:
                # Texts of tools stand before the slot.
                plain = self._tail(shown, shown_tools, marks)
                text = self._tail(marked, shown_tools, marks)
        except DataError:
            self.render(messages, tools) if continued is None else self.extend(ids[:continued], messages, tools)
            return None  # only the marked rendering failed
        text = balance(text, marks, texts_of([shown, shown_tools]))
        if unescape(plain, marks.guard) != text.replace(marks.begin, "").replace(marks.end, ""):
            return None
        traced, inside = self._encoder.trace(text, marks)
        new = tuple(ids[continued or 0 :])
        if not new or traced[-len(new) :] != new:
            return None
        return runs("environment" if flag else "template" for flag in inside[-len(new) :])

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning that the template began, as Nemotron's ``<think>`` prompt does."""
        if self.reader.reasoning_parser is None:
            return False  # without the decoding: this is asked of every prompt
        last = next((i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] in self._encoder.special_ids), 0)
        return self.reader.opened_by(self.decode(prompt_ids[max(last, len(prompt_ids) - _MAX_HEADER) :]))

    def prompt_lengths(self, prompts: Iterable[tuple[Sequence[Message], Sequence[Tool] | None]]) -> list[int | str]:
        """Tokens of each conversation, or why the template cannot render it."""
        lengths: list[int | str] = []
        for messages, tools in prompts:
            try:
                lengths.append(len(self.render(messages, tools)))
            except DataError as error:
                lengths.append(str(error))
        return lengths

    def demonstration(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A conversation whose assistant turns are exactly what the model would have had to sample.

        Returns:
            The ids, and the ascending indices of those in assistant turns: text, tool calls as the template writes
            them, and the end token.

        Raises:
            DataError: there is no assistant turn, or the template cannot be split into turns.
        """
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise DataError("a demonstration needs at least one assistant message")
        ids: tuple[int, ...] = ()
        sampled: list[int] = []
        start = 0
        for turn in turns:
            between = messages[start:turn]
            ids = self.extend(ids, between, tools) if ids else self.render(between, tools)
            said = self._turn_ids(messages[turn], tools)
            sampled.extend(range(len(ids), len(ids) + len(said)))
            ids += said
            start = turn + 1
        return ids, tuple(sampled)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included, with no clean-up."""
        # The backend's, for transformers' own looks at every id in Python first.
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of text that is no conversation: control tokens that it spells are control tokens.

        Args:
            text: a whole prompt.
            add_special_tokens: put what the tokenizer puts in front of a text, such as a begin token.
        """
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Tokens that are one byte of a character the vocabulary lacks; a run of them is decoded as one."""
        names = (f"<0x{byte:02X}>" for byte in range(256))
        found = (self._tokenizer.backend_tokenizer.token_to_id(name) for name in names)
        return frozenset(token for token in found if token is not None)

    def said(self, sampled_ids: Sequence[int]) -> str:
        """What a turn says: its text without the end token."""
        ended = bool(sampled_ids) and sampled_ids[-1] in self.end_token_ids
        return self.decode(sampled_ids[:-1] if ended else sampled_ids)

    def _turn_ids(self, message: Message, tools: Sequence[Tool] | None) -> tuple[int, ...]:
        """What the model samples to say ``message``: its text on the fixed base, up to the end token."""
        plain = normalise([message])
        marks = self._marks(plain, tools)
        user, shown_tools = bridge.base(marks.slot)[:1], self._shown_tools(tools, marks)
        prompt = self._text(user, shown_tools, add_generation_prompt=True)
        whole = self._text([*user, *self._shown(plain, marks)], shown_tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise DataError(
                "the chat template writes an assistant turn that does not begin with its generation prompt, "
                "so demonstrations cannot be made with it"
            )
        ids = self._encoder.encode(whole[len(prompt) :], marks)
        end = next((index for index, token in enumerate(ids) if token in self.end_token_ids), None)
        return (*ids, self.end_token_ids[0]) if end is None else ids[: end + 1]

    def _tail(self, shown: Sequence[Message], tools: Any, marks: Marks) -> str:
        """What the template writes behind the slot, with ``shown`` after it.

        Raises:
            BridgeError: see ``extend``.
        """
        try:
            base = self._base_of(tools, marks)
            try:
                rendered = self._text([*bridge.base(marks.slot), *shown], tools, add_generation_prompt=True)
                return bridge.tail(rendered, base.before, marks.slot)
            except (ConversationError, BridgeError):
                called = bridge.calling_base(marks.slot, shown)
                if called is None:
                    raise
            # Some templates write a tool's result only after the call that it answers.
            before = self._text(called, tools, add_generation_prompt=False)
            rendered = self._text([*called, *shown], tools, add_generation_prompt=True)
            return bridge.tail_after_calls(rendered, before, base.closing)
        except ConversationError as error:
            raise BridgeError(str(error)) from error

    def _base_of(self, tools: Any, marks: Marks) -> _Base:
        key = (json.dumps(tools) if tools else "", marks)
        if key not in self._bases:
            base = bridge.base(marks.slot)
            before = self._text(base[:1], tools, add_generation_prompt=False)
            closing = bridge.tail(self._text(base, tools, add_generation_prompt=False), before, marks.slot)
            ids = self._encoder.encode(closing, marks)
            end = next((i for i, token in enumerate(ids) if token in self.end_token_ids), -1)
            if len(self._bases) >= _MAX_CACHED_BASES:
                self._bases.clear()
            self._bases[key] = _Base(before, closing, ids[: end + 1])
        return self._bases[key]

    def _template_end(self) -> tuple[int, ...]:
        """The special token with which the template closes an assistant turn, if it can be seen."""
        marks = self._encoder.marks(self.chat_template_kwargs)
        try:
            closing = self._encoder.encode(self._base_of(None, marks).closing, marks)
        except DataError:
            return ()  # a template that refuses the base conversation; ``extend`` says so when it is needed
        finally:
            self._bases.clear()  # its closing is cut at end tokens that are not known yet
        return tuple(token for token in closing if token in self._encoder.special_ids)[:1]

    def _marks(self, plain: Sequence[Message], tools: Sequence[Tool] | None) -> Marks:
        """Marks for normalised messages and tools; a client's further fields, such as token ids, are not looked at."""
        check_tools(tools or ())
        return self._encoder.marks(plain, tools, self.chat_template_kwargs)

    def _shown(self, plain: Sequence[Message], marks: Marks) -> list[dict[str, Any]]:
        return [self._encoder.break_message(message, marks) for message in plain]

    def _shown_tools(self, tools: Sequence[Tool] | None, marks: Marks) -> Any:
        return self._encoder.break_value(tools, marks) if tools else None

    def _text(self, shown: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                shown,
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program of its own, and may fail in any way
            raise ConversationError(f"the chat template cannot render this conversation: {error}") from error
