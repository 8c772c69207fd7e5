"""The terminal always says what the run is doing: which tasks start, then one line per step.

On a terminal the startup is a live table and the current phase a line that changes; anywhere else (a pipe, a log file,
CI) every change is one plain line, so nothing is lost and no control code gets into a file. A log file, once it is
given, gets every line and every phase with its time: what a run was doing when it ended can be read there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from gymloop.startup import Event, Timeline

_MARKS = {"started": "…", "progress": "…", "done": "✓", "failed": "✗", "cancelled": "-", "abandoned": "!"}

COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("tool calls", "tools/rollouts_with_calls", "{:.0%}"),
    ("mismatch", "mismatch/kl", "{:.1e}"),
    ("tokens/s", "perf/tokens_per_s", "{:.0f}"),
    ("seconds", "time/step", "{:.1f}"),
)
"""What a step's line shows: title, metric, format."""


class Progress:
    """One run in one terminal. A context manager: leaving it gives the terminal back, however the run ended.

    Args:
        console: where to write; None takes standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._tasks: dict[str, Event] = {}
        self._began: dict[str, float] = {}
        self._live: Live | None = None
        self._status: Status | None = None
        self._log: TextIO | None = None
        self._phase = ""
        self._doing = ""
        self._failed = False

    @property
    def doing(self) -> str:
        """The phase the run is in; while it starts, or after that failed, the tasks that had not ended well."""
        if self._doing:
            return self._doing
        return f"startup ({', '.join(task for task, event in self._tasks.items() if event.kind != 'done')})"

    def failed(self, error: Exception) -> None:
        """Say what the run was doing when it failed, at once, for the teardown takes its time; only the first time.

        The log gets the whole error; the terminal its first line, because the command ends with the whole.
        """
        if self._failed:
            return
        self._failed = True
        doing = self.doing
        self.close()
        self._write(f"failed in {doing}: {error}")
        self._print(f"failed in {doing}: {str(error).partition(chr(10))[0]}")

    def log_to(self, path: Path) -> None:
        """Write lines and phases to this file too, from now on, after what it holds.

        Raises:
            OSError: it cannot be opened.
        """
        self._log = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def startup_event(self, event: Event) -> None:
        """Show a change of the startup; pass this to ``run_graph`` as ``on_event``."""
        if event.kind == "started":
            self._began[event.task] = event.at
        self._tasks[event.task] = event
        if not self.console.is_terminal:
            self.say(self._sentence(event))
            return
        self._write(self._sentence(event))
        if self._live is None:
            self._live = Live(console=self.console, transient=True, get_renderable=self._startup_table)
            self._live.start()
        self._live.refresh()

    def startup_done(self, timeline: Timeline) -> None:
        """Replace the live view by the timeline, with its critical path marked."""
        self.close()
        self.console.print(timeline.table())

    def phase(self, text: str) -> None:
        """Show what the step is at, e.g. ``step 3: rollouts 12/32``, on a terminal until the next line."""
        self._doing = text
        kind = re.sub(r"\d+", "#", text)
        if kind != self._phase:  # a count that goes up is the same phase
            self._phase = kind
            self._write(text)
        if not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def step(self, step: int, total: int, metrics: Mapping[str, float | None]) -> None:
        """Print the line of a finished step; ``-`` where it has no such metric or the value was not finite."""
        shown = [f"{title} {_show(metrics.get(name), form)}" for title, name, form in COLUMNS]
        width = len(str(total))
        self.say(f"step {step:>{width}}/{total}  " + "  ".join(shown))

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._write(text)
        self._print(text)

    def close(self) -> None:
        """Stop everything live; safe to call twice."""
        live, self._live = self._live, None
        status, self._status = self._status, None
        if live is not None:
            live.stop()
        if status is not None:
            status.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        except OSError as error:  # a full disk is no reason to end what the log is about
            self._log = None
            self.say(f"WARNING: the run's log is not written any more: {error.strerror}")

    def _sentence(self, event: Event) -> str:
        seconds = event.at - self._began.get(event.task, event.at)
        text = {
            "started": "started",
            "progress": f"waits for {event.message}",
            "done": f"done after {seconds:.1f} s",
            "failed": f"failed after {seconds:.1f} s: {event.message}",
            "cancelled": f"cancelled after {seconds:.1f} s",
            "abandoned": "ignored its cancellation and was abandoned",
        }[event.kind]
        return f"startup {event.at:6.1f} s  {event.task}: {text}"

    def _startup_table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        for task, event in list(self._tasks.items()):  # rich draws in a thread of its own
            ended = event.kind not in ("started", "progress")
            seconds = f"{event.at - self._began.get(task, event.at):.1f} s" if ended else ""
            table.add_row(_MARKS[event.kind], task, seconds, Text(event.message))
        return table


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
