"""What a collection is of: which rows, how many rollouts of each, and what makes two collections the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from gymloop.config.dump import as_yaml
from gymloop.config.plan import Plan, RowSource, SamplingProfile
from gymloop.errors import ConfigError
from gymloop.gym.contract import Row
from gymloop.gym.loader import fingerprint
from gymloop.gym.rows import read_rows
from gymloop.gym.sources import build_sources, load_source_rows
from gymloop.rollouts.collection import wanted
from gymloop.rollouts.collector import RolloutTask
from gymloop.rollouts.flags import patterns_of
from gymloop.training.tasks.model import Folders
from gymloop.training.tasks.nemo_gym import Hosting

_PLACES = {
    "url",
    "head_server_url",
    "port_range_low",
    "port_range_high",
    "server_spinup_timeout_seconds",
    "nemo_gym_installation",
}
"""Keys of ``env`` that say where something is, and not what."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to collect, besides the recipe.

    Attributes:
        output: absolute.
        part: whose rows, and with which sampling profile.
        generations: rollouts of each row; None takes ``grpo.num_generations_per_prompt``.
        limit: rows from the first on; None takes all.
        model_url: of a server that runs already, such as ``https://host/v1``; None starts the recipe's engine.
        model: the name that server gives the model; None takes ``policy.model_name``.
        api_key: for that server.
        retry_failed: rollouts that failed for good count as missing.
    """

    output: Path
    part: Literal["train", "validation"] = "train"
    generations: int | None = None
    limit: int | None = None
    model_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    retry_failed: bool = False


def source_of(plan: Plan, part: str) -> RowSource:
    """Where the rows come from.

    Raises:
        ConfigError: the recipe has no such rows.
    """
    source = plan.train if part == "train" else plan.validation
    if source is None:
        raise ConfigError("--data validation: the recipe has no data.validation; expected --data train")
    return source


def tasks_of(plan: Plan, request: Request, rows: Sequence[Row]) -> list[RolloutTask]:
    """Every rollout of the collection."""
    generations = request.generations or plan.recipe.grpo.num_generations_per_prompt
    return wanted(request.part, rows, generations, request.limit)


def sampling_of(plan: Plan, request: Request) -> SamplingProfile:
    """How the rollouts are sampled."""
    return plan.train_sampling if request.part == "train" else plan.validation_sampling or plan.train_sampling


def early_rows(plan: Plan, source: RowSource, hosting: Hosting | None) -> list[Row] | None:
    """The rows, read before anything starts; None where a running NeMo Gym has to say first which agents it has."""
    gym = plan.recipe.env.nemo_gym
    if gym is not None and gym.head_server_url is not None:
        return None
    folder = plan.recipe_path.parent
    sources = build_sources(plan.recipe.env, folder)
    if source.data_path is None:
        return load_source_rows(source, sources, folder)
    hosted = () if hosting is None else hosting.gym.plays
    tools = {name: known.tools for name, known in sources.items()}
    return read_rows(source.data_path, {**tools, **dict.fromkeys(hosted)}, source.agent)


def identity(
    plan: Plan, request: Request, rows: Sequence[Row] | None = None, folders: Folders | None = None
) -> dict[str, Any]:
    """What makes two collections one; what is not known yet is left out.

    How many rows and rollouts are asked for, and how fast, is not part of it: a collection may grow.

    Args:
        plan: of the recipe.
        request: what is collected.
        rows: all of them.
        folders: of the engine's model.
    """
    recipe = plan.recipe
    plain = yaml.safe_load(as_yaml(recipe))
    sampling = sampling_of(plan, request)
    patterns = patterns_of(recipe)
    known: dict[str, Any] = {
        "data": request.part,
        "seed": recipe.grpo.seed,
        "model": request.model or recipe.policy.model_name,
        "engine": "the recipe's" if request.model_url is None else "a server's",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "grpo.max_rollout_turns": recipe.grpo.max_rollout_turns,
        "policy.generation.max_new_tokens": recipe.policy.generation.max_new_tokens,
        "policy.max_total_sequence_length": recipe.policy.max_total_sequence_length,
        "digest of policy.tokenizer": _digest([plain["policy"]["tokenizer"], plan.chat_template]),
        "digest of env": _digest(_without_places(plain["env"])),
        "patterns": [list(patterns.invalid_tool_call), list(patterns.thinking)],
        "reward_penalties": plain["reward_penalties"],
    }
    if rows is not None:
        known["digest of the rows"] = fingerprint(rows)
    if folders is not None:
        known["weights"] = dict(folders.identity)
    return known


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items() if key not in _PLACES}
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(yaml.safe_dump(value, sort_keys=True).encode()).hexdigest()[:16]


def refuse_unreachable(plan: Plan, request: Request) -> None:
    """Agents that call a model of their own do not hear of ``--model-url``.

    Raises:
        ConfigError: the recipe has one; or ``--model`` is given without ``--model-url``.
    """
    if request.model_url is None:
        if request.model is not None:
            raise ConfigError("--model is the name of the model at --model-url, which is missing")
        return
    for name, spec in plan.recipe.env.environments.items():
        if spec.agent == "remote":
            raise ConfigError(
                f"--model-url: env.environments.{name} plays with an agent server, which calls its own model; "
                "expected agent tool_calling or gymnasium, or no --model-url"
            )


def refuse_own_models(hosting: Hosting | None, request: Request) -> None:
    """Servers that NeMo Gym's configs give a model are given the recipe's engine, and there is none.

    Raises:
        ConfigError: there is such a server beside ``--model-url``.
    """
    if hosting is None or request.model_url is None:
        return
    if names := [name for name in hosting.gym.blocks.servers if hosting.gym.needs_model(name)]:
        raise ConfigError(
            f"--model-url: NeMo Gym's server {names[0]} calls the model itself, and it can be told of the recipe's "
            "engine only; expected no --model-url, or configs without that server"
        )
