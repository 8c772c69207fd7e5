"""A loss is a weighted sum over trained tokens: it never divides, and untrained positions do not exist for it.

Everything a token may carry (padding, -inf, NaN) is selected away before the first ``exp``. Selecting afterwards leaves
the loss right and the gradient NaN, because backward multiplies the 0 of the mask with the inf of the ``exp``. For the
same reason a log-ratio is clamped before ``exp``, never the ratio after it.

Metrics are 0-dimensional tensors, detached and finite. Those named ``*/min`` and ``*/max`` combine over microbatches
and ranks by minimum and maximum; all others are weighted sums like the loss and combine by addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gymloop.errors import DataError

if TYPE_CHECKING:
    from gymloop.config.schema import Loss

RATIO_LIMIT = 20.0
"""Log-ratios of policy and correction are clamped to plus or minus this, and have no gradient beyond."""

EXP_LIMIT = 80.0
"""Where the recipe sets no smaller clamp; exp leaves float32 at 88.7."""


def policy_loss(
    current: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    settings: Loss,
    reference: Tensor | None = None,
    engine: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient with optional dual clip, KL penalty and importance correction.

    With ``r = exp(current - old)`` and advantage ``A``, a token's loss is ``-min(A r, A clip(r, 1 - lo, 1 + hi))``
    (PPO, arXiv 1707.06347); where ``A < 0`` it is at most ``-A c`` (dual clip, arXiv 1912.09729). It is multiplied by
    the constant ``min(exp(old - engine), cap)`` where the correction is on (truncated importance sampling, Ionides
    2008). The KL
    penalty is added after that, uncorrected, and differentiated as it stands (GRPO, arXiv 2402.03300, equation 4).

    Args:
        current: logprobs of the tokens under the policy, with gradient; any shape, the same for every tensor here.
        old: logprobs under the trainer's weights at the start of the step; a constant.
        advantages: one per token.
        weights: share of each token in the loss; those of one optimizer step sum to 1.
        settings: ``loss_fn`` of the recipe.
        reference: logprobs under the initial policy; needed when ``reference_policy_kl_penalty`` is above 0.
        engine: logprobs the engine sampled with; needed when ``use_importance_sampling_correction``.
        mask: nonzero where a token is trained; None trains all. Values elsewhere have no effect, not even NaN.

    Returns:
        The loss, and metrics: ``loss``, ``clip_fraction`` (tokens whose gradient a clip removed), ``approx_kl``
        (k3 estimate of KL(old, current)), ``ratio/mean``, ``ratio/min``, ``ratio/max``; ``kl`` with a reference that
        is penalised; ``correction/mean``, ``correction/max`` and ``correction/truncated_fraction`` with the correction.
        Without a trained token the loss is 0 and a ratio or correction counts as 1.

    Raises:
        DataError: a trained token has a value that is not finite.
        ValueError: shapes differ, or a needed tensor is missing.
    """
    penalise = settings.reference_policy_kl_penalty > 0
    correct = settings.use_importance_sampling_correction
    if penalise and reference is None:
        raise ValueError("policy_loss needs reference logprobs because reference_policy_kl_penalty is above 0")
    if correct and engine is None:
        raise ValueError("policy_loss needs engine logprobs because use_importance_sampling_correction is true")
    given = {"current": current, "old": old, "advantages": advantages, "weights": weights}
    given |= {name: tensor for name, tensor in (("reference", reference), ("engine", engine)) if tensor is not None}
    chosen = _select(given, mask)
    current, advantages, weights = chosen["current"], chosen["advantages"].detach(), chosen["weights"].detach()
    old = chosen["old"].detach()

    log_ratio = (current - old).clamp(-RATIO_LIMIT, RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    unclipped = -advantages * ratio
    token_loss = torch.maximum(unclipped, -advantages * clipped_ratio)
    clipped = token_loss > unclipped
    if settings.ratio_clip_c is not None:
        ceiling = torch.where(advantages < 0, -advantages * settings.ratio_clip_c, torch.inf)
        clipped |= token_loss > ceiling
        token_loss = torch.minimum(token_loss, ceiling)

    metrics = {
        "clip_fraction": _total(weights, clipped),
        "approx_kl": _total(weights, ratio - 1 - log_ratio),
        "ratio/mean": _total(weights, ratio),
        "ratio/min": _extreme(ratio, torch.amin),
        "ratio/max": _extreme(ratio, torch.amax),
    }
    if correct:
        cap = settings.truncated_importance_sampling_ratio
        raw = (old - chosen["engine"].detach()).clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
        correction = raw if cap is None else raw.clamp(max=cap)
        token_loss = token_loss * correction
        metrics["correction/mean"] = _total(weights, correction)
        metrics["correction/max"] = _extreme(correction, torch.amax)
        metrics["correction/truncated_fraction"] = _total(weights, raw > correction)
    if penalise:
        kl = _kl(current, chosen["reference"].detach(), settings)
        token_loss = token_loss + settings.reference_policy_kl_penalty * kl
        metrics["kl"] = _total(weights, kl)

    loss = (weights * token_loss).sum()
    metrics["loss"] = loss.detach()
    return loss, metrics


def nll_loss(current: Tensor, weights: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted negative log-likelihood of demonstrations: the policy gradient of advantage 1 at ratio 1.

    Args:
        current: logprobs of the tokens under the policy, with gradient.
        weights: share of each token in the loss, same shape.
        mask: nonzero where a token is trained; None trains all.

    Returns:
        The loss in nats, and metrics: ``loss``.

    Raises:
        DataError: a trained token has a value that is not finite.
        ValueError: shapes differ.
    """
    chosen = _select({"current": current, "weights": weights}, mask)
    loss = -(chosen["weights"].detach() * chosen["current"]).sum()
    return loss, {"loss": loss.detach()}


def _select(tensors: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """The trained tokens of each tensor, flat, in one float type of at least 32 bits, and all finite."""
    current = tensors["current"]
    dtype = torch.promote_types(current.dtype, torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mask is not None:
        shapes["mask"] = tuple(mask.shape)
        mask = mask.to(device=current.device, dtype=torch.bool)
    if len(set(shapes.values())) > 1:
        raise ValueError(f"a loss needs tensors of one shape, got {shapes}")
    chosen = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(device=current.device, dtype=dtype)
        chosen[name] = tensor.flatten() if mask is None else tensor[mask]
    if not torch.stack([values.detach().isfinite().all() for values in chosen.values()]).all():  # one device sync
        raise DataError(_describe_bad_value(chosen))
    return chosen


def _describe_bad_value(chosen: dict[str, Tensor]) -> str:
    name, values = next((name, values) for name, values in chosen.items() if not values.isfinite().all())
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    return (
        f"{name} is {values[bad[0]].item()} at trained token {bad[0]} of {len(values)} ({len(bad)} such tokens); "
        "a finite number was expected"
    )


def _kl(current: Tensor, reference: Tensor, settings: Loss) -> Tensor:
    """Per-token estimate of KL(current, reference) from tokens of ``current`` (joschu.net/blog/kl-approx.html)."""
    limit = min(settings.kl_input_clamp_value or EXP_LIMIT, EXP_LIMIT)
    log_ratio = (reference - current).clamp(-limit, limit)
    match settings.reference_policy_kl_type:
        case "k1":
            kl = -log_ratio
        case "k2":
            kl = log_ratio.square() / 2
        case "k3":
            kl = log_ratio.exp() - 1 - log_ratio
    if settings.kl_output_clamp_value is not None:
        kl = kl.clamp(-settings.kl_output_clamp_value, settings.kl_output_clamp_value)
    return kl


def _total(weights: Tensor, values: Tensor) -> Tensor:
    return (weights * values.detach()).sum()


def _extreme(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return reduce(values.detach()) if values.numel() else values.new_ones(())
