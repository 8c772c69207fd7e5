"""A metrics file holds each step exactly once, also after a crash and a resume.

A step is one JSON object on one line, handed to the operating system before the next step begins. On resume the lines
of steps after the checkpoint, which will be run again, and a half-written last line are dropped.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gymloop.errors import InfraError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the metrics of a run go."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record a step; steps come in ascending order, each once. None means the value was not finite.

        Raises:
            InfraError: the file cannot be written.
        """

    def close(self) -> None:
        """Flush and close; safe to call twice."""


class JsonlSink:
    """``metrics.jsonl``: ``{"step": 3, "reward/mean": 0.5, ...}`` a line, null where a value was not finite.

    Args:
        path: the file; its folder is made.
        resume_step: last step of the checkpoint the run goes on from; None starts a new file in place of any old one.

    Raises:
        InfraError: the file cannot be read or written.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._last: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resume_step is None else self._lines_until(resume_step)
            aside = self.path.with_name(self.path.name + ".tmp")
            aside.write_bytes(b"".join(kept))
            os.replace(aside, self.path)
            self._file = self.path.open("ab")
        except OSError as error:
            raise InfraError(f"cannot write metrics to {self.path}: {error.strerror}") from error

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line.

        Raises:
            ValueError: the step was written already, or a value is not finite.
            InfraError: the file cannot be written.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"metrics of step {step} come after those of step {self._last}")
        line = json.dumps({"step": step, **metrics}, allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InfraError(f"cannot write metrics of step {step} to {self.path}: {error.strerror}") from error
        self._last = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines_until(self, resume_step: int) -> list[bytes]:
        kept: list[bytes] = []
        if not self.path.exists():
            return kept
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            step = _step_of(line)
            if step is None:
                logger.warning("%s line %d is not a whole step and was dropped", self.path, number)
            elif step <= resume_step and (self._last is None or step > self._last):
                kept.append(line)
                self._last = step
        return kept


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl``, in order; a half-written line at its end is left out.

    Raises:
        InfraError: the file cannot be read.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InfraError(f"cannot read metrics from {path}: {error.strerror}") from error
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def _step_of(line: bytes) -> int | None:
    """The step of a whole line, None for anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) else None


class TensorBoardSink:
    """TensorBoard scalars, through TensorBoard's own record format: no torch and no TensorFlow in the driver.

    Args:
        folder: the log folder; each opening adds an event file to it.
        resume_step: last step of the checkpoint the run goes on from; TensorBoard then hides what earlier files hold
            of later steps.

    Raises:
        InfraError: the folder cannot be written.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self.folder = Path(folder)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / name).open("xb")
        except OSError as error:
            raise InfraError(f"cannot write TensorBoard events to {self.folder}: {error.strerror}") from error
        self._records = RecordWriter(self._file)
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))
        if resume_step is not None:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(self._event(wall_time=now, step=resume_step + 1, session_log=restart))

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one event with a scalar per metric; a None is left out, a gap in the curve.

        Raises:
            InfraError: the file cannot be written.
        """
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None
        ]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _append(self, event: Any) -> None:
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            raise InfraError(f"cannot write TensorBoard events to {self.folder}: {error.strerror}") from error
