"""The submission to a Ray cluster that runs already, against a ``ray`` that records its arguments."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "ray-job" / "submit.sh"
API = {"RAY_API_SERVER_ADDRESS": "http://head:8265"}


@pytest.fixture
def submit(tmp_path):
    record = tmp_path / "record"
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump(sys.argv[1:], open({str(record)!r}, 'w'))\n"
        "sys.exit(int(os.environ.get('CODE', 0)))\n"
    )
    ray.chmod(0o755)

    def run(*arguments, **environment):
        record.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env={"PATH": f"{ray.parent}:/usr/bin:/bin", "HOME": str(tmp_path)} | environment,
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done, json.loads(record.read_text()) if record.exists() else None

    return run


def test_the_run_is_submitted_with_its_arguments_whole_and_named_after_the_job(submit, tmp_path):
    home = tmp_path / "my 'repository'"
    home.mkdir()
    done, arguments = submit("a b.yaml", "x=$HOME", GYMLOOP_HOME=str(home), GYMLOOP_JOB="j1", **API)
    assert done.returncode == 0, done.stderr
    assert arguments[:5] == ["job", "submit", "--submission-id", "j1", "--"]
    # Ray joins what follows into one line for a shell of the cluster; there it must come apart as it was.
    entrypoint = shlex.split(shlex.join(arguments[5:]))
    assert entrypoint[:2] == ["bash", "-c"]
    assert entrypoint[3:] == [
        str(home), f"{home}/.venv/bin/gymloop", "train", "a b.yaml", "x=$HOME", "--run", "j1",
    ]  # fmt: skip
    program = home / ".venv" / "bin" / "gymloop"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport os, sys\nprint(os.getcwd()); print(sys.argv[1:])\n")
    program.chmod(0o755)
    ran = subprocess.run(shlex.join(entrypoint), shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == [str(home), str(["train", "a b.yaml", "x=$HOME", "--run", "j1"])]


def test_the_exit_code_is_that_of_the_job(submit):
    assert submit("r.yaml", CODE="3", **API)[0].returncode == 3


def test_secrets_are_named_by_their_file_on_the_cluster_and_never_by_value(submit):
    done, arguments = submit("r.yaml", GYMLOOP_SECRETS="/etc/my secrets", HF_TOKEN="hf_x", **API)
    assert "hf_x" not in json.dumps(arguments) + done.stdout + done.stderr
    at = arguments.index("/etc/my secrets")
    assert arguments[at - 1].endswith("launch/with-secrets.sh")
    assert not any("env_vars" in argument or "runtime-env" in argument for argument in arguments)


def test_a_dry_run_prints_the_command_and_runs_none(submit):
    done, arguments = submit("it's.yaml", "--run", "mine", DRY_RUN="1", GYMLOOP_JOB="j2", **API)
    assert done.returncode == 0
    assert arguments is None
    assert shlex.split(done.stdout)[:5] == ["ray", "job", "submit", "--submission-id", "j2"]
    assert shlex.split(done.stdout)[-4:] == ["train", "it's.yaml", "--run", "mine"]


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [((), API, "usage: submit.sh RECIPE"), (("r.yaml",), {}, "RAY_API_SERVER_ADDRESS is not set")],
)
def test_what_is_missing_is_said(submit, arguments, environment, said):
    done, recorded = submit(*arguments, **environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert recorded is None
    assert os.access(SCRIPT, os.X_OK)
