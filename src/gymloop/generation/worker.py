"""One engine replica with its HTTP server: the socket answers before the model loads, under a URL that never changes.

Importing and constructing it needs no torch; ``load`` does. It is a plain class, in a Ray actor or in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gymloop.errors import ConfigError, InfraError
from gymloop.generation.chat import SamplingProfiles
from gymloop.generation.server import GenerationServer
from gymloop.startup.sockets import hold_socket

if TYPE_CHECKING:
    from gymloop.generation.engine import Engine
    from gymloop.tokens.renderer import Renderer
    from gymloop.weights.snapshot import WeightSnapshot

PAUSE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine replica needs to know, in plain values.

    Attributes:
        model_name: the name clients send.
        profiles: what sampling the server accepts.
        port_range: first and last port its socket may take.
        precision: ``auto``, ``float32`` or ``bfloat16``; auto as the policy settles it.
        threads: torch threads.
    """

    model_name: str
    profiles: SamplingProfiles | None
    port_range: tuple[int, int]
    max_model_len: int
    max_batch_size: int
    request_timeout_s: float
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    host: str = "127.0.0.1"
    stop_token_ids: tuple[int, ...] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class EngineWorker:
    """Binds its socket and serves on it at once; answers 503 until ``load`` is done."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._renderer: Renderer | None = None
        self._closed = False
        socket = hold_socket(*spec.port_range, host=spec.host)
        self._server = GenerationServer(
            socket, spec.model_name, spec.profiles, request_timeout_s=spec.request_timeout_s
        )
        self._server.start()

    def url(self) -> str:
        """Base URL of the server, ``http://host:port/v1``."""
        return self._server.url

    def load(self, model_folder: str, tokenizer_folder: str) -> dict[str, Any]:
        """Load tokenizer and model, then open the server for requests.

        Returns:
            Facts for the startup table: precision, threads, context length.

        Raises:
            ConfigError: the folder does not hold a model this engine can run.
        """
        try:
            return self._load(Path(model_folder), Path(tokenizer_folder))
        except BaseException as error:
            self._server.fail(f"{type(error).__name__}: {error}")
            raise

    def _load(self, folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
        from gymloop.compat import settle_precision
        from gymloop.generation.torch_engine import TorchEngine
        from gymloop.tokens.renderer import Renderer

        spec = self._spec
        if spec.threads is not None:
            import torch

            torch.set_num_threads(spec.threads)
        renderer = Renderer.load(
            tokenizer_folder, spec.chat_template, spec.chat_template_kwargs, end_token_ids=spec.stop_token_ids
        )
        precision = settle_precision(spec.precision, spec.device)
        engine = TorchEngine(
            folder,
            dtype=precision,
            device=spec.device,
            max_batch_size=spec.max_batch_size,
            max_model_len=spec.max_model_len,
            seed=spec.seed,
        )
        with self._lock:
            if self._closed:
                engine.close()
                raise InfraError("the engine was closed while its model loaded")
            self._engine, self._renderer = engine, renderer
        self._server.ready(engine, renderer)
        return {"precision": precision, "max_model_len": spec.max_model_len}

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

    def render_demonstrations(
        self, demonstrations: Sequence[Mapping[str, Any]]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Turn conversations into (token ids, indices of the assistant's tokens).

        Args:
            demonstrations: each with ``messages`` and ``tools``.
        """
        self._loaded()
        if self._renderer is None:
            raise ConfigError("demonstrations can be rendered once the tokenizer is loaded")
        return [self._renderer.demonstration(demo["messages"], demo.get("tools")) for demo in demonstrations]

    def close(self) -> None:
        """End the server, then the engine. Safe to call twice."""
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        self._server.close()
        if engine is not None:
            engine.close()

    def _loaded(self) -> Engine:
        with self._lock:
            if self._engine is None:
                raise InfraError("the engine has not loaded its model yet")
            return self._engine
