"""Rules between the machines, what the engines take of them and what is left to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.placement import split_gpus, tensor_parallel_size
from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

GPUS, NODES = "cluster.gpus_per_node", "cluster.num_nodes"
COLOCATED = "policy.generation.colocated.enabled"
ENGINE_GPUS = "policy.generation.colocated.resources.gpus_per_node"
ENGINE_NODES = "policy.generation.colocated.resources.num_nodes"
REPLICAS = "policy.generation.replicas"
TENSOR_PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size"
TRANSPORT = "policy.generation.refit_transport"


def _cpu(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cluster, colocated = recipe.cluster, recipe.policy.generation.colocated
    if cluster.gpus_per_node:
        return
    if cluster.num_nodes > 1:
        yield Violation(
            (NODES, GPUS), f"{cluster.num_nodes} nodes need {GPUS}: on a CPU a run has one node; expected 1"
        )
    if not colocated.enabled:
        yield Violation(
            (COLOCATED, GPUS), f"there are no GPUs to separate ({GPUS} is 0): on a CPU they share; expected true"
        )


def _resources(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """What the engines are given is given where it counts, and leaves something to the policy."""
    cluster, colocated = recipe.cluster, recipe.policy.generation.colocated
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    if colocated.enabled:
        for key, given in ((ENGINE_GPUS, gpus), (ENGINE_NODES, nodes)):
            if given is not None:
                yield Violation(
                    (key, COLOCATED), f"has no effect while {COLOCATED} is true; expected null, or false there"
                )
        return
    if not cluster.gpus_per_node:
        return
    if cluster.num_nodes == 1:
        if gpus is None:
            yield Violation(
                (ENGINE_GPUS, COLOCATED, NODES),
                f"is missing; expected how many of the node's {cluster.gpus_per_node} GPUs the engines get",
            )
        elif gpus >= cluster.gpus_per_node:
            yield Violation(
                (ENGINE_GPUS, GPUS), f"{gpus} of {cluster.gpus_per_node} GPUs leave the policy none; expected fewer"
            )
        if nodes not in (None, 1):
            yield Violation((ENGINE_NODES, NODES), f"is {nodes} and the cluster has one node; expected null")
        return
    if nodes is None:
        yield Violation(
            (ENGINE_NODES, COLOCATED, NODES),
            f"is missing; expected how many of the {cluster.num_nodes} nodes the engines get",
        )
    elif nodes >= cluster.num_nodes:
        yield Violation(
            (ENGINE_NODES, NODES), f"{nodes} of {cluster.num_nodes} nodes leave the policy none; expected fewer"
        )
    if gpus not in (None, cluster.gpus_per_node):
        yield Violation(
            (ENGINE_GPUS, GPUS, NODES),
            f"is {gpus}; on several nodes the engines get whole nodes; expected {cluster.gpus_per_node} or null",
        )


def _replicas(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """The engines' GPUs come out even."""
    cluster, generation = recipe.cluster, recipe.policy.generation
    if not cluster.gpus_per_node:
        return
    generating = [cluster.gpus_per_node] * cluster.num_nodes
    if not generation.colocated.enabled:
        generating = split_gpus(recipe)[1]
    size, total = tensor_parallel_size(recipe), sum(generating)
    uneven = next((units for units in generating if units % size), None)
    if uneven is not None:
        yield Violation(
            (TENSOR_PARALLEL, GPUS, NODES, COLOCATED, ENGINE_GPUS, ENGINE_NODES),
            f"{size} GPUs an engine, all of one node, do not divide the {uneven} that a node has for engines; expected "
            "a divisor",
        )
    elif total and generation.replicas not in (None, total // size):
        yield Violation(
            (REPLICAS, GPUS, NODES, COLOCATED, ENGINE_GPUS, ENGINE_NODES),
            f"is {generation.replicas}, but the engines have {total} GPU{'' if total == 1 else 's'}, {size} for each; "
            f"expected {total // size} or null",
        )


def _policy(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    colocated = recipe.policy.generation.colocated.enabled
    training = recipe.cluster.gpus_per_node * recipe.cluster.num_nodes if colocated else sum(split_gpus(recipe)[0])
    if training > 1:
        yield Violation(
            (GPUS, NODES, COLOCATED, ENGINE_GPUS, ENGINE_NODES),
            f"leaves the policy {training} GPUs, all but one of them idle, since it trains on one; expected "
            f"{GPUS}: 1, or more of them for the engines (policy.generation.colocated)",
        )


def _transport(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """Weights stay on a GPU only where policy and engine share one, and NCCL moves them only where they do not."""
    asked, gpus = recipe.policy.generation.refit_transport, recipe.cluster.gpus_per_node
    colocated = recipe.policy.generation.colocated.enabled
    if asked == "broadcast" and gpus and colocated:
        yield Violation(
            (TRANSPORT, COLOCATED, GPUS),
            f"'broadcast' is NCCL between GPUs, which takes one process of a GPU, and with {COLOCATED} true policy and "
            "engine share one; expected 'auto' or 'cuda_ipc'",
        )
    if asked != "cuda_ipc":
        return
    if not gpus:
        yield Violation((TRANSPORT, GPUS), f"'cuda_ipc' needs a GPU, and {GPUS} is 0; expected 'auto'")
    elif not colocated:
        yield Violation(
            (TRANSPORT, COLOCATED),
            f"'cuda_ipc' needs engines on the policy's GPU, and {COLOCATED} is false; expected 'auto' or 'broadcast'",
        )


RULES: tuple[Rule, ...] = (_cpu, _resources, _replicas, _policy, _transport)
