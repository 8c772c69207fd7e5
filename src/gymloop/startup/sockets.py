"""A port is reserved by listening on it, once, and never let go.

Finding a free port and binding it later loses the port to whoever comes between. The socket returned here is the one
that the server will serve on: its address can be given away at once, and stays true.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections import Counter

from gymloop.errors import ConfigError
from gymloop.startup.holders import listeners

# Spreads neighbouring process ids over the range, so that runs started together rarely try the same port.
_STRIDE = 7919
_NAMED_HOLDERS = 3


def hold_socket(low: int, high: int, host: str = "127.0.0.1") -> socket.socket:
    """Listen on some free port of ``low..high``, both included.

    The search begins at an offset that depends on the process id and uses no random stream. Two processes that meet at
    one port cannot both get it: the kernel refuses the second one's bind or, when both set SO_REUSEADDR before either
    listened, its listen.

    Args:
        low: first port.
        high: last port.
        host: address of this machine to listen on, IPv4 or IPv6.

    Returns:
        A listening socket. The kernel queues connections on it from now on, so a server should follow soon.

    Raises:
        ConfigError: every port is taken, the range is empty, or the host is no address of this machine.
    """
    if not 1 <= low <= high <= 65535:
        raise ConfigError(f"port range {low}..{high} is not a range within 1..65535 (port_range_low, port_range_high)")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, low, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} does not name an address: {error.strerror}") from error
    width = high - low + 1
    forbidden = 0
    for step in range(width):
        port = low + (os.getpid() * _STRIDE + step) % width
        try:
            return _listen(family, (address[0], port, *address[2:]))
        except OSError as error:
            if error.errno == errno.EACCES:
                forbidden += 1
            elif error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host {host!r} is not an address of this machine") from error
            elif error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    taken = f"all {width} are taken" if not forbidden else f"{width - forbidden} are taken and {forbidden} forbidden"
    raise ConfigError(
        f"no free port between {low} and {high} on {host}: {taken}{_by_whom(low, high)}; widen the range "
        "(port_range_low, port_range_high) or end what holds it"
    )


def _by_whom(low: int, high: int) -> str:
    """Those who hold most of the range, where they can be seen."""
    counted = Counter(listeners(low, high).values()).most_common(_NAMED_HOLDERS)
    return f", by {' and '.join(holder for holder, _ in counted)}" if counted else ""


def _listen(family: int, address: tuple) -> socket.socket:
    # The protocol is named because asyncio sets TCP_NODELAY on accepted connections only where it is; without it each
    # reply waits 40 ms for the peer's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # On Linux SO_REUSEADDR passes over connections in TIME_WAIT (a run started again at once) but never over a
        # listener. Elsewhere it can also steal the port of a wildcard listener, so there it stays off.
        if sys.platform == "linux":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(socket.SOMAXCONN)
    except OSError:
        sock.close()
        raise
    return sock
