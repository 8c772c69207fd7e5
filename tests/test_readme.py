"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from gymloop.gym.session import InProcessSource
from gymloop.gym.sources import load_environment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


async def test_the_environment_in_20_lines_can_be_played(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    body = code[1].split("class Counter", 1)[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
    (tmp_path / "readme_counter.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path))

    source = InProcessSource("counter", load_environment("readme_counter:Counter", "README"))
    row = source.generate(3, seed=1)[0]
    session = await source.seed_session(row)
    for count in range(1, row["target"] + 1):
        assert (await session.verify({"output": []})).reward == 0.0
        assert await session.call_tool("increment", {"by": 1}) == str(count)
    assert (await session.verify({"output": []})).reward == 1.0
    await session.close()


def test_the_two_commands_and_every_linked_file_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("quickstart", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
