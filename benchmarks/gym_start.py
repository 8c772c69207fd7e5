"""How long until a NeMo Gym environment takes rollouts: gymloop's host against NeMo Gym's own RunHelper.

    python benchmarks/gym_start.py --gym FOLDER [--server workplace_assistant] [--pairs 3] [--cold]

Each measurement is a fresh process, timed from before it is started until every server has answered. Both sides use the
same installed NeMo Gym and the same config file. gymloop starts the resources server; its agent is a coroutine, whose
import is counted, and its model face is part of the engine. RunHelper starts resources server, agent, relay and model
proxy, with the fastest settings it has: environments that exist already and no probe of the model. Sides alternate, so
that a slow spell of the machine falls on both. CPU is that of all processes of a side, seconds.

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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gymloop.lifeline import reaped

LIMIT_S = 900.0
RUN_HELPER = """
import json, signal, sys
signal.alarm(int(sys.argv[2]))
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
            with tempfile.TemporaryDirectory() as folder:
                measure = gymloop if side == "gymloop" else run_helper
                with reaped():  # RunHelper's Ray outlives a failed start
                    wall, cpu = measure(args, Path(folder))
            counted = args.cold or pair > 0
            print(f"{side:10} {wall:6.1f} s  {cpu:6.1f} CPU-s{'' if counted else '  (not counted)'}", flush=True)
            if counted:
                taken.append((wall, cpu))
    for at, unit in ((0, "wall"), (1, "CPU")):
        ours, theirs = (statistics.median(one[at] for one in measured[side]) for side in measured)
        print(f"{unit}: gymloop {ours:.1f} s, RunHelper {theirs:.1f} s, ratio {theirs / ours:.1f}")


def gymloop(args: argparse.Namespace, folder: Path) -> tuple[float, float]:
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

    python = str(folder / "bin" / "python")
    installation = install(Wanted(ray=run_ray(), python=python), print) if cold else Installation.at(folder)
    gym = Gym.load(installation, {"config_paths": [config(server)]}, [], os.environ)
    with tempfile.TemporaryDirectory() as logs:
        servers = await host(gym, Path(logs))
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await close(servers)


def run_helper(args: argparse.Namespace, folder: Path) -> tuple[float, float]:
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
        "uv_venv_dir": str(folder / "venvs"),
        "uv_cache_dir": str(folder / "uv"),
        "skip_venv_if_present": not args.cold,
    }
    environ = {**os.environ, "UV_CONFIG_FILE": str(folder / "uv.toml"), "RAY_TMPDIR": str(folder)}
    bins = f"{args.gym.resolve() / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(args.gym.resolve() / "bin" / "python"), "-c", RUN_HELPER, json.dumps(given), str(int(LIMIT_S))]
    return timed(command, environ | {"PATH": bins}, folder)


def timed(command: list[str], environ: dict[str, str], folder: Path) -> tuple[float, float]:
    """Wall time until the child says READY, and CPU of it and of all its children until they ended."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "output").open("w") as output:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        wall = None
        for line in process.stdout:
            if line.strip() == "READY":
                wall = time.monotonic() - begun
                break
        if wall is not None:
            process.stdin.write("\n")
            process.stdin.flush()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    if wall is None:
        raise SystemExit(f"{command[0]} did not become ready:\n{(folder / 'output').read_text()[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def config(server: str) -> str:
    return f"resources_servers/{server}/configs/{server}.yaml"


if __name__ == "__main__":
    main()
