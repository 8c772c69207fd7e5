"""How long to wait before an attempt is repeated. Pure: same input, same wait."""

from __future__ import annotations

import zlib

_FIRST_S = 0.5
_LONGEST_S = 10.0


def backoff_s(attempt: int, key: str) -> float:
    """Seconds before attempt number ``attempt`` (the first retry is 1): doubling from 0.5 up to 10, times 0.5 to 1.

    The factor comes from ``key``, the rollout's name, so that rollouts that failed together do not all return together.
    """
    spread = zlib.crc32(f"{key}/{attempt}".encode()) / 0xFFFFFFFF
    return min(_LONGEST_S, _FIRST_S * 2 ** (attempt - 1)) * (0.5 + spread / 2)
