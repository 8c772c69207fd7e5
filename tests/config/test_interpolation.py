import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.config.document import parse
from gymloop.config.expression import escape
from gymloop.config.interpolation import resolve

TREE = """\
n: 3
x: 1e-6
yes: true
none: null
word: n
text: some
list: [10, 20]
d:
  k: {j: 5, up: "${..j2}", side: "${.j}"}
  j2: 6
"""


def resolved(expression: str, environ: dict[str, str] | None = None):
    document = parse(TREE, "r.yaml")
    document.value["v"] = expression
    document.positions["v",] = "r.yaml:99"
    resolve(document, environ or {})
    return document


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${n}", 3),
        ("${x}", 1e-6),
        ("${yes}", True),
        ("${none}", None),
        ("${.n}", 3),
        ("${d.k.j}", 5),
        ("${d[k].j}", 5),
        ("${list.1}", 20),
        ("${list[0]}", 10),
        ("${list}", [10, 20]),
        ("${d.k}", {"j": 5, "up": 6, "side": 5}),
        ("${${word}}", 3),
        ("${d.k.${letter}}", 5),
        ("a${n}b${text}", "a3bsome"),
        ("${n}.${x}", "3.1e-06"),
        ("${mul:${n}, 2}", 6),
        ("${ mul : 2 , 1e-3 }", 0.002),
        ("${add:${n},${mul:${n},${d.k.j}}}", 18),
        ("${sub:1,3}", -2),
        ("${div:64,2}", 32.0),
        ("${max:${n},2.5}", 3),
        (r"\${n}", "${n}"),
        (r"\\${n}", r"\3"),
        (r"a\b${n}", r"a\b3"),
        ("$n {x}", "$n {x}"),
    ],
)
def test_an_expression_has_the_value_and_the_type_that_omegaconf_gives_it(expression, value):
    document = parse(TREE + "letter: j\n", "r.yaml")
    document.value["v"] = expression
    resolve(document, {})
    assert document.problems == []
    assert document.value["v"] == value
    assert type(document.value["v"]) is type(value)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("${nn}", "refers to 'nn', which the recipe does not have; did you mean 'none'?"),
        ("${d.k.jj}", "refers to 'd.k.jj', which the recipe does not have; did you mean 'd.k.j'?"),
        ("${list.5}", "refers to 'list.5', and 'list' is a list of 2"),
        ("${...n}", "leads out of the recipe"),
        ("${v}", "refers to itself: v -> v"),
        ("${n", "'${n' is not closed"),
        ("${}", "refers to nothing"),
        ("${a b[}", "is no key"),
        ("${mull:1,2}", "no resolver 'mull'; expected one of add, sub, mul, div, max, oc.env; did you mean 'mul'?"),
        ("${mul:1}", "mul takes two numbers, and 1 are given"),
        ("${mul:1,2,3}", "mul takes two numbers, and 3 are given"),
        ("${mul:}", "mul takes two numbers, and 0 are given"),
        ("${mul:1,${text}}", "mul takes two numbers, and one of them is 'some'"),
        ("${mul:1,true}", "mul takes two numbers, and one of them is True"),
        ("${mul:1,'2'}", "mul takes two numbers, and one of them is '2'"),
        ("${div:1,0}", "divides by zero"),
        ("${mul:1e308,1e308}", "expected a finite number"),
        ("a${d}", "only text and numbers can stand in the middle of text, and this is a block of keys"),
        ("a${none}", "and this is empty"),
        ("${mul:'1,2}", "has no closing quote"),
        ("${oc.env}", "refers to 'oc.env'"),
        ("${oc.env:}", "takes a variable and perhaps a default, and 0 are given"),
        ("${oc.env:HOMEE}", "the environment has no variable 'HOMEE'; did you mean 'HOME'?"),
    ],
)
def test_an_expression_without_a_value_is_one_problem_with_its_line(expression, sentence):
    document = resolved(expression, {"HOME": "/h"})
    (problem,) = document.problems
    assert problem.path == ("v",)
    assert sentence in problem.text
    assert document.unresolved == {("v",)}


def test_what_depends_on_a_faulty_expression_is_not_told_again(files):
    files.write(
        "r.yaml",
        "defaults: base.yaml\ngrpo:\n  seed: ${grpo.sed}\n  max_num_epochs: ${.seed}\n  val_period: ${.seed}\n",
    )
    (said,) = files.said("r.yaml")
    assert said == (
        "r.yaml:3: grpo.seed: refers to 'grpo.sed', which the recipe does not have; did you mean 'grpo.seed'?"
    )


def test_a_cycle_is_told_once_with_all_of_it(files):
    files.write(
        "r.yaml",
        "defaults: base.yaml\ngrpo:\n  seed: ${.max_num_epochs}\n"
        "  max_num_epochs: ${.val_period}\n  val_period: ${.seed}\n",
    )
    (said,) = files.said("r.yaml")
    assert said == (
        "r.yaml:5: grpo.val_period: refers to itself: grpo.seed -> grpo.max_num_epochs -> grpo.val_period -> grpo.seed"
    )


def test_a_block_may_not_hold_itself(files):
    files.write("r.yaml", "defaults: base.yaml\nenv: {environments: {sums: {kwargs: {all: '${env}'}}}}\n")
    (said,) = files.said("r.yaml")
    assert "env.environments.sums.kwargs.all: refers to itself" in said


def test_values_are_typed_by_the_schema_and_division_gives_an_integer_where_one_is_wanted(files):
    files.write(
        "r.yaml",
        "defaults: base.yaml\n"
        "policy:\n"
        "  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}\n"
        "  train_micro_batch_size: ${div:${policy.train_global_batch_size}, 2}\n"
        "  optimizer: {kwargs: {lr: '${mul:2, 1e-6}', weight_decay: '${grpo.seed}'}}\n"
        "grpo: {val_at_start: '${oc.env:START}', seed: '${oc.env:SEED}', val_period: 1}\n"
        "data: {validation: '${data.train}'}\n",
    )
    recipe = files.load("r.yaml", environ={"START": "true", "SEED": "17"}).recipe
    assert (recipe.policy.train_global_batch_size, recipe.policy.train_micro_batch_size) == (8, 4)
    assert type(recipe.policy.train_micro_batch_size) is int
    assert recipe.policy.optimizer.kwargs.lr == 2e-6
    assert type(recipe.policy.optimizer.kwargs.weight_decay) is float
    assert (recipe.grpo.val_at_start, recipe.grpo.seed) == (True, 17)
    assert recipe.data.validation == recipe.data.train


def test_a_division_that_leaves_a_rest_is_no_integer(files):
    (said,) = files.said("base.yaml", "policy.train_micro_batch_size=${div:${grpo.max_num_steps},2}")
    assert said.endswith("policy.train_micro_batch_size: is 1.5; expected an integer")


def test_a_key_that_no_file_gives_refers_to_its_default(files):
    recipe = files.load("base.yaml", "grpo.max_num_epochs=${mul:${policy.train_micro_batch_size},2}").recipe
    assert recipe.grpo.max_num_epochs == 8


def test_overrides_and_children_come_before_interpolation(files):
    files.write("parent.yaml", "defaults: base.yaml\ngrpo:\n  max_num_epochs: ${grpo.max_num_steps}\n")
    files.write("child.yaml", "defaults: parent.yaml\ngrpo: {max_num_steps: 11}\n")
    assert files.load("child.yaml").recipe.grpo.max_num_epochs == 11
    assert files.load("child.yaml", "grpo.max_num_steps=12").recipe.grpo.max_num_epochs == 12
    assert files.load("child.yaml", "grpo.seed=${mul:${grpo.max_num_epochs},2}").recipe.grpo.seed == 22


def test_a_chat_template_is_never_read_for_expressions(files):
    template = "{% for m in messages %}${m}{{ m.content }}{% endfor %}"
    recipe = files.load("base.yaml", f"policy.tokenizer.chat_template='{template}'").recipe
    assert recipe.policy.tokenizer.chat_template == template


@given(st.text(alphabet="\\${}ab:,.'\" ", max_size=30))
def test_escaped_text_reads_as_itself(text):
    document = resolved(escape(text))
    assert document.problems == []
    assert document.value["v"] == text


@given(st.text(alphabet="\\${}ab:,.'\"[]n 1", max_size=30))
def test_any_text_has_a_value_or_one_problem(text):
    document = resolved(text)
    assert len(document.problems) == len(document.unresolved) <= 1
