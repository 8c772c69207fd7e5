"""One step's update is that of its groups, whatever order they arrived in (A21, the synchronous half)."""

import dataclasses
import random

import pytest

from gymloop.algorithms.step import prepare_batch
from gymloop.config.schema import Grpo, Loss, OptimizerKwargs, Rollouts
from gymloop.policy.spec import PolicySpec
from gymloop.policy.worker import PolicyWorker
from gymloop.rollouts.trajectory import Group, Trajectory, Turn

GRPO = Grpo(num_prompts_per_step=3, num_generations_per_prompt=4, max_num_steps=1)


def groups(rng):
    made = []
    for name in ("e0-r00002", "e0-r00000", "e0-r00001"):
        prompt = tuple(rng.choices(range(20, 90), k=12))
        members = []
        for sample in range(4):
            sampled = tuple(rng.choices(range(20, 90), k=rng.randint(1, 9)))
            turn = Turn(prompt, sampled, tuple(-rng.random() for _ in sampled), "stop", 1, 1)
            members.append(Trajectory(name, sample, 0, (turn,), rng.random()))
        made.append(Group(name, tuple(members)))
    return made


@pytest.mark.parametrize("packing", [True, False])
def test_a21_the_same_groups_in_another_order_of_arrival_are_the_same_update_bit_by_bit(toy, packing):
    def update(arrived):
        spec = PolicySpec(str(toy("q")), 1.0, Loss(), OptimizerKwargs(lr=0.01), "float32", packing=packing, threads=1)
        worker = PolicyWorker(spec)
        worker.load()
        prepared = prepare_batch(arrived, GRPO, Loss(), Rollouts())
        metrics = worker.train(prepared.batch)
        timeless = {name: value for name, value in metrics.items() if not name.startswith("timing/")}
        return prepared.metrics, timeless, worker.snapshot().buffer.tobytes()

    first = groups(random.Random(0))
    rng = random.Random(1)
    second = [
        dataclasses.replace(group, trajectories=tuple(rng.sample(group.trajectories, 4)))
        for group in rng.sample(first, 3)
    ]
    assert second != first
    assert update(second) == update(first)
