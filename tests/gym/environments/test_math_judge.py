"""Answers are compared in processes that may be lost: what is equal, what is hostile, and what is nobody's fault."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.environments import math_judge
from gymloop.gym.environments.math_judge import Judge, require_math_verify


@pytest.fixture(scope="module")
def judge():
    made = Judge(seconds=2.0, processes=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2", "0.5"),
        ("\\frac12", "0.5"),
        ("0.5", "\\frac{1}{2}"),
        ("\\frac{2}{4}", "1/2"),
        ("1/3", "0.333333"),
        ("3 \\frac{1}{2}", "3.5"),
        ("-3", "-3.0"),
        ("1000", "1,000"),
        ("10^{10}", "10000000000"),
        ("50\\%", "0.5"),
        ("5", "5 cm"),
        ("5\\text{ cm}", "5"),
        ("12", "$12"),
        ("\\{1, 2\\}", "\\{2, 1\\}"),
        ("1, 2", "2, 1"),
        ("3", "x = 3"),
        ("x = 3", "3"),
        ("\\sqrt{8}", "2\\sqrt2"),
        ("x^2+2x+1", "(x+1)^2"),
        ("[0,1)", "[0, 1)"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
        ("\\text{Evelyn}", "Evelyn"),
    ],
)
def test_one_answer_in_two_forms_is_equal(judge, gold, answer):
    assert judge.compare(gold, answer) == "equal"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2", "3"),
        ("1/3", "0.33"),
        ("(1,2)", "(2,1)"),
        ("\\{1, 2\\}", "\\{1, 2, 3\\}"),
        ("\\{1, 2\\}", "1"),
        ("1", "1 \\text{ or } 2"),
        ("1", ""),
        ("[0,1)", "[0,1]"),
        ("A", "B"),
        ("7", "\x00"),
        ("7", "\ud800"),
        ("7", '"}\n{"gold": "7"'),
    ],
)
def test_another_answer_is_different(judge, gold, answer):
    assert judge.compare(gold, answer) == "different"


def test_the_answer_is_found_in_a_text_where_that_is_asked_for(judge):
    assert judge.compare("5", "The answer is 5.", extract=True) == "equal"
    assert judge.compare("0.5", "so $x = \\frac{1}{2}$", extract=True) == "equal"
    assert judge.compare("5", "I cannot say", extract=True) == "different"


def test_a_right_answer_that_is_no_mathematics_is_told_apart(judge):
    assert judge.compare("", None) == "gold_unreadable"
    assert judge.compare("\\frac{1}{2}", None) == "readable"


HOSTILE = {
    "tower of powers": "9^{9^{9^{9}}}",
    "tower of powers, plain": "9**9**9**9",
    "a number too long to write": "10^{10^{10}}",
    "a factorial": "100000000!",
    "binomial": "\\binom{10^9}{10^8}",
    "parentheses": "(" * 300 + "1" + ")" * 300,
    "braces": "{" * 900 + "1" + "}" * 900,
    "fractions": "\\frac{" * 200 + "1" + "}{2}" * 200,
    "symbols": "x" * 2000,
    "open braces": "{" * 2000,
}


QUICK = {"tower of powers, plain", "a number too long to write", "braces"}


@pytest.mark.parametrize(
    "answer",
    [pytest.param(text, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, text in HOSTILE.items()],
)
def test_a_hostile_answer_is_bounded_and_not_right(answer):
    judge = Judge(seconds=0.5, processes=1)
    begun = time.monotonic()
    try:
        assert judge.compare("7", answer) in ("different", "out_of_time", "out_of_memory")
        assert judge.compare("1/2", "0.5") == "equal"  # the next one is not harmed
        assert time.monotonic() - begun < 60  # two starts and half a second of CPU time, on a machine that is busy
    finally:
        judge.close()


def test_what_no_python_code_can_interrupt_is_ended_by_the_kernel(monkeypatch, tmp_path):
    """A child whose library call neither returns nor lets signals in, as a long call into C."""
    stubborn = tmp_path / "child.py"
    source = math_judge._CHILD.read_text().replace("    raise OutOfTime\n", "    return\n")
    stubborn.write_text(source)
    monkeypatch.setattr(math_judge, "_CHILD", stubborn)
    judge = Judge(seconds=0.5, processes=1)
    try:
        assert judge.compare("7", "10^{10^{10}} + 9^{9^{9^{9}}}") == "out_of_time"
    finally:
        judge.close()


def child(tmp_path, body: str):
    path = tmp_path / "child.py"
    path.write_text(f"import os, sys, time\n{body}")
    return path


def test_an_answer_that_brings_the_process_down_twice_is_its_own_fault(monkeypatch, tmp_path):
    crash = (
        "print('ready', flush=True)\nfor line in sys.stdin:\n"
        "    os.abort() if 'bad' in line else print('equal', flush=True)\n"
    )
    monkeypatch.setattr(math_judge, "_CHILD", child(tmp_path, crash))
    judge = Judge(seconds=1, processes=1)
    assert judge.compare("7", "bad") == "crashed"
    assert judge.compare("7", "good") == "equal"
    judge.close()


def test_a_process_that_is_killed_from_outside_is_replaced_and_the_comparison_made_again(judge):
    assert judge.compare("1/2", "0.5") == "equal"
    (process,) = judge._alive
    os.kill(process._popen.pid, signal.SIGKILL)
    assert judge.compare("1/2", "0.5") == "equal"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit('no libraries here')", "did not start: no libraries here"),
        ("print('hello', flush=True)\ntime.sleep(60)", "did not start: it said 'hello'"),
        ("print('ready', flush=True)\ntime.sleep(60)", "was silent for 0.6 s"),
        ("print('ready', flush=True)\nfor line in sys.stdin: print('fine', flush=True)", "said 'fine'"),
    ],
)
def test_what_is_not_the_answers_doing_is_an_infra_error_and_no_verdict(monkeypatch, tmp_path, body, said):
    monkeypatch.setattr(math_judge, "_CHILD", child(tmp_path, body))
    monkeypatch.setattr(math_judge, "_STUCK_S", 0.1 if "silent" in said else 60.0)
    judge = Judge(seconds=0.5, processes=1)
    with pytest.raises(InfraError, match=said):
        judge.compare("7", "8")
    with pytest.raises(InfraError, match=said):  # the place of the lost process is not lost with it
        judge.compare("7", "8")
    judge.close()
    assert not judge._alive


def test_threads_share_the_processes(judge):
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(judge.compare(str(n), f"{n}.0")), daemon=True)
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["equal"] * 8
    assert len(judge._alive) == 1


def test_the_processes_end_with_the_one_that_asks(tmp_path):
    code = (
        "import os\nfrom gymloop.gym.environments.math_judge import Judge\n"
        "judge = Judge(1.0, processes=1)\njudge.compare('1/2', '0.5')\n"
        "(process,) = judge._alive\nprint(process._popen.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    pid = int(done.stdout)
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_without_math_verify_the_sentence_has_the_command(monkeypatch):
    require_math_verify()
    monkeypatch.setattr(math_judge, "_there", lambda name: name != "antlr4")
    said = r"antlr4 cannot be imported; run `pip install -e '\.\[math\]'` in gymloop's checkout"
    with pytest.raises(ConfigError, match=said):
        require_math_verify()


def test_nothing_of_sympy_is_loaded_by_the_process_that_asks():
    code = (
        "import sys\nfrom gymloop.gym.environments import Math\nMath()\n"
        "print(sorted({'sympy', 'math_verify', 'latex2sympy2_extended'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_comparison_leaves_the_event_loop_free(judge):
    async def beside() -> int:
        comparing = asyncio.create_task(asyncio.to_thread(judge.compare, "7", "9^{9^{9^{9}}}"))
        beats = 0
        while not comparing.done():
            await asyncio.sleep(0.02)
            beats += 1
        assert comparing.result() == "out_of_time"
        return beats

    assert asyncio.run(beside()) > 10
