"""One engine replica with its HTTP server: the socket answers before the model loads, under a URL that never changes.

No request is answered before the probe has found that the chat template, the parsers and the end tokens agree.
Importing and constructing it needs no torch; ``load`` does. It is a plain class, in a Ray actor or in this process.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymloop.errors import ConfigError, InfraError
from gymloop.garbage import keep, let_go, uncollected
from gymloop.generation.vllm import warm
from gymloop.generation.vllm.environment import of_threads as vllm_environment
from gymloop.generation.vllm.support import installed_version as require_vllm
from gymloop.serving.engine_spec import EngineSpec
from gymloop.serving.server import GenerationServer
from gymloop.startup.sockets import hold_socket

if TYPE_CHECKING:
    from gymloop.serving.engines import OnProgress, ServedEngine
    from gymloop.serving.receiving import Receiving
    from gymloop.serving.traffic import Traffic
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import ReplyReader
    from gymloop.weights.offer import Offer
    from gymloop.weights.place import Place
    from gymloop.weights.snapshot import WeightSnapshot

log = logging.getLogger(__name__)

PAUSE_TIMEOUT_S = 120.0
"""An engine whose running step takes longer is stuck."""
NO_TEMPLATE = (
    "{{ raise_exception('this model has no chat template; give one (gymloop serve --chat-template FILE) "
    "or use /v1/completions') }}"
)
"""Stands in for the template of a model that has none: every conversation is refused with this sentence."""


class EngineWorker:
    """Binds its socket and serves on it at once; answers 503, saying what is being loaded, until ``load`` is done.

    Args:
        spec: of its engine.
        on_progress: called on the thread that loads with each of ``load_progress``'s states.
    """

    def __init__(self, spec: EngineSpec, on_progress: OnProgress | None = None) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._rendering = threading.Lock()  # calls come in threads of their own, and a renderer serves one at a time
        self._engine: ServedEngine | None = None
        self._renderer: Renderer | None = None
        self._receiving: Receiving | None = None
        self._closed = False
        self._stuck: str | None = None
        self._on_progress = on_progress
        self._progress = ("the model's folder", 0, 0)
        self._end_token_ids: tuple[int, ...] = ()
        self._warned: set[str] = set()
        if spec.vllm is not None:
            require_vllm()  # said before anything is loaded
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
        if spec.vllm is not None:
            warm.begin(vllm_environment(spec.threads))

    def url(self) -> str:
        """Base URL of the server, ``http://host:port/v1``."""
        return self._server.url

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

    @uncollected()
    def _load(self, folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
        spec = self._spec
        self._at("torch and transformers")
        from gymloop.serving.engines import load_engine, settled_device

        device = settled_device(spec.device, spec.vllm is not None)
        chats = spec.template_required or spec.chat_template is not None or has_chat_template(tokenizer_folder)
        tokenizer: list[tuple[Renderer, tuple[str, ...]]] = []

        def meanwhile() -> None:
            self._at("the tokenizer")
            tokenizer.append(self._renderer_of(tokenizer_folder, chats))
            keep()
            self._at("the weights")

        engine, receiving, facts = load_engine(spec, folder, device, self._at, meanwhile)
        renderer, warnings = tokenizer[0]
        with self._lock:
            if self._closed:
                engine.close()
                let_go()
                raise InfraError("the engine was closed while its model loaded")
            self._engine, self._renderer, self._receiving = engine, renderer, receiving
        if spec.vllm is not None and spec.vllm.waits_for_weights:
            self._server.waiting_for("the first weight sync: the engine began with random weights")
        else:
            self._server.ready(engine, renderer)
        self._progress = ("ready", 0, 0)
        return {**facts, "chat": chats, "warnings": warnings}

    def _renderer_of(self, folder: Path, chats: bool) -> tuple[Renderer, tuple[str, ...]]:
        """The renderer with its reader of replies, probed; and the probe's warnings."""
        from gymloop.tokens.folder import generation_end_ids
        from gymloop.tokens.renderer import Renderer
        from gymloop.tokens.reply import reply_reader

        spec = self._spec
        reader: ReplyReader = reply_reader(
            spec.tool_parser, spec.tool_parser_plugin, spec.reasoning_parser, spec.reasoning_parser_plugin, folder
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

    def _at(self, what: str, done: int = 0, total: int = 0) -> None:
        self._progress = (what, done, total)
        if self._on_progress is not None:
            self._on_progress(what, done, total)
        share = f", {100 * done // total}% of {total / 1e6:.0f} MB" if total else ""
        self._server.waiting_for(f"{what}{share}")

    def fail(self, reason: str) -> None:
        """Loading cannot even begin: answer every request with 503 and this reason, for good."""
        self._server.fail(reason)

    def check(self) -> None:
        """Return where the engine is well or not there yet.

        Raises:
            InfraError: it died, or stood still when it was to take weights; the message has the cause.
        """
        with self._lock:
            engine = self._engine
        if engine is not None:
            engine.require_alive()
        if self._stuck is not None:
            raise InfraError(self._stuck)

    def traffic(self) -> Traffic:
        """The server's counters since it started."""
        return self._server.traffic()

    def sync_state(self) -> tuple[Place, int | None]:
        """Where the engine takes weights, and the version of those it took last; None before the first."""
        receiving = self._received()
        return receiving.place(), receiving.version

    def load_weights(self, offer: Offer | WeightSnapshot, version: int, rank: int = 1) -> None:
        """Replace the engine's weights between two tokens; requests in flight go on with the new ones.

        Args:
            offer: of the policy, or the weights themselves.
            version: their number.
            rank: of this engine's first process among those that take the offer, from 1.

        Raises:
            ConfigError: the weights do not fit the model; nothing was changed.
            InfraError: the step in progress did not end in time, the version is not the next, or the weights did not
                arrive whole; where some of them have been replaced, every request is refused until a later sync.
        """
        engine, receiving = self._loaded(), self._received()
        self._pause(engine)
        try:
            receiving.take(offer, version, rank)
            self._serve_first_weights()
        finally:
            engine.resume()

    def _pause(self, engine: ServedEngine) -> None:
        """Between two tokens; an engine that does not get there is no use to anybody, until it does."""
        try:
            engine.pause(PAUSE_TIMEOUT_S)
        except InfraError as error:
            self._stuck = str(error)
            raise
        self._stuck = None

    def _serve_first_weights(self) -> None:
        """An engine that began with random weights is served from its first sync on."""
        with self._lock:
            engine, renderer = self._engine, self._renderer
        if engine is not None and renderer is not None and self._spec.vllm is not None:
            self._server.ready(engine, renderer)

    def sleep(self, level: int) -> None:
        """Leave the device's memory to whoever shares it, until ``wake_up``; nothing is sampled meanwhile.

        Args:
            level: 1 keeps the weights on the host, 2 forgets them.
        """
        self._loaded().sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory back: for ``weights``, and, before anything is sampled, for ``kv_cache``."""
        self._loaded().wake(tags)

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
            receiving, self._receiving = self._receiving, None
        let_go()
        self._server.close()
        if receiving is not None:
            receiving.close()
        if engine is not None:
            engine.close()

    def _received(self) -> Receiving:
        with self._lock:
            if self._receiving is None:
                raise InfraError("the engine has not loaded its model yet")
            return self._receiving

    def _loaded(self) -> ServedEngine:
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
