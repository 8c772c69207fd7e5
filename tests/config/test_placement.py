"""What each worker gets of the cluster, by NeMo RL's keys; and what is refused, with the reason."""

import pickle
from pathlib import Path

import pytest

from gymloop.config.explain import derived
from gymloop.config.load import load, load_recipe
from gymloop.config.placement import Share, placed
from gymloop.config.plan import compile_plan
from gymloop.errors import ConfigError

RECIPE = Path(__file__).parent / "data" / "complete.yaml"
SPLIT = "policy.generation.colocated.enabled=false"
BROADCAST = "policy.generation.refit_transport=broadcast"
IPC = "policy.generation.refit_transport=cuda_ipc"
ENGINE_GPUS = "policy.generation.colocated.resources.gpus_per_node"
ENGINE_NODES = "policy.generation.colocated.resources.num_nodes"
# ``complete.yaml`` is deterministic, which is a promise about CPUs.
GPU = "deterministic=false"


def place(*overrides):
    return placed(load_recipe(RECIPE, overrides))


def test_a_cpu_run_has_one_engine_that_shares_its_cpu_with_the_policy():
    made = place()
    assert (made.resource, made.bundles, made.colocated) == ("CPU", (1,), True)
    assert made.shares == (Share("policy", 0, 0.5), Share("engine", 0, 0.5))
    assert not made.takes_turns_on_gpu
    assert made.needs() == "the engine and the policy, which take turns, need 1 CPU"


def test_cpu_replicas_are_numbered_and_have_a_cpu_each():
    made = place("policy.generation.replicas=3")
    assert made.bundles == (1, 1, 1)
    assert made.engines == (Share("engine-0", 0, 0.5), Share("engine-1", 1, 1.0), Share("engine-2", 2, 1.0))
    assert made.policy == Share("policy", 0, 0.5)
    assert made.demand == 3
    assert made.needs() == "the 3 engine replicas and the policy, which take turns, need 3 CPUs"


def test_colocated_engine_and_policy_hold_half_of_the_same_gpu():
    made = place(GPU, "cluster.gpus_per_node=1")
    assert (made.resource, made.bundles, made.policy_gpus, made.generation_gpus) == ("GPU", (1,), 1, 1)
    assert made.shares == (Share("policy", 0, 0.5), Share("engine", 0, 0.5))
    assert made.takes_turns_on_gpu


def test_split_on_one_node_the_engines_take_their_gpus_and_the_policy_has_the_rest():
    made = place(GPU, SPLIT, "cluster.gpus_per_node=4", f"{ENGINE_GPUS}=3")
    assert (made.bundles, made.nodes, made.by_node) == ((1, 1, 1, 1), (0, 0, 0, 0), (4,))
    assert made.policy == Share("policy", 0, 1.0)
    assert made.engines == tuple(Share(f"engine-{index}", index + 1, 1.0) for index in range(3))
    assert not made.colocated
    assert not made.takes_turns_on_gpu
    assert made.needs() == "the 3 engine replicas need 3 GPUs beside the policy's 1"


def test_split_over_nodes_the_engines_take_whole_nodes():
    made = place(GPU, SPLIT, "cluster.gpus_per_node=1", "cluster.num_nodes=3", f"{ENGINE_NODES}=2")
    assert (made.bundles, made.nodes, made.by_node) == ((1, 1, 1), (0, 1, 2), (1, 1, 1))
    assert (made.policy_gpus, made.generation_gpus, made.replicas) == (1, 2, 2)
    assert made.needs().endswith("need 2 GPUs beside the policy's 1, on 3 nodes with 1 + 1 + 1")


def test_bundles_that_no_single_worker_could_share_are_counted_once():
    """Engine and policy of one bundle are never in the same phase, so the demand is that of the larger."""
    colocated = place(GPU, "cluster.gpus_per_node=1")
    split = place(GPU, SPLIT, "cluster.gpus_per_node=2", f"{ENGINE_GPUS}=1")
    assert (colocated.demand, split.demand) == (1, 2)
    for made in (colocated, split):
        for bundle, units in enumerate(made.bundles):
            assert sum(share.amount for share in made.shares if share.bundle == bundle) == units


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.num_nodes=2",), r"2 nodes need cluster\.gpus_per_node: on a CPU a run has one node; expected 1"),
        ((SPLIT,), r"colocated\.enabled.*no GPUs to separate"),
        ((f"{ENGINE_GPUS}=1",), r"resources\.gpus_per_node.*has no effect while .*colocated\.enabled is true"),
        ((GPU, SPLIT, "cluster.gpus_per_node=2"), r"resources\.gpus_per_node.*how many of the node's 2 GPUs"),
        ((GPU, SPLIT, "cluster.gpus_per_node=2", f"{ENGINE_GPUS}=2"), r"2 of 2 GPUs leave the policy none"),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=2", f"{ENGINE_GPUS}=1", f"{ENGINE_NODES}=2"),
            r"resources\.num_nodes.*is 2 and the cluster has one node",
        ),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=1", "cluster.num_nodes=2"),
            r"resources\.num_nodes.*how many of the 2 nodes the engines get",
        ),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=1", "cluster.num_nodes=2", f"{ENGINE_NODES}=2"),
            r"2 of 2 nodes leave the policy none",
        ),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=2", "cluster.num_nodes=2", f"{ENGINE_NODES}=1", f"{ENGINE_GPUS}=1"),
            r"on several nodes the engines get whole nodes; expected 2 or null",
        ),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=4", f"{ENGINE_GPUS}=3", "policy.generation.replicas=2"),
            r"replicas.*is 2, but the engines have 3 GPUs, 1 for each; expected 3 or null",
        ),
        (
            (GPU, "cluster.gpus_per_node=1", "policy.generation.replicas=2"),
            r"replicas.*is 2, but the engines have 1 GPU, 1 for each; expected 1 or null",
        ),
        ((GPU, "cluster.gpus_per_node=2"), r"leaves the policy 2 GPUs, all but one of them idle"),
        ((IPC,), r"refit_transport.*'cuda_ipc' needs a GPU, and cluster\.gpus_per_node is 0; expected 'auto'"),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=2", f"{ENGINE_GPUS}=1", IPC),
            r"refit_transport.*needs engines on the policy's GPU, and .*colocated\.enabled is false",
        ),
        (
            (GPU, "cluster.gpus_per_node=1", BROADCAST),
            r"refit_transport.*takes one process of a GPU, and with .*colocated\.enabled true policy and engine share",
        ),
        (("policy.generation.refit_transport=nccl",), r"refit_transport.*'nccl' is 'broadcast' here"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_keys_and_the_way_out(overrides, said):
    with pytest.raises(ConfigError, match=said):
        place(*overrides)


@pytest.mark.parametrize("overrides", [(), (GPU, SPLIT, "cluster.gpus_per_node=2", f"{ENGINE_GPUS}=1")])
def test_a_broadcast_is_for_processes_that_share_no_gpu(overrides):
    place(*overrides, BROADCAST)


def test_a_recipe_of_nemo_rl_with_null_resources_is_as_it_was():
    given = place(f"{ENGINE_GPUS}=null", f"{ENGINE_NODES}=null")
    assert given == place()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "1 engine and the policy on 1 CPU"),
        (("policy.generation.replicas=2",), "2 engine replicas and the policy on 2 CPUs"),
        ((GPU, "cluster.gpus_per_node=1"), "1 engine and the policy take turns on 1 GPU"),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=4", f"{ENGINE_GPUS}=3"),
            "3 engine replicas on 3 GPUs, the policy on 1",
        ),
        (
            (GPU, SPLIT, "cluster.gpus_per_node=1", "cluster.num_nodes=3", f"{ENGINE_NODES}=2"),
            "2 engine replicas on 2 GPUs, the policy on 1 of 3 nodes",
        ),
    ],
)
def test_a_placement_says_what_it_is_and_explain_says_why(overrides, said):
    loaded = load(RECIPE, overrides)
    plan = compile_plan(loaded.recipe, RECIPE, "r")
    (found,) = [one for one in derived(loaded, plan) if one.name == "placement"]
    assert found.value == said
    assert "cluster.gpus_per_node" in found.because
    if SPLIT in overrides:
        assert "policy.generation.colocated.enabled false (override" in found.because


def test_an_engine_of_several_gpus_lies_on_one_node(tmp_path):
    vllm = ("policy.generation.backend=vllm", "+policy.generation.vllm_cfg.tensor_parallel_size=2")
    made = place(GPU, SPLIT, "cluster.gpus_per_node=5", f"{ENGINE_GPUS}=4", *vllm)
    assert (made.bundles, made.tensor_parallel, made.replicas) == ((1, 2, 2), 2, 2)
    assert made.engines == (Share("engine-0", 1, 2.0), Share("engine-1", 2, 2.0))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size.*2 GPUs an engine.*do not divide the 3"):
        place(GPU, SPLIT, "cluster.gpus_per_node=4", f"{ENGINE_GPUS}=3", *vllm)


def test_a_placement_is_plain_data():
    made = place("policy.generation.replicas=2")
    assert pickle.loads(pickle.dumps(made)) == made
