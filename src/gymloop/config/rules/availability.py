"""What this version cannot do is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe


def _backend(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if recipe.policy.generation.backend == "vllm":
        yield Violation(("policy.generation.backend",), "'vllm' is not available yet; expected 'torch'")
    if not recipe.policy.generation.colocated.enabled:
        yield Violation(
            ("policy.generation.colocated.enabled",), "separate devices are not available yet; expected true"
        )


def _cluster(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cluster = recipe.cluster
    if cluster.num_nodes > 1:
        yield Violation(("cluster.num_nodes",), f"{cluster.num_nodes} nodes are not available yet; expected 1")
    if cluster.gpus_per_node > 1:
        yield Violation(
            ("cluster.gpus_per_node",),
            f"{cluster.gpus_per_node} GPUs would leave all but one idle, since tensor and data parallel are not "
            "available yet; expected 0 or 1",
        )


RULES: tuple[Rule, ...] = (_backend, _cluster)
