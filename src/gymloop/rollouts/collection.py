"""A collection is a set of rollouts, by group and sample, each on one line of one file; what is not there is missing.

    rows ── wanted: every row, so many samples of each ──┐
                                                         ├──> missing ──> rollouts ──> lines, as each finishes
    file ── found: the lines that are whole ─────────────┘

A line is whole when it ends with a newline and is a JSON object; the last line of a killed process may not be, and is
cut off. A line is NeMo Gym's ``/run`` reply (the row, ``response``, ``reward``, ``reward_components``) with its
collector's indices, and ``gymloop``: what a trajectory knows besides. A rollout that failed is a line too. It has
``failure`` in place of ``response`` and ``reward``, and is missing again only when failures are to be retried.

No I/O here: lines come and go as bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from gymloop.errors import ConfigError
from gymloop.gym.bundle import whole_response
from gymloop.gym.contract import Row
from gymloop.rollouts.collector import RolloutTask, expand
from gymloop.rollouts.trajectory import Failure, Rollout, as_record

Key: TypeAlias = tuple[str, int]
"""Group id and sample id."""

PASSED = 1.0
"""A rollout with a reward of at least this has passed."""


_PREFIX = {"train": "train", "validation": "val"}


def wanted(part: str, rows: Sequence[Row], generations: int, limit: int | None) -> list[RolloutTask]:
    """Every rollout of a collection, in the order of the rows.

    Args:
        part: ``train`` or ``validation``; group ids name it and a row's place, as those of a validation pass do.
        rows: all of them.
        generations: rollouts of each row.
        limit: rows from the first on; None takes all.
    """
    groups = ((f"{_PREFIX[part]}-r{index:05d}", row) for index, row in enumerate(rows[:limit]))
    return expand(groups, generations)


def missing(tasks: Iterable[RolloutTask], done: Iterable[Key]) -> list[RolloutTask]:
    """The tasks that no line is of, in order."""
    have = set(done)
    return [task for task in tasks if (task.group_id, task.sample_id) not in have]


# Lines


def to_line(result: Mapping[str, Any]) -> bytes:
    """A result as a line, newline included."""
    return orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)


def as_result(task: RolloutTask, rollout: Rollout) -> dict[str, Any]:
    """A rollout as an agent server of NeMo Gym's would return it; see the module.

    ``gymloop.tokens`` is None where the model's server gave no token ids: nothing of such a rollout can be trained.
    """
    record = as_record(rollout)
    indices = {"_ng_task_index": int(task.group_id.rpartition("-r")[2]), "_ng_rollout_index": task.sample_id}
    if isinstance(rollout, Failure):
        ids = {key: record.pop(key) for key in ("group_id", "sample_id", "attempt")}
        record["kind"] = record.pop("failure")
        return {**task.row, **indices, "failure": record, "gymloop": ids}
    response = {
        "id": f"resp_{task.group_id}_{task.sample_id}",
        "status": "incomplete" if rollout.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if rollout.cut else None,
        "output": rollout.output,
    }
    said = {"reward": record.pop("reward")}
    if rollout.components and not rollout.penalties:  # which have to sum to the reward here
        said["reward_components"] = record.pop("components")
    record.pop("output")
    tokens = {"sampled": record.pop("sampled_tokens"), "segments": record.pop("segments")}
    record["tokens"] = tokens if rollout.turns and all(turn.has_tokens for turn in rollout.turns) else None
    details = record.pop("details")
    return {**task.row, **details, **indices, "response": whole_response(task.row, response), **said, "gymloop": record}


@dataclass(slots=True)
class Found:
    """What a file holds.

    Attributes:
        tally: of its whole lines.
        failed: of these, the rollouts that failed.
        done: every rollout that has a line.
        size: bytes of its whole lines; what follows is torn.
    """

    tally: Tally = field(default_factory=lambda: Tally())
    failed: set[Key] = field(default_factory=set)
    done: set[Key] = field(default_factory=set)
    size: int = 0


def read_lines(lines: Iterable[bytes], name: str) -> Found:
    """Read a file's lines.

    Args:
        lines: in order, each with its newline, the last one perhaps without.
        name: of the file, for messages.

    Raises:
        ConfigError: a line that is not the last is no line of a collection, or two are of one rollout.
    """
    found = Found()
    torn: int | None = None
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise ConfigError(f"{name}, line {torn}: is not JSON, and lines follow it; expected whole lines")
        result = _object(line)
        if result is None:
            torn = number
            continue
        key = _key(result)
        if key is None:
            raise ConfigError(f"{name}, line {number}: is no rollout of a collection; choose another --output")
        if key in found.done:
            raise ConfigError(f"{name}, line {number}: rollout {key[0]}/{key[1]} has a line before it")
        found.done.add(key)
        if "failure" in result:
            found.failed.add(key)
        found.tally.add(result)
        found.size += len(line)
    return found


def without_failures(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The whole lines of rollouts that finished."""
    for line in lines:
        result = _object(line)
        if result is not None and "failure" not in result:
            yield line


def _object(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line, else None."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _key(result: Mapping[str, Any]) -> Key | None:
    ours = result.get("gymloop")
    if not isinstance(ours, dict):
        return None
    group, sample = ours.get("group_id"), ours.get("sample_id")
    return (group, sample) if isinstance(group, str) and type(sample) is int else None


# Sums


@dataclass(slots=True)
class Tally:
    """What the lines of a collection add up to.

    Attributes:
        finished: rollouts with a reward.
        rewards: their sum.
        passed: those with a reward of at least ``PASSED``.
        solved: the groups of these.
        with_calls: finished rollouts that ran a tool.
        truncated: finished rollouts that a limit cut.
        untokened: finished rollouts without token ids.
        failures: failed ones, by kind and cause.
        tokens: sampled ones, where they are known.
    """

    finished: int = 0
    rewards: float = 0.0
    passed: int = 0
    solved: set[str] = field(default_factory=set)
    with_calls: int = 0
    truncated: int = 0
    untokened: int = 0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: int = 0

    def add(self, result: Mapping[str, Any]) -> None:
        """Count one line; see ``as_result``."""
        ours = result["gymloop"]
        if (failure := result.get("failure")) is not None:
            self.failures[failure["kind"], failure["cause"]] += 1
            return
        self.finished += 1
        self.rewards += result["reward"]
        if result["reward"] >= PASSED:
            self.passed += 1
            self.solved.add(ours["group_id"])
        self.with_calls += ours["tool_calls"] > 0
        self.truncated += ours["truncated"]
        self.untokened += ours["tokens"] is None
        self.tokens += ours["tokens"]["sampled"] if ours["tokens"] else 0

    def sentences(self, groups: int) -> Iterator[str]:
        """The summary, a line each.

        Args:
            groups: in the whole collection.
        """
        if self.finished:
            yield (
                f"reward mean {self.rewards / self.finished:.4f}  passed {self.passed / self.finished:.1%} of rollouts "
                f"(reward at least {PASSED:g}), {len(self.solved) / groups:.1%} of {groups} rows at least once"
            )
            yield (
                f"tool calls in {self.with_calls / self.finished:.1%}  truncated {self.truncated / self.finished:.1%}"
                + (f"  without token ids {self.untokened}" if self.untokened else f"  {self.tokens} tokens sampled")
            )
        if self.failures:
            listed = ", ".join(f"{count} {kind} ({cause})" for (kind, cause), count in sorted(self.failures.items()))
            yield f"failed for good: {listed}"


# Identity


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What tells two collections apart, a clause for each field; one that either side does not have is not compared."""
    return [
        f"{key} was {_short(theirs[key])} and is {_short(value)}"
        for key, value in ours.items()
        if key in theirs and theirs[key] != value
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
