"""A folder that passes for an installation of NeMo Gym: this interpreter, and one server, the tests' calculator.

Its server is started as NeMo Gym's are, told its configuration as they are, and answers the same routes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[2]
CONFIG = "resources_servers/calculator/configs/calculator.yaml"
AGENT = "calculator_simple_agent"
SERVER = "calculator"

APP = f"""
import json, os, sys, time
ray_enabled = False
name = os.environ["NEMO_GYM_CONFIG_PATH"]
config = json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])
settings = config[name]["resources_servers"]["calculator"]
print("starting", name, flush=True)
if settings.get("dies_if") and os.path.exists(settings["dies_if"]):
    print("no such dictionary: words.txt", flush=True)
    os._exit(3)
judge_key = settings["judge_key"]
sys.path.insert(0, {str(TESTS)!r})
import uvicorn
from calculator_server import application
if __name__ == "__main__":
    uvicorn.run(application(), host=settings["host"], port=settings["port"], log_level="warning")
"""
BLOCKS = f"""
calculator:
  resources_servers:
    calculator: {{entrypoint: app.py, domain: math, judge_key: "${{oc.env:CALCULATOR_JUDGE_KEY,none}}"}}
{AGENT}:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      max_steps: 1
      resources_server: {{type: resources_servers, name: calculator}}
      model_server: {{type: responses_api_models, name: policy_model}}
      datasets:
      - {{name: train, type: train, jsonl_fpath: resources_servers/calculator/data/train.jsonl}}
      - {{name: validation, type: validation, jsonl_fpath: resources_servers/calculator/data/none.jsonl}}
"""
OWN_AGENT = """
import json, os
ray_enabled = False
import httpx, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

name = os.environ["NEMO_GYM_CONFIG_PATH"]
config = json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])
own = config[name]["responses_api_agents"]["calling_agent"]
model = config["policy_model"]["responses_api_models"]["gymloop"]

async def healthz(request):
    return JSONResponse({})

async def run(request):
    params = (await request.json())["responses_create_params"]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        reply = await client.post(f"http://{model['host']}:{model['port']}/v1/responses", json=params)
    return JSONResponse({"response": reply.json(), "reward": 0.5}, status_code=reply.status_code)

uvicorn.run(
    Starlette(routes=[Route("/healthz", healthz), Route("/run", run, methods=["POST"])]),
    host=own["host"], port=own["port"], log_level="warning",
)
"""
OWN_ROW = {"responses_create_params": {"input": "hi", "tools": []}, "agent_ref": {"name": "own"}}


def make_own_agent(folder: Path) -> str:
    """An agent's server that calls the run's model itself, made in ``folder``; the name of its configuration there."""
    server = folder / "responses_api_agents" / "calling_agent"
    server.mkdir(parents=True)
    (server / "app.py").write_text(OWN_AGENT)
    model = {"type": "responses_api_models", "name": "policy_model"}
    block = {"own": {"responses_api_agents": {"calling_agent": {"entrypoint": "app.py", "model_server": model}}}}
    (folder / "own_agent.yaml").write_text(yaml.safe_dump(block))
    return "own_agent.yaml"


def make(folder: Path) -> Path:
    """The installation's folder, made in ``folder``."""
    site = folder / "lib" / "python3.13" / "site-packages"
    server = site / "resources_servers" / "calculator"
    for path in (folder / "bin", site / "nemo_gym-0.7.0.dist-info", site / "nemo_gym", server / "configs"):
        path.mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (server / "app.py").write_text(APP)
    (site / CONFIG).write_text(BLOCKS)
    return folder


def processes(installation: Path) -> list[int]:
    """Pids of the servers that run from an installation."""
    folder = str(installation / "lib" / "python3.13" / "site-packages" / "resources_servers" / "calculator")
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _works_in(int(pid), folder)]


def gone(installation: Path, within_s: float) -> bool:
    """Whether all of them end in time."""
    until = time.monotonic() + within_s
    while processes(installation) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes(installation)


def _works_in(pid: int, folder: str) -> bool:
    try:
        alive = "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        return alive and os.readlink(f"/proc/{pid}/cwd") == folder
    except OSError:
        return False
