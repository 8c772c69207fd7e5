"""Checkpoints are whole or not there: kill, damage, full disk, retention (field case F14, behaviour A23)."""

import ast
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.files import UnwritableError
from gymloop.training.checkpoint import CheckpointStore
from gymloop.training.manifest import MANIFEST
from gymloop.training.retention import Retention

MODEL = {"name": "toy", "weights": "ab12"}


def store(folder, keep_latest_k=2, **ranking):
    return CheckpointStore(folder, Retention(keep_latest_k, **ranking))


def write(target, step, parts, state, metrics=None):
    """What a run does: begin, let each part create its file or folder, commit."""
    aside = target.begin(step)
    for name, create in parts.items():
        create(aside / name)
    return target.commit(aside, state, model=MODEL, metrics=metrics or {})


def text(content):
    return lambda path: path.write_text(content)


def folder_of(**files):
    def create(path):
        path.mkdir()
        for name, content in files.items():
            (path / name).write_text(content)

    return create


def save(target, step, content="weights", **metrics):
    parts = {"weights": folder_of(shard=f"{content} {step}"), "loader": text("x")}
    return write(target, step, parts, {"step": step}, metrics)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_found_again(tmp_path):
    written = save(store(tmp_path), 3)
    found = store(tmp_path).latest()
    assert found == written
    assert found.step == 3
    assert found.state == {"step": 3}
    assert found.model == MODEL
    assert (found.part("weights") / "shard").read_text() == "weights 3"
    assert found.part("loader").read_text() == "x"
    with pytest.raises(ConfigError, match="has no part 'optimizer'"):
        found.part("optimizer")


def test_the_manifest_names_every_file_with_size_and_hash(tmp_path):
    save(store(tmp_path), 1)
    manifest = json.loads((tmp_path / "step_1" / MANIFEST).read_text())
    assert manifest["format_version"] == 3
    assert manifest["step"] == 1
    assert manifest["model"] == MODEL
    assert manifest["state"] == {"step": 1}
    assert manifest["files"] == {
        # printf x | sha256sum
        "loader": {"size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"},
        # printf 'weights 1' | sha256sum
        "weights/shard": {"size": 9, "sha256": "3bb63c501a2cb9b43bfbf09f0b02a7f12408e1922617522b8441afd37272b915"},
    }


def test_nothing_there_is_none(tmp_path):
    assert store(tmp_path).latest() is None
    assert store(tmp_path / "never made").latest() is None


def test_another_process_may_write_the_parts_between_begin_and_commit(tmp_path):
    target = store(tmp_path)
    aside = target.begin(4)
    program = f"import pathlib; pathlib.Path({str(aside)!r}, 'weights').write_text('from the policy')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert target.latest() is None
    target.commit(aside, {}, model=MODEL, metrics={})
    assert target.latest().part("weights").read_text() == "from the policy"


def test_giving_up_while_another_thread_commits_cannot_tear_the_checkpoint(tmp_path):
    target = store(tmp_path, keep_latest_k=1)
    save(target, 1)

    def commit(aside):
        with contextlib.suppress(UnwritableError):  # it may also come too late
            target.commit(aside, {}, model=MODEL, metrics={})

    for step in range(2, 22):
        aside = target.begin(step)
        for shard in range(20):
            (aside / f"shard{shard}").write_bytes(bytes(50_000))
        committing = threading.Thread(target=commit, args=(aside,))
        committing.start()
        time.sleep(0.001 * (step % 5))
        target.discard(aside)
        committing.join()
        assert target.latest() is not None
        assert not aside.exists()


def test_the_newest_k_are_kept_by_number_not_by_name(tmp_path):
    target = store(tmp_path, keep_latest_k=2)
    for step in (8, 9, 10, 11):
        save(target, step)
    assert names(tmp_path) == ["step_10", "step_11"]


def test_retention_never_removes_the_one_just_written(tmp_path):
    target = store(tmp_path, keep_latest_k=1)
    save(target, 9)
    save(target, 3)
    assert names(tmp_path) == ["step_3"]


def test_retention_waits_until_the_new_one_is_complete(tmp_path):
    target = store(tmp_path, keep_latest_k=1)
    save(target, 1)
    seen = []
    write(target, 2, {"weights": lambda path: (path.write_text("w"), seen.extend(names(tmp_path)))}, {})
    assert seen == ["step_1", "tmp_step_2"]
    assert names(tmp_path) == ["step_2"]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    target = store(tmp_path)
    save(target, 2, "old")
    save(target, 2, "new")
    assert names(tmp_path) == ["step_2"]
    assert (target.latest().part("weights") / "shard").read_text() == "new 2"


def test_killed_between_the_two_renames_of_a_replacement_the_old_one_counts(tmp_path):
    target = store(tmp_path, keep_latest_k=1)
    save(target, 2, "old")
    (tmp_path / "step_2").rename(tmp_path / "replaced_step_2")
    assert target.latest().step == 2
    save(target, 3)
    assert names(tmp_path) == ["step_3"]


def test_an_unfinished_folder_is_named_ignored_and_cleared_by_the_next_save(tmp_path, caplog):
    target = store(tmp_path)
    save(target, 2)
    aside = target.begin(3)
    (aside / "weights").write_text("half")
    assert store(tmp_path).latest().step == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint {tmp_path / 'tmp_step_3'} was never finished and is ignored"
    ]
    save(store(tmp_path), 4)
    assert names(tmp_path) == ["step_2", "step_4"]


def truncate(folder):
    os.truncate(folder / "weights" / "shard", 4)


def flip(folder):
    path = folder / "weights" / "shard"
    path.write_text(path.read_text().replace("w", "v"))


def edit_manifest(**changes):
    """By somebody who does not know of its hash."""

    def damage(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | changes))

    return damage


def forge_manifest(**changes):
    """By somebody who does."""

    def damage(folder):
        edited = json.loads((folder / MANIFEST).read_text()) | changes
        del edited["sha256"]
        digest = hashlib.sha256(json.dumps(edited, sort_keys=True).encode()).hexdigest()
        (folder / MANIFEST).write_text(json.dumps(edited | {"sha256": digest}))

    return damage


def flip_bits(name):
    """Each file is read back with one bit changed in its middle."""

    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def replace_by_folder(folder):
    (folder / "loader").unlink()
    (folder / "loader").mkdir()


def dangle(folder):
    (folder / "loader").unlink()
    (folder / "loader").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "weights/shard has 4 bytes instead of 9"),
        (flip, "weights/shard does not have its hash"),
        (lambda folder: (folder / "loader").unlink(), "loader is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "it has no manifest.json"),
        (lambda folder: os.truncate(folder / MANIFEST, 20), "manifest.json is not JSON"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json has no format_version"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"), "manifest.json is not JSON"),
        (lambda folder: (folder / MANIFEST).write_text('{"format_version": 3}'), "manifest.json has no step"),
        (edit_manifest(state={"step": 4}), "manifest.json does not have its hash"),
        (edit_manifest(files=[]), "manifest.json does not have its hash"),
        (edit_manifest(sha256=None), "manifest.json does not have its hash"),
        (flip_bits("loader"), "loader does not have its hash"),
        (flip_bits(MANIFEST), "manifest.json"),
        (forge_manifest(step=7), "manifest.json says step 7"),
        (forge_manifest(files={"../step_2/loader": {"size": 1, "sha256": ""}}), "which lies outside"),
        (replace_by_folder, "loader is missing"),
        (dangle, "loader is missing"),
    ],
)
def test_a_damaged_newest_is_named_and_the_one_before_is_taken(tmp_path, caplog, damage, reason):
    target = store(tmp_path)
    save(target, 2)
    save(target, 3)
    damage(tmp_path / "step_3")
    assert target.latest().step == 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "step_3") in message
    assert reason in message


def test_what_somebody_put_into_a_checkpoint_or_moved_behind_a_link_does_no_harm(tmp_path):
    target = store(tmp_path)
    save(target, 2)
    (tmp_path / "step_2" / "notes.txt").write_text("the good one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_2").rename(tmp_path / "elsewhere" / "step_2")
    (tmp_path / "step_2").symlink_to(tmp_path / "elsewhere" / "step_2")
    assert target.latest().step == 2
    for step in (3, 4, 5):
        save(target, step)
    assert names(tmp_path) == ["elsewhere", "step_4", "step_5"]
    assert (tmp_path / "elsewhere" / "step_2" / "notes.txt").exists(), "only the link was ours to remove"


def test_whatever_lies_in_the_way_of_a_save_is_removed(tmp_path):
    """A link or a file by the name of an unfinished one must not end all saves to come."""
    (tmp_path / "tmp_step_1").symlink_to("/nowhere")
    (tmp_path / "tmp_step_2").write_text("a file")
    (tmp_path / "tmp_step_3").mkdir()
    save(store(tmp_path), 3)
    assert names(tmp_path) == ["step_3"]


def test_a_damaged_step_is_replaced_when_it_is_reached_again(tmp_path):
    target = store(tmp_path)
    save(target, 2)
    save(target, 3, "old")
    truncate(tmp_path / "step_3")
    save(target, 3, "new")
    assert (target.latest().part("weights") / "shard").read_text() == "new 3"


def test_a_stray_empty_folder_and_foreign_names_are_ignored_in_silence(tmp_path, caplog):
    target = store(tmp_path)
    save(target, 2)
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_10").write_text("a file")
    (tmp_path / "step_11_backup").mkdir()
    assert target.latest().step == 2
    assert caplog.records == []


def test_f14_where_only_damaged_ones_are_left_beginning_anew_is_the_users_decision(tmp_path):
    target = store(tmp_path)
    for step in (2, 3):
        save(target, step)
        truncate(tmp_path / f"step_{step}")
    with pytest.raises(
        ConfigError, match=r"no checkpoint in .* is whole \(2 damaged, the newest step_3\); restore one"
    ):
        target.latest()


def test_a_damaged_one_is_not_counted_among_the_kept(tmp_path):
    save(store(tmp_path), 2)
    save(store(tmp_path), 3)
    truncate(tmp_path / "step_3")
    target = store(tmp_path, keep_latest_k=2)
    assert target.latest().step == 2
    save(target, 4)
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]


def test_a_format_of_the_future_is_refused_not_passed_over(tmp_path):
    save(store(tmp_path), 1)
    edit_manifest(format_version=4)(tmp_path / "step_1")
    with pytest.raises(ConfigError, match="has format 4, this version of gymloop reads 3"):
        store(tmp_path).latest()


def test_a_commit_that_fails_leaves_nothing_behind_and_the_older_one_untouched(tmp_path, monkeypatch):
    target = store(tmp_path)
    save(target, 1)

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("gymloop.training.manifest.fsync", full)
    with pytest.raises(UnwritableError) as caught:
        save(target, 2)
    assert str(caught.value) == (
        f"checkpoint of step 2 was not written: No space left on device ({tmp_path}/tmp_step_2/loader); "
        f"earlier checkpoints in {tmp_path} are untouched"
    )
    assert names(tmp_path) == ["step_1"]
    assert target.latest().step == 1


def test_a_checkpoint_counts_only_after_its_folder_was_handed_to_the_disk(tmp_path, monkeypatch):
    synced = []
    for module in ("manifest", "checkpoint"):
        monkeypatch.setattr(f"gymloop.training.{module}.fsync", lambda path: synced.append((path, names(tmp_path))))
    save(store(tmp_path), 1)
    aside = tmp_path / "tmp_step_1"
    before = ["tmp_step_1"]
    assert synced == [
        (aside / "loader", before),
        (aside / "weights" / "shard", before),
        (aside / "weights", before),
        (aside, before),
        (tmp_path, ["step_1"]),
    ]


def test_the_best_by_a_metric_stay_beside_the_newest(tmp_path):
    target = store(tmp_path, keep_latest_k=1, metric_name="validation/reward/mean", keep_top_k=2)
    for step, reward in enumerate((0.1, 0.9, 0.2, 0.8, 0.3), 1):
        save(target, step, **{"validation/reward/mean": reward})
    assert names(tmp_path) == ["step_2", "step_4", "step_5"]


def test_a_checkpoint_without_the_metric_ranks_last_and_is_named_once(tmp_path, caplog):
    target = store(tmp_path, keep_latest_k=1, metric_name="validation/reward/mean", keep_top_k=1)
    save(target, 1, **{"validation/reward/mean": -5.0})
    save(target, 2)
    save(target, 3)
    save(target, 4)
    assert names(tmp_path) == ["step_1", "step_4"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"checkpoint {tmp_path / 'step_2'} has no value of checkpointing.metric_name")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "results").write_text("a file where a folder belongs")
    with pytest.raises(InfraError, match=r"checkpoint of step 1 was not written: (Not a directory|File exists)"):
        save(store(tmp_path / "results"), 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loss": float("nan")}, "checkpoint state is not JSON"),
        ({"path": Path("x")}, "checkpoint state is not JSON"),
        ({"seen": {3: "x"}}, "checkpoint state.seen has the key 3; JSON keys are strings"),
    ],
)
def test_state_that_would_not_read_back_is_refused_before_anything_is_replaced(tmp_path, state, message):
    target = store(tmp_path)
    save(target, 1)
    with pytest.raises(ValueError, match=message):
        write(target, 1, {"weights": text("w")}, state)
    assert target.latest().state == {"step": 1}
    assert names(tmp_path) == ["step_1"]


def test_links_and_a_part_called_manifest_are_refused(tmp_path):
    target = store(tmp_path)
    with pytest.raises(ValueError, match=r"weights is a link"):
        write(target, 1, {"weights": lambda path: path.symlink_to("/etc/hostname")}, {})
    with pytest.raises(ValueError, match=r"may not be called manifest\.json"):
        write(target, 1, {MANIFEST: text("{}")}, {})


WRITER = """
import sys
from pathlib import Path
from gymloop.training.checkpoint import CheckpointStore
from gymloop.training.retention import Retention
store = CheckpointStore(Path(sys.argv[1]), Retention(2))
found = store.latest()
step = found.step if found else 0
while True:
    step += 1
    aside = store.begin(step)
    (aside / "weights").write_bytes(bytes([step % 256]) * 2_000_000)
    (aside / "optimizer").write_text(str(step))
    store.commit(aside, {"step": step}, model={}, metrics={})
    print(step, flush=True)
"""


def test_f14_killed_at_any_moment_the_newest_complete_one_is_found(tmp_path):
    target = CheckpointStore(tmp_path, Retention(2))
    random.seed(0)
    reached = 0
    for _ in range(10):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            first = int(child.stdout.readline())
            time.sleep(random.uniform(0, 0.05))
        finally:
            child.kill()
            printed = [int(line) for line in child.communicate(timeout=30)[0].splitlines()]
        assert first == reached + 1  # it went on from the one that was found
        found = target.latest()
        assert found.step >= max([first, *printed])  # what was reported as saved is there
        assert found.part("weights").read_bytes() == bytes([found.step % 256]) * 2_000_000
        assert found.part("optimizer").read_text() == str(found.step) == str(found.state["step"])
        reached = found.step
    assert reached >= 10


def test_nothing_in_the_source_pickles_to_a_file():
    """Ray serialises what it moves between processes; nothing that lies on a disk may run code when it is opened."""
    found = []
    for path in (Path(__file__).parents[2] / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
            if (path.name, names) == ("warm.py", {"cloudpickle"}):  # a closure of vLLM's on its way to a fork
                continue
            if names & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}:
                found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.save", "torch.load", "np.load"):
                found.append(f"{path.name}:{node.lineno}")
    assert not found
