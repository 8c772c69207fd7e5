"""The reward curve, drawn from the file a run leaves."""

import pytest

from gymloop.errors import DataError
from gymloop.observe.curve import draw_png, draw_text, read_curve

POINTS = [(1, 0.0), (2, 0.5), (3, 0.25), (4, 1.0)]


def test_the_curve_is_read_from_the_metrics_with_gaps_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "r": 0.5}\n{"step": 2, "r": null}\n{"step": 3}\n{"step": 4, "r": 1.0}\n')
    assert read_curve(path, "r") == [(1, 0.5), (4, 1.0)]


def test_every_point_lies_at_its_step_and_value():
    assert draw_text(POINTS, "reward", width=7, height=5, ascii_only=True).splitlines() == [
        "reward",
        "1 |      *",
        "  |      |",
        "  |  * | |",
        "  |  | *",
        "0 |*",
        "  +-------",
        "   1     4",
    ]


def test_unicode_marks_stand_at_the_same_places():
    plain = draw_text(POINTS, "reward", width=20, height=6, ascii_only=True)
    unicode = draw_text(POINTS, "reward", width=20, height=6)
    assert unicode.translate(str.maketrans("●│└─", "*|+-")) == plain


@pytest.mark.parametrize("points", [[(3, 0.5)], [(3, 0.5), (4, 0.5)]])
def test_a_flat_curve_and_a_single_point_are_drawn(points):
    drawn = draw_text(points, "reward", width=10, height=3)
    assert drawn.count("●") == len(points)


def test_more_steps_than_columns_keep_the_first_and_the_last():
    drawn = draw_text([(step, step / 1000) for step in range(1001)], "reward", width=30, height=5, ascii_only=True)
    rows = drawn.splitlines()
    assert rows[1].startswith("1 |")
    assert rows[1].endswith("*")
    assert rows[5].startswith("0 |")
    assert max(len(row) for row in rows) <= 3 + 30


def test_no_point_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no step has reward/mean"):
        draw_text([], "reward/mean")
    with pytest.raises(DataError, match="no step has reward/mean"):
        draw_png([], "reward/mean", tmp_path / "curve.png")


def test_the_png_is_a_picture_of_the_expected_size(tmp_path):
    path = tmp_path / "curve.png"
    draw_png(POINTS, "reward/mean", path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (840, 480)
