"""When a run validates, saves and ends, decided on numbers alone."""

import pytest

from gymloop.training.schedule import Schedule, seconds_of


def schedule(**changes):
    return Schedule(
        **{"total": 7, "val_period": 0, "val_at_end": False, "save_period": 3, "must_save_by_s": None} | changes
    )


def steps(decides):
    return [step for step in range(1, 8) if decides(step)]


def test_every_period_and_the_last_step():
    assert steps(schedule().saves_after) == [3, 6, 7]
    assert steps(schedule(val_period=3).validates_after) == [3, 6]
    assert steps(schedule(val_period=3, val_at_end=True).validates_after) == [3, 6, 7]


def test_nothing_asked_for_is_never():
    assert steps(schedule(save_period=None).saves_after) == []
    assert steps(schedule().validates_after) == []
    assert not schedule().must_end(1e9, 1e9, 1e9)


@pytest.mark.parametrize(
    ("elapsed", "step", "save", "ends"),
    [(70, 20, 10, False), (70.1, 20, 10, True), (60, 20, 0, False), (61, 20, 0, True), (200, 1, 1, True)],
)
def test_the_end_leaves_room_for_the_longest_step_and_save(elapsed, step, save, ends):
    """100 s: a save not seen yet is taken to last as long as a step."""
    assert schedule(must_save_by_s=100).must_end(elapsed, step, save) is ends


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:03:45:00", 13500.0), ("01:00:00:01", 86401.0), ("100:00:00:00", 8640000.0)]
)
def test_days_hours_minutes_seconds(text, seconds):
    assert seconds_of(text) == seconds
