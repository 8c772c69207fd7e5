"""Critical path and metrics of a startup, against numbers computed by hand."""

import io

import pytest
from rich.console import Console

from gymloop.startup import Record, Timeline, critical_path

RECORDS = (
    Record("sockets", 0.0, 0.5),
    Record("engine", 0.5, 4.5, ("sockets",), ((1.0, "shard 1"),), remarks=("compile cache miss",)),
    Record("environment", 0.5, 3.0, ("sockets",)),
    Record("data", 0.0, 1.0),
    Record("ready", 4.5, 5.0, ("environment", "engine", "data")),
)


def test_critical_path_follows_the_need_that_ended_last():
    assert critical_path(RECORDS) == ("sockets", "engine", "ready")


def test_critical_path_of_nothing_is_empty():
    assert critical_path(()) == ()
    assert critical_path((Record("engine", None, None, outcome="not started"),)) == ()


def test_metrics_name_each_task_and_the_three_totals():
    assert Timeline(RECORDS).metrics() == pytest.approx(
        {
            "startup/sockets_s": 0.5,
            "startup/engine_s": 4.0,
            "startup/environment_s": 2.5,
            "startup/data_s": 1.0,
            "startup/ready_s": 0.5,
            "startup/total_s": 5.0,
            "startup/sequential_sum_s": 8.5,
            "startup/critical_path_s": 5.0,
        }
    )


def test_a_task_that_never_began_has_no_metric():
    timeline = Timeline((*RECORDS[:1], Record("engine", None, None, ("sockets",), (), "not started")))
    assert "startup/engine_s" not in timeline.metrics()


def test_json_round_trip_keeps_everything():
    assert Timeline.from_json(Timeline(RECORDS).to_json()) == Timeline(RECORDS)


def test_the_table_marks_the_critical_path_and_says_the_totals():
    out = io.StringIO()
    Console(file=out, width=120).print(Timeline(RECORDS).table())
    lines = out.getvalue().splitlines()
    marked = {line.split("│")[1].strip() for line in lines if " * " in line and "│" in line}
    assert marked == {"sockets *", "engine *", "ready *"}
    engine = next(number for number, line in enumerate(lines) if "engine *" in line)
    assert "compile cache miss" in lines[engine + 1]
    assert "total 5.0 s, one after another 8.5 s, critical path 5.0 s" in out.getvalue()
