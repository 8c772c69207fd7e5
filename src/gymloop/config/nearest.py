"""The right thing nearest to a wrong one: what makes an error message an answer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None when none is close; case, dash and underscore do not count."""
    plain = {_plain(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing."""
    found = nearest(word, candidates)
    return f"; did you mean {found!r}?" if found else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
