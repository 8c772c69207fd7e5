"""The real NeMo Gym, and a private server that behaves as its configuration says, hosted by this interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from gymloop.gym.nemo.host import Gym
from gymloop.gym.nemo.install import Installation

from .real import real_gym

APP = """
import json, os, signal, subprocess, sys, time
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

name = os.environ["NEMO_GYM_CONFIG_PATH"]
config = json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])
settings = config[name]["resources_servers"]["odd"]
print("starting", name, flush=True)
if settings.get("dies") or os.path.exists(settings.get("dies_if", "")):
    raise SystemExit("no such dictionary: words.txt")
time.sleep(settings.get("sleeps", 0))
if settings.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
    with open(settings["stubborn"], "w") as file:
        file.write(str(child.pid))
    uvicorn.Server.capture_signals = __import__("contextlib").nullcontext

begun = time.monotonic()

async def healthz(request):
    if time.monotonic() - begun < settings.get("unwell_s", 0):
        return JSONResponse({"detail": "loading words"}, 503)
    return JSONResponse({"status": "ok"})

async def told(request):
    return JSONResponse({"name": name, "config": config, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd()})

async def die(request):
    print("a tool went wrong", flush=True)
    os._exit(3)

async def stand_still(request):
    print("standing still", flush=True)
    time.sleep(600)

routes = [Route("/stand_still", stand_still), Route("/healthz", healthz), Route("/told", told), Route("/die", die)]
if __name__ == "__main__":
    uvicorn.run(Starlette(routes=routes), host=settings["host"], port=settings["port"], log_level="warning")
"""


@pytest.fixture
def odd(tmp_path: Path):
    """``odd({"a": {}, "b": {"dies": True}})`` is a Gym of private servers with these settings."""
    folder = tmp_path / "resources_servers" / "odd"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    here = Installation(Path(sys.prefix), Path(sys.executable), tmp_path / "none", "0")

    def make(servers: dict[str, dict], **given) -> Gym:
        blocks = {
            name: {"resources_servers": {"odd": {"entrypoint": "app.py", **settings}}}
            for name, settings in servers.items()
        }
        (tmp_path / "odd.yaml").write_text(yaml.safe_dump(blocks))
        return Gym.load(here, {"config_paths": ["odd.yaml"], **given}, [tmp_path], {})

    return make


@pytest.fixture(scope="session")
def installation() -> Installation:
    """A real NeMo Gym."""
    return real_gym()
