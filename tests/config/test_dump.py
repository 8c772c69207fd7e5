from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.config.document import parse
from gymloop.config.dump import as_yaml
from gymloop.config.load import load, load_recipe
from gymloop.config.schema import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BASE = Path(__file__).parent / "data" / "complete.yaml"


def reloaded(recipe: Recipe, beside: Path, environ: dict[str, str] | None = None) -> Recipe:
    """The recipe, written beside the one it came from, so that its paths mean the same, and read again."""
    path = beside / "resolved-by-a-test.yaml"
    path.write_text(as_yaml(recipe), encoding="utf-8")
    try:
        return load(path, (), environ or {}).recipe
    finally:
        path.unlink()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_f11_the_dump_of_every_shipped_recipe_loads_to_the_same_object(path, tmp_path):
    for file in path.parent.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    recipe = load_recipe(path)
    assert reloaded(recipe, tmp_path) == recipe


words = st.text(max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | words
    | st.sampled_from(["1e-6", "no", "010", "0x1f", "~", "null", "1:30", "<<", "=", "${x}", "\\${x}", "2001-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(
    kwargs=st.dictionaries(words.filter(lambda key: "token" not in key), values, max_size=4),
    lr=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    clip=st.floats(1e-300, 1) | st.integers(1, 9),
    stop=st.none() | st.lists(st.integers(0, 9), max_size=3),
    template=st.text(min_size=1, max_size=20),
)
def test_any_recipe_reads_back_as_the_same_object(kwargs, lr, seed, clip, stop, template):
    tree = parse(BASE.read_text(encoding="utf-8"), "complete.yaml").value
    tree["env"]["environments"]["calculator"]["kwargs"] = kwargs
    tree["policy"]["optimizer"]["kwargs"]["lr"] = lr
    tree["policy"]["max_grad_norm"] = clip
    tree["policy"]["generation"]["stop_token_ids"] = stop
    tree["policy"]["tokenizer"]["chat_template"] = "{{ messages }}" + template
    tree["grpo"]["seed"] = seed
    recipe = Recipe.model_validate(tree)
    document = parse(as_yaml(recipe), "dump.yaml")
    assert document.problems == []
    from gymloop.config.interpolation import resolve

    resolve(document, {})
    assert document.problems == []
    again = Recipe.model_validate(document.value)
    assert again == recipe
    assert as_yaml(again) == as_yaml(recipe)


OVERRIDES = {
    "grpo.max_num_steps": st.integers(1, 10**6),
    "grpo.seed": st.integers(0, 5) | st.just("${mul:${grpo.max_num_steps},2}"),
    "policy.optimizer.kwargs.lr": st.floats(0, 1) | st.sampled_from(["3e-6", "1E-5", "0"]),
    "policy.optimizer.kwargs.betas": st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
    "grpo.normalize_rewards": st.sampled_from(["true", "false"]),
    "loss_fn.ratio_clip_c": st.sampled_from(["null", "3", "3.5"]),
    "+env.environments.other": st.just("{entrypoint: 'm:C', kwargs: {a: 1e-6, b: [x, 'no', 010]}}"),
}


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({}, optional=OVERRIDES))
def test_f11_a_recipe_with_any_overrides_loads_from_its_dump(chosen):
    recipe = load_recipe(BASE, [f"{key}={value}" for key, value in chosen.items()])
    assert reloaded(recipe, BASE.parent) == recipe


def test_f11_floats_are_floats_for_every_yaml_reader():
    text = as_yaml(load_recipe(BASE, ["policy.optimizer.kwargs.lr=3e-6", "policy.optimizer.kwargs.eps=1e-8"]))
    kwargs = yaml.safe_load(text)["policy"]["optimizer"]["kwargs"]
    assert (kwargs["lr"], kwargs["eps"]) == (3e-6, 1e-8)
    assert type(kwargs["lr"]) is type(kwargs["eps"]) is float


def test_a_dump_keeps_no_trace_of_inheritance_or_interpolation(files):
    files.write("child.yaml", "defaults: base.yaml\ngrpo: {seed: '${mul:3,${grpo.max_num_steps}}'}\n")
    recipe = files.load("child.yaml").recipe
    text = as_yaml(recipe)
    assert "${" not in text
    assert "defaults" not in text
    assert reloaded(recipe, files.folder) == recipe


def test_with_a_folder_paths_are_absolute_so_that_the_text_loads_from_anywhere(files):
    files.write("chat.jinja", "{{ messages }}")
    recipe = files.load("base.yaml", "policy.tokenizer.chat_template=chat.jinja").recipe
    files.write("elsewhere/recipe.yaml", as_yaml(recipe, files.folder))
    again = files.load("elsewhere/recipe.yaml").recipe
    assert again.policy.tokenizer.chat_template == str(files.folder / "chat.jinja")
    assert again.data.train.data_path is None
    assert again.grpo == recipe.grpo
