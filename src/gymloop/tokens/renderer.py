"""The one place where a conversation becomes a prompt.

``render`` writes a whole conversation, ``extend`` continues sampled ids, ``demonstration`` writes a conversation as if
the model had sampled it. All three encode by ``encoding.Encoder``, so text never becomes a control token, and all three
agree: for turns as the template writes them, extending equals rendering.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError, DataError
from gymloop.tokens import bridge
from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import ConversationError, Message, Tool, normalise
from gymloop.tokens.encoding import Encoder, Marks

_MAX_CACHED_BASES = 64


@dataclass(frozen=True, slots=True)
class _Base:
    """The fixed base conversation under some tools.

    Attributes:
        before: text of its user message.
        closing_ids: what follows the text of its assistant turn when nothing else does.
    """

    before: str
    closing_ids: tuple[int, ...]


class Renderer:
    """A tokenizer and its chat template. Use from one thread at a time.

    Attributes:
        end_token_ids: every token that ends a turn: those of the model's generation config, the tokenizer's own, and
            the one with which the template closes an assistant turn.
        vocab_size: ids are below this number; a model's may be above its tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_token_ids: Collection[int] = (),
        vocab_size: int = 0,
    ):
        """Wrap a fast tokenizer.

        Args:
            tokenizer: a transformers tokenizer with a ``tokenizers`` backend; no longer used by anyone else.
            chat_template: Jinja text; None takes the tokenizer's own.
            chat_template_kwargs: extra variables of the template.
            end_token_ids: tokens that end a turn beside the tokenizer's own and the template's.
            vocab_size: of the model, where it has more ids than the tokenizer.

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
        self.chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
        sources = chat_template if chat_template is not None else own
        source = sources if isinstance(sources, str) else "\n".join(sources.values())
        self._encoder = Encoder(tokenizer.backend_tokenizer, source)
        self._bases: dict[tuple[str, Marks], _Base] = {}
        self.vocab_size: int = max(vocab_size, len(tokenizer))
        own_ends = (tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ()
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*end_token_ids, *own_ends, *self._template_end())))
        if not self.end_token_ids:
            raise ConfigError(f"{name} names no end token; set policy.generation.stop_token_ids")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_token_ids: Collection[int] | None = None,
    ) -> Renderer:
        """Read tokenizer, template and end tokens from a model folder, without any network.

        Args:
            folder: holds ``tokenizer.json`` and, if it has one, ``generation_config.json``.
            chat_template: Jinja text, or a path ending in ``.jinja``; None takes the tokenizer's own.
            chat_template_kwargs: extra variables of the template.
            end_token_ids: None takes those of the generation config.

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
        return cls(tokenizer, _template_text(chat_template), chat_template_kwargs, ends, _model_vocab_size(folder))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids of a whole conversation as the template writes it.

        Raises:
            ConversationError: the template cannot render these messages.
            ControlTokenInInput: see ``encoding``.
        """
        marks = self._encoder.marks(messages, tools, self.chat_template_kwargs)
        text = self._text(self._shown(messages, marks), tools, marks, add_generation_prompt)
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
        marks = self._encoder.marks(new_messages, tools, self.chat_template_kwargs)
        shown = [*_base(marks), *(self._shown(new_messages, marks) if new_messages else [])]
        try:
            base = self._base_of(tools, marks)
            rendered = self._text(shown, tools, marks, add_generation_prompt=True)
        except ConversationError as error:
            raise BridgeError(str(error)) from error
        tail_ids = self._encoder.encode(bridge.tail(rendered, base.before, marks.slot), marks)
        end = next((i for i, token in enumerate(base.closing_ids) if token in self.end_token_ids), -1)
        return bridge.join(prefix_ids, tail_ids, base.closing_ids[: end + 1], self.end_token_ids)

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
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def said(self, sampled_ids: Sequence[int]) -> str:
        """What a turn says: its text without the end token."""
        ended = bool(sampled_ids) and sampled_ids[-1] in self.end_token_ids
        return self.decode(sampled_ids[:-1] if ended else sampled_ids)

    def _turn_ids(self, message: Message, tools: Sequence[Tool] | None) -> tuple[int, ...]:
        """What the model samples to say ``message``: its text on the fixed base, up to the end token."""
        marks = self._encoder.marks(message, tools, self.chat_template_kwargs)
        user = _base(marks)[:1]
        prompt = self._text(user, tools, marks, add_generation_prompt=True)
        whole = self._text([*user, *self._shown([message], marks)], tools, marks, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise DataError(
                "the chat template writes an assistant turn that does not begin with its generation prompt, "
                "so demonstrations cannot be made with it"
            )
        ids = self._encoder.encode(whole[len(prompt) :], marks)
        end = next((index for index, token in enumerate(ids) if token in self.end_token_ids), None)
        return (*ids, self.end_token_ids[0]) if end is None else ids[: end + 1]

    def _base_of(self, tools: Sequence[Tool] | None, marks: Marks) -> _Base:
        key = (json.dumps(tools) if tools else "", marks)
        if key not in self._bases:
            before = self._text(_base(marks)[:1], tools, marks, add_generation_prompt=False)
            whole = self._text(_base(marks), tools, marks, add_generation_prompt=False)
            closing = self._encoder.encode(bridge.tail(whole, before, marks.slot), marks)
            if len(self._bases) >= _MAX_CACHED_BASES:
                self._bases.clear()
            self._bases[key] = _Base(before, closing)
        return self._bases[key]

    def _template_end(self) -> tuple[int, ...]:
        """The special token with which the template closes an assistant turn, if it can be seen."""
        try:
            closing = self._base_of(None, self._encoder.marks(self.chat_template_kwargs)).closing_ids
        except DataError:
            return ()  # a template that refuses the base conversation; ``extend`` says so when it is needed
        return tuple(token for token in closing if token in self._encoder.special_ids)[:1]

    def _shown(self, messages: Sequence[Message], marks: Marks) -> list[dict[str, Any]]:
        return [self._encoder.break_message(message, marks) for message in normalise(messages)]

    def _text(
        self, shown: Sequence[Message], tools: Sequence[Tool] | None, marks: Marks, add_generation_prompt: bool
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                shown,
                tools=self._encoder.break_value(tools, marks) if tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program of its own, and may fail in any way
            raise ConversationError(f"the chat template cannot render this conversation: {error}") from error


def _base(marks: Marks) -> list[dict[str, Any]]:
    return [{"role": "user", "content": bridge.BASE_USER_TEXT}, {"role": "assistant", "content": marks.slot}]


def _template_text(chat_template: str | None) -> str | None:
    if chat_template is None or not chat_template.endswith(".jinja") or "\n" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise ConfigError(f"policy.tokenizer.chat_template: the file {chat_template} does not exist")
    return path.read_text(encoding="utf-8")


def generation_end_ids(folder: str | Path) -> tuple[int, ...]:
    """``eos_token_id`` of the folder's generation config, one or several; empty if there is none.

    Raises:
        ConfigError: the file is not JSON or the value is not made of token ids.
    """
    value = _json_object(Path(folder) / "generation_config.json").get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(end) is int for end in ends):
        raise ConfigError(
            f"{folder}/generation_config.json: eos_token_id is {value!r}; expected a token id or a list of them"
        )
    return tuple(ends)


def _model_vocab_size(folder: str | Path) -> int:
    config = _json_object(Path(folder) / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if type(size) is int else 0


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value
