"""vLLM's processes are told apart by when they started, in an environment that is the whole process's."""

import ast
import subprocess
import sys

STARTS = """
import multiprocessing.context, os, sys, threading, time
from gymloop.errors import InfraError
from gymloop.generation.vllm import core

def start(name, until):
    engine = core.EngineCore()
    try:
        with engine.starting({f"ONLY_{name}": "1"}):
            told.append(f"{name} begins among {[one for one in os.environ if one.startswith('ONLY_')]}")
            begun.set()
            until()
            told.append(f"{name} ends")
    except InfraError as error:
        told.append(f"{name}: {error}")
        refused.set()
    finally:
        engine.close()

if __name__ == "__main__":
    core.TURN_LIMIT_S = float(sys.argv[1])
    contexts = vars(multiprocessing.context)["_concrete_contexts"]
    environment, spawn, told = dict(os.environ), contexts["spawn"], []
    begun, refused = threading.Event(), threading.Event()
    first = {"waits": lambda: time.sleep(1.0), "is refused": lambda: refused.wait(60)}[sys.argv[2]]
    threads = [threading.Thread(target=start, args=("A", first)), threading.Thread(target=start, args=("B", int))]
    for thread in threads:
        thread.start()
        begun.wait(60)
    for thread in threads:
        thread.join(60)
    left = {name for name in os.environ.items() ^ environment.items()}
    print((told, left, contexts["spawn"] is spawn))
"""


def started(tmp_path, turn_limit_s, second):
    """What two engines say that start at once, the variables they leave changed, and whether ``spawn`` is as it was."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    command = [sys.executable, str(script), str(turn_limit_s), second]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return ast.literal_eval(done.stdout.splitlines()[-1].replace("set()", "()"))


def test_engines_that_start_at_once_take_turns_and_leave_the_process_as_it_was(tmp_path):
    told, left, spawn_is_back = started(tmp_path, 60, "waits")
    assert told == ["A begins among ['ONLY_A']", "A ends", "B begins among ['ONLY_B']", "B ends"]
    assert not left
    assert spawn_is_back


def test_an_engine_whose_turn_does_not_come_says_what_it_waited_for(tmp_path):
    told, left, _ = started(tmp_path, 0.2, "is refused")
    assert told == [
        "A begins among ['ONLY_A']",
        "B: another vLLM engine of this process is still starting after 0.2 s; one starts at a time",
        "A ends",
    ]
    assert not left
