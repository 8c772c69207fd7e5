"""Finds the places of a source file that may wait for ever, by their form.

A wait is bounded by an argument (``timeout``), or a comment that begins with ``# bounded:`` says what bounds it, on
one of its lines or alone on the line above its statement. The comment is read by people; that it is there is checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

REASON = re.compile(r"#\s*bounded: \S")
COMMENT = re.compile(r"\s*#")

NEEDS_TIMEOUT = {
    "ray.get", "ray.wait", "asyncio.wait", "asyncio.wait_for", "subprocess.run", "subprocess.call",
    "subprocess.check_call", "subprocess.check_output", "http.client.HTTPConnection", "http.client.HTTPSConnection",
    "urllib.request.urlopen", "urlopen", "socket.create_connection", "aiohttp.ClientSession", "ClientSession",
    "concurrent.futures.wait", "select.select",
}  # fmt: skip
"""Functions whose ``timeout`` keyword, or an argument at the place below, bounds the wait."""
PLACE = {"socket.create_connection": 1, "select.select": 3, "asyncio.wait_for": 1}
METHODS = {
    # method: how many positional arguments make it another method or give the timeout
    "get": 1,  # Queue.get(); dict.get(key) has one
    "wait": 1,  # Event, Condition, Popen: wait(5)
    "join": 1,  # Thread.join(5), str.join(parts)
    "acquire": 2,
    "result": 1,  # of concurrent.futures; asyncio's does not wait, so it counts only where the former is used
    "communicate": 2,
    "wait_closed": 1,
    "serve_forever": 1,
    "drain": 1,
}
AWAITED_ONLY = {"wait_closed", "serve_forever", "drain"}
THREADED = re.compile(r"concurrent\.futures|run_coroutine_threadsafe")
PAUSES = {"sleep", "wait", "get", "read", "readline", "recv", "receive", "accept", "poll", "select", "flock", "acquire"}
"""What makes a ``while True`` a wait rather than a computation, as does any ``await`` in it."""


def unbounded(source: str) -> list[str]:
    """One sentence for each wait without a bound, ``line 7: ray.get without timeout``."""
    lines = source.splitlines()
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    threaded = THREADED.search(source) is not None
    return [
        f"line {getattr(node, 'lineno', 0)}: {what}"
        for node in ast.walk(tree)
        for what in _waits(node, parents, threaded)
        if not _reasoned(node, parents, lines)
    ]


def _waits(node: ast.AST, parents: dict[ast.AST, ast.AST], threaded: bool) -> Iterator[str]:
    awaited = isinstance(parents.get(node), ast.Await)
    if isinstance(node, ast.Call):
        if threaded or not (isinstance(node.func, ast.Attribute) and node.func.attr == "result"):
            yield from _call(node, awaited)
    elif isinstance(node, ast.Await) and not isinstance(node.value, ast.Call):
        yield f"await {ast.unparse(node.value)}, a future or task"
    elif isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value and _pauses(node):
        yield "while True"
    elif isinstance(node, ast.arguments):
        yield from _defaults(node)


def _pauses(loop: ast.While) -> bool:
    return any(
        isinstance(node, ast.Await)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PAUSES)
        for node in ast.walk(loop)
    )


def _call(node: ast.Call, awaited: bool) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    name = ast.unparse(node.func)
    timeout = given.get("timeout")
    if isinstance(timeout, ast.Constant) and timeout.value is None:
        yield f"{name} with timeout=None"
    elif name in NEEDS_TIMEOUT:
        if "timeout" not in given and len(node.args) <= PLACE.get(name, 99):
            yield f"{name} without timeout"
    elif name in ("asyncio.gather", "asyncio.wrap_future") and awaited:
        yield f"await {name}"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and "timeout" not in given:
        method = node.func.attr
        if len(node.args) < METHODS[method] and not node.keywords and (awaited or method not in AWAITED_ONLY):
            yield f"{name}() without timeout"


def _defaults(node: ast.arguments) -> Iterator[str]:
    positional = [*node.posonlyargs, *node.args]
    named = [*zip(positional[::-1], node.defaults[::-1], strict=False)]
    named += [(name, value) for name, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
    for name, default in named:
        if name.arg == "timeout" and isinstance(default, ast.Constant) and default.value is None:
            yield "timeout=None by default"


def _reasoned(node: ast.AST, parents: dict[ast.AST, ast.AST], lines: list[str]) -> bool:
    """Whether a line of the wait, of a simple statement around it, or of the comment above that, gives the reason."""
    statement = node
    while not isinstance(statement, ast.stmt | ast.excepthandler) and statement in parents:
        statement = parents[statement]
    first = getattr(statement, "lineno", 1)
    last = getattr(statement, "end_lineno", first) if not hasattr(statement, "body") else getattr(node, "lineno", first)
    if hasattr(statement, "body"):
        last = max(first, min(last, statement.body[0].lineno - 1))
    while first > 1 and COMMENT.match(lines[first - 2]):
        first -= 1
    return any(REASON.search(line) for line in lines[first - 1 : last])
