"""How long until a NeMo Gym environment takes rollouts: gymloop's host against NeMo Gym's own RunHelper.

    python benchmarks/gym_start.py --gym FOLDER [--server workplace_assistant] [--pairs 3] [--cold]

Each measurement is a fresh process, timed from before it is started until resources server, agent and model face have
answered; no model is loaded on either side. Both use the same installed NeMo Gym and the same config file. gymloop
starts the resources server from its own process, in which the agent is a coroutine and the generation server a thread.
RunHelper starts resources server, agent, relay and model proxy, with the fastest settings it has: environments that
exist already and no probe of the model. Sides alternate, so that a slow spell of the machine falls on both. CPU is that
of all processes of a side until they have ended, seconds.

RunHelper starts Ray, which kills itself where its dashboard's agent is not up within 15 s, as on a loaded machine. A
start that fails is told and tried again, twice at most, then with a Ray that goes without its dashboard's packages,
which is the faster start and so in RunHelper's favour.

Warm, the exit status is 1 when gymloop's best start takes more than 5/23.5 of RunHelper's: 5 s where that takes 23.5.

Without ``--cold`` the environment exists and files are in the page cache (one start of each is not counted). With it,
each side first makes its environment with an empty package cache. RunHelper needs Python 3.13; FOLDER is an environment
of `gymloop gym install --python python3.13`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from gymloop.lifeline import reaped

BEGUN = time.monotonic()
GOAL_SHARE = 5.0 / 23.5
"""Of RunHelper's time, warm: 5 s on a machine on which its best start took 23.5 s."""
LIMIT_S = 900.0
TRIES = 3
RUN_HELPER = """
import json, signal, sys
signal.alarm(int(sys.argv[2]))
if sys.argv[3] == "light":
    import ray._private.utils as utils
    utils.get_dashboard_dependency_error = lambda: ImportError("left out")
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from omegaconf import OmegaConf
helper = RunHelper()
try:
    helper.start(GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(json.loads(sys.argv[1])),
        skip_load_from_cli=True, skip_load_from_dotenv=True))
    print("READY", flush=True)
    sys.stdin.readline()
finally:
    helper.shutdown()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gym", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--server", default="workplace_assistant")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        asyncio.run(host_once(args.gym, args.server, args.cold))
        return
    print(f"{args.server}, {'cold' if args.cold else 'warm'}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    measured: dict[str, list[tuple[float, float]]] = {"gymloop": [], "RunHelper": []}
    for pair in range(args.pairs + (0 if args.cold else 1)):
        for side, taken in measured.items():
            found = measure(side, args)
            if found is not None and (args.cold or pair > 0):
                taken.append(found)
            counted = "" if args.cold or pair > 0 else "  (not counted)"
            if found is not None:
                print(f"{side:10} {found[0]:6.1f} s  {found[1]:6.1f} CPU-s{counted}", flush=True)
    if not all(measured.values()):
        missing = " and ".join(side for side, taken in measured.items() if not taken)
        raise SystemExit(f"no ratio: {missing} never became ready")
    for at, unit in ((0, "wall"), (1, "CPU")):
        ours, theirs = (statistics.median(one[at] for one in measured[side]) for side in measured)
        print(f"{unit}: gymloop {ours:.1f} s, RunHelper {theirs:.1f} s, ratio {theirs / ours:.1f}")
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if not args.cold:
        ours, theirs = (min(one[0] for one in measured[side]) for side in measured)
        met = ours <= GOAL_SHARE * theirs
        print(f"{'met   ' if met else 'MISSED'} at most {GOAL_SHARE:.2f} of RunHelper's best: {ours / theirs:.2f}")
        raise SystemExit(0 if met else 1)


def measure(side: str, args: argparse.Namespace) -> tuple[float, float] | None:
    """Wall and CPU seconds of one start; None where it failed every time."""
    for attempt in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="gs") as folder:  # short, as Ray's sockets need it
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                with reaped():  # RunHelper's Ray outlives a failed start
                    if side == "gymloop":
                        wall = gymloop(args, Path(folder))
                    else:
                        wall = run_helper(args, Path(folder), light=attempt > 0)
            except NotReady as failure:
                print(f"{side:10} failed at load {os.getloadavg()[0]:.1f}: {failure}", flush=True)
                continue
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return None


class NotReady(Exception):
    """A start failed; the message has the end of its output."""


def gymloop(args: argparse.Namespace, folder: Path) -> float:
    command = [sys.executable, __file__, "--child", "--gym", str(args.gym), "--server", args.server]
    environ = dict(os.environ)
    if args.cold:
        command.append("--cold")
        environ |= {"GYMLOOP_CACHE": str(folder / "cache"), "UV_CACHE_DIR": str(folder / "uv")}
    return timed(command, environ, folder)


async def host_once(folder: Path, server: str, cold: bool) -> None:
    import gymloop.gym.agent  # noqa: F401  (the agent's part of the start)
    from gymloop.gym.nemo.host import Gym, close, host
    from gymloop.gym.nemo.install import Installation, Wanted, install, run_ray
    from gymloop.serving.server import GenerationServer
    from gymloop.startup.sockets import hold_socket

    imported = time.monotonic()
    sock = hold_socket(20000, 29999)
    model = GenerationServer(sock, "none", None)
    starting = asyncio.create_task(asyncio.to_thread(model.start))
    python = str(folder / "bin" / "python")
    installation = install(Wanted(ray=run_ray(), python=python), print) if cold else Installation.at(folder)
    gym = Gym.load(installation, {"config_paths": [config(server)]}, [], os.environ)
    read = time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        servers = await host(gym, Path(logs), model=sock.getsockname()[:2])
        await starting
        print("READY", flush=True)
        parts = {"imports": imported - BEGUN, "configs": read - imported, "servers": time.monotonic() - read}
        print(" + ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items()), file=sys.stderr)
        await asyncio.to_thread(sys.stdin.readline)
        await close(servers)
    model.close()


def run_helper(args: argparse.Namespace, folder: Path, *, light: bool) -> float:
    types = ("resources_servers/" + args.server, "responses_api_agents/simple_agent",
             "environment_servers/legacy_agent", "responses_api_models/vllm_model")  # fmt: skip
    if not args.cold:
        for one in types:
            (folder / "venvs" / one).mkdir(parents=True)
            (folder / "venvs" / one / ".venv").symlink_to(args.gym.resolve())
    (folder / "uv.toml").write_text('[pip]\npython-version = "3.13.14"\n')
    given = {
        "config_paths": [config(args.server), "responses_api_models/vllm_model/configs/vllm_model.yaml"],
        "policy_model_name": "none",
        "policy_api_key": "none",
        "policy_base_url": ["http://127.0.0.1:9/v1"],
        "model_endpoint_readiness_timeout_seconds": 0,
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "uv_venv_dir": str(folder / "venvs"),
        "uv_cache_dir": str(folder / "uv"),
        "skip_venv_if_present": not args.cold,
    }
    environ = {**os.environ, "UV_CONFIG_FILE": str(folder / "uv.toml"), "RAY_TMPDIR": str(folder)}
    bins = f"{args.gym.resolve() / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    if light:  # nor does it start workers, at niceness 15, that nothing here needs
        environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    python = str(args.gym.resolve() / "bin" / "python")
    command = [python, "-c", RUN_HELPER, json.dumps(given), str(int(LIMIT_S)), "light" if light else "whole"]
    return timed(command, environ | {"PATH": bins}, folder)


def timed(command: list[str], environ: dict[str, str], folder: Path) -> float:
    """Wall time until the child says READY; it and all it started have ended on return.

    Raises:
        NotReady: it ended, or took too long.
    """
    with (folder / "output").open("w") as output:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            ready = any(line.strip() == "READY" for line in process.stdout)
            wall = time.monotonic() - begun
        finally:
            limit.cancel()
        try:
            process.communicate("\n" if ready else None, timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    said = (folder / "output").read_text()
    if not ready:
        raise NotReady(f"{Path(command[0]).name} did not become ready:\n{said[-2000:]}")
    for line in said.splitlines():
        if line.startswith("imports "):
            print(f"{'':10} {line}")
    return wall


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def config(server: str) -> str:
    return f"resources_servers/{server}/configs/{server}.yaml"


if __name__ == "__main__":
    main()
