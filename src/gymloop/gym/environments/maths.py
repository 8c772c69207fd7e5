r"""Mathematics in one turn: a problem, a worked answer, and a reward for the right one in whatever form.

The answer is what the last complete ``\boxed{}`` of the final message holds. It is right if math-verify finds it equal
to the row's: 0.5 is 1/2, {2, 1} is {1, 2}. An answer that cannot be read, takes too long or too much memory to compare,
or brings the comparison down is a wrong answer; only a comparison that could not be made is a failure.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from gymloop.errors import ConfigError, DataError
from gymloop.gym.contract import Row
from gymloop.gym.environment import Call, Environment
from gymloop.gym.environments.math_judge import judge, require_math_verify
from gymloop.gym.environments.math_tasks import KINDS
from gymloop.gym.items import final_text
from gymloop.gym.tools import nearest

ANSWER_KEYS = ("expected_answer", "ground_truth")
"""Fields of a row that may hold the right answer: NeMo Gym's and NeMo RL's names."""
MAX_ANSWER = 2000
"""Characters; a longer answer is wrong, and of a text without a box only so much of the end is searched."""
_BOX = "\\boxed{"
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_INSTRUCTION = "Put the answer in \\boxed{}."


class Math(Environment):
    r"""Problems with one answer, generated or from rows.

    Args:
        kinds: of generated problems, from ``math_tasks.KINDS``; null takes all.
        largest: number in generated problems.
        boxed: only an answer in ``\boxed{}`` counts; false takes the last number or expression of a text without one.
        time_limit_s: CPU time for comparing one answer, seconds.

    Raises:
        ConfigError: math-verify is missing, or an argument is out of range.
    """

    blocking = True  # an answer is compared in another process

    def __init__(
        self,
        kinds: Sequence[str] | None = None,
        largest: int = 20,
        boxed: bool = True,
        time_limit_s: float = 5.0,
    ) -> None:
        require_math_verify()
        self.kinds = list(KINDS) if kinds is None else list(kinds)
        for kind in self.kinds or [""]:
            if kind not in KINDS:
                raise ConfigError(f"kinds has {kind!r}{nearest(kind, KINDS)}; expected some of {', '.join(KINDS)}")
        if type(largest) is not int or not 1 <= largest <= 10**9:
            raise ConfigError(f"largest is {largest!r}; expected a whole number from 1 to 1000000000")
        if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, int | float) or not 0.1 <= time_limit_s <= 60:
            raise ConfigError(f"time_limit_s is {time_limit_s!r}; expected seconds, 0.1 to 60")
        self.largest = largest
        self.boxed = boxed
        self.judge = judge(float(time_limit_s))

    def tasks(self, rng: random.Random) -> Iterator[Mapping[str, Any]]:
        """Problems without end."""
        while True:
            text, answer = KINDS[rng.choice(self.kinds)](rng, self.largest)
            yield {"prompt": f"{text} {_INSTRUCTION}", "expected_answer": answer}

    def seed(self, row: Row) -> None:
        """Find the row's answer.

        Raises:
            DataError: it has none, two different ones, or one that cannot be read.
        """
        self.gold = gold_of(row)
        if _WHOLE.fullmatch(self.gold) is None and self.judge.compare(self.gold, None) != "readable":
            raise DataError(f"the expected answer {self.gold!r:.80} cannot be read as mathematics")

    def verify(self, response: Mapping[str, Any]) -> float:
        """1 for the right answer, else 0."""
        text = final_text(response)
        answer = last_boxed(text)
        if answer is not None:
            return float(0 < len(answer.strip()) <= MAX_ANSWER and self._equal(answer, extract=False))
        if self.boxed or not text.strip():
            return 0.0
        return float(self._equal(text[-MAX_ANSWER:], extract=True))

    def solve(self, row: Row) -> Generator[Call, str, str]:
        """The answer, in a box."""
        yield from ()
        return f"\\boxed{{{gold_of(row)}}}"

    def _equal(self, answer: str, *, extract: bool) -> bool:
        if answer.strip() == self.gold:
            return True
        if _WHOLE.fullmatch(answer.strip()) and _WHOLE.fullmatch(self.gold):
            return int(answer) == int(self.gold)
        return self.judge.compare(self.gold, answer, extract=extract) == "equal"


def gold_of(row: Row) -> str:
    """The right answer of a row, without delimiters.

    Raises:
        DataError: see ``Math.seed``.
    """
    given = {key: row[key] for key in ANSWER_KEYS if row.get(key) is not None}
    if not given:
        raise DataError(f"the row has no {' or '.join(ANSWER_KEYS)}")
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{key} is {value!r:.80}; expected text or a number")
    answers = {bare(str(value)) for value in given.values()}
    if len(answers) > 1:
        raise DataError(f"expected_answer and ground_truth differ: {' and '.join(sorted(answers)):.80}")
    answer = answers.pop()
    if not answer or len(answer) > MAX_ANSWER:
        raise DataError(f"the expected answer has {len(answer)} characters; expected 1 to {MAX_ANSWER}")
    return answer


def bare(answer: str) -> str:
    r"""An answer without the ``$``, ``\(`` or ``\boxed{}`` around it."""
    answer = answer.strip()
    for opening, closing in _DELIMITERS:
        if len(answer) >= len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
            answer = answer[len(opening) : -len(closing)].strip()
    boxed = last_boxed(answer)
    return boxed.strip() if boxed is not None and answer == f"{_BOX}{boxed}}}" else answer


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{}`` that is closed holds; None without one. Time is linear in the text's length."""
    ends: dict[int, int] = {}  # where a brace closes, by where it opens
    opened: list[int] = []
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # an escaped brace is a sign of its own
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            ends[opened.pop()] = found.start()
    for found in reversed(list(re.finditer(re.escape(_BOX), text))):
        start = found.end() - 1
        if start in ends:
            return text[start + 1 : ends[start]]
    return None
