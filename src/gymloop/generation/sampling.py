"""Drawing tokens: the reported logprob is that of the distribution the token was drawn from, after every filter.

Order of filters: temperature, then top-k, then top-p, as in transformers and vLLM. A temperature of 0 takes the
likeliest token and reports its logprob at temperature 1 over the whole vocabulary. A row's draw depends on its own
logits and its own uniform number only, never on the other rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Filters:
    """What shapes the distribution of each row.

    Attributes:
        temperature: float32 [n], 0 is greedy.
        top_p: float32 [n], or None where every row keeps all mass.
        top_k: int64 [n] with the vocabulary size where unlimited, or None where every row is unlimited.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None


def draw(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: float32 [n, vocab]; overwritten.
        filters: per row.
        uniform: float64 [n] in [0, 1); ignored by greedy rows.

    Returns:
        Token ids int64 [n] and their natural logprobs float32 [n]. A row whose logits are not finite gets a logprob
        that is not finite; the caller must look.
    """
    # Every pass over [n, vocab] shows in the time of a step, so each is made only when some row needs it.
    greedy = filters.temperature == 0
    likeliest = logits.argmax(dim=-1) if bool(greedy.any()) else None
    divisor = torch.where(greedy, 1.0, filters.temperature)
    if bool((divisor != 1).any()):
        logits.div_(divisor[:, None])
    _filter(logits, filters, ~greedy)
    probabilities = torch.softmax(logits, dim=-1)
    if likeliest is None:
        tokens = invert_cdf(probabilities, uniform)
    elif bool(greedy.all()):
        tokens = likeliest
    else:
        tokens = torch.where(greedy, likeliest, invert_cdf(probabilities, uniform))
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    # A softmax may round to one ulp above 1; anything more is not rounding and stays visible to the caller.
    return tokens, torch.where((logprobs > 0) & (logprobs < 1e-5), 0.0, logprobs)


def invert_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes ``uniform``.

    Cumulates over block sums and then inside one block, in float64: exact enough for any vocabulary, and several times
    cheaper than noise for every token (``torch.multinomial`` draws vocab numbers per row, this draws one).

    Args:
        probabilities: float32 [n, vocab], rows sum to 1.
        uniform: float64 [n] in [0, 1).

    Returns:
        int64 [n]; a token of probability 0 is never chosen.
    """
    n, vocab = probabilities.shape
    whole = vocab // BLOCK * BLOCK
    sums = probabilities[:, :whole].view(n, -1, BLOCK).sum(dim=-1, dtype=torch.float64)
    if whole < vocab:
        tail = probabilities[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, tail], dim=1)
    cumulative = sums.cumsum(dim=-1)
    target = uniform * cumulative[:, -1]
    block = _first_above(cumulative, target, sums > 0)
    before = (cumulative - sums).gather(1, block)

    index = block * BLOCK + torch.arange(BLOCK, device=probabilities.device)
    inside = probabilities.gather(1, index.clamp(max=vocab - 1)).to(torch.float64)
    inside = torch.where(index < vocab, inside, 0.0)
    place = _first_above(inside.cumsum(dim=-1), target - before[:, 0], inside > 0)
    return index.gather(1, place)[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    """Index [n, 1] of the first entry above ``target``; rounding at the end falls back to the last possible one."""
    first = (cumulative <= target[:, None]).sum(dim=-1)
    width = cumulative.shape[1]
    last = width - 1 - possible.flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(first, last)[:, None]


def _filter(scaled: torch.Tensor, filters: Filters, sampled: torch.Tensor) -> None:
    """Set logits outside the top-k and top-p sets to minus infinity, in place, on the rows that ask for it."""
    vocab = scaled.shape[1]
    wanted = torch.zeros_like(sampled)
    if filters.top_k is not None:
        wanted |= filters.top_k < vocab
    if filters.top_p is not None:
        wanted |= filters.top_p < 1
    rows = (wanted & sampled).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    ordered, order = scaled[rows].sort(dim=-1, descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if filters.top_k is not None:
        drop |= torch.arange(vocab, device=scaled.device) >= filters.top_k[rows, None]
    if filters.top_p is not None:
        mass = torch.softmax(ordered.masked_fill(drop, -torch.inf), dim=-1)
        # Keep a token while the mass before it is below top_p: the set is the smallest that reaches it.
        drop |= (mass.cumsum(dim=-1) - mass) >= filters.top_p[rows, None]
    drop[:, 0] = False
    scaled[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(drop, -torch.inf))
