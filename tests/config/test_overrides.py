import pytest

from gymloop.config.document import parse
from gymloop.config.overrides import apply

TEXT = "a:\n  b: 1\n  c: {d: x, e: [1, 2]}\n"


def applied(*overrides: str):
    document = parse(TEXT, "r.yaml")
    apply(document, overrides)
    return document


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a.b=2", "a.b", 2),
        ("a.b=3e-6", "a.b", 3e-6),
        ("a.b=no", "a.b", "no"),
        ("a.b=null", "a.b", None),
        ("a.b=", "a.b", ""),
        ("a.b=-1", "a.b", -1),
        ("a.b=k=v", "a.b", "k=v"),
        ("a.b=[1, 2.5]", "a.b", [1, 2.5]),
        ("a.b=pkg.mod:Class", "a.b", "pkg.mod:Class"),
        ("+a.f.g=true", "a.f.g", True),
        ("++a.b=5", "a.b", 5),
        ("++a.n=5", "a.n", 5),
        ("a.c={d: y}", "a.c", {"d": "y", "e": [1, 2]}),
        ("a.c={d:y,e:[]}", "a.c", {"d": "y", "e": []}),
        ("+a.f={g:{h:1e-6},'i.j':[x,'y, z',{}],}", "a.f", {"g": {"h": 1e-6}, "i.j": ["x", "y, z", {}]}),
        ("a.b='1'", "a.b", "1"),
        ('a.b="it\'s"', "a.b", "it's"),
        (r"a.b='it\'s a \n\\'", "a.b", "it's a \\n\\"),
        ("a.b=''", "a.b", ""),
        ("a.b=${mul:${a.c.d},2}", "a.b", "${mul:${a.c.d},2}"),
        ("a.b=[${a.c.d},${max:1,2}]", "a.b", ["${a.c.d}", "${max:1,2}"]),
        ("a.b=http://x:80/y?z=1", "a.b", "http://x:80/y?z=1"),
        ("a.c.e.1=7", "a.c", {"d": "x", "e": [1, 7]}),
        ("++a.c.e.0=7", "a.c", {"d": "x", "e": [7, 2]}),
    ],
)
def test_an_override_sets_a_value_read_by_the_rules_of_the_recipe(override, path, value):
    document = applied(override)
    assert document.problems == []
    found = document.value
    for key in path.split("."):
        found = found[key]
    assert found == value
    assert type(found) is type(value)


def test_a_tilde_removes_a_key_and_with_a_value_only_that_value():
    assert applied("~a.b").value["a"] == {"c": {"d": "x", "e": [1, 2]}}
    assert "b" not in applied("~a.b=1").value["a"]
    (problem,) = applied("~a.b=2").problems
    assert "gives 1" in problem.text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("a.b", "expected key=value"),
        ("=1", "expected key=value"),
        ("a..b=1", "expected key=value"),
        ("+a.b=2", "already in the recipe"),
        ("~a.bb", "did you mean 'b'?"),
        ("~aa.b", "nothing to remove"),
        ("a.b.c=1", "'a.b' is 1, not a block of keys"),
        ("a.b=[1", "expected ']' or ',' in '[1'"),
        ("a.b={x:1", "expected '}' or ',' in '{x:1'"),
        ("a.b={x}", "expected ':' after the key 'x'"),
        ("a.b={x:1,x:2}", "'x' is given twice"),
        ("a.b='x", "no closing quote"),
        ("a.b=${x", "not closed"),
        ("a.b=[1]]", "']' follows the value"),
        ("a.b=1,2", "is a sweep in Hydra; write a list as [1,2]"),
        ("a.b: 2", "did you mean 'a.b=2'?"),
        ("a.b = 2", "did you mean 'a.b=2'?"),
        ("a.b 2", "did you mean 'a.b=2'?"),
        ("=", "without spaces around '='"),
        ("a.c.e.2=7", "'a.c.e' is a list and it has 2 items; give the whole list"),
        ("~a.c.e.0", "items cannot be removed"),
        ("+a.c.e.2=7", "items cannot be added"),
        ("a.c.e.9.x=7", "'a.c.e' is a list of 2, counted from 0"),
    ],
)
def test_an_override_that_cannot_be_done_is_a_problem_that_names_it(override, sentence):
    (problem,) = applied(override).problems
    assert sentence in problem.text
    assert problem.where == f"override {override!r}"


def test_later_overrides_see_earlier_ones_and_positions_name_the_override():
    document = applied("+a.x={y: 1}", "a.x.y=2")
    assert document.value["a"]["x"] == {"y": 2}
    assert document.positions["a", "x", "y"] == "override 'a.x.y=2'"
    assert document.positions["a", "b"] == "r.yaml:2"


def test_a_dot_inside_a_key_is_escaped():
    document = applied(r"+a.x\.y=1")
    assert document.value["a"]["x.y"] == 1
    assert document.positions["a", "x.y"].startswith("override ")
