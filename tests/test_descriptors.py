"""The bound on open descriptors is raised by whoever opens many, in the process that does."""

import resource
import subprocess
import sys

import pytest

START = """
import asyncio, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
{opens}
soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
sys.exit(0 if soft == hard else f"{{soft}} of {{hard}}")
"""
CLIENT = "from gymloop.gym.connections import Connections\nConnections('http://127.0.0.1:9', limit=1)"
SERVER = """
import socket
from gymloop.serving.server import GenerationServer
sock = socket.create_server(("127.0.0.1", 0))
server = GenerationServer(sock, "toy", None)
server.start()
server.close()
"""


@pytest.mark.parametrize("opens", [CLIENT, SERVER], ids=["client", "server"])
def test_a_process_that_opens_many_connections_may(opens):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 256:
        pytest.skip("this user may not open more than 256 descriptors")
    done = subprocess.run(
        [sys.executable, "-c", START.format(opens=opens)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
