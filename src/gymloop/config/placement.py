"""Which machines' GPUs and CPUs each worker gets: NeMo RL's keys, settled into bundles before anything starts.

A bundle is what one node must have free, whole, for as long as the run lives. Colocated, the policy lives in the bundle
of an engine and both hold half of it, since they take turns; split, each has bundles of its own. A CPU run reserves one
CPU a bundle, so that it too is refused where there is no room; threads are another matter (``plan.ActorThreads``).

| | policy | engine replicas |
| --- | --- | --- |
| CPU | with the first engine | ``policy.generation.replicas``, else 1 |
| GPU, colocated | all GPUs of the cluster | the same GPUs, ``tensor_parallel_size`` each |
| GPU, split, one node | the node's GPUs that the engines leave | ``colocated.resources.gpus_per_node`` |
| GPU, split, several nodes | the nodes that the engines leave | all GPUs of ``colocated.resources.num_nodes`` nodes |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from gymloop.config.schema import Recipe

Resource = Literal["CPU", "GPU"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker's process holds.

    Attributes:
        worker: its name.
        bundle: index into ``Placement.bundles``.
        amount: of the bundle's resource; a fraction where several workers take turns.
    """

    worker: str
    bundle: int
    amount: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers of a run live.

    Attributes:
        resource: what the bundles count.
        bundles: units of it that each bundle holds, on one node.
        nodes: of each bundle, the number of its node; bundles of one number lie on one node.
        colocated: policy and engines share bundles.
        tensor_parallel: GPUs of one engine replica; 1 on a CPU.
        policy_gpus: GPUs the policy trains on; 0 on a CPU.
        generation_gpus: GPUs of all engines together; 0 on a CPU.
        shares: one for the policy, then one for each engine replica in order.
    """

    resource: Resource
    bundles: tuple[int, ...]
    nodes: tuple[int, ...]
    colocated: bool
    tensor_parallel: int
    policy_gpus: int
    generation_gpus: int
    shares: tuple[Share, ...]

    @property
    def policy(self) -> Share:
        """The policy's."""
        return self.shares[0]

    @property
    def engines(self) -> tuple[Share, ...]:
        """One for each replica."""
        return self.shares[1:]

    @property
    def replicas(self) -> int:
        """Engines that serve beside each other."""
        return len(self.engines)

    @property
    def demand(self) -> int:
        """Units held over the whole run. Workers of one bundle are never in the same phase, so it counts once."""
        return sum(self.bundles)

    @property
    def takes_turns_on_gpu(self) -> bool:
        """Engine and policy cannot both have their memory on the GPU: see ``training.turns``."""
        return self.colocated and self.resource == "GPU"

    @property
    def by_node(self) -> tuple[int, ...]:
        """Units that each node must have free at once."""
        counted: Counter[int] = Counter()
        for node, units in zip(self.nodes, self.bundles, strict=True):
            counted[node] += units
        return tuple(counted[node] for node in sorted(counted))

    def summary(self) -> str:
        """The placement in words, for people who ask what a recipe comes to."""
        engines = "1 engine" if self.replicas == 1 else f"{self.replicas} engine replicas"
        if self.resource == "CPU":
            return f"{engines} and the policy on {_counted(self.demand, 'CPU')}"
        if self.colocated:
            return f"{engines} and the policy take turns on {_counted(self.demand, 'GPU')}"
        nodes = len(self.by_node)
        where = f" of {nodes} nodes" if nodes > 1 else ""
        return f"{engines} on {_counted(self.generation_gpus, 'GPU')}, the policy on {self.policy_gpus}{where}"

    def needs(self) -> str:
        """The demand as errors and the startup table say it."""
        engines = "the engine" if self.replicas == 1 else f"the {self.replicas} engine replicas"
        if self.resource == "CPU":
            said = f"{engines} and the policy, which take turns, need {_counted(self.demand, 'CPU')}"
        elif self.colocated:
            said = f"{engines} and the policy, which take turns, need {_counted(self.demand, 'GPU')}"
        else:
            verb = "needs" if self.replicas == 1 else "need"
            said = f"{engines} {verb} {_counted(self.generation_gpus, 'GPU')} beside the policy's {self.policy_gpus}"
        if len(self.by_node) > 1:
            said += f", on {len(self.by_node)} nodes with {' + '.join(map(str, self.by_node))}"
        return said


def placed(recipe: Recipe) -> Placement:
    """The placement of a recipe that keeps ``rules.placement``."""
    cluster, generation = recipe.cluster, recipe.policy.generation
    if not cluster.gpus_per_node:
        replicas = generation.replicas or 1
        engines = _engines([Share("engine", index, 1.0 if index else 0.5) for index in range(replicas)])
        return Placement("CPU", (1,) * replicas, (0,) * replicas, True, 1, 0, 0, (Share("policy", 0, 0.5), *engines))
    tensor_parallel = tensor_parallel_size(recipe)
    if generation.colocated.enabled:
        total = cluster.gpus_per_node * cluster.num_nodes
        replicas, per_node = total // tensor_parallel, cluster.gpus_per_node // tensor_parallel
        half = tensor_parallel / 2
        engines = _engines([Share("engine", index, half) for index in range(replicas)])
        return Placement(
            "GPU",
            (tensor_parallel,) * replicas,
            tuple(index // per_node for index in range(replicas)),
            True,
            tensor_parallel,
            total,
            total,
            (Share("policy", 0, half), *engines),
        )
    policy, generating = split_gpus(recipe)
    on_policy = [(node, units) for node, units in enumerate(policy) if units]
    replicas_of = [(node, units // tensor_parallel) for node, units in enumerate(generating)]
    nodes = [node for node, count in replicas_of for _ in range(count)]
    engines = _engines([Share("engine", len(on_policy) + index, float(tensor_parallel)) for index in range(len(nodes))])
    return Placement(
        "GPU",
        (*(units for _, units in on_policy), *(tensor_parallel,) * len(nodes)),
        (*(node for node, _ in on_policy), *nodes),
        False,
        tensor_parallel,
        sum(policy),
        sum(generating),
        (Share("policy", 0, float(on_policy[0][1])), *engines),
    )


def split_gpus(recipe: Recipe) -> tuple[list[int], list[int]]:
    """GPUs of the policy and of the engines on each node, where they are not colocated; as far as the keys are given.

    On one node the engines take some of its GPUs, on several they take whole nodes, the last ones.
    """
    cluster, resources = recipe.cluster, recipe.policy.generation.colocated.resources
    if cluster.num_nodes == 1:
        taken = resources.gpus_per_node or 0
        return [cluster.gpus_per_node - taken], [taken]
    kept = cluster.num_nodes - (resources.num_nodes or 0)
    nodes = range(cluster.num_nodes)
    per_node = cluster.gpus_per_node
    return [per_node * (node < kept) for node in nodes], [per_node * (node >= kept) for node in nodes]


def tensor_parallel_size(recipe: Recipe) -> int:
    """GPUs of one engine replica; the embedded engine computes on one."""
    cfg = recipe.policy.generation.vllm_cfg
    return 1 if cfg is None or recipe.policy.generation.backend != "vllm" else cfg.tensor_parallel_size


def _engines(shares: list[Share]) -> list[Share]:
    """The same with a number in their names; the only one needs none."""
    if len(shares) == 1:
        return shares
    return [Share(f"{share.worker}-{index}", share.bundle, share.amount) for index, share in enumerate(shares)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
