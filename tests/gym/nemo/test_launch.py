"""Imports are put off without a change to what a module does; a held socket serves."""

from __future__ import annotations

import ast
import socket
import sys

import pytest
import uvicorn

from gymloop.gym.nemo.launch import KEEP_ALIVE_S, deferred, serve_on

HEAD = "from __future__ import annotations\nimport json\nfrom fractions import Fraction as F\n"


def run(source: str) -> tuple[dict, str]:
    tree = deferred(ast.parse(source), ("json", "fractions"))
    names: dict = {}
    exec(compile(ast.fix_missing_locations(tree), "module", "exec"), names)
    return names, ast.unparse(tree)


def test_an_import_moves_into_the_functions_that_use_it():
    names, _ = run(HEAD + "def f(x: F) -> F:\n    'Says.'\n    return json.dumps(str(F(x)))\ndef g():\n    return 1\n")
    assert "json" not in names
    assert "F" not in names
    assert names["f"](2) == '"2"'
    assert names["f"].__doc__ == "Says."


def test_methods_and_closures_find_what_they_use():
    names, _ = run(HEAD + "class C:\n    def m(self):\n        return [(lambda: F(1, i))() for i in (1, 2)]\n")
    assert [str(one) for one in names["C"]().m()] == ["1", "1/2"]


@pytest.mark.parametrize("use", ["X = F(1)", "def f(x=F(1)): ...", "class C(F): ...", "class C:\n    x: F", "F.f = F"])
def test_what_is_used_outside_functions_stays(use):
    tree = deferred(ast.parse(HEAD + use), ("json", "fractions"))
    assert "from fractions import Fraction as F" in [ast.unparse(node) for node in tree.body]
    assert "import json" not in [ast.unparse(node) for node in tree.body]


def test_without_postponed_annotations_nothing_moves():
    source = "import json\ndef f():\n    return json.dumps(1)\n"
    assert ast.unparse(deferred(ast.parse(source), ("json",))) == ast.unparse(ast.parse(source))
    assert "json" in sys.modules


def test_uvicorn_serves_on_the_held_socket_and_keeps_idle_connections(monkeypatch):
    served = []
    monkeypatch.setattr(uvicorn.Config, "bind_socket", uvicorn.Config.bind_socket)  # both are put back
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda server, sockets: served.append((sockets, server.config.timeout_keep_alive))
    )
    with socket.socket() as held:
        serve_on(held)
        uvicorn.Server(uvicorn.Config("nowhere:app")).run()
        assert served == [([held], KEEP_ALIVE_S)]
        assert uvicorn.Config("nowhere:app").bind_socket() is held
