"""Which transport moves weights between two places, and why: one pure function over plain facts.

| transport       | moves                                                            | needs            |
| --------------- | ---------------------------------------------------------------- | ---------------- |
| `shared_memory` | one copy into anonymous shared memory that every engine maps     | one host, Linux  |
| `object_store`  | one copy into Ray's object store, which also reaches other hosts | Ray              |
| `cuda_ipc`      | nothing: engines read the policy's own parameters                | the policy's GPU |
| `broadcast`     | buckets, from the policy to all engines at once, NCCL or gloo    | sockets between  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gymloop.errors import ConfigError
from gymloop.weights.place import Place

Transport = Literal["shared_memory", "object_store", "cuda_ipc", "broadcast"]
KEY = "policy.generation.refit_transport"


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and the reason for it, a clause."""

    transport: Transport
    reason: str


def choose_transport(policy: Place, engines: Sequence[Place], asked: Transport | None = None) -> Choice:
    """Choose for one policy and all its engines together.

    Args:
        policy: where the weights are.
        engines: where they go; at least one.
        asked: what the recipe asks for; None leaves the choice to the facts.

    Raises:
        ConfigError: what is asked for cannot work between these places.
    """
    if asked is not None:
        why_not = _why_not(asked, policy, engines)
        if why_not is not None:
            best = choose_transport(policy, engines)
            raise ConfigError(
                f"{KEY}: {asked!r} cannot be used, because {why_not}; expected {best.transport!r} ({best.reason}) "
                "or 'auto'"
            )
        return Choice(asked, f"{KEY} asks for it")
    devices = {policy.device, *(engine.device for engine in engines)}
    if _why_not("cuda_ipc", policy, engines) is None:
        return Choice("cuda_ipc", "policy and engine share a GPU")
    shares_gpu = _why_not("broadcast", policy, engines) is not None
    if devices == {"cuda"} and not shares_gpu:
        return Choice("broadcast", "policy and engines are on several GPUs")
    if _why_not("shared_memory", policy, engines) is None:
        mixed = "one of these on its GPU" if shares_gpu else "on a CPU and a GPU"
        where = "in main memory" if devices == {"cpu"} else mixed
        return Choice("shared_memory", f"policy and engines are on one host, {where}")
    if policy.host is None:
        return Choice("object_store", "this system has no anonymous shared memory")
    if shares_gpu:
        return Choice("object_store", "policy and engines are on several hosts, one of these on its GPU")
    return Choice("broadcast", "policy and engines are on several hosts")


def _why_not(transport: Transport, policy: Place, engines: Sequence[Place]) -> str | None:
    """Why a transport cannot connect these places, a clause; None where it can."""
    if transport == "cuda_ipc":
        if policy.device != "cuda" or any(engine.device != "cuda" for engine in engines):
            return "policy and engines are not all on a GPU"
        if any((engine.host, engine.gpu) != (policy.host, policy.gpu) for engine in engines):
            return "policy and engines are not all on one GPU of one host"
    if transport == "shared_memory":
        if policy.host is None:
            return "this system has no anonymous shared memory"
        if any(engine.host != policy.host for engine in engines):
            return "policy and engines are not all on one host"
    on_gpus = {policy.device, *(engine.device for engine in engines)} == {"cuda"}
    shared = any((engine.host, engine.gpu) == (policy.host, policy.gpu) for engine in engines)
    if transport == "broadcast" and on_gpus and shared:
        return "policy and engine are on one GPU, and NCCL takes one process per GPU"
    return None
