"""Waiting for the nodes of a cluster, in virtual time."""

import pytest

from gymloop.cluster.ready import POLL_S, main, wait_for_nodes
from gymloop.errors import InfraError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pause(self, seconds):
        self.now += seconds


def test_it_returns_when_all_are_there_and_tells_each_change_once():
    clock, said = Clock(), []
    there = {100.0: ["n1"], 104.0: ["n1", "n2"], 110.0: ["n3", "n1", "n2"]}
    wait_for_nodes(
        3, 60, lambda: there[max(time for time in there if time <= clock.now)], said.append, clock, clock.pause
    )
    assert said == [
        "1 of 3 nodes are there: n1",
        "2 of 3 nodes are there: n1, n2",
        "3 of 3 nodes are there: n1, n2, n3",
    ]
    assert clock.now == 110.0


def test_a_node_that_never_comes_is_told_within_the_bound_with_those_that_came():
    clock = Clock()
    with pytest.raises(InfraError, match=r"^only 2 of 3 nodes joined within 30 s: n1, n2; the logs"):
        wait_for_nodes(3, 30, lambda: ["n2", "n1"], lambda _: None, clock, clock.pause)
    assert 130 <= clock.now <= 130 + POLL_S


def test_without_an_address_there_is_nothing_to_wait_for(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--nodes", "2"]) == 2
    assert "RAY_ADDRESS does not name the cluster" in capsys.readouterr().err


def test_a_head_that_does_not_answer_is_told(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert main(["--nodes", "2", "--within", "0.1"]) == 1
    assert "could not join the Ray cluster at RAY_ADDRESS=127.0.0.1:9" in capsys.readouterr().err
