"""An environment whose rows may be spoilt: while a file called ``broken`` lies in its folder, some never end well."""

from __future__ import annotations

from pathlib import Path

from gymloop.errors import DataError, InfraError
from letters import Letters


class Moody(Letters):
    """Letters; beside ``broken`` the prompts of every third task fail in verify, each after its kind."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def verify(self, response):
        last = int(self.prompt.split()[-1])
        if last % 3 == 0 and (Path(self.folder) / "broken").exists():
            raise (InfraError if last % 2 else DataError)(f"no verdict on {self.prompt}")
        return super().verify(response)

    def seed(self, row):
        super().seed(row)
        self.prompt = row["responses_create_params"]["input"][0]["content"]
