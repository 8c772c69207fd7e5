"""What a set of verdicts comes to: NeMo Gym's ``/aggregate_metrics``, its statistics that need no statistics package.

Every number of a verdict (booleans are 0 and 1; names that begin with ``_`` are the collector's) and of its
``response.usage`` gives mean, max, min, median and standard deviation (``n - 1``; 0 for one value): over all verdicts,
by task, and by repeat. Verdicts that say of themselves that they are no measurement (``mask_sample``) are counted and
left out. Confidence intervals and quartiles are not given.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gymloop.gym.serve.refusal import malformed

TASK, REPEAT = "_ng_task_index", "_ng_rollout_index"
_STATS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}

Verdicts = Sequence[Mapping[str, Any]]


def aggregate(body: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request ``{"verify_responses": [...]}``.

    Raises:
        Refusal: 422, that is not what the body holds.
    """
    given = body.get("verify_responses")
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise malformed(["verify_responses"], "expected a list of verify responses", "list_type")
    for index, one in enumerate(given):
        for key in (TASK, REPEAT):
            if type(one.get(key, 0)) is not int:
                raise malformed(["verify_responses", index, key], "expected an integer", "int_type")
    reply: dict[str, Any] = {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}, "perf_summary": None}
    reply["repeat_level_metrics"] = []
    if not given:
        return reply
    scored = [one for one in given if one.get("mask_sample") is not True]
    coverage = _coverage(given, scored)
    if not scored:
        return reply | {"agent_metrics": coverage, "key_metrics": coverage}
    metrics = _stats(scored) | coverage | {"num_repeats": len({one.get(REPEAT, 0) for one in given})}
    return reply | {
        "group_level_metrics": [_of_task(task, some) for task, some in sorted(_by(scored, TASK).items())],
        "agent_metrics": metrics,
        "key_metrics": {name: value for name, value in metrics.items() if name.startswith("mean/")} | coverage,
        "repeat_level_metrics": _of_repeats(scored),
    }


def _of_task(task: int, verdicts: Verdicts) -> dict[str, Any]:
    infos = [{"rollout_id": f"{task}:{one.get(REPEAT, 0)}", TASK: task, REPEAT: one.get(REPEAT, 0)} for one in verdicts]
    for info, verdict in zip(infos, verdicts, strict=True):
        info.update(_numbers(verdict))
    return {
        TASK: task,
        **_stats(verdicts),
        "num_rollouts": len(verdicts),
        "rollout_infos": sorted(infos, key=lambda info: info[REPEAT]),
    }


def _of_repeats(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Nothing where there is one repeat: it has nothing to be compared with."""
    repeats = _by(verdicts, REPEAT)
    tasks = len(_by(verdicts, TASK))
    if len(repeats) < 2:
        return []
    counted = [(repeat, some, len(_by(some, TASK))) for repeat, some in sorted(repeats.items())]
    return [
        {REPEAT: repeat, "sample_count": present, "missing_count": tasks - present, **_stats(some)}
        for repeat, some, present in counted
    ]


def _coverage(given: Verdicts, scored: Verdicts) -> dict[str, int]:
    """How much of the whole the statistics are of; nothing where they are of all."""
    if len(given) == len(scored):
        return {}
    return {
        "coverage/measured_rollouts": len(scored),
        "coverage/masked_rollouts": len(given) - len(scored),
        "coverage/measured_tasks": len(_by(scored, TASK)),
        "coverage/fully_masked_tasks": len(_by(given, TASK)) - len(_by(scored, TASK)),
    }


def _stats(verdicts: Verdicts) -> dict[str, float]:
    columns: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in _numbers(verdict).items():
            columns[name].append(value)
    return {f"{stat}/{name}": of(values) for stat, of in _STATS.items() for name, values in columns.items()}


def _numbers(verdict: Mapping[str, Any]) -> dict[str, float]:
    response = verdict.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    found = {**verdict, **(usage if isinstance(usage, Mapping) else {})}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and name[:1] != "_" and name != "mask_sample"
    }


def _by(verdicts: Iterable[Mapping[str, Any]], key: str) -> dict[int, list[Mapping[str, Any]]]:
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.get(key, 0)].append(verdict)
    return groups
