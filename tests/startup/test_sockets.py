"""Held sockets: two holders never share a port, whoever they are."""

import socket
import subprocess
import sys

import pytest

from gymloop.errors import ConfigError
from gymloop.startup import hold_socket
from gymloop.startup.holders import listeners


def listener(host="127.0.0.1", reuse=False, family=socket.AF_INET):
    sock = socket.socket(family)
    if reuse:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    sock.listen()
    return sock


def test_the_socket_lies_in_the_range_and_accepts_connections_from_the_first_moment():
    with hold_socket(20000, 30000) as held:
        host, port = held.getsockname()
        assert host == "127.0.0.1"
        assert 20000 <= port <= 30000
        with socket.create_connection((host, port), timeout=2):
            pass


def test_every_port_of_a_range_is_found_and_then_the_range_is_full():
    with hold_socket(20000, 60000) as anchor:
        low = anchor.getsockname()[1]
    held = []

    def hold_all():
        while True:
            held.append(hold_socket(low, low + 3))

    try:
        with pytest.raises(
            ConfigError, match=rf"no free port between {low} and {low + 3} on 127.0.0.1: all 4 are taken"
        ):
            hold_all()
        # The neighbours may be in use by others on this machine; those found must be distinct and inside.
        ports = {sock.getsockname()[1] for sock in held}
        assert len(ports) == len(held)
        assert low in ports
        assert ports <= set(range(low, low + 4))
    finally:
        for sock in held:
            sock.close()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_somebody_listens_on_is_never_taken(host, reuse):
    with listener(host, reuse) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="all 1 are taken"):
            hold_socket(port, port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs a dual-stack machine")
def test_a_port_of_a_dual_stack_listener_is_never_taken():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="all 1 are taken"):
            hold_socket(port, port)


def test_a_socket_bound_with_reuse_before_anyone_listens_gives_one_winner():
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        port = rival.getsockname()[1]
        with hold_socket(port, port), pytest.raises(OSError, match="in use"):
            rival.listen()


def test_a_port_is_free_again_at_once_although_old_connections_linger():
    with hold_socket(20000, 60000) as held:
        host, port = held.getsockname()
        client = socket.create_connection((host, port), timeout=2)
        served, _ = held.accept()
        served.close()  # the server side closes first and stays in TIME_WAIT
        client.close()
    hold_socket(port, port).close()


def test_processes_started_together_get_different_ports():
    program = (
        "import sys; from gymloop.startup import hold_socket; s = hold_socket(20000, 20999);"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        ports = [int(child.stdout.readline()) for child in children]
    finally:
        for child in children:
            child.communicate(timeout=10)
    assert len(set(ports)) == 4


@pytest.mark.parametrize(
    ("low", "high", "host", "message"),
    [
        (3000, 2999, "127.0.0.1", r"port range 3000\.\.2999"),
        (0, 10, "127.0.0.1", r"port range 0\.\.10"),
        (65000, 70000, "127.0.0.1", r"port range 65000\.\.70000"),
        (3000, 3001, "192.0.2.1", r"'192\.0\.2\.1' is not an address of this machine"),
        (3000, 3001, "no host", "'no host' does not name an address"),
    ],
)
def test_a_range_or_host_that_cannot_work_is_refused(low, high, host, message):
    with pytest.raises(ConfigError, match=message):
        hold_socket(low, high, host)


def test_a_range_that_is_full_names_who_holds_it():
    program = (
        "import sys; from gymloop.startup import hold_socket; s = [hold_socket(17100, 17102) for _ in range(3)];"
        "print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as caught:
            hold_socket(17100, 17102)
    finally:
        child.communicate(timeout=10)
    assert "no free port between 17100 and 17102 on 127.0.0.1: all 3 are taken, by " in str(caught.value)
    assert f"(pid {child.pid})" in str(caught.value)
    assert listeners(17100, 17102) == {}, "the child has ended"
