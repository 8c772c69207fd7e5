"""Whether a placement fits, and the sentence that says why not: demand, supply, what is free."""

from gymloop.cluster.supply import Supply, impossible, scattered, short
from gymloop.config.placement import Placement, Share

EIGHT = Placement("GPU", (6, 2), (0, 0), False, 2, 6, 2, (Share("policy", 0, 6.0), Share("engine", 1, 2.0)))
TWO_NODES = Placement("GPU", (4, 4), (0, 1), False, 4, 4, 4, (Share("policy", 0, 4.0), Share("engine", 1, 4.0)))


def test_what_fits_has_nothing_to_say():
    supply = Supply({"a": 8}, 8)
    assert impossible(EIGHT, supply) is None
    assert short(EIGHT, supply) is None


def test_demand_and_supply_and_what_is_free_are_in_one_sentence():
    assert short(EIGHT, Supply({"a": 8}, 7)) == (
        "the engine needs 2 GPUs beside the policy's 6; the cluster has 8 GPUs, 7 free"
    )


def test_what_others_hold_may_become_free_and_what_is_not_there_may_not():
    assert impossible(EIGHT, Supply({"a": 8}, 0)) is None
    assert impossible(EIGHT, Supply({"a": 4}, 4)) == (
        "the engine needs 2 GPUs beside the policy's 6; the cluster has 4 GPUs, 4 free"
    )
    assert impossible(EIGHT, Supply({}, 0)).endswith("the cluster has 0 GPUs, 0 free")


def test_enough_in_all_is_not_enough_on_one_node():
    supply = Supply({"a": 4, "b": 4}, 8)
    assert impossible(EIGHT, supply) == (
        "the engine needs 2 GPUs beside the policy's 6; the cluster has 8 GPUs on 2 nodes (a 4, b 4), 8 free, "
        "but no node has 8 together"
    )
    assert impossible(TWO_NODES, supply) is None


def test_two_nodes_worth_may_lie_on_one_large_node_but_not_on_small_ones():
    assert impossible(TWO_NODES, Supply({"a": 8}, 8)) is None
    assert impossible(TWO_NODES, Supply({"a": 5, "b": 3}, 8)).endswith("but no node has 4 together")


def test_free_but_not_together_is_said_as_such():
    assert scattered(EIGHT, Supply({"a": 8, "b": 8}, 9)).endswith(
        "the cluster has 16 GPUs on 2 nodes (a 8, b 8), 9 free, but not 8 together on one node"
    )


def test_a_long_list_of_nodes_is_cut():
    told = Supply({f"n{index}": 8 for index in range(20)}, 0).told("GPU")
    assert told.startswith("the cluster has 160 GPUs on 20 nodes (n0 8, ")
    assert told.endswith(", 12 more), 0 free")
