"""Bring the parts of a run up together: the task graph, its timeline, and sockets held from the first moment."""

from gymloop.startup.graph import Started, run_graph
from gymloop.startup.sockets import hold_socket
from gymloop.startup.task import Context, Event, StartupError, Task
from gymloop.startup.timeline import Record, Timeline, critical_path

__all__ = [
    "Context",
    "Event",
    "Record",
    "Started",
    "StartupError",
    "Task",
    "Timeline",
    "critical_path",
    "hold_socket",
    "run_graph",
]
