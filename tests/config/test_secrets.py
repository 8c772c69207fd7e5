"""Acceptance behaviour A26: secrets come from the environment and are never shown."""

import pickle

import pytest

from gymloop.config.dump import as_yaml
from gymloop.config.explain import derived
from gymloop.config.plan import compile_plan
from gymloop.config.secrets import is_secret, masked_override

SECRET = "hunter2-in-clear"
KWARGS = "env.environments.sums.kwargs"


@pytest.mark.parametrize(
    "key", ["api_key", "apikey", "API_KEY", "openai_api_key", "token", "hf_token", "password", "db.password", "secret",
            "client_secret", "aws_secret_access_key", "credentials", "authorization"],
)  # fmt: skip
def test_a26_keys_that_hold_secrets_are_known_by_name(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["tokenizer", "max_new_tokens", "train_mb_tokens", "eos_token", "pad_token", "secretary", "key", 0],
)
def test_a26_other_keys_are_not_taken_for_secrets(key):
    assert not is_secret(key)


@pytest.mark.parametrize(
    "lines",
    [
        f"api_key: {SECRET}",
        f"nested: {{password: {SECRET}}}",
        f"tokens: {{hf_token: [{SECRET}]}}",
        f"url: https://me:{SECRET}@host/path",
        f"api_key: ${{oc.env:KEY,{SECRET}}}",
        f"plain: {SECRET}\n        api_key: ${{.plain}}",
    ],
)
def test_a26_a_secret_written_out_is_refused_and_not_repeated(files, lines):
    files.write("r.yaml", f"defaults: base.yaml\nenv:\n  environments:\n    sums:\n      kwargs:\n        {lines}\n")
    said = files.said("r.yaml")
    assert any("looks like a secret; give it through the environment: ${oc.env:" in line for line in said)
    assert SECRET not in "\n".join(said) or "plain" in lines
    assert said[0].startswith("r.yaml:")


@pytest.mark.parametrize(
    "override",
    [
        f"+{KWARGS}.api_key={SECRET}",
        f"+{KWARGS}={{api_key: {SECRET}}}",
        f"logger.wandb.api_key={SECRET}",
        f"api_key: {SECRET}",
        f"{KWARGS}.api_key=[{SECRET}",
        f"~grpo.seed.api_key={SECRET}",
        f"+{KWARGS}.url=https://me:{SECRET}@host",
    ],
)
def test_a26_no_message_repeats_a_secret_of_the_command_line(files, override):
    assert SECRET not in "\n".join(files.said("base.yaml", override))


def test_a26_what_the_environment_gives_is_used_and_shown_as_its_reference(files):
    files.write(
        "r.yaml",
        "defaults: base.yaml\n"
        "policy: {model_name: '${oc.env:MODEL}'}\n"
        "grpo: {seed: '${oc.env:SEED,5}'}\n"
        "env: {environments: {sums: {kwargs:\n"
        "  {api_key: '${oc.env:KEY}', head: 'Bearer ${.api_key}', copy: '${.head}'}}}}\n"
        "logger: {log_dir: '${oc.env:KEY}/x'}\n",
    )
    environ = {"KEY": SECRET, "MODEL": "me/private-model"}
    loaded = files.load("r.yaml", environ=environ)
    kwargs = loaded.recipe.env.environments["sums"].kwargs
    assert kwargs == {"api_key": SECRET, "head": f"Bearer {SECRET}", "copy": f"Bearer {SECRET}"}
    text = as_yaml(loaded.recipe)
    assert SECRET not in text
    assert "private-model" not in text
    assert "api_key: ${oc.env:KEY}" in text
    assert "seed: ${oc.env:SEED,5}" in text
    plan = compile_plan(loaded.recipe, files.folder / "r.yaml", "run")
    because = "\n".join(one.because for one in derived(loaded, plan))
    assert SECRET not in because
    assert "logger.log_dir (" in because
    path = files.write("again.yaml", text)
    assert files.load(path.name, environ=environ).recipe == loaded.recipe
    assert pickle.loads(pickle.dumps(plan)).recipe.from_environment == loaded.recipe.from_environment


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("grpo: {seed: '${oc.env:KEY}'}", "what ${oc.env:KEY} gives does not fit; expected an integer"),
        (
            "policy: {generation: {max_new_tokens: '${oc.env:SHORT}'}}",
            "what ${oc.env:SHORT} gives does not fit",
        ),
        ("policy: {generation: {max_new_tokens: '${mul:${oc.env:KEY},2}'}}", "something from the environment"),
        ("data: {train: {environment: '${oc.env:KEY}'}}", "'${oc.env:KEY}' is not under env.environments"),
        ("policy: {tokenizer: {tool_parser: '${oc.env:KEY}'}}", "there is no parser '${oc.env:KEY}'"),
        ("sft_warmup: {data_path: '${oc.env:KEY}/x.jsonl'}", "${oc.env:KEY}"),
    ],
)
def test_a26_no_message_shows_a_value_of_the_environment(files, lines, expected):
    files.write("r.yaml", f"defaults: base.yaml\n{lines}\n")
    said = "\n".join(files.said("r.yaml", environ={"KEY": SECRET, "SHORT": "zz"}))
    assert expected in said
    assert SECRET not in said
    assert "zz" not in said


def test_a26_overrides_without_secrets_are_shown_as_they_are():
    for text in ("policy.tokenizer.name=x", "policy.generation.max_new_tokens=5", "a.api_key=${oc.env:KEY}"):
        assert masked_override(text) == text
