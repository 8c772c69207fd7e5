"""Compares answers in a process of its own, which may be slow, grow or die without harm to anyone else.

Time is CPU time, so a busy machine changes no verdict: a timer interrupts Python code at the limit, and the kernel ends
the process a little later if a library function does not return. Memory is bounded by the size of the address space.
Whatever went beyond a limit has left the libraries in an unknown state, so the process says so and ends.

One request a line on standard input, ``{"gold": ..., "answer": ..., "extract": ...}``, one outcome a line on standard
output; the first line is ``ready``. It ends when its input does. This file is run by its path: it imports the standard
library and math-verify only.

    python -P math_child.py SECONDS MEGABYTES
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any

_GRACE_S = 2
"""CPU seconds between the timer and the kernel's end of the process."""
_AGAIN_S = 0.5
"""The timer goes off again, in case the first exception was swallowed."""


class OutOfTime(BaseException):
    """Not an ``Exception``: math-verify and sympy catch those."""


def compare(request: dict[str, Any]) -> str:
    r"""One outcome: ``equal``, ``different``, ``readable`` (no answer was given) or ``gold_unreadable``.

    Args:
        request: ``gold`` and ``answer`` are LaTeX or plain text without ``\boxed``; with ``extract`` the answer is a
            text in which the answer has to be found.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    # The time limits of math-verify are alarms in whole seconds of wall time; this process has its own.
    gold = parse(f"\\boxed{{{request['gold']}}}", (latex,), parsing_timeout=None)
    if not gold:
        return "gold_unreadable"
    if request["answer"] is None:
        return "readable"
    text = request["answer"] if request["extract"] else f"\\boxed{{{request['answer']}}}"
    answer = parse(text, (plain, latex), parsing_timeout=None)
    return "equal" if verify(gold, answer, timeout_seconds=None) else "different"


def limited(request: dict[str, Any], seconds: float) -> tuple[str, bool]:
    """The outcome, and whether this process can go on.

    Args:
        request: see ``compare``.
        seconds: of CPU time.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds) + _GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
            return compare(request), True
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OutOfTime:
        return "out_of_time", False
    except MemoryError:
        return "out_of_memory", False
    except Exception:  # noqa: BLE001  (said to the parent: math-verify gave up on what the model wrote)
        return "different", True


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTime


def main(seconds: float, megabytes: int) -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGPROF, _interrupt)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the libraries print is no outcome
    logging.disable(logging.CRITICAL)
    compare({"gold": "1", "answer": "2", "extract": False})  # imports, and what is built at the first use
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    print("ready", file=said)
    for line in sys.stdin:  # bounded: by the life of the parent
        outcome, go_on = limited(json.loads(line), seconds)
        print(outcome, file=said)
        if not go_on:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
