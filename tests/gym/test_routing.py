"""Least load, and what is known of replicas in trouble; time is a number here."""

import pytest

from gymloop.errors import InfraError
from gymloop.gym.routing import SUSPECT_S, Routing


def test_rollouts_go_where_there_is_least_to_do_and_of_equals_to_the_first():
    routing = Routing(["a", "b", "c"])
    assert [routing.take(0.0) for _ in range(4)] == ["a", "b", "c", "a"]
    routing.give_back("b")
    assert routing.load == {"a": 2, "b": 0, "c": 1}
    assert routing.take(0.0) == "b"


def test_a_retry_goes_elsewhere_even_where_there_is_more_to_do():
    routing = Routing(["a", "b"])
    for _ in range(4):
        routing.take(0.0, avoid={"a"})
    assert routing.load == {"a": 0, "b": 4}
    assert routing.take(0.0, avoid={"a", "b"}) == "a", "with nowhere else to go, the least load"


def test_a_lost_connection_keeps_new_rollouts_away_for_a_while():
    routing = Routing(["a", "b"])
    routing.suspect("a", 100.0)
    assert [routing.take(100.0 + SUSPECT_S - 0.1) for _ in range(3)] == ["b", "b", "b"]
    assert routing.take(100.0 + SUSPECT_S) == "a"


def test_a_suspect_is_asked_only_where_nobody_else_is_left_whoever_else_is_to_be_avoided():
    routing = Routing(["a", "b"])
    routing.suspect("a", 0.0)
    assert routing.take(1.0, avoid={"b"}) == "b"
    routing.suspect("b", 0.0)
    assert routing.take(1.0, avoid={"b"}) == "a"


def test_the_dead_are_never_taken_again():
    routing = Routing(["a", "b"])
    routing.take(0.0)
    routing.bury("a", "a died")
    routing.give_back("a")  # the rollout that was on it has failed
    assert [routing.take(time) for time in (0.0, 1e9)] == ["b", "b"]
    assert routing.living == ("b",)


def test_when_all_are_dead_each_is_named_with_its_cause():
    routing = Routing(["engine-0", "engine-1"])
    routing.bury("engine-1", "engine-1 died during run")
    routing.bury("engine-0", "engine-0 does not respond")
    said = "no engine replica is left: engine-0: engine-0 does not respond; engine-1: engine-1 died during run"
    with pytest.raises(InfraError, match=said):
        routing.take(0.0)
