"""What the startup did and when, as a record nobody changes afterwards.

Times are seconds since the graph began. A task starts the moment its last dependency ends, so the critical path is the
chain of last-ending dependencies that leads to the task that ended last: shortening anything else shortens nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

Outcome = Literal["done", "failed", "cancelled", "abandoned", "not started"]

_BAR_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Record:
    """One task of the graph.

    Attributes:
        task: its name.
        start: when it began, seconds; None if it never did.
        end: when it ended or was given up, seconds; None if it never began.
        needs: the tasks it waited for before it began.
        waited_for: what it said it was waiting for, in order: (seconds, message).
        outcome: how it ended; ``abandoned`` means it ignored its cancellation.
        remarks: what it had to say of itself, e.g. ``compile cache hit``.
    """

    task: str
    start: float | None
    end: float | None
    needs: tuple[str, ...] = ()
    waited_for: tuple[tuple[float, str], ...] = ()
    outcome: Outcome = "done"
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of the task itself, its dependencies not counted."""
        return 0.0 if self.start is None or self.end is None else self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """All tasks of one startup, in dependency order."""

    records: tuple[Record, ...]

    def metrics(self) -> dict[str, float]:
        """Seconds: ``startup/<task>_s`` per task that began, and total, sequential sum and critical path."""
        began = [record for record in self.records if record.start is not None]
        by_task = {f"startup/{record.task}_s": record.seconds for record in began}
        path = set(critical_path(self.records))
        return by_task | {
            "startup/total_s": _end(began),
            "startup/sequential_sum_s": sum(record.seconds for record in began),
            "startup/critical_path_s": sum(record.seconds for record in began if record.task in path),
        }

    def to_json(self) -> str:
        """The timeline as JSON text, for a file in the run's folder."""
        return json.dumps({"records": [asdict(record) for record in self.records]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what ``to_json`` wrote."""
        return cls(tuple(_record(entry) for entry in json.loads(text)["records"]))

    def table(self) -> Table:
        """A rich table, one row a task, with a bar for its time and the critical path marked."""
        from rich.table import Table
        from rich.text import Text

        path = set(critical_path(self.records))
        total = _end(self.records)
        numbers = self.metrics()
        table = Table(
            title="startup",
            title_justify="left",
            caption=(
                f"total {numbers['startup/total_s']:.1f} s, one after another {numbers['startup/sequential_sum_s']:.1f}"
                f" s, critical path {numbers['startup/critical_path_s']:.1f} s (marked *)"
            ),
            caption_justify="left",
        )
        table.add_column("task")
        table.add_column("seconds", justify="right")
        table.add_column("from", justify="right")
        table.add_column("", min_width=_BAR_WIDTH, no_wrap=True)
        table.add_column("after")
        for record in self.records:
            critical = record.task in path
            table.add_row(
                f"{record.task} *" if critical else record.task,
                f"{record.seconds:.2f}" if record.outcome == "done" else record.outcome,
                "" if record.start is None else f"{record.start:.2f}",
                _bar(record, total),
                ", ".join(record.needs),
                style="bold" if critical else None,
            )
            for remark in record.remarks:
                table.add_row("", "", "", Text(remark), "")
        return table


def critical_path(records: Iterable[Record]) -> tuple[str, ...]:
    """Names of the tasks that decided the total, first to last; empty when nothing ended.

    Walk back from the task that ended last, each time to the dependency that ended last. Ties go to the task that the
    graph lists first.
    """
    ended = {record.task: record for record in records if record.end is not None}
    path: list[str] = []
    candidates: Iterable[str] = ended
    while last := max((ended[name] for name in candidates if name in ended), key=_end_of, default=None):
        path.append(last.task)
        candidates = last.needs
    return tuple(reversed(path))


def _end_of(record: Record) -> float:
    return record.end if record.end is not None else 0.0


def _end(records: Iterable[Record]) -> float:
    return max((_end_of(record) for record in records), default=0.0)


def _bar(record: Record, total: float) -> str:
    if record.start is None or record.end is None or total <= 0:
        return ""
    first = min(int(record.start / total * _BAR_WIDTH), _BAR_WIDTH - 1)
    last = max(first + 1, round(record.end / total * _BAR_WIDTH))
    return " " * first + "━" * (last - first)


def _record(entry: Mapping[str, Any]) -> Record:
    return Record(
        task=entry["task"],
        start=entry["start"],
        end=entry["end"],
        needs=tuple(entry["needs"]),
        waited_for=tuple((when, message) for when, message in entry["waited_for"]),
        outcome=entry["outcome"],
        remarks=tuple(entry.get("remarks", ())),
    )
