"""Drawing tokens: the reported logprob is that of the distribution the token was drawn from, after every filter.

Order: bias, penalties, temperature, min-p, top-k, top-p, each defined as in vLLM. A temperature of 0 takes the
likeliest token after bias and penalties and reports its logprob at temperature 1, without the filters. A row's draw
depends on its own logits and uniform number only, never on the other rows; what no row asks for costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Bias:
    """``values`` float32 [k] added to the logits at ``rows`` and ``tokens``, int64 [k], no pair twice."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of tokens that came before, for the rows that ask for one.

    Attributes:
        rows: int64 [m].
        repetition: float32 [m], 1 is off; ``presence`` and ``frequency`` likewise, 0 is off.
        prompt: int64 [m, any], padded with the vocabulary size; ``sampled`` likewise.
    """

    rows: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    prompt: torch.Tensor
    sampled: torch.Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """What shapes the distribution of each row.

    Attributes:
        temperature: float32 [n], 0 is greedy.
        top_p: float32 [n], or None where every row keeps all mass.
        top_k: int64 [n] with the vocabulary size where unlimited, or None where every row is unlimited.
        min_p: float32 [n] with 0 where off, or None where every row has it off.
        bias: additions to logits, or None.
        penalties: of repeated tokens, or None.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    bias: Bias | None = None
    penalties: Penalties | None = None


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
    if filters.bias is not None:
        logits.index_put_((filters.bias.rows, filters.bias.tokens), filters.bias.values, accumulate=True)
    if filters.penalties is not None:
        _penalise(logits, filters.penalties)
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


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Lower the logits of tokens that came before, in place."""
    vocab = logits.shape[1]
    counts = _counts(penalties.sampled, vocab)
    seen = (counts > 0) | (_counts(penalties.prompt, vocab) > 0)
    some = logits[penalties.rows]
    factor = penalties.repetition[:, None]
    some = torch.where(seen, torch.where(some > 0, some / factor, some * factor), some)
    some -= penalties.frequency[:, None] * counts + penalties.presence[:, None] * (counts > 0)
    logits[penalties.rows] = some


def _counts(ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """How often each token stands in each row, int64 [m, vocab]; the id ``vocab`` is padding."""
    zeros = torch.zeros((ids.shape[0], vocab + 1), dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(1, ids, torch.ones_like(ids))[:, :vocab]


def _filter(scaled: torch.Tensor, filters: Filters, sampled: torch.Tensor) -> None:
    """Set logits outside the min-p, top-k and top-p sets to minus infinity, in place, on rows that ask for it."""
    vocab = scaled.shape[1]
    if filters.min_p is not None:
        # p < min_p * p_max is z < z_max + log(min_p); the logarithm of 0 keeps everything, the likeliest always stays.
        floor = scaled.amax(dim=-1) + filters.min_p.log()
        scaled.masked_fill_((scaled < floor[:, None]) & sampled[:, None], -torch.inf)
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
