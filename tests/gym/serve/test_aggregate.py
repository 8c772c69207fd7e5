"""Aggregated verdicts, against numbers worked out by hand; the integration tests compare with NeMo Gym's own."""

import math

import pytest

from gymloop.gym.serve.aggregate import aggregate
from gymloop.gym.serve.refusal import Refusal


def verdict(task, repeat, reward, **fields):
    return {"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": reward, **fields}


def test_statistics_over_all_by_task_and_by_repeat():
    given = [verdict(0, 0, 0.0, solved=False), verdict(0, 1, 1.0, solved=True), verdict(1, 0, 1.0), verdict(1, 1, 2.0)]
    found = aggregate({"verify_responses": given})
    metrics = found["agent_metrics"]
    assert {name: metrics[f"{name}/reward"] for name in ("mean", "max", "min", "median")} == {
        "mean": 1.0, "max": 2.0, "min": 0.0, "median": 1.0,
    }  # fmt: skip
    assert metrics["std/reward"] == pytest.approx(math.sqrt(2 / 3))
    assert (metrics["mean/solved"], metrics["num_repeats"]) == (0.5, 2)
    assert found["key_metrics"] == {"mean/reward": 1.0, "mean/solved": 0.5}
    first, second = found["group_level_metrics"]
    assert (first["_ng_task_index"], first["mean/reward"], first["num_rollouts"]) == (0, 0.5, 2)
    assert (second["_ng_task_index"], second["mean/reward"]) == (1, 1.5)
    assert first["rollout_infos"][1] == {
        "rollout_id": "0:1", "_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 1.0, "solved": 1.0,
    }  # fmt: skip
    assert [one["mean/reward"] for one in found["repeat_level_metrics"]] == [0.5, 1.5]


def test_what_is_no_measurement_is_counted_and_left_out():
    given = [verdict(0, 0, 0.0, mask_sample=True), verdict(1, 0, 0.5, mask_sample=False)]
    found = aggregate({"verify_responses": given})
    assert found["agent_metrics"]["mean/reward"] == 0.5
    assert found["key_metrics"]["coverage/masked_rollouts"] == found["key_metrics"]["coverage/fully_masked_tasks"] == 1
    nothing = aggregate({"verify_responses": given[:1]})
    assert "mean/reward" not in nothing["agent_metrics"]
    assert nothing["agent_metrics"]["coverage/measured_rollouts"] == 0


def test_usage_counts_and_texts_lists_and_collector_keys_do_not():
    given = [verdict(0, 0, 1.0, note="x", parts=[1], _other=3, response={"usage": {"input_tokens": 4}})]
    metrics = aggregate({"verify_responses": given})["agent_metrics"]
    assert {name for name in metrics if name.startswith("mean/")} == {"mean/reward", "mean/input_tokens"}
    assert metrics["std/reward"] == 0.0


def test_nothing_comes_to_nothing_and_what_is_no_list_of_verdicts_is_refused():
    assert aggregate({"verify_responses": []})["agent_metrics"] == {}
    for body in (
        {},
        {"verify_responses": 3},
        {"verify_responses": [3]},
        {"verify_responses": [{"_ng_task_index": "a"}]},
    ):
        with pytest.raises(Refusal) as caught:
            aggregate(body)
        assert caught.value.status == 422
