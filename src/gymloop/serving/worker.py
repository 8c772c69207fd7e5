"""One engine replica with its HTTP server: the socket answers before the model loads, under a URL that never changes.

No request is answered before the probe has found that the chat template, the parsers and the end tokens agree.
Importing and constructing it needs no torch; ``load`` does. It is a plain class, in a Ray actor or in this process.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gymloop.errors import ConfigError, InfraError
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.server import GenerationServer
from gymloop.startup.sockets import hold_socket

if TYPE_CHECKING:
    from gymloop.generation.torch_engine import TorchEngine
    from gymloop.serving.traffic import Traffic
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import ReplyReader
    from gymloop.weights.snapshot import WeightSnapshot

log = logging.getLogger(__name__)

PAUSE_TIMEOUT_S = 120.0
NO_TEMPLATE = (
    "{{ raise_exception('this model has no chat template; give one (gymloop serve --chat-template FILE) "
    "or use /v1/completions') }}"
)
"""Stands in for the template of a model that has none: every conversation is refused with this sentence."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine replica needs to know, in plain values.

    Attributes:
        model_name: the name clients send.
        profiles: what sampling the server accepts; None accepts any.
        port_range: first and last port its socket may take.
        max_model_len: prompt and sample together, tokens; None takes the model's own.
        max_batch_size: requests decoded together; None takes as many as the free memory holds, at most 64.
        precision: ``auto``, ``float32`` or ``bfloat16``; auto as the policy settles it.
        device: as torch names it; ``auto`` is a GPU where torch sees one.
        threads: torch threads.
        tool_parser, tool_parser_plugin, reasoning_parser, reasoning_parser_plugin: see ``tokens.reply``.
        deterministic: see ``TorchEngine``.
        template_required: False serves a model without a chat template, for completions only.
        api_key: what clients must send as ``Authorization: Bearer``; None asks for nothing.
        loop_lag_s: see ``GenerationServer``.
    """

    model_name: str
    profiles: SamplingProfiles | None
    port_range: tuple[int, int]
    max_model_len: int | None
    max_batch_size: int | None
    request_timeout_s: float
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    host: str = "127.0.0.1"
    stop_token_ids: tuple[int, ...] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "hermes"
    tool_parser_plugin: str | None = None
    reasoning_parser: str | None = None
    reasoning_parser_plugin: str | None = None
    deterministic: bool = False
    template_required: bool = True
    api_key: str | None = field(default=None, repr=False)
    loop_lag_s: float = 5.0


class EngineWorker:
    """Binds its socket and serves on it at once; answers 503, saying what is being loaded, until ``load`` is done."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._rendering = threading.Lock()  # calls come in threads of their own, and a renderer serves one at a time
        self._engine: TorchEngine | None = None
        self._renderer: Renderer | None = None
        self._closed = False
        self._progress = ("the model's folder", 0, 0)
        self._end_token_ids: tuple[int, ...] = ()
        self._warned: set[str] = set()
        socket = hold_socket(*spec.port_range, host=spec.host)
        self._server = GenerationServer(
            socket,
            spec.model_name,
            spec.profiles,
            request_timeout_s=spec.request_timeout_s,
            api_key=spec.api_key,
            loop_lag_s=spec.loop_lag_s,
        )
        self._server.waiting_for(self._progress[0])
        self._server.start()

    def url(self) -> str:
        """Base URL of the server, ``http://host:port/v1``."""
        return self._server.url

    def heartbeat(self) -> tuple[str, int, int]:
        """Answers at once whatever the engine does: it takes no lock, so no answer means that the process is stuck.

        Returns:
            ``load_progress``.
        """
        return self._progress

    def load_progress(self) -> tuple[str, int, int]:
        """What is being loaded, the bytes of it that are there, and their total (0 where it is not bytes).

        It changes as long as loading gets on, so a deadline may be extended by it. Takes no lock.
        """
        return self._progress

    def load(self, model_folder: str, tokenizer_folder: str) -> dict[str, Any]:
        """Load tokenizer and model, probe them, then open the server for requests.

        Returns:
            Facts for the startup table: precision, device, context length, rows, whether chat works, and the probe's
            warnings.

        Raises:
            ConfigError: the folder does not hold a model this engine can run, or the probe found errors: one sentence
                each.
        """
        try:
            return self._load(Path(model_folder), Path(tokenizer_folder))
        except BaseException as error:
            self._server.fail(f"{type(error).__name__}: {error}")
            raise

    def _load(self, folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
        spec = self._spec
        self._at("torch and transformers")
        import torch

        from gymloop.compat import settle_precision
        from gymloop.generation.torch_engine import TorchEngine

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self._at("the tokenizer")
        chats = spec.template_required or spec.chat_template is not None or has_chat_template(tokenizer_folder)
        renderer, warnings = self._renderer_of(tokenizer_folder, chats)
        device = spec.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = settle_precision(spec.precision, device)
        max_model_len, rows = self._size(folder, precision, device)
        self._at("the weights")
        engine = TorchEngine(
            folder,
            dtype=precision,
            device=device,
            max_batch_size=rows,
            max_model_len=max_model_len,
            seed=spec.seed,
            deterministic=spec.deterministic,
            on_loading=self._at_weights,
        )
        with self._lock:
            if self._closed:
                engine.close()
                raise InfraError("the engine was closed while its model loaded")
            self._engine, self._renderer = engine, renderer
        self._server.ready(engine, renderer)
        self._progress = ("ready", 0, 0)
        return {
            "precision": precision,
            "device": device,
            "max_model_len": max_model_len,
            "max_batch_size": rows,
            "chat": chats,
            "warnings": warnings,
        }

    def _renderer_of(self, folder: Path, chats: bool) -> tuple[Renderer, tuple[str, ...]]:
        """The renderer with its reader of replies, probed; and the probe's warnings."""
        from gymloop.tokens.folder import generation_end_ids
        from gymloop.tokens.renderer import Renderer
        from gymloop.tokens.reply import reply_reader

        spec = self._spec
        reader: ReplyReader = reply_reader(
            spec.tool_parser, spec.tool_parser_plugin, spec.reasoning_parser, spec.reasoning_parser_plugin
        )
        renderer = Renderer.load(
            folder,
            spec.chat_template if chats else NO_TEMPLATE,
            spec.chat_template_kwargs,
            end_token_ids=spec.stop_token_ids,
            reader=reader,
        )
        if not chats:
            warning = f"{spec.model_name} has no chat template: completions work, chat is refused"
            log.warning(warning)
            return renderer, (warning,)
        self._at("the check of template, parsers and end tokens")
        self._end_token_ids = generation_end_ids(folder) if spec.stop_token_ids is None else spec.stop_token_ids
        return renderer, self._probed(renderer, None)

    def _probed(self, renderer: Renderer, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...]:
        """What the probe warns of; each warning goes to the log once.

        Raises:
            ConfigError: it found errors.
        """
        from gymloop.tokens.probe import probe

        findings = probe(renderer, self._end_token_ids, tools)
        errors = [finding.what for finding in findings if finding.severity == "error"]
        if errors:
            raise ConfigError("\n".join(errors))
        warnings = tuple(finding.what for finding in findings)
        for warning in warnings:
            if warning not in self._warned:
                log.warning(warning)
        self._warned.update(warnings)
        return warnings

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Probe once more with the tools that a run will show, before it asks for anything.

        Returns:
            The probe's warnings.

        Raises:
            ConfigError: the template does not show them, or its calls are not read back: what was a warning without
                tools would teach the model calls that nobody runs.
        """
        self._loaded()
        if self._renderer is None:
            raise InfraError("the tokenizer is not loaded yet")
        with self._rendering:
            return self._probed(self._renderer, tools)

    def _size(self, folder: Path, precision: str, device: str) -> tuple[int, int]:
        """Context length and rows of the engine: as given, else what model and memory allow."""
        from gymloop.generation import capacity
        from gymloop.models.load import tensor_bytes

        spec = self._spec
        if spec.max_model_len is not None and spec.max_batch_size is not None:
            return spec.max_model_len, spec.max_batch_size
        config = capacity.text_config(folder)
        max_model_len = spec.max_model_len or capacity.context_length(config)
        row = capacity.row_bytes(config, precision, max_model_len)
        weights = sum(tensor_bytes(folder).values())
        rows = spec.max_batch_size or capacity.rows_that_fit(row, weights, capacity.free_bytes(device))
        return max_model_len, rows

    def _at(self, what: str) -> None:
        self._progress = (what, 0, 0)
        self._server.waiting_for(what)

    def _at_weights(self, done: int, total: int) -> None:
        self._progress = ("the weights", done, total)
        percent = 100 * done // max(total, 1)
        self._server.waiting_for(f"the weights, {percent}% of {total / 1e6:.0f} MB")

    def fail(self, reason: str) -> None:
        """Loading cannot even begin: answer every request with 503 and this reason, for good."""
        self._server.fail(reason)

    def check(self) -> None:
        """Return where the engine is well or not there yet.

        Raises:
            InfraError: it died; the message has the cause.
        """
        with self._lock:
            engine = self._engine
        if engine is not None:
            engine.require_alive()

    def traffic(self) -> Traffic:
        """The server's counters since it started."""
        return self._server.traffic()

    def load_weights(self, snapshot: WeightSnapshot, version: int) -> None:
        """Replace the engine's weights between two tokens; requests in flight go on with the new ones.

        Raises:
            ConfigError: the snapshot does not fit the model; nothing was changed.
            InfraError: the step in progress did not end in time.
        """
        engine = self._loaded()
        engine.pause(PAUSE_TIMEOUT_S)
        try:
            engine.load_weights(snapshot, version)
        finally:
            engine.resume()

    def weight_version(self) -> int:
        """Version of the weights the next token is sampled with."""
        return self._loaded().weight_version

    def prompt_lengths(
        self, prompts: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]]
    ) -> list[int | str]:
        """Tokens of each conversation, or why the template cannot render it.

        Args:
            prompts: chat messages, and tools or None.
        """
        self._loaded()
        if self._renderer is None:
            raise InfraError("the tokenizer is not loaded yet")
        return self._renderer.prompt_lengths(prompts)

    def render_demonstrations(
        self, demonstrations: Sequence[Mapping[str, Any]]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Turn conversations into (token ids, indices of the assistant's tokens).

        Args:
            demonstrations: each with ``messages`` and ``tools``.
        """
        self._loaded()
        if self._renderer is None:
            raise InfraError("the tokenizer is not loaded yet")
        with self._rendering:
            return [self._renderer.demonstration(demo["messages"], demo.get("tools")) for demo in demonstrations]

    def close(self) -> None:
        """End the server, then the engine. Safe to call twice."""
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        self._server.close()
        if engine is not None:
            engine.close()

    def _loaded(self) -> TorchEngine:
        with self._lock:
            if self._engine is None:
                raise InfraError("the engine has not loaded its model yet")
            return self._engine


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer's folder holds a chat template of its own, in either of the places transformers reads."""
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return isinstance(config, dict) and bool(config.get("chat_template"))
