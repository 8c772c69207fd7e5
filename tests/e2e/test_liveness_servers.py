"""An environment's server that dies in a run on Ray: named within 10 s, and nothing of the run stays (F15, A16)."""

from __future__ import annotations

import re
import time

import pytest
import yaml

from calculator_server import rows, serving, write_rows
from homes import Home, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMED_WITHIN_S = 10.0
ENDED_WITHIN_S = 60.0


@pytest.fixture
def home(tmp_path, toy):
    made = Home(tmp_path, toy("q"))
    yield made
    made.kill_all()


def attach(home, url):
    recipe = yaml.safe_load(home.recipe.read_text())
    write_rows(home.folder / "rows.jsonl", rows(8))
    recipe["data"] = {key: {"data_path": "rows.jsonl"} for key in ("train", "validation")}
    recipe["env"] = {"environments": {"calculator": {"url": url}}}
    recipe["sft_warmup"] = {"steps": 0}
    home.recipe.write_text(yaml.safe_dump(recipe))


def test_f15_8_an_environment_server_killed_in_step_2_ends_the_run_and_the_next_start_works(home):
    with serving("--ignore-sigterm") as server:
        attach(home, server.url)
        process = home.start("grpo.max_num_steps=100000", "grpo.max_num_epochs=100000")
        home.wait_for_step(1, process)
        server.kill()
        began = time.monotonic()
        said = f"environment server calculator at {server.url} is gone"
        log = home.run_dir / "logs" / "run.log"
        while said not in log.read_text():
            assert time.monotonic() < began + ENDED_WITHIN_S, log.read_text()
            time.sleep(0.05)
        named = time.monotonic() - began
        output, _ = process.communicate(timeout=ENDED_WITHIN_S)
        assert gone(home, max(0.0, began + ENDED_WITHIN_S - time.monotonic())), home.processes()
        assert named < NAMED_WITHIN_S
        assert process.returncode == 1, output
        assert re.search(rf"^gymloop: .*{re.escape(said)}", output, re.MULTILINE), output
    last = home.metrics()[-1]["step"]
    with serving() as server:
        attach(home, server.url)
        code, output = home.train("--resume", f"grpo.max_num_steps={last + 1}", "grpo.max_num_epochs=100000")
        assert code == 0, output
        assert server.exit_code is None
