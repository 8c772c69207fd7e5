"""What runs inside vLLM's own worker processes: the only place that touches vLLM's internals.

A worker takes an offer of weights itself, by whichever transport carries it, so that nothing is copied on the way that
need not be. What it then has must be what a fresh load of the same weights would have. Two ways lead there:

* **in place**, on a GPU where no layer keeps its weights in a form of its own: vLLM's loaders write into the parameters
  that are there. It can be repeated after it was cut short.
* **reload**, everywhere else: vLLM's ``reload_weights`` restores each layer that it is given weights for and processes
  it again, which on a CPU packs a copy for its matrix product. An output head that is tied to the embedding is given
  none: it shares the embedding's new values and keeps its *old packed copy*, and answers with it, without a word. So
  every embedding-like layer is processed once more after the reload. Experts are processed as if nothing were packed,
  likewise without a word, so they are made to begin anew.

vLLM joins this class to its worker (``worker_extension_cls``); names begin with ``gymloop_`` to clash with none of its.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal

from gymloop.errors import InfraError
from gymloop.weights.offer import Offer
from gymloop.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    import torch

NAME = f"{__name__}.TakesWeights"
EXPERTS = {"gate_up_proj": (2, ("gate_proj", "up_proj")), "down_proj": (1, ("down_proj",))}
"""What transformers holds of all experts of a layer in one tensor, the dimension of that which is the hidden size, and
what a checkpoint has of one expert."""
Damage = Literal["none", "half", "lost"]
"""Of a failed update: nothing was changed; half of it was, and the next one mends that; no update can mend it."""


class TakesWeights:
    """Methods for ``AsyncLLM.collective_rpc``."""

    if TYPE_CHECKING:
        device: torch.device
        rank: int
        model_config: Any
        get_model: Callable[[], Any]
        reload_weights: Callable[..., None]
        gymloop_receiver: WeightReceiver

    def gymloop_take_weights(self, pickled: bytes, version: int, first_rank: int) -> tuple[str, str, Damage] | None:
        """Replace every parameter by those of an offer.

        Args:
            pickled: an ``Offer``, as ``multiprocessing`` moves what goes to another process.
            version: of the weights.
            first_rank: of this engine's first worker among the receivers of the offer.

        Returns:
            None when it is done; else the kind of failure, what happened, and what it left behind. An exception would
            reach the engine as text alone.
        """
        offer: Offer = ForkingPickler.loads(pickled)
        if not hasattr(self, "gymloop_receiver"):
            self.gymloop_receiver = WeightReceiver(str(self.device))
        receiver = self.gymloop_receiver
        receiver.version = None  # the engine keeps count: a worker that was done when another one failed is asked again
        damage: Damage = "none"
        try:
            model = self.get_model()
            with receiver.opened(offer, version, first_rank + self.rank) as source:
                in_place = can_take_in_place(model, str(self.device))
                hidden = int(self.model_config.get_hidden_size())
                tensors = as_its_loader_names_them(model, hidden, _begun(source.tensors()))
                damage = "half" if in_place else "lost"
                load = self._gymloop_in_place if in_place else self._gymloop_reload
                with unknown_names_told(model):
                    loaded = load(model, tensors)
            missing = sorted({name for name, _ in model.named_parameters()} - loaded)
            if missing:
                raise RuntimeError(f"no value came for {len(missing)} parameters, among them {missing[0]!r}")
        except Exception as error:  # noqa: BLE001  (told, not lost: see Returns)
            return type(error).__name__, str(error), damage
        return None

    def _gymloop_in_place(self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write into the parameters; returns the names of what was loaded."""
        import torch

        with torch.no_grad():
            return set(model.load_weights(tensors))

    def _gymloop_reload(self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as vLLM does at its start; returns the names of what was loaded.

        vLLM keeps each tensor until its layer is complete, and a source's is valid until the next is asked for.
        """
        kept = ((name, tensor.clone()) for name, tensor in tensors)
        if self.device.type == "cpu":
            _let_experts_be_packed_again(model)
        with _told_what_was_loaded(model) as loaded, _quiet("vllm.model_executor.model_loader.reload.layerwise"):
            self.reload_weights(weights_iterator=kept)
        _process_embeddings_again(model)
        return loaded


def can_take_in_place(model: Any, device: str) -> bool:
    """Whether each parameter is what the checkpoint's tensors are copied into, and nothing else is made from it.

    Args:
        model: vLLM's.
        device: as torch names it.
    """
    if not device.startswith("cuda"):
        return False  # a CPU's layers compute with a packed copy
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method) not in plain:
            return False
        if hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention):
            return False
    return True


def _begun(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, once the first of them is here: a sender that is gone is known before anything changes."""
    first = next(tensors, None)
    return tensors if first is None else itertools.chain([first], tensors)


def as_its_loader_names_them(
    model: Any, hidden_size: int, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with experts one by one where vLLM says that it knows them so, as a checkpoint has them.

    Builds differ in whether they know transformers' form too. One that holds them transposed is left as it is.

    Args:
        model: vLLM's.
        hidden_size: of the model.
        tensors: under transformers' names; of experts [experts, 2 * intermediate, hidden], gate before up, and
            [experts, hidden, intermediate].
    """
    mapping = getattr(model, "get_expert_mapping", None)
    known = set() if mapping is None else {entry[1] for entry in mapping()}
    one_by_one = {f"experts.0.{part}." for _, parts in EXPERTS.values() for part in parts} <= known
    for name, tensor in tensors:
        owner, _, kind = name.rpartition(".")
        hidden_at, parts = EXPERTS.get(kind, (0, ()))
        of_experts = owner.endswith(".experts") and parts and tensor.ndim == 3
        if not (one_by_one and of_experts and tensor.shape[hidden_at] == hidden_size):
            yield name, tensor
            continue
        for part, values in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            for expert, value in enumerate(values):
                yield f"{owner}.{expert}.{part}.weight", value


@contextmanager
def unknown_names_told(model: Any) -> Iterator[None]:
    """vLLM's loaders look a name up and let the KeyError of one that is not there go."""
    try:
        yield
    except KeyError as error:
        raise InfraError(f"this build of vLLM has no place for {error} in its {type(model).__name__}") from error


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


def _let_experts_be_packed_again(model: Any) -> None:
    """Forget their kernels, which a reload then makes anew: the old ones read as packed what it would leave plain."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _process_embeddings_again(model: Any) -> None:
    """Pack each embedding's and output head's present values, as a load does."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
