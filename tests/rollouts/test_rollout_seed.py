"""An environment's random numbers belong to the rollout: not to its order of arrival, its attempt or its neighbours."""

import asyncio
import random

from gymloop.gym import Environment
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.collector import RolloutTask, rollout_seed


class Dice(Environment):
    def seed(self, row):
        self.drawn = self.rng.random()

    def verify(self, response):
        return self.drawn


def test_the_seed_follows_from_the_runs_seed_and_the_ids_alone():
    one = rollout_seed(7, RolloutTask("e0-r1", 2, {"any": "row"}))
    assert one == rollout_seed(7, RolloutTask("e0-r1", 2, {}))
    others = {rollout_seed(seed, RolloutTask(group, sample, {})) for seed, group, sample in (
        (8, "e0-r1", 2), (7, "e1-r1", 2), (7, "e0-r1", 3), (7, "e0-r12", 0),
    )}  # fmt: skip
    assert len(others | {one}) == 5
    assert 0 <= one < 2**63, "fits the integers of every language an environment may be written in"


def test_a_session_draws_the_same_whenever_it_is_made_and_its_row_is_the_rows_own():
    source = InProcessSource("dice", Dice)

    def drawn(row):
        session = asyncio.run(source.seed_session(row))
        assert session.environment.row == {"question": "?"}
        return session.environment.drawn

    assert drawn({"question": "?", ROLLOUT_SEED: 5}) == drawn({"question": "?", ROLLOUT_SEED: 5})
    assert drawn({"question": "?", ROLLOUT_SEED: 5}) == random.Random(5).random()
    assert drawn({"question": "?", ROLLOUT_SEED: 6}) != drawn({"question": "?", ROLLOUT_SEED: 5})
    assert drawn({"question": "?"}) == drawn({"question": "?"}), "outside a run, too"
