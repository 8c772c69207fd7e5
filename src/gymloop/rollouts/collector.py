"""The collector runs rollouts: a bounded number at once, yielded as they finish, matched by id and never by order.

An attempt is one session from ``seed_session`` to ``close``, and has a deadline. What happens when it does not end in a
verdict:

| raised | meaning | what follows |
| --- | --- | --- |
| ``InfraError``, deadline | a party failed | a new attempt in a new session, then ``Failure("infra")`` |
| ``DataError`` | this row cannot be used | ``Failure("data")``, no retry |
| ``PolicyError`` | the model's doing, and no verdict | ``Failure("policy")``, no retry |
| ``ConfigError`` | nothing will work | raised to the caller; other rollouts are cancelled |
| anything else | a bug in gymloop | raised likewise, never hidden in a record |

A failure has no reward. Its record names the party with its route, and what the party did (``gymloop.errors.Cause``).
Cancelling the collector cancels every rollout and closes its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gymloop.config.schema import RewardPenalties, Rollouts
from gymloop.errors import DataError, GymloopError, InfraError, PolicyError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Agent, Terms, agent_of
from gymloop.gym.contract import Row, SessionSource
from gymloop.gym.deadline import within
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.replicas import Replicas
from gymloop.rollouts.flags import NEMO_RL, Patterns, flag_turns
from gymloop.rollouts.penalties import penalised
from gymloop.rollouts.retry import backoff_s
from gymloop.rollouts.trajectory import Failure, FailureKind, Group, Rollout, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A rollout to be made: the group it belongs to, its index there, and the row."""

    group_id: str
    sample_id: int
    row: Row


def expand(groups: Iterable[tuple[str, Row]], num_generations: int) -> list[RolloutTask]:
    """Tasks of whole groups, ``num_generations`` of each, the samples of a group one after the other."""
    return [RolloutTask(group_id, sample, row) for group_id, row in groups for sample in range(num_generations)]


def rollout_seed(seed: int, task: RolloutTask) -> int:
    """63 bits from the run's seed and the rollout's ids; a second attempt has the same."""
    digest = hashlib.sha256(f"{seed}/{task.group_id}/{task.sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class Collector:
    """Runs rollouts of any environment against one model.

    Attributes:
        sources: by the name that rows carry in ``agent_ref``: an agent, or an environment for the ``tool_calling`` one.
        model: an open client, or those of several replicas: each attempt of a rollout stays on one of them.
        limits: concurrency, deadlines and attempts.
        max_turns: model calls per rollout.
        max_tokens: tokens per model call.
        profile: sampling profile of the requests.
        seed: of the run; with a rollout's ids it seeds the environment's session.
        patterns: by which turns are flagged.
        penalties: which faults take a rollout its reward.
    """

    sources: Mapping[str, SessionSource | Agent]
    model: ModelClient | Replicas
    limits: Rollouts
    max_turns: int
    max_tokens: int
    profile: Profile = "train"
    seed: int = 0
    patterns: Patterns = NEMO_RL
    penalties: RewardPenalties = field(default_factory=RewardPenalties)

    async def collect(
        self, tasks: Sequence[RolloutTask], at_once: Callable[[RolloutTask, Rollout], None] | None = None
    ) -> AsyncGenerator[Rollout, None]:
        """Yield one record per task, as each finishes. Closing the generator (``aclosing``) cancels the rest.

        Args:
            tasks: with ids that differ.
            at_once: called with each record the moment it is there. Records that wait to be yielded are lost when the
                generator is closed; whoever must not lose one takes it here.

        Raises:
            ConfigError: see the module.
            GymloopError: two tasks have the same ids.
        """
        _refuse_duplicates((task.group_id, task.sample_id) for task in tasks)
        waiting = iter(tasks)
        # Records, and lanes that ended: a lane ends before its tasks do only by raising.
        finished: asyncio.Queue[Rollout | asyncio.Task[None]] = asyncio.Queue()

        async def lane() -> None:
            for task in waiting:
                rollout = await self._rollout(task)
                if at_once is not None:
                    at_once(task, rollout)
                finished.put_nowait(rollout)

        lanes = [asyncio.create_task(lane()) for _ in range(min(self.limits.max_concurrency, len(tasks)))]
        for running in lanes:
            running.add_done_callback(finished.put_nowait)
        try:
            left = len(tasks)
            while left:
                # bounded: every attempt has a deadline and attempts are counted
                record = await finished.get()
                if isinstance(record, asyncio.Task):
                    record.result()
                else:
                    left -= 1
                    yield record
        finally:
            for running in lanes:
                running.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)  # bounded: they were cancelled

    async def gather(
        self, tasks: Sequence[RolloutTask], on_rollout: Callable[[Rollout, int], None] | None = None
    ) -> list[Group]:
        """Run all tasks and return their groups, ordered by id.

        Args:
            tasks: see ``expand``.
            on_rollout: called with each record and the number finished so far.
        """
        rollouts: list[Rollout] = []
        async with contextlib.aclosing(self.collect(tasks)) as records:
            async for rollout in records:
                rollouts.append(rollout)
                if on_rollout is not None:
                    on_rollout(rollout, len(rollouts))
        return assemble_groups(tasks, rollouts)

    async def _rollout(self, task: RolloutTask) -> Rollout:
        """Attempt a task until it ends in a verdict or its attempts are used up."""
        failure: Failure | None = None
        failed_at: set[str] = set()
        for attempt in range(self.limits.max_infra_attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, f"{task.group_id}/{task.sample_id}"))
            conversation = Conversation()
            try:
                with self.model.lease(failed_at) as model:
                    failed_at.add(model.url)  # of attempts that end well nobody asks
                    work = self._attempt(task, attempt, model, conversation)
                    return await within(self.limits.deadline_s, "rollout", work)
            except InfraError as error:
                failure = _failure(task, attempt, "infra", error, conversation)
                log.info("attempt %d of %s/%d failed: %s", attempt, task.group_id, task.sample_id, error)
            except DataError as error:
                return _failure(task, attempt, "data", error, conversation)
            except PolicyError as error:
                return _failure(task, attempt, "policy", error, conversation)
        if failure is None:
            raise ValueError("max_infra_attempts must be at least 1")
        return failure

    async def _attempt(
        self, task: RolloutTask, attempt: int, model: ModelClient, conversation: Conversation
    ) -> Trajectory:
        start = time.monotonic()
        terms = Terms(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            call_timeout_s=self.limits.call_timeout_s,
            deadline_s=self.limits.deadline_s,
            profile=self.profile,
            rollout_id=f"{task.group_id}/{task.sample_id}",
            seed=rollout_seed(self.seed, task),
        )
        agent = agent_of(self.sources[task.row["agent_ref"]["name"]])
        verdict = await agent.play(task.row, model, conversation, terms)
        trajectory = Trajectory(
            group_id=task.group_id,
            sample_id=task.sample_id,
            attempt=attempt,
            turns=tuple(conversation.turns),
            reward=float(verdict.reward),
            components=dict(verdict.components),
            details=dict(verdict.details),
            truncated=conversation.truncated,
            cut=conversation.cut,
            tool_calls=conversation.tool_calls,
            bad_tool_calls=conversation.bad_tool_calls,
            output=tuple(conversation.output),
            seconds=time.monotonic() - start,
            flags=flag_turns(conversation.output, [turn.malformed_calls for turn in conversation.turns], self.patterns),
        )
        return penalised(trajectory, self.penalties)


def assemble_groups(tasks: Sequence[RolloutTask], rollouts: Iterable[Rollout]) -> list[Group]:
    """Match records to tasks by id; groups ordered by id, their rollouts by sample.

    Raises:
        GymloopError: a task has no record or two, or a record has no task.
    """
    rollouts = list(rollouts)
    ids = [(rollout.group_id, rollout.sample_id) for rollout in rollouts]
    _refuse_duplicates(ids)
    expected = {(task.group_id, task.sample_id) for task in tasks}
    for what, difference in (("has no record", expected - set(ids)), ("was never asked for", set(ids) - expected)):
        if difference:
            group_id, sample_id = min(difference)
            raise GymloopError(f"rollout {group_id}/{sample_id} {what} ({len(difference)} such)")
    members: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample_id)):
        members.setdefault(rollout.group_id, []).append(rollout)
    return [
        Group(
            group_id,
            tuple(member for member in group if isinstance(member, Trajectory)),
            tuple(member for member in group if isinstance(member, Failure)),
        )
        for group_id, group in members.items()
    ]


def _refuse_duplicates(ids: Iterable[tuple[str, int]]) -> None:
    (group_id, sample_id), count = next(iter(Counter(ids).most_common(1)), (("", 0), 0))
    if count > 1:
        raise GymloopError(f"rollout {group_id}/{sample_id} appears {count} times; ids are unique")


def _failure(
    task: RolloutTask, attempt: int, kind: FailureKind, error: GymloopError, conversation: Conversation
) -> Failure:
    cause = error.cause
    return Failure(task.group_id, task.sample_id, attempt, kind, str(error), conversation.where, cause)
