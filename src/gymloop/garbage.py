"""Python does not look for garbage while a process loads, and afterwards not among what a server has imported.

Importing torch, transformers and vLLM and building a model make a million objects and hardly any garbage among them.
Python walks all of them whenever their number has grown: a fifth of the seconds that the imports take. Later each such
walk stops every thread for as long as it lasts, a server in the midst of its requests.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_resting = 0
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the block, in whichever threads it is entered, nothing is collected; after the last, as before the first.

    What reference counting frees is freed. Only for what ends by itself: cycles that become garbage meanwhile wait.
    """
    global _resting, _was_on
    with _lock:
        if _resting == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _resting += 1
    try:
        yield
    finally:
        with _lock:
            _resting -= 1
            if _resting == 0 and _was_on:
                gc.enable()


def keep() -> None:
    """Collect once; what is there then is not looked at again before ``let_go``. Reference counting goes on."""
    gc.collect()
    gc.freeze()


def let_go() -> None:
    """Whatever was kept may be collected again."""
    gc.unfreeze()
