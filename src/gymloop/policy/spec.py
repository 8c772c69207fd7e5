"""All that a policy worker needs to know, in one frozen value that travels to its process. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gymloop.config.schema import Loss, OptimizerKwargs


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What to train and how.

    Attributes:
        model_folder: Hugging Face model folder that the weights start from.
        temperature: of training rollouts; logprobs are those of ``softmax(logits / temperature)``. 0 (greedy) counts as
            1, as it does in the engine.
        loss: ``loss_fn`` of the recipe.
        optimizer: arguments of AdamW.
        precision: compute type over float32 masters; ``auto`` takes bfloat16 where the device has it natively.
        device: as torch names it.
        starts_on_host: read the weights on the host, and move to ``device`` only when told to: an engine has it.
        lr_warmup_steps: training steps over which the learning rate rises linearly; supervised steps do not count.
        max_grad_norm: clip the global gradient norm to this; None does not clip.
        packing: compute tokens that sequences share once; False computes padded rows.
        train_mb_tokens: packed tokens per microbatch; a longer sequence gets a microbatch of its own.
        train_micro_batch_size: sequences per microbatch where packing is off or the model does not allow it.
        rollouts_per_optimizer_step: None makes one optimizer step of each batch.
        seed: of torch's generator.
        deterministic: every kernel gives the same bits each time; an operation that has no such kernel is an error.
        threads: torch threads; None takes the process's. The order of additions, so the last bits, depend on it.
    """

    model_folder: str
    temperature: float
    loss: Loss
    optimizer: OptimizerKwargs
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    starts_on_host: bool = False
    lr_warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    packing: bool = True
    train_mb_tokens: int = 1024
    train_micro_batch_size: int = 4
    rollouts_per_optimizer_step: int | None = None
    seed: int = 0
    deterministic: bool = False
    threads: int | None = None
