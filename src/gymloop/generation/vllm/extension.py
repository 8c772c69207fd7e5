"""What runs inside vLLM's own worker processes: the only place that touches vLLM's internals.

A weight update must leave the worker as a fresh load of the same weights would. vLLM's ``reload_weights`` restores each
layer that it is given weights for and processes it again, which on a CPU packs a copy for its matrix product. An output
head that is tied to the embedding is given none: it shares the embedding's new values and keeps its *old packed copy*,
and answers with it, without a word. So every embedding-like layer is processed once more after the reload.

vLLM joins this class to its worker (``worker_extension_cls``); names begin with ``gymloop_`` to clash with none of its.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gymloop.weights.layout import Entry
from gymloop.weights.snapshot import WeightSnapshot

if TYPE_CHECKING:
    import torch

NAME = f"{__name__}.WeightReceiver"


class WeightReceiver:
    """Methods for ``AsyncLLM.collective_rpc``."""

    if TYPE_CHECKING:
        get_model: Callable[[], Any]
        reload_weights: Callable[..., None]

    def gymloop_load_weights(self, path: str, nbytes: int, manifest: Sequence[Sequence[Any]]) -> int:
        """Replace every parameter by those of a snapshot that lies in shared memory.

        Args:
            path: of the memory, see ``SharedBytes``.
            nbytes: of the snapshot's buffer.
            manifest: the fields of each ``Entry``.

        Returns:
            Parameters of the model, as vLLM counts them.

        Raises:
            RuntimeError: a parameter of the model got no value; the model is then half replaced and must not be used.
        """
        import numpy as np

        entries = tuple(Entry(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in manifest)
        buffer = np.memmap(path, np.uint8, "r", shape=(nbytes,))
        model = self.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with _told_what_was_loaded(model) as loaded, _quiet("vllm.model_executor.model_loader.reload.layerwise"):
            self.reload_weights(weights_iterator=WeightSnapshot(entries, buffer).tensors())
        missing = sorted(expected - loaded)
        if missing:
            raise RuntimeError(f"the snapshot gave no value to {len(missing)} parameters, among them {missing[0]!r}")
        _process_embeddings_again(model)
        return len(expected)


@contextmanager
def _told_what_was_loaded(model: Any) -> Iterator[set[str]]:
    """The names that ``model.load_weights`` returns while the block runs; ``reload_weights`` keeps them to itself."""
    loaded: set[str] = set()
    original = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = original(weights)
        loaded.update(names)
        return names

    model.load_weights = load_weights
    try:
        yield loaded
    finally:
        del model.load_weights


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """No warnings of one of vLLM's loggers: it warns of every layer without weights of its own, such as a tied head."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _process_embeddings_again(model: Any) -> None:
    """Pack each embedding's and output head's present values, as a load does."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
