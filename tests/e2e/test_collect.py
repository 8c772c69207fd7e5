"""``gymloop collect``: killed anywhere it goes on, and every rollout has its line once; whole runs, see ``forked``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import forked

ROWS, GENERATIONS = 5, 3


class Lab:
    """A folder with a recipe, and collections of it by name."""

    def __init__(self, folder: Path, model: Path, nursery: forked.Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(
            yaml.safe_dump(
                {
                    "grpo": {
                        "num_prompts_per_step": 2,
                        "num_generations_per_prompt": GENERATIONS,
                        "max_num_steps": 1,
                        "max_rollout_turns": 1,
                    },
                    "rollouts": {"max_infra_attempts": 2, "max_concurrency": 2},
                    "policy": {
                        "model_name": str(model),
                        "max_total_sequence_length": 128,
                        "precision": "float32",
                        "optimizer": {"kwargs": {"lr": 0.01}},
                        "generation": {"max_new_tokens": 8, "torch_cfg": {"max_batch_size": 6}},
                    },
                    "data": {
                        "train": {"environment": "letters", "num_tasks": ROWS},
                        "validation": {"environment": "letters", "num_tasks": 2, "seed": 9},
                    },
                    "env": {
                        "environments": {
                            "letters": {"entrypoint": "letters:Letters"},
                            "moody": {"entrypoint": "moody:Moody", "kwargs": {"folder": str(folder)}},
                        }
                    },
                    "startup": {"deadline_s": 60.0},
                    "deterministic": True,
                }
            )
        )

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def collect(self, name: str, *arguments: str, **how: Any) -> forked.Done:
        return self.nursery.run("collect", self.recipe, "--output", self.output(name), *arguments, **how)

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = self.output(name).read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def ids(self, name: str) -> list[tuple[str, int]]:
        return [(line["gymloop"]["group_id"], line["gymloop"]["sample_id"]) for line in self.lines(name)]

    def said(self, name: str) -> dict[tuple[str, int], Any]:
        """Everything but times, by rollout."""
        result = {}
        for line in self.lines(name):
            line["response"].pop("created_at")
            line["gymloop"].pop("seconds")
            result[line["gymloop"]["group_id"], line["gymloop"]["sample_id"]] = line
        return result


ALL = {(f"train-r{row:05d}", sample) for row in range(ROWS) for sample in range(GENERATIONS)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, toy) -> Iterator[Lab]:
    with forked.Nursery() as nursery:
        made = Lab(tmp_path_factory.mktemp("collect"), toy("q"), nursery)
        done = made.collect("reference")
        assert done.code == 0, done.output
        yield made


def test_every_rollout_has_a_line_in_the_shape_of_nemo_gyms_run_reply(lab):
    assert sorted(lab.ids("reference")) == sorted(ALL)
    for line in lab.lines("reference"):
        assert line["responses_create_params"]["input"][0]["content"].startswith("Write ")
        assert line["agent_ref"]["name"] == "letters"
        assert f"train-r{line['_ng_task_index']:05d}" == line["gymloop"]["group_id"]
        assert line["_ng_rollout_index"] == line["gymloop"]["sample_id"]
        assert 0 <= line["reward"] <= 1
        assert line["response"]["object"] == "response"
        last = line["response"]["output"][-1]
        assert len(last["generation_token_ids"]) == len(last["generation_log_probs"]) > 0
        assert last["prompt_token_ids"]
        ours = line["gymloop"]
        assert ours["tokens"]["sampled"] == len(last["generation_token_ids"])
        assert ours["tokens"]["segments"][0]["tokens"] == len(last["prompt_token_ids"]) + ours["tokens"]["sampled"]
        assert ours["weight_versions"] == [0, 0]
        assert (ours["turns"], ours["attempt"], ours["invalid_tool_call_turns"]) == (1, 0, [])


@pytest.mark.slow
def test_the_summary_says_what_was_collected(lab):
    done = lab.collect("summary", "--limit", "1")
    rewards = [line["reward"] for line in lab.lines("summary")]
    assert f"reward mean {sum(rewards) / len(rewards):.4f}" in done.output
    assert "tool calls in 0.0%" in done.output
    assert "tokens/s" in done.output


def test_a_finished_collection_says_so_and_starts_nothing(lab):
    before = lab.output("reference").read_bytes()
    done = lab.collect("reference")
    assert done.code == 0
    assert f"is finished: all {len(ALL)} rollouts are there" in done.output
    assert "startup" not in done.output
    assert lab.output("reference").read_bytes() == before


POINTS = {
    "before_a_line": "gymloop.training.output:Output.append:5:before",
    "after_a_line": "gymloop.training.output:Output.append:5:after",
    "while_a_rollout_runs": "gymloop.rollouts.collector:Collector._rollout:4:before",
    "file_opened": "gymloop.training.output:Output.open:1:after",
    "no_identity_yet": "gymloop.training.output:replace_text:1:before",
    "last_line": "gymloop.training.output:Output.append:15:after",
    "synced": "gymloop.training.output:Output.sync:1:after",
}
QUICK = ("after_a_line",)


@pytest.mark.parametrize(
    "point", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in POINTS]
)
def test_killed_at_any_point_it_goes_on_with_exactly_what_is_missing(lab, point):
    killed = lab.collect(point, die=POINTS[point])
    assert killed.code == -9, killed.output
    there = lab.output(point).read_bytes() if lab.output(point).exists() else b""
    done = lab.collect(point)
    assert done.code == 0, done.output
    assert lab.output(point).read_bytes().startswith(there), "what was there is as it was"
    assert sorted(lab.ids(point)) == sorted(ALL)
    assert lab.said(point) == lab.said("reference"), "and the rollouts are those of a collection that was not killed"


@pytest.mark.slow
def test_a_torn_last_line_is_cut_off_and_said(lab):
    assert lab.collect("torn", "--limit", "2").code == 0
    whole = lab.output("torn").read_bytes()
    lab.output("torn").write_bytes(whole[:-20])
    done = lab.collect("torn", "--limit", "2")
    assert done.code == 0, done.output
    assert "the last line was torn; its " in done.output
    assert "5 of 6 rollouts are there; 1 are missing" in done.output
    assert lab.said("torn") == {key: line for key, line in lab.said("reference").items() if key[0] < "train-r00002"}


@pytest.mark.slow
def test_a_disk_that_is_full_tears_a_line_and_loses_no_other(lab):
    done = lab.collect("full", limit_after=("gymloop.training.output:Output.append:3", 6000))
    assert done.code == 1
    assert "cannot write" in done.output
    kept = lab.output("full").read_bytes().rpartition(b"\n")[0]
    assert lab.collect("full").code == 0
    assert lab.output("full").read_bytes().startswith(kept)
    assert lab.said("full") == lab.said("reference")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_clean_and_loses_nothing_finished(lab, number, code):
    name = f"signal{code}"
    stopped = lab.collect(name, die="gymloop.training.output:Output.append:4:after", number=number)
    assert stopped.code == code, stopped.output
    assert "the same command goes on with what is missing" in stopped.output
    assert len(lab.lines(name)) >= 4
    assert lab.collect(name).code == 0
    assert lab.said(name) == lab.said("reference")


@pytest.mark.slow
def test_it_grows_with_more_rows_and_more_samples(lab):
    assert lab.collect("grows", "--limit", "2", "--generations", "1").code == 0
    first = lab.output("grows").read_bytes()
    assert lab.collect("grows").code == 0
    assert lab.output("grows").read_bytes().startswith(first)
    assert lab.said("grows") == lab.said("reference")


@pytest.mark.slow
def test_validation_rows_are_sampled_as_validation(lab):
    done = lab.collect("val", "--data", "validation", "--generations", "2", "policy.generation.val_temperature=0")
    assert done.code == 0, done.output
    assert sorted(lab.ids("val")) == [(f"val-r{row:05d}", sample) for row in (0, 1) for sample in (0, 1)]
    texts = {line["gymloop"]["group_id"]: set() for line in lab.lines("val")}
    for line in lab.lines("val"):
        texts[line["gymloop"]["group_id"]].add(tuple(line["response"]["output"][-1]["generation_token_ids"]))
    assert all(len(said) == 1 for said in texts.values()), "greedy"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.train.seed=1"], "digest of the rows was"),
        (["policy.generation.temperature=0.5"], "temperature was 1.0 and is 0.5"),
        (["grpo.seed=1"], "seed was 42 and is 1"),
        (["--data", "validation"], "data was train and is validation"),
        (["env.environments.moody.kwargs.folder=x"], "digest of env was"),
    ],
)
def test_the_file_of_another_collection_is_refused_and_left_as_it_is(lab, arguments, said):
    before = lab.output("reference").read_bytes()
    done = lab.collect("reference", *arguments)
    assert done.code == 2
    assert said in done.output
    assert "is of another collection" in done.output
    assert lab.output("reference").read_bytes() == before


def test_a_file_that_no_collection_wrote_is_refused_and_left_as_it_is(lab):
    lab.output("notes").write_text("dear diary")
    done = lab.collect("notes")
    assert done.code == 2
    assert "exists and is no collection's" in done.output
    assert lab.output("notes").read_text() == "dear diary"


@pytest.mark.slow
def test_rows_that_fail_for_good_are_counted_have_no_reward_and_may_be_taken_again(lab):
    (lab.folder / "broken").touch()
    how = ("--generations", "1", "data.train.environment=moody", "data.train.num_tasks=8")
    done = lab.collect("moody", *how)
    failed = [line for line in lab.lines("moody") if "failure" in line]
    assert done.code == 1, done.output
    assert 0 < len(failed) < 8
    assert len(lab.lines("moody")) == 8
    for line in failed:
        assert "reward" not in line
        assert "response" not in line
        assert line["failure"]["kind"] in ("infra", "data")
        assert line["failure"]["where"] == "environment moody, verify"
        assert line["gymloop"]["attempt"] == (1 if line["failure"]["kind"] == "infra" else 0)
    assert "failed for good: " in done.output
    again = lab.collect("moody", *how)
    assert (again.code, "is finished" in again.output) == (1, True), "a failure is a record, not a gap"
    (lab.folder / "broken").unlink()
    kept = [line for line in lab.lines("moody") if "failure" not in line]
    healed = lab.collect("moody", "--retry-failed", *how)
    assert healed.code == 0, healed.output
    assert f"{len(failed)} rollouts that failed are taken again" in healed.output
    assert lab.lines("moody")[: len(kept)] == kept
    assert len({*lab.ids("moody")}) == len(lab.ids("moody")) == 8


@pytest.mark.slow
def test_two_collections_do_not_share_a_file(lab):
    from gymloop.files import held
    from gymloop.training.output import folder_of

    with held(folder_of(lab.output("shared"))):
        done = lab.collect("shared")
    assert done.code == 2
    assert "another collection; wait for its end" in done.output
