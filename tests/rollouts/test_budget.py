"""A step may have so many failures; one more ends it with the party that failed most often."""

import pytest

from gymloop.errors import InfraError
from gymloop.rollouts.budget import FailureBudget, worst
from gymloop.rollouts.trajectory import Failure, Trajectory


def failure(sample, where="environment toy, verify", cause="timeout"):
    return Failure("g", sample, 2, "infra", "no answer within 5 s", where, cause)


def test_up_to_the_limit_nothing_happens_and_finished_rollouts_cost_nothing():
    budget = FailureBudget(2, "step 3")
    for sample in range(5):
        budget.spend(Trajectory("g", sample, 0, (), 1.0))
    budget.spend(failure(5))
    budget.spend(failure(6))
    with pytest.raises(InfraError, match=r"step 3: 3 rollouts failed for good, .*max_failed_rollouts_per_step = 2; "):
        budget.spend(failure(7))


def test_without_a_limit_any_number_may_fail():
    budget = FailureBudget(None, "step 1")
    for sample in range(1000):
        budget.spend(failure(sample))


def test_a_limit_of_0_ends_with_the_first():
    with pytest.raises(InfraError, match=r"step 1: 1 rollouts failed .* = 0; worst: environment toy with 1"):
        FailureBudget(0, "step 1").spend(failure(0))


def test_the_worst_party_is_named_over_all_its_routes_with_its_causes_and_an_example():
    failures = [
        failure(4),
        failure(3, "environment toy, seed_session", "raised"),
        failure(5),
        failure(1, "model http://h/v1/chat/completions", "server_error"),
        failure(0, "model http://h/v1/chat/completions", "server_error"),
    ]
    assert worst(failures) == (
        "worst: environment toy with 3 (2 timeout, 1 raised), "
        "such as rollout g/3: environment toy, seed_session: no answer within 5 s"
    )
    assert worst(list(reversed(failures))) == worst(failures)


def test_of_equals_the_first_by_name_is_named():
    assert worst([failure(0, "model b"), failure(1, "environment a, verify")]).startswith("worst: environment a with 1")
