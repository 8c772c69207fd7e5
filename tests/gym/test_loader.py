"""Order, ids and position follow from seed, epoch and content (A24)."""

import json

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.loader import GroupLoader, fingerprint

ROWS = [{"id": index} for index in range(7)]


def loader(rows=ROWS, **changes) -> GroupLoader:
    return GroupLoader(rows, **{"prompts_per_step": 3, "seed": 5, "shuffle": True, "epochs": 2, **changes})


def ids(steps) -> list[list[str]]:
    return [[group_id for group_id, _ in step] for step in steps]


def test_file_order_names_epoch_and_row_and_leaves_out_the_rest():
    steps = list(loader(shuffle=False))
    assert ids(steps) == [
        ["e0-r00000", "e0-r00001", "e0-r00002"],
        ["e0-r00003", "e0-r00004", "e0-r00005"],
        ["e1-r00000", "e1-r00001", "e1-r00002"],
        ["e1-r00003", "e1-r00004", "e1-r00005"],
    ]
    assert steps[1][0][1] is ROWS[3]
    assert loader().num_steps == len(steps) == 4


def test_each_epoch_has_its_own_order_from_the_seed():
    assert ids(loader()) == ids(loader())
    assert ids(loader()) != ids(loader(seed=6))
    first, second = [sum(half, []) for half in (ids(loader())[:2], ids(loader())[2:])]  # noqa: RUF017
    assert [name[3:] for name in first] != [name[3:] for name in second]
    assert len(set(first + second)) == 12
    assert all(row["id"] == int(name[-5:]) for step in loader() for name, row in step)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_a_resume_yields_exactly_what_was_left(taken):
    first = loader()
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader([dict(row) for row in ROWS])
    second.load_state_dict(state)
    assert ids(second) == ids(loader())[taken:]


def test_a_resume_on_other_data_or_another_order_is_refused():
    state = loader().state_dict()
    changed = [*ROWS[:6], {"id": 7}]
    for other, said in (
        (loader(changed), "content of the training data changed"),
        (loader(seed=6), "loader's seed changed, 5 in the checkpoint, 6 now"),
        (loader(prompts_per_step=2), "prompts_per_step"),
        (loader(shuffle=False), "shuffle"),
    ):
        with pytest.raises(ConfigError, match=said):
            other.load_state_dict(state)
    longer = loader(epochs=3)
    longer.load_state_dict(state)
    assert len(list(longer)) == 6


@pytest.mark.parametrize(("taken", "epoch"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_changed_data_can_be_accepted_and_begin_the_next_epoch(taken, epoch):
    """Two steps an epoch; three epochs asked for."""
    first = loader(epochs=3)
    for _ in range(taken):
        next(first)
    changed = [{"id": index + 100} for index in range(10)]  # three steps an epoch
    second = loader(changed, epochs=3)
    second.load_state_dict(first.state_dict(), accept_changed_data=True)
    expected = ids(loader(changed, epochs=3))[3 * epoch :]
    assert second.num_steps == taken + len(expected)
    state = json.loads(json.dumps(second.state_dict()))
    assert ids(second) == expected
    third = loader(changed, epochs=3)
    third.load_state_dict(state)
    assert ids(third) == expected, "a second resume needs no permission"


def test_accepting_changed_data_accepts_no_other_change():
    with pytest.raises(ConfigError, match="loader's seed changed"):
        loader(seed=6).load_state_dict(loader().state_dict(), accept_changed_data=True)


def test_fewer_rows_than_a_step_takes_is_said():
    with pytest.raises(ConfigError, match=r"data has 2 rows, fewer than grpo\.num_prompts_per_step = 3"):
        loader(ROWS[:2])


def test_the_fingerprint_is_of_content_and_order():
    assert fingerprint([{"a": 1, "b": "\u2028"}]) == fingerprint([{"b": "\u2028", "a": 1}])
    assert fingerprint([{"a": 1}, {"a": 2}]) != fingerprint([{"a": 2}, {"a": 1}])


def test_prompts_taken_besides_the_steps_move_the_rest_on_and_none_is_lost():
    """Six rows an epoch, two epochs: four steps whatever is taken besides."""
    taking = loader(shuffle=False)
    taken = [*next(taking), *taking.take(2), *next(taking), *taking.take(1), *next(taking), *next(taking)]
    assert [name for name, _ in taken] == [f"e{epoch}-r{row:05d}" for epoch in range(3) for row in range(6)][:15]
    assert all(row["id"] == int(name[-5:]) for name, row in taken)
    assert taking.num_steps == 4
    assert list(taking) == []


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_resume_after_prompts_taken_besides_yields_exactly_what_was_left(taken, extra):
    first = loader()
    for _ in range(taken):
        next(first)
        first.take(extra)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    assert ids(second) == ids(first)
    assert second.take(2) == first.take(2)


def test_changed_data_begin_after_the_epoch_that_the_prompts_reached():
    first = loader(epochs=9)
    next(first)
    first.take(4)  # seven of six
    second = loader([{"id": 50}] * 9, epochs=9)
    second.load_state_dict(first.state_dict(), accept_changed_data=True)
    assert next(second)[0][0].startswith("e2-")
