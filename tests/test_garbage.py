import gc
import threading
import weakref

import pytest

from gymloop.garbage import keep, let_go, uncollected


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.enable()


def test_a_cycle_stays_while_a_block_lasts_and_goes_after_it():
    with uncollected():
        gone = cycle()
        many = [[] for _ in range(200_000)]  # far beyond any threshold
        assert gone() is not None
        assert not gc.isenabled()
    assert gc.isenabled()
    del many
    gc.collect()
    assert gone() is None


def test_the_last_of_several_blocks_ends_it():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with uncollected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert inside.wait(10)
        with uncollected():
            pass
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join(10)
    assert gc.isenabled()


def test_an_error_ends_it_too():
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_off():
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_is_kept_is_not_walked_and_garbage_is_not_kept():
    before = cycle()
    later = Node()
    later.itself = later
    seen = weakref.ref(later)
    keep()
    try:
        assert before() is None
        del later
        gc.collect()
        assert seen() is not None
    finally:
        let_go()
    gc.collect()
    assert seen() is None
