"""Rules between lengths, ports and times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe


def _lengths(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    policy, generation = recipe.policy, recipe.policy.generation
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        yield Violation(
            ("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
            f"{generation.max_new_tokens} leaves no room for a prompt; expected less than "
            f"policy.max_total_sequence_length, which is {policy.max_total_sequence_length}",
        )


def _ports(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    generation = recipe.policy.generation
    if generation.port_range_low > generation.port_range_high:
        yield Violation(
            ("policy.generation.port_range_low", "policy.generation.port_range_high"),
            f"{generation.port_range_low} is above port_range_high, which is {generation.port_range_high}",
        )


def _health(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    health = recipe.health
    if health.unresponsive_after_s <= health.check_period_s:
        yield Violation(
            ("health.unresponsive_after_s", "health.check_period_s"),
            f"{health.unresponsive_after_s:g} s are over before the second look at a worker; expected more than "
            f"health.check_period_s, which is {health.check_period_s:g}",
        )


def _deterministic(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if recipe.deterministic and recipe.cluster.gpus_per_node:
        yield Violation(
            ("deterministic", "cluster.gpus_per_node"),
            "equal bits are proven on the CPU only, where every kernel has one order of sums; expected "
            "cluster.gpus_per_node: 0, or false",
        )


RULES: tuple[Rule, ...] = (_lengths, _ports, _health, _deterministic)
