"""Which task may begin after which: pure, and every fault of a graph is found before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from gymloop.errors import ConfigError
from gymloop.startup.task import Task


def dependency_order(tasks: Sequence[Task[Any]]) -> tuple[Task[Any], ...]:
    """The tasks, each after those it needs, otherwise in the order given.

    Raises:
        ConfigError: unknown need, cycle, duplicate name or deadline that is not positive.
    """
    by_name: dict[str, Task[Any]] = {}
    for task in tasks:
        if task.name in by_name:
            raise ConfigError(f"two startup tasks are named {task.name!r}")
        if not task.deadline_s > 0:
            raise ConfigError(f"startup task {task.name!r} has deadline_s {task.deadline_s}, expected more than 0 s")
        by_name[task.name] = task
    for task in tasks:
        for need in task.needs:
            if need not in by_name:
                nearest = difflib.get_close_matches(need, by_name, n=1)
                hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
                raise ConfigError(f"startup task {task.name!r} needs {need!r}, which is not a task{hint}")
    order: dict[str, Task[Any]] = {}
    while len(order) < len(by_name):
        waiting = (task for name, task in by_name.items() if name not in order)
        ready = next((task for task in waiting if order.keys() >= set(task.needs)), None)
        if ready is None:
            raise ConfigError(f"startup tasks wait for each other: {' -> '.join(_cycle(by_name, order))}")
        order[ready.name] = ready
    return tuple(order.values())


def _cycle(by_name: Mapping[str, Task[Any]], ended: Mapping[str, Task[Any]]) -> list[str]:
    """One cycle among the tasks that can never begin; each of them has a need that cannot begin either."""
    walk = [next(name for name in by_name if name not in ended)]
    while walk.count(walk[-1]) == 1:
        walk.append(next(need for need in by_name[walk[-1]].needs if need not in ended))
    return walk[walk.index(walk[-1]) :]
