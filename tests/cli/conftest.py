"""What ``gymloop check`` finds installed, without installing it."""

from collections.abc import Callable
from importlib import metadata

import pytest

from gymloop.generation.vllm.support import DISTRIBUTIONS


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``builds(vllm="0.32.0")`` makes these builds of vLLM the installed ones, and no other; ``_`` stands for ``-``."""
    real = metadata.version

    def pretend(**versions: str) -> None:
        named = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in DISTRIBUTIONS:
                return real(name)
            if name in named:
                return named[name]
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", version)

    return pretend
