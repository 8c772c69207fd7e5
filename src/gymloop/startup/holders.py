"""Who listens on a port, as far as this user may see it: what ``ss -ltnp`` would print."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"


def listeners(low: int, high: int) -> dict[int, str]:
    """The ports of ``low..high`` that are listened on, each with its process as ``name (pid 123)``, if it can be seen.

    Empty where there is no /proc.
    """
    sockets: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == _LISTEN and low <= port <= high:
                sockets[f"socket:[{fields[9]}]"] = port
    found = dict.fromkeys(sorted(sockets.values()), "another user's process")
    for process in Path("/proc").iterdir() if sockets else ():
        if process.name.isdigit():
            for link in _links(process / "fd"):
                if link in sockets:
                    found[sockets[link]] = f"{_name(process)} (pid {process.name})"
    return found


def _links(folder: Path) -> list[str]:
    links = []
    try:
        for entry in folder.iterdir():
            links.append(os.readlink(entry))
    except OSError:  # another user's, or it has just ended
        pass
    return links


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "a process that has ended"
