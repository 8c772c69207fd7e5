"""The loss and its gradient against hand-computed numbers, a scalar oracle, and garbage where nothing is trained."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymloop.algorithms.losses import nll_loss, policy_loss
from gymloop.config.schema import Loss
from gymloop.errors import DataError

from . import oracle

NAN, INF = math.nan, math.inf


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_token(*, current=-1.0, old=-1.0, advantage=1.0, weight=1.0, reference=None, engine=None, **settings):
    """Loss, gradient and metrics of a batch of one token, as floats."""
    leaf = tensor([current]).requires_grad_()
    loss, metrics = policy_loss(
        leaf,
        tensor([old]),
        tensor([advantage]),
        tensor([weight]),
        settings=Loss(**settings),
        reference=None if reference is None else tensor([reference]),
        engine=None if engine is None else tensor([engine]),
    )
    loss.backward()
    return loss.item(), leaf.grad.item(), {name: value.item() for name, value in metrics.items()}


# F09: the tokens of the case, then one more row that a sample mask excludes

F09_MASK = [[1, 1, 1, 0], [1, 1, 0, 0]]
F09_CURRENT = [[-0.5, -1.0, -0.2, 0.0], [-0.7, -0.3, 0.0, 0.0]]
F09_OLD = [[-0.6, -1.0, -0.25, -200.0], [-0.7, -0.4, -INF, NAN]]
F09_ADVANTAGES = [[1.0] * 4, [-1.0] * 4]
F09_LOSS = -(math.exp(0.1) + 1 + math.exp(0.05) - 1 - math.exp(0.1)) / 5
F09_GRADIENT = [[-0.221034, -0.2, -0.210254, 0], [0.2, 0.221034, 0, 0]]


def f09(*, current=F09_CURRENT, old=F09_OLD, advantages=F09_ADVANTAGES, mask=F09_MASK, weight=0.2, others=None, **more):
    """Loss, gradient and metrics; the weight of masked positions is ``others``."""
    leaf = tensor(current).requires_grad_()
    mask = tensor(mask)
    weights = torch.where(mask > 0, weight, weight if others is None else others)
    extras = {name: tensor(more.pop(name)) for name in ("reference", "engine") if name in more}
    loss, metrics = policy_loss(
        leaf, tensor(old), tensor(advantages), weights, settings=Loss(**more), mask=mask, **extras
    )
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values()), metrics
    return loss.detach(), leaf.grad, metrics


def assert_bitwise_equal(result, expected):
    rows = len(expected[1])
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1][:rows], expected[1])
    assert not result[1][rows:].any()


def test_F09_1_loss_and_gradient_with_garbage_behind_the_mask():
    loss, gradient, metrics = f09()
    assert loss.item() == pytest.approx(F09_LOSS, abs=1e-6)
    assert loss.item() == pytest.approx(-0.210254, abs=1e-5)
    torch.testing.assert_close(gradient, tensor(F09_GRADIENT), rtol=0, atol=1e-5)
    assert not gradient[tensor(F09_MASK) == 0].any()
    assert metrics["loss"] == loss


def test_F09_2_masked_values_do_not_change_a_bit():
    clean = [[-0.6, -1.0, -0.25, 0.0], [-0.7, -0.4, 0.0, 0.0]]
    assert_bitwise_equal(f09(old=clean), f09())


@pytest.mark.parametrize("garbage", [NAN, -INF, INF])
def test_F09_3_an_excluded_row_does_not_change_a_bit(garbage):
    padding = [[0.0] * 4, [0.0] * 4]
    settings = {
        "use_importance_sampling_correction": True,
        "reference_policy_kl_penalty": 0.1,
        "engine": [[-0.6, -1.0, -0.25, 0], [-0.7, -0.4, 0, 0]],
        "reference": [[-0.6, -1.1, -0.25, 0], [-0.7, -0.5, 0, 0]],
    }
    expected = f09(**settings)
    row = [garbage] * 4
    result = f09(
        current=[*F09_CURRENT, row],
        old=[*F09_OLD, row],
        advantages=[*F09_ADVANTAGES, row],
        mask=[*F09_MASK, padding[0]],
        others=garbage,
        **settings | {"engine": [*settings["engine"], row], "reference": [*settings["reference"], row]},
    )
    assert_bitwise_equal(result, expected)
    assert {name: value.item() for name, value in result[2].items()} == {
        name: value.item() for name, value in expected[2].items()
    }


def test_F09_4_a_clamped_kl_has_no_gradient():
    loss, gradient, metrics = one_token(
        current=-0.5,
        old=-0.5,
        advantage=0.0,
        reference=99.5,
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type="k3",
        kl_input_clamp_value=20.0,
        kl_output_clamp_value=10.0,
    )
    assert (loss, gradient, metrics["kl"]) == (10.0, 0.0, 10.0)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reference", [99.5, -200.0, -1e30])
@pytest.mark.parametrize("input_clamp", [None, 20.0, 1e6])
@pytest.mark.parametrize("output_clamp", [None, 10.0])
def test_F09_4_no_clamp_setting_makes_a_kl_overflow(kl_type, reference, input_clamp, output_clamp):
    loss, gradient, metrics = one_token(
        reference=reference,
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type=kl_type,
        kl_input_clamp_value=input_clamp,
        kl_output_clamp_value=output_clamp,
    )
    assert math.isfinite(loss)
    assert math.isfinite(gradient)
    assert all(math.isfinite(value) for value in metrics.values())


def test_F09_5_missing_engine_logprobs_behind_the_mask_have_no_effect():
    engine = [[-0.6, -1.0, -0.25, NAN], [-0.7, -0.4, NAN, NAN]]
    result = f09(engine=engine, use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0)
    assert_bitwise_equal(result, f09())


@pytest.mark.parametrize("correct", [True, False])
def test_F09_5_a_missing_engine_logprob_of_a_trained_token_is_an_error(correct):
    engine = [[-0.6, NAN, -0.25, NAN], [-0.7, -0.4, NAN, NAN]]
    with pytest.raises(DataError, match=r"engine is nan at trained token 1 of 5 \(1 such tokens\)"):
        f09(engine=engine, use_importance_sampling_correction=correct)


@pytest.mark.parametrize("name", ["current", "old", "advantage", "weight", "reference"])
@pytest.mark.parametrize("bad", [NAN, -INF])
def test_a_trained_value_that_is_no_number_is_an_error_naming_it(name, bad):
    with pytest.raises(DataError, match=rf"{name}s? is (nan|-inf) at trained token 0 of 1"):
        one_token(**{"reference": -1.0, "reference_policy_kl_penalty": 0.1} | {name: bad})


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("current", "old"), [(-0.1, -300.0), (-300.0, -0.1), (-1e30, -0.1), (-0.1, -1e30)])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_a_huge_ratio_of_a_trained_token_stays_finite_in_loss_and_gradient(advantage, current, old, dual):
    loss, gradient, metrics = one_token(current=current, old=old, advantage=advantage, ratio_clip_c=dual)
    assert math.isfinite(loss)
    assert gradient == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


# Clipping; ratio 1.5 is log 0.405465, ratio 0.5 is log -0.693147


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        (2.0, 1.1, -2.2, -2.2, 0),  # inside the band: -A r, whose derivative by the logprob is -A r
        (2.0, 1.5, -2.4, 0.0, 1),  # good token already likelier by more than 1.2: no further push
        (2.0, 0.5, -1.0, -1.0, 0),  # good token that became less likely: pulled back
        (-2.0, 0.5, 1.6, 0.0, 1),  # bad token already below 0.8
        (-2.0, 1.5, 3.0, 3.0, 0),  # bad token that became likelier: pushed down
        (0.0, 1.5, 0.0, 0.0, 0),
    ],
)
def test_clipping_removes_the_gradient_only_in_the_direction_of_the_advantage(
    advantage, ratio, loss, gradient, clipped
):
    got = one_token(current=-1 + math.log(ratio), old=-1.0, advantage=advantage)
    assert got[0] == pytest.approx(loss, abs=1e-6)
    assert got[1] == pytest.approx(gradient, abs=1e-6)
    assert got[2]["clip_fraction"] == clipped
    assert got[2]["ratio/mean"] == got[2]["ratio/min"] == got[2]["ratio/max"] == pytest.approx(ratio, abs=1e-6)


def test_clip_limits_are_set_apart():
    assert one_token(current=math.log(1.5) - 1, ratio_clip_max=0.28)[0] == pytest.approx(-1.28, abs=1e-6)
    low = one_token(current=math.log(0.5) - 1, advantage=-1.0, ratio_clip_min=0.1)
    assert low[0] == pytest.approx(0.9, abs=1e-6)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_much_likelier():
    plain = one_token(current=-0.5, old=-0.5 - math.log(5), advantage=-1.0)
    dual = one_token(current=-0.5, old=-0.5 - math.log(5), advantage=-1.0, ratio_clip_c=3.0)
    assert plain[:2] == pytest.approx((5.0, 5.0), abs=1e-5)
    assert dual[:2] == (3.0, 0.0)
    assert (plain[2]["clip_fraction"], dual[2]["clip_fraction"]) == (0.0, 1.0)


def test_dual_clip_leaves_good_tokens_alone():
    ratio = {"current": -0.5, "old": -0.5 - math.log(5), "advantage": 1.0}
    assert one_token(**ratio, ratio_clip_c=3.0)[:2] == one_token(**ratio)[:2] == pytest.approx((-1.2, 0.0))


# KL; log(reference / current) = 0.5 throughout


@pytest.mark.parametrize(
    ("kl_type", "kl", "slope"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_kl_estimators(kl_type, kl, slope):
    loss, gradient, metrics = one_token(
        advantage=0.0, reference=-0.5, reference_policy_kl_penalty=0.1, reference_policy_kl_type=kl_type
    )
    assert metrics["kl"] == pytest.approx(kl, abs=1e-6)
    assert loss == pytest.approx(0.1 * kl, abs=1e-6)
    assert gradient == pytest.approx(0.1 * slope, abs=1e-6)


def test_a_reference_without_penalty_is_not_used():
    assert one_token(reference=-5.0) == one_token()


def test_the_correction_does_not_touch_the_kl_penalty():
    loss, _, metrics = one_token(
        old=-1.0,
        engine=-1 - math.log(4),
        reference=-0.5,
        reference_policy_kl_penalty=1.0,
        use_importance_sampling_correction=True,
    )
    assert loss == pytest.approx(-4 + metrics["kl"], abs=1e-5)


# Correction by exp(old - engine)


def test_the_correction_scales_loss_and_gradient_as_a_constant():
    loss, gradient, metrics = one_token(engine=-1 - math.log(1.5), use_importance_sampling_correction=True)
    assert (loss, gradient) == pytest.approx((-1.5, -1.5), abs=1e-6)
    assert metrics["correction/mean"] == metrics["correction/max"] == pytest.approx(1.5, abs=1e-6)
    assert metrics["correction/truncated_fraction"] == 0


def test_the_correction_is_truncated_from_above_only():
    settings = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
    above = one_token(engine=-1 - math.log(8), **settings)
    below = one_token(engine=-1 + math.log(8), **settings)
    assert above[:2] == (-2.0, -2.0)
    assert below[:2] == pytest.approx((-0.125, -0.125), abs=1e-6)
    assert (above[2]["correction/truncated_fraction"], below[2]["correction/truncated_fraction"]) == (1.0, 0.0)


def test_an_untruncated_correction_stays_finite():
    loss, gradient, metrics = one_token(engine=-500.0, use_importance_sampling_correction=True)
    assert all(math.isfinite(value) for value in (loss, gradient, *metrics.values()))


def test_engine_logprobs_without_the_correction_do_not_change_the_loss():
    assert one_token(engine=-3.0) == one_token()


# The sum


def test_on_policy_the_gradient_is_reinforce():
    advantages, weights = tensor([1.0, -2.0, 0.5]), tensor([0.5, 0.25, 0.25])
    current = tensor([-0.1, -2.0, -7.0]).requires_grad_()
    loss, metrics = policy_loss(current, current, advantages, weights, settings=Loss())
    loss.backward()
    assert torch.equal(current.grad, -advantages * weights)
    assert loss.item() == -(0.5 - 0.5 + 0.125)
    assert metrics["approx_kl"] == 0


def test_approx_kl_and_means_are_weighted():
    current, old = tensor([math.log(0.5), math.log(0.2)]), tensor([math.log(0.4), math.log(0.2)])
    _, metrics = policy_loss(current, old, tensor([1.0, 1.0]), tensor([0.75, 0.25]), settings=Loss(ratio_clip_max=0.2))
    assert metrics["ratio/mean"].item() == pytest.approx(0.75 * 1.25 + 0.25, abs=1e-6)
    assert metrics["approx_kl"].item() == pytest.approx(0.75 * (0.25 - math.log(1.25)), abs=1e-6)
    assert metrics["clip_fraction"].item() == 0.75


@pytest.mark.parametrize("masked", [True, False])
def test_nothing_trained_is_loss_zero_with_finite_metrics_and_zero_gradient(masked):
    shape = (2, 3) if masked else (0,)
    current = torch.full(shape, NAN if masked else 0.0, requires_grad=True)
    other = torch.full(shape, NAN)
    loss, metrics = policy_loss(
        current,
        other,
        other,
        other,
        settings=Loss(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True),
        reference=other,
        engine=other,
        mask=torch.zeros(shape) if masked else None,
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(current.grad, torch.zeros(shape))
    assert all(value.isfinite() for value in metrics.values())


def test_low_precision_logprobs_are_computed_in_float32():
    current = torch.tensor([-0.5], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(current, tensor([-0.6]), tensor([1.0]), tensor([1.0]), settings=Loss())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(0.1), abs=1e-6)


def test_no_gradient_flows_into_constants():
    old, engine, reference = (tensor([-1.0]).requires_grad_() for _ in range(3))
    current = tensor([-1.1]).requires_grad_()
    settings = Loss(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    loss, metrics = policy_loss(
        current, old, tensor([1.0]), tensor([1.0]), settings=settings, reference=reference, engine=engine
    )
    loss.backward()
    assert current.grad is not None
    assert old.grad is engine.grad is reference.grad is None
    assert not any(value.requires_grad for value in metrics.values())


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"one shape.*'old': \(1,\)"):
        policy_loss(tensor([0.0, 0.0]), tensor([0.0]), tensor([1.0, 1.0]), tensor([1.0, 1.0]), settings=Loss())


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"reference_policy_kl_penalty": 0.1}, "reference"), ({"use_importance_sampling_correction": True}, "engine")],
)
def test_a_setting_needs_its_logprobs(settings, missing):
    with pytest.raises(ValueError, match=f"needs {missing} logprobs"):
        one_token(**settings)


def test_nll_is_the_weighted_mean_of_negative_logprobs():
    current = tensor([-1.0, -3.0, NAN]).requires_grad_()
    loss, metrics = nll_loss(current, tensor([0.5, 0.5, NAN]), mask=tensor([1, 1, 0]))
    loss.backward()
    assert loss.item() == metrics["loss"].item() == 2.0
    assert current.grad.tolist() == [-0.5, -0.5, 0.0]


def test_nll_has_the_gradient_of_policy_loss_with_advantage_one():
    weights = tensor([0.75, 0.25])
    gradients = []
    for loss_of in (
        lambda current: nll_loss(current, weights)[0],
        lambda current: policy_loss(current, current.detach(), torch.ones(2), weights, settings=Loss())[0],
    ):
        current = tensor([-1.0, -3.0]).requires_grad_()
        loss_of(current).backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)


# Against the oracle, on tokens away from the kinks, where both one-sided derivatives are right

logprob = st.floats(-6, -0.01)
token = st.fixed_dictionaries(
    {
        "current": logprob,
        "old": logprob,
        "engine": logprob,
        "reference": logprob,
        "advantage": st.floats(-3, 3),
        "weight": st.floats(0, 1),
    }
)
settings = st.fixed_dictionaries(
    {
        "low": st.sampled_from([0.1, 0.2]),
        "high": st.sampled_from([0.2, 0.28]),
        "dual": st.sampled_from([None, 3.0]),
        "beta": st.sampled_from([0.0, 0.1]),
        "kl_type": st.sampled_from(["k1", "k2", "k3"]),
        "input_clamp": st.sampled_from([None, 2.0, 20.0]),
        "output_clamp": st.sampled_from([None, 1.5]),
        "correct": st.booleans(),
        "cap": st.sampled_from([None, 2.0]),
    }
)


def loss_settings(options) -> Loss:
    return Loss(
        ratio_clip_min=options["low"],
        ratio_clip_max=options["high"],
        ratio_clip_c=options["dual"],
        reference_policy_kl_penalty=options["beta"],
        reference_policy_kl_type=options["kl_type"],
        kl_input_clamp_value=options["input_clamp"],
        kl_output_clamp_value=options["output_clamp"],
        use_importance_sampling_correction=options["correct"],
        truncated_importance_sampling_ratio=options["cap"],
    )


def run(tokens, options, mask=None):
    """Loss, gradient and metrics in float64."""
    column = {
        name: torch.tensor([t[name] for t in tokens], dtype=torch.float64)
        for name in ("current", "old", "advantage", "weight", "engine", "reference")
    }
    current = column["current"].requires_grad_()
    loss, metrics = policy_loss(
        current,
        column["old"],
        column["advantage"],
        column["weight"],
        settings=loss_settings(options),
        reference=column["reference"],
        engine=column["engine"],
        mask=mask,
    )
    loss.backward()
    return loss.detach(), current.grad, metrics


@given(st.lists(token, min_size=1, max_size=8), settings)
def test_matches_the_scalar_oracle(tokens, options):
    loss, gradient, _ = run(tokens, options)
    expected_loss, expected_gradient = oracle.policy_loss(tokens, **options)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    assert gradient.tolist() == pytest.approx(expected_gradient, rel=1e-9, abs=1e-9)


@given(st.lists(token, min_size=1, max_size=8), settings, st.data())
def test_microbatches_and_order_change_neither_loss_nor_gradient(tokens, options, data):
    order = data.draw(st.permutations(range(len(tokens))))
    border = data.draw(st.integers(0, len(tokens)))
    whole_loss, whole_gradient, whole_metrics = run(tokens, options)
    parts = [order[:border], order[border:]]
    results = [run([tokens[index] for index in part], options) for part in parts]
    assert sum(loss.item() for loss, _, _ in results) == pytest.approx(whole_loss.item(), rel=1e-9, abs=1e-9)
    for part, (_, gradient, _) in zip(parts, results, strict=True):
        assert torch.equal(gradient, whole_gradient[part])
    for name, value in whole_metrics.items():
        combine = {"min": min, "max": max}.get(name.rpartition("/")[2], sum)
        pieces = [metrics[name].item() for part, (_, _, metrics) in zip(parts, results, strict=True) if part]
        assert combine(pieces) == pytest.approx(value.item(), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(token, st.booleans()), min_size=1, max_size=8), settings, st.data())
def test_garbage_behind_the_mask_never_changes_a_bit(rows, options, data):
    garbage = st.fixed_dictionaries(
        {
            name: st.sampled_from([NAN, INF, -INF, 1e30, -1e30, 0.0])
            for name in ("current", "old", "engine", "reference", "advantage", "weight")
        }
    )
    keep = torch.tensor([kept for _, kept in rows])
    clean = [values for values, _ in rows]
    dirty = [values if kept else data.draw(garbage) for values, kept in rows]
    expected, result = run(clean, options, keep), run(dirty, options, keep)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])
    assert not result[1][~keep].any()
    assert {k: v.item() for k, v in result[2].items()} == {k: v.item() for k, v in expected[2].items()}
