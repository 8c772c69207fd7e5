"""How an engine replica takes offered weights: in its own process, or in those that hold its model.

Either way only the next version is taken, and it counts as taken when all of it has arrived.
"""

from __future__ import annotations

from typing import Protocol

from gymloop.generation.engine import Engine
from gymloop.generation.vllm_engine import VllmEngine
from gymloop.weights.offer import Offer
from gymloop.weights.place import Place, here
from gymloop.weights.receiver import WeightReceiver, require_next
from gymloop.weights.snapshot import WeightSnapshot


class Receiving(Protocol):
    """Of one replica."""

    @property
    def version(self) -> int | None:
        """Of the last weights that were taken completely; None before the first."""

    def place(self) -> Place:
        """Where they are taken."""

    def take(self, offer: Offer | WeightSnapshot, version: int, rank: int) -> None:
        """Replace the engine's weights; see ``EngineWorker.load_weights``."""

    def close(self) -> None:
        """Leave a broadcast's group. Safe to call twice."""


class InThisProcess:
    """An engine whose parameters are here.

    Args:
        engine: takes what arrives.
        device: of its parameters, as torch names it.
    """

    def __init__(self, engine: Engine, device: str) -> None:
        self._engine = engine
        self._receiver = WeightReceiver(device)

    @property
    def version(self) -> int | None:
        """See ``Receiving``."""
        return self._receiver.version

    def place(self) -> Place:
        """See ``Receiving``."""
        return here(self._receiver.device)

    def take(self, offer: Offer | WeightSnapshot, version: int, rank: int) -> None:
        """See ``Receiving``."""
        with self._receiver.opened(offer, version, rank) as source:
            self._engine.load_weights(source, version)

    def close(self) -> None:
        """See ``Receiving``."""
        self._receiver.close()


class InVllmsProcesses:
    """vLLM: the offer is handed on to the processes that hold the model.

    Args:
        engine: takes the offer.
        device: of each process, as torch names it.
        processes: tensor-parallel ranks.
    """

    def __init__(self, engine: VllmEngine, device: str, processes: int) -> None:
        self._engine = engine
        self._device = device
        self._processes = processes
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """See ``Receiving``."""
        return self._version

    def place(self) -> Place:
        """See ``Receiving``."""
        return here(self._device, self._processes)

    def take(self, offer: Offer | WeightSnapshot, version: int, rank: int) -> None:
        """See ``Receiving``."""
        require_next(self._version, version)
        if isinstance(offer, WeightSnapshot):
            self._engine.load_weights(offer, version)
        else:
            self._engine.take_weights(offer, version, rank)
        self._version = version

    def close(self) -> None:
        """Nothing: a broadcast's group ends with vLLM's processes."""
