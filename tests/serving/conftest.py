"""Servers for the tests of serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from gymloop.tokens import Renderer
from gymloop.tokens.reply import reply_reader
from toys import build_toy

from .scripted import Served, servers


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory) -> Callable[..., Renderer]:
    """``renderer_of(family)``, or with a reasoning parser's name. No weights are made, so no torch is imported."""
    root = tmp_path_factory.mktemp("tokenizers")

    @cache
    def load(family: str, reasoning: str | None = None) -> Renderer:
        folder = root / family
        if not folder.exists():
            build_toy(root, family, weights=False)
        return Renderer.load(folder, reader=reply_reader("hermes", None, reasoning))

    return load


@pytest.fixture
def serve(renderer_of) -> Iterator[Callable[..., Served]]:
    """``serve(family, ...)`` starts a server with a scripted engine."""
    with servers(renderer_of) as start:
        yield start
