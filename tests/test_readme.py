"""What the README and the pages of ``docs/`` show works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gymloop.cli import main as cli
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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def runs() -> list[tuple[str, str]]:
    """Runs and checks of shipped recipes in the pages' blocks of commands, each with the name of its page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if re.match(r"gymloop (train|check) recipes/", line)]
    return found


@pytest.mark.parametrize(("page", "line"), runs())
def test_every_run_of_a_shipped_recipe_compiles(page, line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, _, recipe, *given = shlex.split(line, comments=True)
    changed = [argument for argument in given if "=" in argument or argument.startswith("~")]
    assert cli.main(["check", recipe, *changed]) == 0, capsys.readouterr().err


def test_the_steps_to_vllm_are_in_the_readme_and_on_its_page():
    """From the quickstart to one GPU to several; and on a CPU by a target that exists."""
    steps = {
        page: [line for name, line in runs() if name == page and "vllm" in line] for page in ("README.md", "vllm.md")
    }
    for page, lines in steps.items():
        assert any("quickstart" in line and "cluster.gpus_per_node=1" in line for line in lines), page
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)$", text, re.MULTILINE)
    assert targets, "how a CPU gets vLLM"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_target_that_make_help_promises_has_something_to_do():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    promised = re.search(r"^help:\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert promised is not None
    for line in re.findall(r'"make ((?:[\w-]+ ??)+)', promised[1]):
        for target in line.split():
            assert re.search(rf"^[\w. -]*\b{target}\b[\w. -]*:.*\n\t", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page):
    """The file exists, and so does the heading after ``#``."""
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, (target, heading)
