"""Runs a NeMo Gym server's own ``app.py`` in NeMo Gym's interpreter, on a socket that is listening already.

Nothing of the server is changed. Three things around it are: uvicorn serves on the socket handed down instead of
binding the port again, it keeps idle connections, and the imports of ``DEFERRED`` happen when a function that needs
them is first called. This file is run by its path, in an environment without gymloop: it imports the standard library
and uvicorn only.

    python launch.py DESCRIPTOR ENTRYPOINT      in the server's folder
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

DEFERRED = {"nemo_gym.reward_profile": ("pandas", "scipy", "wandb")}
"""By module: packages that it imports at its top and that only its functions use; here, for /aggregate_metrics."""
KEEP_ALIVE_S = 3600
"""uvicorn's own is 5 s. A server that works through a thousand requests reads the next ones later than that, and would
close connections whose requests it has not read yet."""
EAGER = "GYMLOOP_GYM_EAGER_IMPORTS"
"""Set to 1, every import happens where the source has it."""


def deferred(tree: ast.Module, packages: Sequence[str]) -> ast.Module:
    """Move imports of ``packages`` from the top of a module into the functions that use what they bind.

    An import whose names are also used outside functions stays where it is. Annotations of functions do not count: the
    module must have ``from __future__ import annotations``, or nothing is moved.
    """
    if not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
        return tree
    moving = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) and _of(node, packages)]
    functions = list(_functions(tree))
    inside = {id(node) for function in functions for part in function.body for node in ast.walk(part)}
    inside |= {id(node) for function in functions for part in _annotations(function) for node in ast.walk(part)}
    outside = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside}
    moving = [node for node in moving if not outside & _bound(node)]
    for function in functions:
        used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
        needed: list[ast.stmt] = [node for node in moving if used & _bound(node)]
        at = 1 if ast.get_docstring(function, clean=False) is not None else 0
        function.body[at:at] = needed
    tree.body = [node for node in tree.body if node not in moving]
    return tree


def _of(node: ast.Import | ast.ImportFrom, packages: Sequence[str]) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return all(name.partition(".")[0] in packages for name in names)


def _bound(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The outermost functions, methods among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _functions(child)


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    given = function.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None and argument.annotation is not None:
            yield argument.annotation
    if function.returns is not None:
        yield function.returns


class _Deferring(importlib.abc.MetaPathFinder):
    """Finds the modules of ``DEFERRED`` where they are, and compiles them with their imports moved."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = deferred(ast.parse(self.get_data(path)), DEFERRED[fullname])
        return compile(tree, path, "exec", dont_inherit=True)


def serve_on(held: socket.socket) -> None:
    """Have uvicorn serve on ``held`` wherever it would bind an address itself, with one worker or several."""
    import uvicorn

    run = uvicorn.Server.run

    def run_on_held(server: Any, sockets: list[socket.socket] | None = None) -> Any:
        server.config.timeout_keep_alive = max(KEEP_ALIVE_S, server.config.timeout_keep_alive)
        return run(server, sockets=[held] if sockets is None else sockets)

    def hand_over(_config: Any) -> socket.socket:
        return held

    uvicorn.Server.run = run_on_held  # type: ignore[method-assign, assignment]
    uvicorn.Config.bind_socket = hand_over  # type: ignore[method-assign, assignment]


def main(descriptor: int, entrypoint: str) -> None:
    """Become the server."""
    if os.environ.get(EAGER) != "1":
        sys.meta_path.insert(0, _Deferring())
    sys.argv = [entrypoint]
    sys.path[0] = os.getcwd()  # as for ``python app.py``, in place of this file's folder
    held = socket.socket(fileno=descriptor)
    held.set_inheritable(False)  # what the server starts has no business with it
    serve_on(held)
    runpy.run_path(entrypoint, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
