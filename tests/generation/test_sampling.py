"""The reported logprob is that of the distribution drawn from; numbers below are computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gymloop.errors import ConfigError
from gymloop.generation.engine import Sampling
from gymloop.generation.sampling import BLOCK, Bias, Filters, Penalties, draw, invert_cdf


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def filters(temperature: float, n: int = 1, top_p: float | None = None, top_k: int | None = None) -> Filters:
    return Filters(
        torch.full((n,), temperature),
        None if top_p is None else torch.full((n,), top_p),
        None if top_k is None else torch.full((n,), top_k),
    )


def one(probabilities: list[float], uniform: float, **kwargs: float) -> tuple[int, float]:
    temperature = kwargs.pop("temperature", 1.0)
    tokens, logprobs = draw(
        logits_of(probabilities)[None],
        filters(temperature, **kwargs),  # type: ignore[arg-type]
        torch.tensor([uniform], dtype=torch.float64),
    )
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.999999, 2)])
def test_uniform_number_picks_the_token_whose_share_it_falls_in(uniform: float, token: int) -> None:
    probabilities = [0.5, 0.3, 0.2]
    drawn, logprob = one(probabilities, uniform)
    assert drawn == token
    assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-6)


def test_temperature_sharpens_and_logprob_is_of_the_sharpened_distribution() -> None:
    # Temperature 0.5 squares the odds: 0.6^2 : 0.4^2 = 0.36 : 0.16.
    drawn, logprob = one([0.6, 0.4], 0.70, temperature=0.5)
    assert drawn == 1
    assert logprob == pytest.approx(math.log(0.16 / 0.52), abs=1e-6)


def test_top_k_renormalises_over_the_k_likeliest() -> None:
    drawn, logprob = one([0.1, 0.5, 0.4], 0.6, top_k=2)
    assert drawn == 2
    assert logprob == pytest.approx(math.log(0.4 / 0.9), abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    # 0.5 < 0.6, so the second token is needed; the third is not.
    drawn, logprob = one([0.5, 0.3, 0.2], 0.99, top_p=0.6)
    assert drawn == 1
    assert logprob == pytest.approx(math.log(0.3 / 0.8), abs=1e-6)


def test_top_p_always_keeps_the_likeliest_token() -> None:
    assert one([0.5, 0.3, 0.2], 0.99, top_p=0.01) == (0, 0.0)


def test_top_k_comes_before_top_p() -> None:
    # After top-k 2 the masses are 5/9 and 4/9, so top-p 0.55 keeps one; without top-k it would keep two.
    assert one([0.5, 0.4, 0.1], 0.99, top_k=2, top_p=0.55)[0] == 0
    assert one([0.5, 0.4, 0.1], 0.99, top_p=0.55)[0] == 1


def test_greedy_takes_the_likeliest_and_reports_temperature_one_over_the_whole_vocabulary() -> None:
    drawn, logprob = one([0.2, 0.5, 0.3], 0.99, temperature=0.0, top_k=1, top_p=0.1)
    assert drawn == 1
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_rows_of_one_batch_keep_their_own_filters() -> None:
    logits = logits_of([0.5, 0.3, 0.2]).repeat(4, 1)
    rows = Filters(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.6, 1.0]), torch.tensor([3, 3, 3, 1]))
    tokens, logprobs = draw(logits, rows, torch.full((4,), 0.99, dtype=torch.float64))
    assert tokens.tolist() == [0, 2, 1, 0]
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.2), math.log(0.3 / 0.8), 0.0], abs=1e-6)


@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_blockwise_inversion_equals_plain_inversion(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probabilities = torch.softmax(torch.randn(64, vocab, generator=generator) * 3, dim=-1)
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    plain = torch.searchsorted(probabilities.double().cumsum(-1), uniform[:, None], right=True)[:, 0]
    assert torch.equal(invert_cdf(probabilities, uniform), plain.clamp(max=vocab - 1))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    probabilities = torch.zeros(1, 3 * BLOCK)
    probabilities[0, BLOCK + 7] = 0.3
    probabilities[0, BLOCK + 9] = 0.7
    expected = BLOCK + 7 if uniform == 0 else BLOCK + 9
    assert invert_cdf(probabilities, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_draw_frequencies_follow_the_distribution() -> None:
    n = 20_000
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    tokens, _ = draw(logits_of([0.5, 0.3, 0.2]).repeat(n, 1), filters(1.0, n), uniform)
    shares = torch.bincount(tokens, minlength=3) / n
    # Three standard deviations of a share are at most 0.011.
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.011)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_a_logprob_that_is_not_finite(temperature: float) -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    _, logprobs = draw(logits, filters(temperature, 2), torch.full((2,), 0.5, dtype=torch.float64))
    assert not math.isfinite(logprobs[0])
    assert math.isfinite(logprobs[1])


def drawn_with(logits: list[list[float]], uniform: float = 0.0, **kinds: Any) -> tuple[list[int], list[float]]:
    temperature = torch.tensor(kinds.pop("temperature", [1.0] * len(logits)))
    numbers = torch.full((len(logits),), uniform, dtype=torch.float64)
    tokens, logprobs = draw(torch.tensor(logits), Filters(temperature, **kinds), numbers)
    return tokens.tolist(), logprobs.tolist()


def penalties(rows: list[int], repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> Penalties:
    """The prompt of each row is token 0; it sampled token 1 twice. 4 is the vocabulary, so padding."""
    m = len(rows)
    return Penalties(
        torch.tensor(rows),
        torch.full((m,), repetition),
        torch.full((m,), presence),
        torch.full((m,), frequency),
        torch.tensor([[0, 4]] * m),
        torch.tensor([[1, 1, 4]] * m),
    )


def expected_logprob(logits: list[float], token: int) -> float:
    return logits[token] - math.log(sum(math.exp(value) for value in logits))


def test_min_p_keeps_tokens_of_at_least_that_share_of_the_likeliest() -> None:
    # 0.2 is 0.4 of 0.5, so it stays at 0.39 and goes at 0.41; a row with 0 keeps all.
    logits = logits_of([0.5, 0.3, 0.2]).tolist()
    tokens, logprobs = drawn_with([logits] * 3, 0.99, min_p=torch.tensor([0.39, 0.41, 0.0]))
    assert tokens == [2, 1, 2]
    assert logprobs == pytest.approx([math.log(0.2), math.log(0.3 / 0.8), math.log(0.2)], abs=1e-6)


def test_min_p_of_one_keeps_the_likeliest() -> None:
    assert drawn_with([[1.0, 3.0, 2.0, 0.0]], 0.99, min_p=torch.tensor([1.0])) == ([1], [0.0])


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_sample() -> None:
    tokens, logprobs = drawn_with([[2.0, -1.0, 1.0, -2.0]] * 2, penalties=penalties([1], repetition=2.0))
    assert tokens == [0, 0]
    assert logprobs[0] == pytest.approx(expected_logprob([2.0, -1.0, 1.0, -2.0], 0), abs=1e-6)
    assert logprobs[1] == pytest.approx(expected_logprob([1.0, -2.0, 1.0, -2.0], 0), abs=1e-6)


@pytest.mark.parametrize(("kind", "value", "lowered"), [("presence", 0.5, 0.5), ("frequency", 0.5, 1.0)])
def test_presence_counts_a_sampled_token_once_and_frequency_every_time(kind: str, value: float, lowered: float) -> None:
    _, logprobs = drawn_with([[2.0, 1.0, 1.0, 0.0]], penalties=penalties([0], **{kind: value}))
    assert logprobs[0] == pytest.approx(expected_logprob([2.0, 1.0 - lowered, 1.0, 0.0], 0), abs=1e-6)


def test_bias_comes_before_greedy_and_its_logprob() -> None:
    bias = Bias(torch.tensor([0]), torch.tensor([3]), torch.tensor([5.0]))
    tokens, logprobs = drawn_with([[2.0, 1.0, 1.0, 0.0]] * 2, temperature=[0.0, 0.0], bias=bias)
    assert tokens == [3, 0]
    assert logprobs == pytest.approx(
        [expected_logprob([2.0, 1.0, 1.0, 5.0], 3), expected_logprob([2.0, 1.0, 1.0, 0.0], 0)], abs=1e-6
    )


def test_bias_comes_before_penalties_and_penalties_before_temperature() -> None:
    # Token 1: -1 + 3 = 2, halved by the repetition penalty because it is positive by then, then over 0.5.
    bias = Bias(torch.tensor([0]), torch.tensor([1]), torch.tensor([3.0]))
    _, logprobs = drawn_with(
        [[0.0, -1.0, 0.0, 0.0]], 0.5, temperature=[0.5], bias=bias, penalties=penalties([0], repetition=2.0)
    )
    assert logprobs[0] == pytest.approx(expected_logprob([0.0, 2.0, 0.0, 0.0], 1), abs=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 100.5}),
        ("slot", -1),
        ("temperature", math.inf),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"sampling has {field} .*expected"):
        Sampling(1, **{field: value}).check()


def test_defaults_are_off() -> None:
    sampling = Sampling(1)
    sampling.check()
    assert not sampling.penalises
    assert (sampling.min_p, sampling.logit_bias, sampling.noise_key, sampling.slot) == (0.0, None, None, None)
    assert hash(sampling) == hash(Sampling(1, logit_bias={1: 2.0}))
