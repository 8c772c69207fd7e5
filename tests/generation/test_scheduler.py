"""Rows, prefix reuse and the plan of a step, on a store that only records what it was told."""

from __future__ import annotations

import numpy as np

from gymloop.generation.scheduler import RowTable, Work


class Contents:
    """Tokens per row and position, moved as the real cache moves keys and values."""

    def __init__(self, rows: int, length: int):
        self.held = np.full((rows, length), -1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.held[target, :length] = self.held[source, :length]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        kept = self.held[a].copy()
        self.held[a, :length_b] = self.held[b, :length_b]
        self.held[b, :length_a] = kept[:length_a]


def table_of(rows: int) -> tuple[RowTable[str], Contents]:
    contents = Contents(rows, 200)
    return RowTable(rows, 200, contents), contents


def compute(table: RowTable[str], contents: Contents, budget: int = 1000) -> tuple[int, list[Work]]:
    """Run a planned step: what is computed appears in the contents, and must follow valid contents."""
    n, work = table.plan(budget, budget)
    for piece in [*(Work(row, int(table.computed[row]), 1) for row in range(n)), *work]:
        span = slice(piece.start, piece.start + piece.count)
        assert contents.held[piece.row, : piece.start].tolist() == table.tokens[piece.row, : piece.start].tolist()
        contents.held[piece.row, span] = table.tokens[piece.row, span]
        table.computed[piece.row] += piece.count
    return n, work


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PROMPT = np.arange(100, dtype=np.int32)


def test_followers_of_one_prompt_wait_for_it_and_then_compute_one_token_each() -> None:
    table, contents = table_of(8)
    assert table.admit(PROMPT, "leader")
    assert not table.admit(PROMPT, "follower")
    n, work = compute(table, contents)
    assert (n, work) == (0, [Work(0, 0, 100)])
    table.append([0], ids(7))
    for index in range(7):
        assert table.admit(PROMPT, f"follower {index}")
    n, work = compute(table, contents)
    assert (n, work) == (8, [])
    assert table.reused == 7 * 99


def test_second_turn_continues_the_row_that_its_first_turn_left() -> None:
    table, contents = table_of(2)
    table.admit(PROMPT, "turn 1")
    compute(table, contents)
    table.append([0], ids(7))
    compute(table, contents)
    table.append([0], ids(8))
    table.release(0)
    table.admit(np.concatenate([PROMPT, ids(7, 8, 50, 51)]), "turn 2")
    # The last sampled token was never computed, so it is with the new ones.
    assert compute(table, contents) == (0, [Work(0, 101, 3)])


def test_prefill_is_bounded_and_oldest_first_while_decoding_goes_on() -> None:
    table, contents = table_of(4)
    table.admit(ids(1, 2), "a")
    compute(table, contents)
    table.append([0], ids(3))
    table.admit(PROMPT, "b")
    table.admit(PROMPT[::-1].copy(), "c")
    assert compute(table, contents, budget=60) == (1, [Work(1, 0, 60)])
    table.append([0], ids(4))
    assert compute(table, contents, budget=60) == (1, [Work(1, 60, 40), Work(2, 0, 20)])


def test_prefill_is_larger_while_nobody_decodes() -> None:
    table, _ = table_of(2)
    table.admit(PROMPT, "a")
    assert table.plan(10, 70) == (0, [Work(0, 0, 70)])


def test_a_row_that_leaves_is_filled_by_the_last_active_row_with_its_contents() -> None:
    table, contents = table_of(3)
    for index, name in enumerate("abc"):
        table.admit(ids(10 + index, 20 + index, 30 + index), name)
    compute(table, contents)
    table.append([0, 1, 2], ids(1, 2, 3))
    table.release(0)
    assert table.requests[:2] == ["c", "b"]
    assert table.active == 2
    compute(table, contents)
    assert table.tokens[0, :4].tolist() == [12, 22, 32, 3]


def test_decoding_rows_come_first_when_a_later_row_is_ready_sooner() -> None:
    table, contents = table_of(3)
    table.admit(PROMPT, "long")
    compute(table, contents, budget=10)
    table.admit(ids(500, 501), "short")
    compute(table, contents, budget=200)
    table.append([0, 1], ids(1, 2))
    table.admit(PROMPT[::-1].copy(), "late")
    table.computed[0] -= 5
    n, work = table.plan(3, 100)
    assert n == 1
    assert table.requests == ["short", "long", "late"]
    assert work == [Work(1, 95, 3)]


def test_after_new_weights_active_rows_start_over_and_free_rows_offer_nothing() -> None:
    table, contents = table_of(3)
    table.admit(PROMPT, "stays")
    compute(table, contents)
    table.admit(PROMPT, "leaves")
    compute(table, contents)
    table.append([0, 1], ids(7, 8))
    table.release(1)
    table.forget()
    contents.held[:] = -9
    assert compute(table, contents) == (0, [Work(0, 0, 101)])
    reused = table.reused
    table.admit(ids(*range(100), 8), "new")
    assert table.reused - reused == 100


def test_full_table_admits_nobody_and_reuses_the_row_left_longest_ago() -> None:
    table, contents = table_of(2)
    table.admit(ids(1, 2, 3), "a")
    table.admit(ids(4, 5, 6), "b")
    assert not table.admit(ids(7, 8), "c")
    compute(table, contents)
    table.release(1)
    table.release(0)
    table.admit(ids(9, 9), "c")
    # b left first, so its row is gone and a's is retained.
    assert ids(1, 2, 3).tolist() in table.tokens[:, :3].tolist()
    assert ids(4, 5, 6).tolist() not in table.tokens[:, :3].tolist()


def test_random_traffic_never_computes_on_contents_of_another_request() -> None:
    rng = np.random.default_rng(0)
    table, contents = table_of(5)
    waiting = [rng.integers(0, 2, rng.integers(1, 60)).astype(np.int32) for _ in range(120)]
    served = 0
    for _ in range(5000):
        waiting = [prompt for prompt in waiting if not table.admit(prompt, "r")]
        if not waiting and not table.active:
            break
        compute(table, contents, budget=25)  # asserts that what it builds on is right
        done = [row for row in range(table.active) if table.computed[row] == table.known[row]]
        table.append(done, rng.integers(0, 2, len(done)).astype(np.int32))
        for row in sorted(done, reverse=True):
            if rng.random() < 0.2:
                table.release(row)
                served += 1
        if rng.random() < 0.02:
            table.forget()
            contents.held[:] = -9
    assert served == 120
