"""The wait before a retry doubles, is bounded, and differs between rollouts."""

from gymloop.rollouts.retry import backoff_s


def test_the_wait_doubles_up_to_its_bound():
    for attempt, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (9, 10.0)):
        waits = [backoff_s(attempt, f"e0-r{row:05d}/0") for row in range(50)]
        assert all(longest / 2 <= wait <= longest for wait in waits)
        assert len(set(waits)) > 40
    assert backoff_s(2, "a") == backoff_s(2, "a")
