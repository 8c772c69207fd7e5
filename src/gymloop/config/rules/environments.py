"""Rules about environments: a class in the run's process, a server by its URL, servers of NeMo Gym, and what only some
of them can do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import EnvironmentSpec, NemoGym, Recipe
from gymloop.config.unsupported import not_yet

GYM = "env.nemo_gym"
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ADDRESS = re.compile(r"https?://[^/\s@?#]+(/[^\s@?#]*)?")


def _each(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if not recipe.env.environments and recipe.env.nemo_gym is None:
        yield Violation(
            ("env.environments", GYM),
            f"is empty, so nothing gives a reward; expected at least one environment, or {GYM}",
        )
    for name, spec in recipe.env.environments.items():
        yield from _one(f"env.environments.{name}", spec)


def _gym_switches(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    env = recipe.env
    switch, extra, installation = (f"env.{name}" for name in (
        "should_use_nemo_gym", "nemo_gym_extra", "nemo_gym_installation"
    ))  # fmt: skip
    if env.nemo_gym is None:
        if env.should_use_nemo_gym:
            yield Violation((switch, GYM), f"is true, and {GYM} is missing; expected its config_paths there")
        for key, given in ((extra, env.nemo_gym_extra), (installation, env.nemo_gym_installation)):
            if given:
                yield Violation((key, GYM), f"has no effect without {GYM}; remove it")
        return
    if env.should_use_nemo_gym is False:
        yield Violation((switch, GYM), f"is false, and {GYM} would be used all the same; remove one of the two")
    if env.nemo_gym_extra and env.nemo_gym_installation is not None:
        yield Violation((extra, installation), f"chooses an installation, and so does {installation}; keep one")
    yield from _gym(env.nemo_gym)


def _gym(gym: NemoGym) -> Iterator[Violation]:
    paths, head = f"{GYM}.config_paths", f"{GYM}.head_server_url"
    if gym.is_trajectory_collection:
        yield Violation(
            (f"{GYM}.is_trajectory_collection",),
            "a training run trains; expected false (`gymloop collect` plays rollouts without training)",
        )
    for name in gym.overrides:
        if (sentence := not_yet((*GYM.split("."), name))) is not None:
            yield Violation((f"{GYM}.{name}",), sentence)
    if (gym.config_paths is None) == (gym.head_server_url is None):
        given = "neither is given" if gym.config_paths is None else "both are given"
        yield Violation(
            (GYM, paths, head),
            f"expected config_paths (servers that the run starts) or head_server_url (servers that run), exactly one; "
            f"{given}",
        )
    if gym.config_paths is not None and not gym.config_paths:
        yield Violation((paths,), "is empty, so no server starts; expected a list of NeMo Gym's config files")
    if gym.port_range_low > gym.port_range_high:
        yield Violation(
            (f"{GYM}.port_range_low", f"{GYM}.port_range_high"),
            f"{gym.port_range_low} is above port_range_high, which is {gym.port_range_high}",
        )
    if gym.head_server_url is not None:
        if not _ADDRESS.fullmatch(gym.head_server_url):
            yield Violation((head,), "is not an address of a server; expected http://host:port, without a password")
        for name in gym.overrides:
            yield Violation(
                (f"{GYM}.{name}", head), "the servers run already; they are configured where they are started"
            )


def _one(key: str, spec: EnvironmentSpec) -> Iterator[Violation]:
    entrypoint, kwargs, url, agent = (f"{key}.{name}" for name in ("entrypoint", "kwargs", "url", "agent"))
    if (spec.entrypoint is None) == (spec.url is None):
        given = "neither is given" if spec.url is None else "both are given"
        yield Violation(
            (key, entrypoint, url), f"expected entrypoint (a class) or url (a server), exactly one; {given}"
        )
        return
    if spec.entrypoint is not None:
        if not _CLASS.fullmatch(spec.entrypoint):
            yield Violation(
                (entrypoint,),
                f"{spec.entrypoint!r} names no class; expected 'module:Class' such as 'my_gym.tasks:Sorting'",
            )
        if spec.agent != "tool_calling":
            yield Violation(
                (agent, entrypoint),
                f"{spec.agent!r} plays on a server; expected url, or 'tool_calling' with entrypoint",
            )
    if spec.url is not None:
        if not _ADDRESS.fullmatch(spec.url):
            yield Violation((url,), "is not an address of a server; expected http://host:port, without a password")
        if spec.kwargs:
            yield Violation(
                (kwargs, url), "are arguments of a class; a server with url is configured where it is started"
            )


def _no_generator(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    environments = recipe.env.environments
    for key, source in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        name = None if source is None else source.environment
        spec = environments.get(name or "")
        if spec is not None and spec.url is not None:
            yield Violation(
                (f"{key}.environment", f"env.environments.{name}.url"),
                f"{name!r} is a server, and a server generates no tasks; expected {key}.data_path",
            )


def _no_solver(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    warmup, environments = recipe.sft_warmup, recipe.env.environments
    classes = any(spec.url is None for spec in environments.values())
    if warmup.steps and warmup.data_path is None and not classes and (environments or recipe.env.nemo_gym is not None):
        yield Violation(
            ("sft_warmup.data_path", "sft_warmup.steps", "env.environments"),
            "missing: every environment is a server, and a server has no solver to learn from",
        )


def _remote_agents(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """An agent server calls the model itself, and its calls do not say which profile they belong to."""
    remote = next((name for name, spec in recipe.env.environments.items() if spec.agent == "remote"), None)
    if remote is None or recipe.data.validation is None:
        return
    generation = recipe.policy.generation
    for name in ("temperature", "top_p", "top_k"):
        own = getattr(generation, f"val_{name}")
        if own is not None and own != getattr(generation, name):
            yield Violation(
                (f"policy.generation.val_{name}", f"policy.generation.{name}", f"env.environments.{remote}.agent"),
                f"the calls of the remote agent {remote!r} sample as in training; expected null or the value of "
                f"policy.generation.{name}",
            )


RULES: tuple[Rule, ...] = (_each, _gym_switches, _no_generator, _no_solver, _remote_agents)
