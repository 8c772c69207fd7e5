"""An environment is one class, and one instance of it is one session: whatever it remembers belongs to one rollout.

```python
class Counter(Environment):
    '''Count to a target with a tool.'''

    def tasks(self, rng):
        while True:
            yield {"prompt": f"Count to {(target := rng.randint(2, 5))}.", "target": target}

    def seed(self, row):
        self.count = 0

    @tool
    def increment(self, by: int = 1) -> str:
        '''Add to the counter.'''
        self.count += by
        return str(self.count)

    def verify(self, response):
        return float(self.count == self.row["target"])
```

``seed``, ``verify``, ``close`` and tools may be plain or ``async``. Plain ones run on the event loop that drives every
other rollout, which is fastest and right for work of microseconds; ``blocking = True`` runs them in threads instead.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gymloop.gym.contract import Row
from gymloop.gym.tools import ToolSpec, read_tools


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that a scripted solver makes."""

    name: str
    arguments: Mapping[str, Any]


def call(name: str, /, **arguments: Any) -> Call:
    """A solver's step: ``text = yield call("calculate", expression="3 * 4")``."""
    return Call(name, arguments)


class Environment:
    """Base of environments. A subclass writes ``verify`` and its tools; the rest is optional.

    Constructor arguments come from ``env.environments.<name>.kwargs`` and are the same for every session.
    """

    blocking: ClassVar[bool] = False
    """Plain methods wait (files, sockets, sleep), so run them in threads, where a deadline can leave them behind."""
    max_reward: ClassVar[float] = 1.0
    """The reward that ``solve`` must reach."""
    tool_specs: ClassVar[Mapping[str, ToolSpec]] = {}
    """Read from the methods marked ``@tool`` when the class is made."""
    row: Row
    """The task of this session; set before ``seed``."""
    rng: random.Random
    """Random numbers of this rollout, set before ``seed``: the same whenever the rollout is made again."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tool_specs = read_tools(cls)

    def tasks(self, rng: random.Random) -> Iterator[Mapping[str, Any]]:
        """Generate tasks for training without a file: ``prompt`` (text or messages) and fields of your own.

        All randomness comes from ``rng``: the same seed gives the same tasks.
        """
        raise NotImplementedError

    def seed(self, row: Row) -> Any:
        """Start the session; ``self.row`` is already set.

        Raises:
            DataError: this row cannot be used. Anything else raised here is the environment's failure, and is retried.
        """

    def verify(self, response: Mapping[str, Any]) -> Any:
        """Score the conversation: a ``Verdict``, or a number.

        ``response["output"]`` holds the items of the conversation (``message``, ``function_call``,
        ``function_call_output``); ``final_text(response)`` is the last assistant message.
        """
        raise NotImplementedError

    def solve(self, row: Row) -> Generator[Call, str, str]:
        """Solve the task as the model should: yield tool calls, get their results, return the final message.

        The supervised warm-up learns from it. ``verify`` must give ``max_reward``.
        """
        raise NotImplementedError

    def close(self) -> Any:
        """Free what the session holds; called once, also after a failure."""


def overrides(cls: type[Environment], method: str) -> bool:
    """Whether a class wrote its own version of an optional method."""
    return getattr(cls, method) is not getattr(Environment, method)
