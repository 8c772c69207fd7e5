import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gymloop.cli import main as cli
from gymloop.errors import ConfigError, InfraError

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
HEAVY = ("torch", "ray", "transformers", "vllm")


def run(*argv: str, poison: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, in which importing anything heavy is an error."""
    for name in HEAVY:
        package = poison / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(f"raise SystemExit('imported {name}')\n")
    return subprocess.run(
        [sys.executable, *(("-c", code) if code else ("-m", "gymloop.cli.main")), *argv],
        env={**os.environ, "PYTHONPATH": str(poison)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_check_says_what_a_recipe_would_run_within_two_seconds_and_imports_nothing_heavy(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("check", str(QUICKSTART), "grpo.max_num_steps=7", poison=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which is its wall time on an idle machine: other tests may be running beside this one.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    assert "quickstart.yaml: OK" in done.stdout
    assert "at most 7 steps" in done.stdout
    assert done.stderr == ""
    assert seconds < 2, f"check took {seconds:.1f} s"


def test_check_leaves_nothing_heavy_in_sys_modules(tmp_path):
    code = (
        "import sys; from gymloop.cli.main import main; rc = main(sys.argv[1:]); "
        f"heavy = {HEAVY!r}; print('heavy:', sorted(set(heavy) & set(sys.modules))); sys.exit(rc)"
    )
    done = run("check", str(QUICKSTART), poison=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout


def test_check_of_a_faulty_recipe_lists_all_and_exits_2(tmp_path):
    done = run("check", str(QUICKSTART), "grpo.max_num_stepz=3", "policy.generation.top_p=0.5", poison=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'max_num_steps'?" in done.stderr
    assert "full vocabulary" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["check", "--help"], ["models", "fetch", "--help"]])
def test_help_needs_nothing_heavy(tmp_path, argv):
    done = run(*argv, poison=tmp_path)
    assert done.returncode == 0
    assert "usage: gymloop" in done.stdout


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["chekc", "r.yaml"], "unknown verb 'chekc'; did you mean 'check'?"),
        (["train", "r.yaml", "--resum"], "unknown argument '--resum'; did you mean '--resume'?"),
        (["train"], "RECIPE"),
        ([], "VERB"),
        (["models", "fetch", "a", "b"], "unknown argument 'b'"),
    ],
)
def test_a_wrong_command_line_gets_one_line_and_exit_2(capsys, argv, sentence):
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_overrides_may_stand_around_options():
    args = cli.parse(["train", "r.yaml", "a=1", "--run", "x", "~b", "+c=2", "--resume"])
    assert args.overrides == ["a=1", "~b", "+c=2"]
    assert (args.run, args.resume, args.sequential) == ("x", True, False)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (InfraError("no"), 1), (KeyboardInterrupt(), 130)])
def test_the_exit_code_says_who_must_act(monkeypatch, capsys, error, code):
    import gymloop.cli.check

    def fail(args):
        raise error

    monkeypatch.setattr(gymloop.cli.check, "run", fail)
    assert cli.main(["check", "r.yaml"]) == code
    said = capsys.readouterr().err
    assert said in ("gymloop: no\n", "gymloop: interrupted\n")


def test_debug_shows_the_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GYMLOOP_DEBUG", "1")
    assert cli.main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_models_fetch_prints_the_folder_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["models", "fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.resolve()}\n"
