"""AdamW over float32 masters: whatever type the model computes in, gradients add up and weights move in float32.

In float32 the masters are the model's own parameters. In bfloat16 the model holds a compute copy; each gradient is
added to its master as soon as backward has produced it, and the copy is refreshed after each step. Nothing moves when
a gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gymloop.config.schema import OptimizerKwargs
from gymloop.errors import InfraError


class NonFiniteError(InfraError):
    """A loss, logprob or gradient is NaN or infinite; the optimizer step it belongs to was not made."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step: the global L2 norm of the gradient before clipping, and the learning rate used."""

    grad_norm: float
    lr: float


class MasterAdamW:
    """The optimizer, the masters and the learning-rate warm-up.

    Attributes:
        masters: float32 parameters by name, in the model's order.
        schedule_step: training steps made, which place the next one on the warm-up.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        kwargs: OptimizerKwargs,
        *,
        compute_dtype: torch.dtype,
        lr_warmup_steps: int,
        max_grad_norm: float | None,
    ) -> None:
        """Take a model's float32 parameters; with another ``compute_dtype`` they are cast to it, in place."""
        self._compute = dict(parameters)
        self._kwargs = kwargs
        self._lr_warmup_steps = lr_warmup_steps
        self._max_grad_norm = max_grad_norm
        self.schedule_step = 0
        self.masters = self._compute
        if compute_dtype != torch.float32:
            self.masters = {name: torch.nn.Parameter(copy.detach()) for name, copy in self._compute.items()}
            for name, copy in self._compute.items():
                copy.data = copy.data.to(compute_dtype)
                copy.register_post_accumulate_grad_hook(_adder(self.masters[name]))
        self.adamw = torch.optim.AdamW(
            self.masters.values(),
            lr=kwargs.lr,
            betas=kwargs.betas,
            eps=kwargs.eps,
            weight_decay=kwargs.weight_decay,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next training step: ``lr * min(1, (steps made + 1) / lr_warmup_steps)``."""
        return self._kwargs.lr * min(1.0, (self.schedule_step + 1) / max(1, self._lr_warmup_steps))

    @torch.no_grad()
    def step(self, lr: float | None = None) -> StepReport:
        """Clip, move the weights, forget the gradients.

        Args:
            lr: learning rate of a step outside the schedule; None takes the schedule's and advances it.

        Raises:
            NonFiniteError: the gradient is not finite. Weights, moments and schedule are as before.
        """
        gradients: list[Tensor] = []
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not norm.isfinite():
            culprits = [name for name, master in self.masters.items() if not _finite(master.grad)]
            self.zero_grad()
            raise NonFiniteError(
                f"the gradient norm is {norm.item()}, so no optimizer step was made; "
                f"{len(culprits)} of {len(self.masters)} parameters have such gradients"
                + (f", the first is {culprits[0]}" if culprits else "")
            )
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            torch._foreach_mul_(gradients, float(self._max_grad_norm / norm))
        rate = self.lr if lr is None else lr
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        if lr is None:
            self.schedule_step += 1
        self.zero_grad()
        self.refresh()
        return StepReport(float(norm), rate)

    def zero_grad(self) -> None:
        """Forget the gradients of masters and compute copy."""
        for parameters in (self.masters, self._compute):
            for parameter in parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the compute copy, where there is one."""
        if self.masters is not self._compute:
            torch._foreach_copy_(list(self._compute.values()), list(self.masters.values()))


def _adder(master: torch.nn.Parameter):
    def add(copy: Tensor) -> None:
        if copy.grad is None:
            return
        master.grad = copy.grad.float() if master.grad is None else master.grad.add_(copy.grad)
        copy.grad = None

    return add


def _finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())
