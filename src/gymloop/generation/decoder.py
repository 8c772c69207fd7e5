"""A causal language model that reads a cache of ours: what it may be, one pass over a step, and its weights in place.

No family is ever decoded wrongly: at start the model's own full forward is compared with the same tokens computed piece
by piece through the very rows that will serve requests, and a model that differs is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gymloop import compat
from gymloop.errors import ConfigError
from gymloop.generation.engine import Sampling
from gymloop.generation.kv_cache import ATTENTION, DenseCache, Step
from gymloop.generation.rows import Rows
from gymloop.models.load import OnBytes, load_causal_lm
from gymloop.models.tensors import checkpoint_tensors
from gymloop.weights.fit import check_fits
from gymloop.weights.source import WeightSource

LAYER_TYPES = ("full_attention", "sliding_attention")
PROBE_TOKENS = 12
PROBE_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest error of the probe's logits, relative to their spread."""


class Decoder:
    """Any Hugging Face decoder with full or sliding-window attention, on one device.

    Args:
        folder: Hugging Face model folder.
        dtype: ``float32`` or ``bfloat16``.
        device: as torch names it.
        max_model_len: the longest row it will see, tokens.
        fixed_shapes: compute mixtures of experts in shapes that do not follow from the routing.
        on_loading: hears of the weights' progress, in bytes; see ``load_causal_lm``.

    Raises:
        ConfigError: the folder cannot be loaded, or the model cannot be decoded with a KV cache of ours.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: Literal["float32", "bfloat16"],
        device: str,
        max_model_len: int,
        fixed_shapes: bool = False,
        on_loading: OnBytes | None = None,
    ):
        self.device = torch.device(device)
        self.model: Any = load_causal_lm(folder, dtype, device, on_loading)
        self.name = type(self.model).__name__
        self.dtype: torch.dtype = self.model.dtype
        self.vocab = int(self.model.get_input_embeddings().weight.shape[0])
        self._cache_argument = compat.cache_argument(self.model)
        self._windows: set[int | None] = set()
        _check_supported(self.model, max_model_len)
        if fixed_shapes and not compat.fix_expert_shapes(self.model):
            raise ConfigError(
                f"{self.name} cannot run on the deterministic torch engine: the shapes its experts compute in follow "
                "from the routing of the whole batch"
            )
        ids = torch.randint(self.vocab, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        self._probe_ids = ids.numpy().astype(np.int32)
        with torch.inference_mode():
            logits = self.model(input_ids=ids[None].to(self.device), use_cache=False).logits
        self._probe_logits = logits[0].float()
        if not compat.set_attention(self.model, ATTENTION):
            raise ConfigError(f"{self.name} cannot run on the torch engine: its attention cannot be replaced")

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Indices on the device, int64."""
        return torch.from_numpy(array.astype(np.int64)).to(self.device, non_blocking=True)

    def forward(self, cache: DenseCache, step: Step, ids: np.ndarray, drawn_at: Sequence[int]) -> torch.Tensor:
        """Compute one step.

        Args:
            cache: gets the keys and values of the step's tokens.
            step: row and position of every token.
            ids: int [tokens].
            drawn_at: indices into ``ids`` whose logits are wanted; none is legal.

        Returns:
            Float32 logits [len(drawn_at), vocab].
        """
        cache.step = step
        try:
            output = self.model(
                input_ids=self.tensor(ids)[None],
                position_ids=step.position_ids[None],
                use_cache=True,
                logits_to_keep=torch.tensor(drawn_at, dtype=torch.int64, device=self.device),
                dense_step=step,
                windows_seen=self._windows,
                **{self._cache_argument: cache},
            )
        finally:
            cache.step = None
        return output.logits[0].float()

    def check_fits(self, source: WeightSource) -> None:
        """Check that the source holds exactly this model's parameters and persistent buffers.

        Raises:
            ConfigError: it does not.
        """
        check_fits(source, self.model)

    def replace_weights(self, source: WeightSource) -> None:
        """Copy weights that fit into the model's tensors, which stay where they are; types become the model's.

        Raises:
            InfraError: the source ended early; some tensors have their new values, some the old ones.
        """
        held = dict(checkpoint_tensors(self.model))
        with torch.no_grad():
            if not all(tensor.is_contiguous() for tensor in held.values()):
                for name, tensor in source.tensors():
                    held[name].copy_(tensor)
                return
            for piece in source.pieces():
                flat = held[piece.entry.name].view(-1)
                flat[piece.begin : piece.begin + piece.values.numel()].copy_(piece.values)

    @torch.inference_mode()
    def probe(self, make_rows: Callable[[], Rows[Any]]) -> None:
        """Compare rows of the kind that ``make_rows`` gives with the model's own full forward.

        Args:
            make_rows: two rows or more of at least ``PROBE_TOKENS`` positions, with a small prefill per step.

        Raises:
            ConfigError: the logits differ, or a sliding window never reaches the attention.
        """
        rows = make_rows()
        try:
            worst = self._worst_error(rows)
        # Whatever a foreign forward may raise when it is handed a cache of ours; the full forward has just run.
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{self.name} cannot run on the torch engine: {reason}") from error
        finally:
            rows.clear()
        limit = PROBE_LIMITS[self.dtype]
        if not worst <= limit:
            raise ConfigError(
                f"{self.name} cannot run on the torch engine: its logits with a cache differ from a full forward by "
                f"{worst:.2g} of their size, at most {limit:g} was expected"
            )
        self._check_windows()

    def _worst_error(self, rows: Rows[Any]) -> float:
        """Largest error over the probe's last tokens, of its prompt and then fed one by one."""
        known = self._probe_ids
        # A bystander comes first and leaves early, so that rows which move have moved.
        bystander = _Probe("bystander", known[::-1][:5].copy(), Sampling(1, noise_key="0/0/0"))
        request = _Probe("probe", known[:-2].copy(), Sampling(1, noise_key="0/1/0"))
        admitted = [rows.admit(bystander), rows.admit(request)]
        if not all(admitted):
            raise RuntimeError("two empty rows did not take two requests")
        fed = len(request.prompt)
        worst = 0.0
        while fed <= len(known):
            for ready in rows.step():
                tokens = np.zeros(len(ready.rows), dtype=np.int32)
                for index, owner in enumerate(ready.requests):
                    if owner is request:
                        worst = max(worst, self._error(ready.logits[index], fed - 1))
                        tokens[index] = known[min(fed, len(known) - 1)]
                        fed += 1
                rows.append(ready, tokens)
                if bystander in ready.requests:
                    rows.remove([bystander])
        return worst

    def _error(self, found: torch.Tensor, position: int) -> float:
        expected = self._probe_logits[position]
        error = (found - expected).norm() / (expected - expected.mean()).norm().clamp(min=1e-12)
        return float(error) if bool(error.isfinite()) else float("inf")

    def _check_windows(self) -> None:
        """A window longer than the probe shows no difference, so it must at least have reached the attention."""
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True):
            return
        layers = getattr(config, "layer_types", None)
        if (layers is None or "sliding_attention" in layers) and self._windows == {None}:
            raise ConfigError(
                f"{self.name} cannot run on the torch engine: its sliding window of {config.sliding_window} does not "
                "reach the attention function"
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Probe:
    """An occupant that nobody waits for."""

    request_id: str
    prompt: np.ndarray
    sampling: Sampling


def _check_supported(model: Any, max_model_len: int) -> None:
    """Refuse what the dense cache cannot hold."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    strange = [kind for kind in getattr(config, "layer_types", None) or () if kind not in LAYER_TYPES]
    if strange:
        raise ConfigError(
            f"{name} cannot run on the torch engine: it has layers of type {strange[0]!r}; "
            f"supported are {' and '.join(LAYER_TYPES)}"
        )
    if model._is_stateful or getattr(config, "is_encoder_decoder", False):
        kind = "recurrent state" if model._is_stateful else "an encoder"
        raise ConfigError(f"{name} cannot run on the torch engine: it has {kind}, which a KV cache does not hold")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_model_len > positions:
        raise ConfigError(
            f"the context limit is {max_model_len} tokens but {name} has {positions} positions "
            "(max_position_embeddings in its config.json)"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    if short is not None and max_model_len > short:
        raise ConfigError(
            f"the context limit is {max_model_len} tokens but {name} encodes positions differently beyond {short} "
            "(longrope in its config.json), for all rows at once; set the limit to at most that"
        )
