"""One policy worker: a model that gives logprobs of sampled tokens and takes optimizer steps. A plain class, no Ray.

The loss is a weighted sum whose weights are fixed before the batch is cut (see ``algorithms.weighting``), so
microbatches only add: their size and packing change nothing but the order of float additions. "Old" logprobs are the
trainer's own from before the first optimizer step on a batch; the engine's enter only the correction and the mismatch
metrics.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.algorithms.losses import nll_loss, policy_loss
from gymloop.algorithms.step import split
from gymloop.compat import settle_precision
from gymloop.errors import DataError
from gymloop.garbage import uncollected
from gymloop.models.load import load_causal_lm, tensor_elements
from gymloop.models.tensors import checkpoint_tensors
from gymloop.policy import state
from gymloop.policy.forward import (
    Microbatch,
    packed_microbatches,
    padded_microbatches,
    sampled_logprobs,
    use_tree_attention,
    why_not_packed,
)
from gymloop.policy.optimizer import MasterAdamW, NonFiniteError
from gymloop.policy.residence import Residence, estimated_bytes
from gymloop.policy.spec import PolicySpec
from gymloop.weights.offer import Offer, SyncRequest
from gymloop.weights.place import Place, here
from gymloop.weights.sender import WeightSender
from gymloop.weights.snapshot import WeightSnapshot, take


class PolicyWorker:
    """The policy in one process.

    ``load`` comes first. A call that raises leaves no gradient behind, and no optimizer step half made.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.temperature = spec.temperature or 1.0
        self._model: Any = None
        self._reference: Any = None
        self._optimizer: MasterAdamW | None = None
        self._packing = False
        self._progress = ("the weights", 0, 0)
        self._residence = Residence(spec.device)
        self._sender = WeightSender(lambda: checkpoint_tensors(self._model), spec.device)

    def load_progress(self) -> tuple[str, int, int]:
        """What is being loaded, the bytes of it that are there, and their total (0 where it is not bytes).

        It changes as long as loading gets on, so a deadline may be extended by it.
        """
        return self._progress

    @uncollected()
    def load(self) -> dict[str, Any]:
        """Read the weights, settle the precision, and find out whether the model can be packed.

        Returns:
            ``params`` (count), ``precision`` (of the compute copy), ``packing`` (bool), ``packing_reason`` (one clause
            why not, or None), ``threads``, ``seconds``.

        Raises:
            ConfigError: the folder or the device cannot be used.
        """
        begin = time.monotonic()
        if self.spec.threads is not None:
            torch.set_num_threads(self.spec.threads)
        if self.spec.deterministic:
            # cuBLAS reads it when the process first touches the device.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(self.spec.seed)
        precision = settle_precision(self.spec.precision, self.spec.device)
        if self.spec.starts_on_host and torch.device(self.spec.device).type != "cpu":
            self._reserve(precision)
        device = "cpu" if self.spec.starts_on_host else self.spec.device
        model = load_causal_lm(self.spec.model_folder, "float32", device, self._read)
        self._progress = ("the comparison of packed with unpacked rows", 0, 0)
        reason: str | None = "policy.sequence_packing.enabled is false"
        if self.spec.packing:
            reason = why_not_packed(model, self.temperature)
        self._packing = reason is None
        self._progress = ("the optimizer", 0, 0)
        self._optimizer = MasterAdamW(
            model.named_parameters(),
            self.spec.optimizer,
            compute_dtype=getattr(torch, precision),
            lr_warmup_steps=self.spec.lr_warmup_steps,
            max_grad_norm=self.spec.max_grad_norm,
        )
        self._model = model
        if self.spec.loss.reference_policy_kl_penalty > 0:
            reference = load_causal_lm(self.spec.model_folder, precision, device, self._read)
            self._reference = reference.requires_grad_(False)
            if self._packing:
                use_tree_attention(self._reference)
        if self.spec.starts_on_host:
            self._progress = ("memory that the GPU copies from", 0, 0)
            self.to_host()
        return {
            "params": sum(parameter.numel() for parameter in model.parameters()),
            "precision": precision,
            "packing": self._packing,
            "packing_reason": reason,
            "threads": torch.get_num_threads(),
            "seconds": time.monotonic() - begin,
        }

    def to_device(self) -> None:
        """Move everything to where it computes; nothing changes where it is there."""
        self._residence.to_device(self._models(), self._loaded())

    def to_host(self) -> None:
        """Leave the device to others; everything but ``save``, ``restore`` and ``to_device`` needs it back first."""
        self._residence.to_host(self._models(), self._loaded())

    def _models(self) -> list[torch.nn.Module]:
        return [model for model in (self._model, self._reference) if model is not None]

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Make the policy-gradient steps of one batch: one, or as ``rollouts_per_optimizer_step`` cuts it.

        Returns:
            The metrics of the loss (``loss``, ``clip_fraction``, ``ratio/*``, ...; see ``algorithms.losses``) and
            ``grad_norm``, each the mean over the optimizer steps (extremes stay extremes); ``lr`` of the last;
            ``optimizer_steps``; ``entropy`` and ``mismatch/*`` (see ``mismatch``); ``tokens/packed``, those the
            backbone computed, of ``tokens/unpacked``; ``timing/*_s`` of ``forward``, ``backward`` and ``optimizer``.

        Raises:
            DataError: the batch is empty, or a value in it is not finite.
            NonFiniteError: a logprob, the loss or the gradient is not finite; that optimizer step was not made.
        """
        self._loaded()
        cut = split(batch, self.spec.rollouts_per_optimizer_step, self.spec.loss)
        if not cut:
            raise DataError("the training batch is empty")
        timing: dict[str, float] = defaultdict(float)
        steps: list[dict[str, float]] = []
        if len(cut) == 1:  # the current logprobs are the old ones: no pass is spent on them
            metrics, before = self._policy_step(batch.sequences, None, timing)
            steps.append(metrics)
        else:
            before = self._all_logprobs(batch.sequences, timing)
            begin = 0
            for part in cut:
                end = begin + len(part.sequences)
                steps.append(self._policy_step(part.sequences, before[begin:end], timing)[0])
                begin = end
        return (
            _over_steps(steps)
            | {"optimizer_steps": float(len(steps)), "tokens/unpacked": float(batch.num_tokens)}
            | mismatch(batch.sequences, before)
            | {f"timing/{name}_s": seconds for name, seconds in timing.items()}
        )

    def sft(self, batch: TrainBatch, lr: float | None = None) -> dict[str, float]:
        """Make one supervised step on demonstrations: the weighted negative log-likelihood of their sampled tokens.

        It shares AdamW's moments with the training steps, and leaves their warm-up where it is.

        Args:
            batch: see ``algorithms.warmup``.
            lr: learning rate; None takes the optimizer's, without warm-up.

        Returns:
            ``loss`` (nats per token), ``grad_norm``, ``lr``, ``tokens/packed``, ``tokens/unpacked``, ``timing/*_s``.

        Raises:
            DataError: the batch is empty.
            NonFiniteError: as for ``train``.
        """
        self._loaded()
        if not batch.sequences:
            raise DataError("the supervised batch is empty")
        timing: dict[str, float] = defaultdict(float)

        def loss_of(microbatch: Microbatch, current: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return nll_loss(current, self._tensor([sequence.weights for sequence in microbatch.sequences]))

        microbatches = self._microbatches(batch.sequences, lambda sequence: bool(np.any(sequence.weights)))
        metrics = self._step(microbatches, loss_of, self.spec.optimizer.lr if lr is None else lr, timing)
        return (
            metrics
            | {"tokens/unpacked": float(batch.num_tokens)}
            | {f"timing/{name}_s": seconds for name, seconds in timing.items()}
        )

    def logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        """Logprobs of the sampled tokens under the present weights: float32 [k] per sequence, in the batch's order."""
        self._loaded()
        return self._all_logprobs(batch.sequences, defaultdict(float))

    def snapshot(self) -> WeightSnapshot:
        """Copy the weights, in the compute precision, under the names of ``models.tensors.checkpoint_tensors``."""
        self._loaded()
        return take(checkpoint_tensors(self._model))

    def place(self) -> Place:
        """Where the weights are."""
        return here(self.spec.device)

    def offer_weights(self, request: SyncRequest) -> Offer:
        """Make the present weights, in the compute precision, reachable for engines; see ``WeightSender``.

        Nothing may change them before ``release_weights``.
        """
        self._loaded()
        return self._sender.offer(request)

    def release_weights(self, complete: bool) -> dict[str, float]:
        """The sync is over, with all engines or not; see ``WeightSender.release``."""
        return self._sender.release(complete)

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer and generators; see ``state``.

        Raises:
            UnwritableError: the disk refused; what is in the folder is worth nothing.
        """
        state.save(Path(folder), self._model, self._loaded(), Path(self.spec.model_folder))

    def restore(self, folder: str | Path) -> str | None:
        """Go on from what ``save`` wrote; the reference of the KL penalty stays the model folder's.

        Returns:
            One sentence where ``deterministic`` cannot hold because what computes is not what did, else None.

        Raises:
            ConfigError: the folder is incomplete or belongs to another model; nothing was changed.
        """
        then, now = state.restore(Path(folder), self._model, self._loaded()), state.made_with()
        changed = [f"{key} {then.get(key)}, now {value}" for key, value in now.items() if then.get(key) != value]
        if not changed or not self.spec.deterministic:
            return None
        return f"the run goes on, but not bit for bit as it would have: {folder} was made with {'; '.join(changed)}"

    def close(self) -> None:
        """Let go of the model; every other call fails from now on. Safe to call twice."""
        self._sender.close()
        self._model = self._reference = self._optimizer = None
        self._residence.close()

    def _reserve(self, precision: str) -> None:
        """Begin to page-lock what the policy will lie in: it takes as long as what is done meanwhile."""
        from transformers import AutoConfig

        elements = tensor_elements(self.spec.model_folder)
        if not elements:
            return
        reference = self.spec.loss.reference_policy_kl_penalty > 0
        try:
            config = AutoConfig.from_pretrained(self.spec.model_folder, local_files_only=True)
            nbytes = estimated_bytes(elements, config, precision, reference=reference)
        except (OSError, ValueError, KeyError):
            return  # loading says what is wrong with the folder
        self._residence.reserve(nbytes)

    def _read(self, done: int, total: int) -> None:
        self._progress = ("the weights", done, total)

    def _loaded(self) -> MasterAdamW:
        if self._optimizer is None:
            raise RuntimeError("PolicyWorker.load() comes first")
        return self._optimizer

    def _policy_step(
        self, sequences: Sequence[TrainSequence], old: Sequence[np.ndarray] | None, timing: dict[str, float]
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """One optimizer step; also returns the logprobs from before it, one array per sequence."""
        before: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(sequences)
        loss = self.spec.loss

        def loss_of(microbatch: Microbatch, current: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            for index, piece in zip(microbatch.indices, _cut(current, microbatch.sequences), strict=True):
                before[index] = piece
            reference = None
            if self._reference is not None:
                with torch.no_grad(), _timed(timing, "reference"):
                    reference = sampled_logprobs(self._reference, microbatch.input, self.temperature)
            return policy_loss(
                current,
                current.detach() if old is None else self._tensor([old[index] for index in microbatch.indices]),
                self._tensor([sequence.advantages for sequence in microbatch.sequences]),
                self._tensor([sequence.weights for sequence in microbatch.sequences]),
                settings=loss,
                reference=reference,
                engine=self._tensor([sequence.engine_logprobs for sequence in microbatch.sequences])
                if loss.use_importance_sampling_correction
                else None,
            )

        return self._step(self._microbatches(sequences, self._feels), loss_of, None, timing), before

    def _step(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        lr: float | None,
        timing: dict[str, float],
    ) -> dict[str, float]:
        """Add up the gradient of all microbatches, then step; the metrics are those of the whole."""
        optimizer = self._loaded()
        metrics: dict[str, float] = {}
        try:
            for microbatch in microbatches:
                with torch.set_grad_enabled(microbatch.trains):
                    with _timed(timing, "forward"):
                        current = self._current(microbatch)
                    loss, parts = loss_of(microbatch, current)
                if not loss.isfinite():
                    raise NonFiniteError(f"the loss of a microbatch is {loss.item()}, so no optimizer step was made")
                if microbatch.trains:
                    with _timed(timing, "backward"):
                        loss.backward()
                _combine(metrics, {name: float(value) for name, value in parts.items()})
            with _timed(timing, "optimizer"):
                report = optimizer.step(lr)
        finally:
            optimizer.zero_grad()
        computed = sum(microbatch.input.computed_tokens for microbatch in microbatches)
        return metrics | {"grad_norm": report.grad_norm, "lr": report.lr, "tokens/packed": float(computed)}

    def _current(self, microbatch: Microbatch) -> Tensor:
        current = sampled_logprobs(self._model, microbatch.input, self.temperature)
        finite = current.detach().isfinite()
        if not finite.all():
            counts = [len(sequence.sampled) for sequence in microbatch.sequences]
            bad = int((~finite).nonzero()[0, 0])
            sequence = microbatch.sequences[int(np.searchsorted(np.cumsum(counts), bad, side="right"))]
            raise NonFiniteError(
                f"the policy's logprob of a sampled token of group {sequence.group_id!r}, sample {sequence.sample_id} "
                f"is {current[bad].item()}, so no optimizer step was made; the weights are probably not finite any more"
            )
        return current

    def _all_logprobs(self, sequences: Sequence[TrainSequence], timing: dict[str, float]) -> list[np.ndarray]:
        result: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for microbatch in self._microbatches(sequences, lambda sequence: False):
            with torch.no_grad(), _timed(timing, "forward"):
                current = self._current(microbatch)
            for index, piece in zip(microbatch.indices, _cut(current, microbatch.sequences), strict=True):
                result[index] = piece
        return result

    def _feels(self, sequence: TrainSequence) -> bool:
        """Whether some token of the sequence can have a gradient."""
        if self.spec.loss.reference_policy_kl_penalty > 0:
            return bool(np.any(sequence.weights))
        return bool(np.any((sequence.weights != 0) & (sequence.advantages != 0)))

    def _microbatches(
        self, sequences: Sequence[TrainSequence], trains: Callable[[TrainSequence], bool]
    ) -> list[Microbatch]:
        """Groups without any gradient are kept apart: their forward pass is needed for metrics, a backward is not."""
        training = {sequence.group_id for sequence in sequences if trains(sequence)}
        result: list[Microbatch] = []
        for wanted in (True, False):
            indices = [index for index, sequence in enumerate(sequences) if (sequence.group_id in training) == wanted]
            if indices and self._packing:
                result += packed_microbatches(sequences, indices, self.spec.train_mb_tokens, trains=wanted)
            elif indices:
                result += padded_microbatches(sequences, indices, self.spec.train_micro_batch_size, trains=wanted)
        return result

    def _tensor(self, arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32, copy=False)).to(self.spec.device)


def mismatch(sequences: Sequence[TrainSequence], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the engine is from the trainer, and how spread the policy is, on the trained tokens before the update.

    With ``d`` = trainer - engine logprob of a token the engine sampled: ``mismatch/kl`` is ``mean(exp(d) - 1 - d)``,
    the k3 estimate of KL(engine, trainer) (joschu.net/blog/kl-approx.html); ``mismatch/max_abs_logprob_diff`` and
    ``mismatch/mean_abs_logprob_diff`` are of ``|d|``. ``entropy`` is the mean of minus the trainer's logprob, nats.
    Tokens whose engine logprob is NaN were not sampled by an engine; where all are, there is no ``mismatch/*``.

    Args:
        sequences: the batch.
        logprobs: of the trainer, one array per sequence.
    """
    trainer = np.concatenate(logprobs).astype(np.float64)
    engine = np.concatenate([sequence.engine_logprobs for sequence in sequences]).astype(np.float64)
    metrics = {"entropy": float(-trainer.mean())}
    sampled = np.isfinite(engine)
    if sampled.any():
        difference = trainer[sampled] - engine[sampled]
        metrics |= {
            "mismatch/kl": float((np.expm1(difference) - difference).mean()),
            "mismatch/max_abs_logprob_diff": float(np.abs(difference).max()),
            "mismatch/mean_abs_logprob_diff": float(np.abs(difference).mean()),
        }
    return metrics


def _cut(flat: Tensor, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """One array per sequence of values that lie flat."""
    borders = np.cumsum([len(sequence.sampled) for sequence in sequences])[:-1]
    return np.split(flat.detach().cpu().numpy(), borders)


def _combine(total: dict[str, float], parts: dict[str, float]) -> None:
    """Add the metrics of a microbatch to those before it: extremes by extreme, weighted sums by addition."""
    for name, value in parts.items():
        if name not in total:
            total[name] = value
        elif name.endswith("/min"):
            total[name] = min(total[name], value)
        elif name.endswith("/max"):
            total[name] = max(total[name], value)
        else:
            total[name] += value


def _over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps: extremes, the sum of tokens, the last learning rate, else the mean."""
    total: dict[str, float] = {}
    for metrics in steps:
        _combine(total, metrics)
    for name in total:
        if not name.endswith(("/min", "/max")) and name != "tokens/packed":
            total[name] /= len(steps)
    return total | {"lr": steps[-1]["lr"]}


@contextmanager
def _timed(timing: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    timing[name] += time.perf_counter() - begin
