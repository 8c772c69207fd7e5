"""Imports point one way, light parts stay light, and every wait has a bound: read from the source, not from a run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from waits import unbounded

SRC = Path(__file__).parents[1] / "src"
HEAVY = {"torch", "ray", "transformers", "vllm"}

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"training"}),
    frozenset(
        {
            "startup",
            "algorithms",
            "rollouts",
            "policy",
            "serving",
            "generation",
            "gym",
            "weights",
            "observe",
            "cluster",
        }
    ),
    frozenset({"asgi", "tokens", "models"}),
    frozenset(
        {"bytecode", "config", "compat", "descriptors", "files", "garbage", "lifeline", "loops", "threads", "wakeup"}
    ),
    frozenset({"errors", "gpu", ""}),  # "" is the package itself: its version
)
"""From the top; a part imports parts below it."""

PEERS = {
    ("policy", "algorithms.batch"),  # what the step function hands over
    ("policy", "algorithms.losses"),
    ("policy", "algorithms.step"),  # how a batch is cut into optimizer steps
    ("policy", "weights"),
    ("generation", "weights"),  # an engine checks and takes snapshots
    ("serving", "generation"),  # the face of an engine, and the worker that holds both
    ("serving", "weights"),
    ("gym", "startup.sockets"),  # hosted servers serve on sockets that gymloop holds
    ("serving", "startup.sockets"),  # the engine's actor holds its own socket
    ("serving", "observe.watchdog"),  # the server's event loop is watched
    ("rollouts", "gym"),  # a collector drives agents
    ("rollouts", "generation.engine"),
    ("algorithms", "rollouts.trajectory"),
    ("gym", "rollouts.trajectory"),  # an agent writes turns
    ("observe", "startup"),  # the live table shows the timeline
}
"""Imports allowed within the middle layer: a part, and the module or package of another part that it may use."""

LIGHT = ("config", "gym", "rollouts", "startup", "observe", "algorithms", "cli")
"""Parts whose modules load none of ``HEAVY`` when they are imported."""
MAY_BE_HEAVY = {"algorithms.losses"}


@dataclass(frozen=True)
class Import:
    target: str  # dotted, as far as the source names a module: ``gymloop.config.plan``, ``torch.nn``
    line: int
    at_import: bool  # runs when the module is imported: neither in a function nor under TYPE_CHECKING


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SRC / "gymloop").rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> tuple[Import, ...]:
    return tuple(_imports(tree(name), name, True))


def _imports(node: ast.AST, name: str, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name}:{child.lineno}: imports are absolute"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield Import(full if full in MODULES else str(child.module), child.lineno, at_import)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _imports(ast.Module([part], []), name, False)
            for part in child.orelse:
                yield from _imports(ast.Module([part], []), name, at_import)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, name, at_import and not inside)


def inner(name: str) -> str:
    """``gymloop.config.plan`` is ``config.plan``."""
    return name.removeprefix("gymloop").removeprefix(".")


def part_of(name: str) -> str:
    return inner(name).partition(".")[0]


def layer(name: str) -> int:
    found = [depth for depth, parts in enumerate(LAYERS) if part_of(name) in parts]
    assert found, f"{name}: part {part_of(name)!r} belongs to no layer; give it one in LAYERS"
    return found[0]


def is_peer(importer: str, target: str) -> bool:
    return any(
        part_of(importer) == part and (inner(target) == allowed or inner(target).startswith(f"{allowed}."))
        for part, allowed in PEERS
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    wrong = [
        f"{MODULES[name].relative_to(SRC)}:{found.line} imports {found.target}"
        for found in imports(name)
        if found.target.partition(".")[0] == "gymloop"
        and part_of(found.target) != part_of(name)
        and not (layer(found.target) > layer(name) or is_peer(name, found.target))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle():
    edges = {
        name: {found.target for found in imports(name) if found.at_import and found.target in MODULES}
        for name in MODULES
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for target in sorted(edges[name] - {name}):
                walk(target, (*path, name))
            done.add(name)

    for name in MODULES:
        walk(name, ())


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name) in LIGHT])
def test_light_parts_import_nothing_heavy(name):
    if inner(name) in MAY_BE_HEAVY:
        return
    heavy = [
        f"{found.target}, line {found.line}"
        for found in imports(name)
        if found.at_import and found.target.partition(".")[0] in HEAVY
    ]
    assert not heavy


def test_nemo_gym_is_never_imported_only_run():
    """Not in functions either, and not by the launcher, which its servers' own interpreter runs."""
    assert not [name for name in MODULES for found in imports(name) if found.target.partition(".")[0] == "nemo_gym"]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(tree(name)), f"{MODULES[name].relative_to(SRC)} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_wait_has_a_bound(name):
    """By an argument, or by what a comment ``# bounded: ...`` beside it names; see ``waits``."""
    assert not unbounded(MODULES[name].read_text(encoding="utf-8")), MODULES[name].relative_to(SRC)


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("ray.get(x)", True),
        ("ray.wait([x], num_returns=1)", True),
        ("ray.get(x, timeout=5)", False),
        ("f(timeout=None)", True),
        ("def f(a, timeout=None): ...", True),
        ("def f(*, b, timeout=None): ...", True),
        ("def f(*, timeout, b=None): ...", False),
        ("await future", True),
        ("await self._tasks[name]", True),
        ("await coroutine_function(x)", False),
        ("await event.wait()", True),
        ("event.wait()", True),
        ("event.wait(3)", False),
        ("process.wait(timeout=3)", False),
        ("queue.get()", True),
        ("await queue.get()", True),
        ("mapping.get(key)", False),
        ("thread.join()", True),
        ("thread.join(3)", False),
        ("', '.join(parts)", False),
        ("lock.acquire()", True),
        ("lock.acquire(timeout=3)", False),
        ("lock.acquire(blocking=False)", False),
        ("import concurrent.futures\nfuture.result()", True),
        ("import concurrent.futures\nfuture.result(3)", False),
        ("task.result()", False),
        ("await asyncio.wait({a, b})", True),
        ("await asyncio.wait({a, b}, timeout=s)", False),
        ("await asyncio.gather(a, b)", True),
        ("await asyncio.wait_for(a, 3)", False),
        ("subprocess.run(c, check=True)", True),
        ("subprocess.run(c, timeout=3)", False),
        ("process.communicate()", True),
        ("process.communicate(timeout=3)", False),
        ("aiohttp.ClientSession()", True),
        ("aiohttp.ClientSession(timeout=t)", False),
        ("http.client.HTTPConnection(h)", True),
        ("urllib.request.urlopen(u)", True),
        ("socket.create_connection(a)", True),
        ("socket.create_connection(a, 3)", False),
        ("while True:\n    time.sleep(1)", True),
        ("while True:\n    await f()", True),
        ("while True:\n    position += 1", False),
        ("while not self._leave.wait(3):\n    f()", False),
        ("while True:  # bounded: by the deadline\n    await f()", False),
        ("while True:\n    await f()  # bounded: not said where it is", True),
        ("x = await future  # bounded: by the task's deadline", False),
        ("# bounded: by the task's deadline,\n# which its progress extends\nx = await future", False),
        ("x = await future  # it ends some day", True),
        ("x = f(\n    await future,  # bounded: it is done\n)", False),
        ("await future\ng()  # bounded: of another statement", True),
    ],
)
def test_the_search_for_unbounded_waits_finds_them(source, caught):
    assert bool(unbounded(source)) is caught


def test_the_search_for_imports_tells_when_they_run():
    source = (
        "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    d = None\ndef f():\n    import e\nclass C:\n    import g\n"
    )
    found = {one.target: one.at_import for one in _imports(ast.parse(source), "x", True)}
    assert found == {"a": True, "b": False, "c": True, "d": True, "e": False, "g": True}


LIGHT_ENTRIES = sorted(
    name for name in MODULES if part_of(name) in ("rollouts", "gym", "config", "startup") or name == "gymloop.cli.main"
)


def test_light_parts_leave_nothing_heavy_loaded():
    code = f"import importlib, sys\nfor name in {LIGHT_ENTRIES!r}: importlib.import_module(name)\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
