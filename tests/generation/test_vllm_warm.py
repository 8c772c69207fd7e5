"""What vLLM would start a process for is done in a fork of the one that has imported it, or fails with its cause."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCRIPT = """
import gc, os, pathlib, signal
from gymloop.generation.vllm import warm

def wrong():
    raise ValueError("no such layer")

def titled():
    import setproctitle  # which vLLM names its processes with
    setproctitle.setproctitle("VLLM::of-a-test")
    return pathlib.Path("/proc/self/cmdline").read_text().rstrip(chr(0))

if __name__ == "__main__":
    warm.begin({})
    from vllm.model_executor.models import registry
    model, before = registry.ModelRegistry.models["LlamaForCausalLM"], registry._run_in_subprocess
    registry._SUBPROCESS_COMMAND = ["false"]  # what vLLM would start otherwise
    with warm.inspecting():
        print(model.inspect_model_cls().is_text_generation_model)
    print(registry._run_in_subprocess is before)
    here = os.getpid()
    print(warm.in_a_fork(lambda: os.getpid() != here))
    print(warm.in_a_fork(titled))
    print(warm.in_a_fork(lambda: (gc.isenabled(), gc.get_freeze_count() > 100_000)))
    for work in (wrong, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        try:
            warm.in_a_fork(work)
        except RuntimeError as error:
            print(str(error).splitlines()[-1])
"""


def test_a_fork_looks_at_a_models_class_has_a_title_of_its_own_collects_garbage_and_says_what_goes_wrong(tmp_path):
    script = tmp_path / "look.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "True",
        "True",
        "VLLM::of-a-test",
        "(True, True)",
        "ValueError: no such layer",
        "the process that looks at the model's class ended with -9",
    ]
