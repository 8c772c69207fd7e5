"""A worker that dies in any phase of a run on Ray is named within 10 s, with the phase and the end of its log.

The toy's phases last milliseconds. So a worker that a phase will need is stopped (SIGSTOP) in the phase before, which
does without it: the run then waits in the midst of the phase for the kill, however fast or slow the machine is.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from homes import Home, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NAMED_WITHIN_S = 10.0
ENDED_WITHIN_S = 40.0
"""The name is said at once; what is torn down then takes its time on a busy machine."""
SAID_WITHIN_S = 150.0
RUN = (
    "grpo.max_num_steps=1000",
    "grpo.max_num_epochs=1000",
    "grpo.val_period=1",
    "grpo.max_val_samples=60",
    "data.validation.num_tasks=60",
    "data.train.num_tasks=400",
    "sft_warmup.steps=200",
)
NO_WARM_UP = (*RUN, "sft_warmup.steps=0")
# A toy's few rollouts last milliseconds, less than a kill takes: this many are under way for seconds.
MANY_ROLLOUTS = (*NO_WARM_UP, "grpo.num_prompts_per_step=100", "grpo.num_generations_per_prompt=8")
SOME_ROLLOUTS = (*NO_WARM_UP, "grpo.num_prompts_per_step=20", "grpo.num_generations_per_prompt=8")
MANY_ROWS = (*NO_WARM_UP, "grpo.max_val_samples=800", "data.validation.num_tasks=800")


@pytest.fixture
def home(tmp_path, toy):
    made = Home(tmp_path, toy("q"))
    yield made
    made.kill_all()


def until(home, process, condition, what):
    """Wait until ``condition`` holds of the text of the run's log; returns what it gave."""
    log = home.run_dir / "logs" / "run.log"
    deadline = time.monotonic() + SAID_WITHIN_S
    while True:
        text = log.read_text() if log.exists() else ""
        if found := condition(text):
            return found
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{what} did not come within {SAID_WITHIN_S:.0f} s:\n{text}"
        time.sleep(0.002)


def log_of(home, name):
    return home.run_dir / "logs" / f"{name}.log"


def actor(home, name):
    """Pid of an actor: its log file is its standard output. None until it has written to that."""
    log = log_of(home, name)
    if not log.exists() or not log.stat().st_size:
        return None
    for pid in home.processes():
        try:
            if os.path.realpath(f"/proc/{pid}/fd/1") == str(log):
                return pid
        except OSError:
            continue
    return None


HELD_IN_SYNC = (
    ("step 1: rollouts", "policy", signal.SIGSTOP),
    ("step 1: update", "engine", signal.SIGSTOP),
    ("step 1: update", "policy", signal.SIGCONT),
    ("step 1: weight sync", None, None),
)
HELD_IN_UPDATE = (("step 1: rollouts", "policy", signal.SIGSTOP), ("step 1: update", None, None))
HELD_IN_SAVE = (("validation on 800 rows", "policy", signal.SIGSTOP), ("step 1: saving", None, None))
CASES = {
    # who is killed; what is done before, each when the log says so; the phase that is named
    "policy_in_startup": ("policy", (("policy: waits for", None, None),), r"startup \(.*policy"),
    "engine_in_startup": ("engine", (("engine: waits for", None, None),), r"startup \(.*engine"),
    "policy_in_warmup": ("policy", (("warm-up 2/200", None, None),), r"warm-up \d+/200"),
    "engine_in_rollouts": ("engine", (("step 1: rollouts", None, None),), "step 1: rollouts"),
    "policy_in_update": ("policy", HELD_IN_UPDATE, "step 1: update"),
    "policy_in_weight_sync": ("policy", HELD_IN_SYNC, "step 1: weight sync"),
    "engine_in_weight_sync": ("engine", HELD_IN_SYNC, "step 1: weight sync"),
    "engine_in_validation": ("engine", (("validation on 800 rows", None, None),), "validation on 800 rows"),
    "policy_in_save": ("policy", HELD_IN_SAVE, "step 1: saving"),
}

# The phase in which a signal is sent has to last for much longer than that takes.
HOW = {
    "policy_in_warmup": RUN,
    "engine_in_rollouts": MANY_ROLLOUTS,
    "policy_in_update": SOME_ROLLOUTS,
    "policy_in_weight_sync": SOME_ROLLOUTS,
    "engine_in_weight_sync": SOME_ROLLOUTS,
    "engine_in_validation": MANY_ROWS,
    "policy_in_save": MANY_ROWS,
}


@pytest.mark.parametrize("case", CASES)
def test_f15_a_worker_that_dies_in_any_phase_is_named_within_10_s_with_the_phase_and_its_log(home, case):
    name, script, phase = CASES[case]
    process = home.start(*HOW.get(case, NO_WARM_UP))
    try:
        pids = {}
        if "startup" not in case:
            until(home, process, lambda text: "weights: started" in text, "the end of loading")
            pids = {each: actor(home, each) for each in ("engine", "policy")}
        for said, who, number in script:
            until(home, process, lambda text, said=said: said in text, said)
            if who is not None:
                os.kill(pids[who], number)
        pid = pids.get(name) or until(home, process, lambda _: actor(home, name), f"the {name}'s process")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        named = until(home, process, lambda text: re.search(r"failed in (?s:.*)", text), "the name of what died")
        seconds = time.monotonic() - began
        output, _ = process.communicate(timeout=ENDED_WITHIN_S)
        assert process.returncode == 1, output
        assert seconds < NAMED_WITHIN_S, output
        final_note = f"  {name}.log: {log_of(home, name).read_text().splitlines()[-1]}"
        assert re.match(rf"failed in {phase}.*: .*{name} died during ", named[0]), named[0]
        assert final_note in named[0]
        assert re.search(rf"^failed in {phase}.*: .*{name} died during ", output, re.MULTILINE), output
        last = output[output.rindex("\ngymloop: ") :]
        assert f"{name} died during " in last
        assert final_note in last
        assert gone(home, NAMED_WITHIN_S), home.processes()
        assert not list((home.run_dir / "checkpoints").glob("tmp_*"))
    finally:
        home.kill_all()
