"""Policy and engines in real processes, without Ray: what a sync needs of ``Remote``, and parties that can be held.

The forkserver has torch imported, so a process is there in a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from gymloop.errors import InfraError
from gymloop.weights.checksum import checksums
from gymloop.weights.fit import check_fits
from gymloop.weights.place import here
from gymloop.weights.receiver import WeightReceiver
from gymloop.weights.sender import WeightSender

MULTI = multiprocessing.get_context("forkserver")
MULTI.set_forkserver_preload(["torch", "torch.distributed", __name__])


def model(width: int = 256, seed: int = 0) -> torch.nn.Module:
    """Tied weights, two dtypes, sizes that are no multiple of anything, about 85 kB."""
    generator = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.Linear(width, 33).bfloat16(), torch.nn.Linear(64, width)
    )
    net[2].weight = net[0].weight
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def held_here() -> list[str]:
    """Connections, listening sockets and shared memory of a sync that this process holds."""
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    sockets = {f"socket:[{fields[9]}]" for fields in tcp}
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target in sockets or "memfd:gymloop" in target:
            found.append(target)
    return found


class Policy:
    """What ``PolicyWorker`` is to a sync."""

    def __init__(self) -> None:
        self.net = model()
        self.sender = WeightSender(self.net.named_parameters, "cpu")

    def place(self):
        return here("cpu")

    def offer_weights(self, request):
        return self.sender.offer(request)

    def release_weights(self, complete):
        return self.sender.release(complete, 5.0)

    def held(self):
        return held_here()

    def change(self):
        """Another step of training; the checksums of the weights after it."""
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.mul_(1.5)
        return checksums(self.net.named_parameters())


class Engine:
    """What ``EngineWorker`` is to a sync, with a net in place of the engine.

    Args:
        folder: where ``held`` and ``held-<pid>`` appear when it has taken ``hold_after`` pieces, and ``go`` is
            waited for.
    """

    def __init__(self, folder: Path, width: int = 256) -> None:
        self.net = model(width, seed=1)
        self.receiver = WeightReceiver("cpu")
        self.folder = folder
        self.hold_after: int | None = None
        self.broken = False

    def sync_state(self):
        return here("cpu"), self.receiver.version

    def hold(self, after: int | None):
        self.hold_after = after

    def load_weights(self, offer, version, rank):
        with self.receiver.opened(offer, version, rank) as source:
            check_fits(source, self.net)
            parameters = dict(self.net.named_parameters())
            self.broken = True
            with torch.no_grad():
                for number, piece in enumerate(source.pieces()):
                    if number == self.hold_after:
                        (self.folder / f"held-{os.getpid()}").touch()
                        (self.folder / "held").touch()
                        while not (self.folder / "go").exists():
                            time.sleep(0.01)
                    flat = parameters[piece.entry.name].view(-1)
                    flat[piece.begin : piece.begin + piece.values.numel()].copy_(piece.values)
            self.broken = False

    def held(self):
        return held_here()

    def weights(self):
        return "broken" if self.broken else checksums(self.net.named_parameters())


def serve(connection, build, args) -> None:
    torch.set_num_threads(1)
    worker = build(*args)
    sending = threading.Lock()

    def answer(number, method, args):
        try:
            outcome = (number, True, getattr(worker, method)(*args))
        except Exception as error:  # noqa: BLE001
            outcome = (number, False, error)
        with sending:
            connection.send(outcome)

    while True:
        try:
            number, method, args = connection.recv()
        except EOFError:
            os._exit(0)
        if method == "pulse":
            with sending:
                connection.send((number, True, None))
        else:
            threading.Thread(target=answer, args=(number, method, args), daemon=True).start()


class ProcessRemote:
    """A ``Remote`` whose worker is a process of its own."""

    def __init__(self, name, build, *args):
        self.name = name
        self.connection, theirs = MULTI.Pipe()
        self.process = MULTI.Process(target=serve, args=(theirs, build, args), daemon=True)
        self.process.start()
        theirs.close()
        self.numbers = itertools.count()
        self.pending: dict[int, tuple[str, Future]] = {}
        self.lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while True:
            try:
                number, fine, value = self.connection.recv()
            except (EOFError, OSError):
                break
            with self.lock:
                _, future = self.pending.pop(number)
            if future.set_running_or_notify_cancel():
                future.set_result(value) if fine else future.set_exception(value)
        with self.lock:
            self.dead = True
            pending, self.pending = self.pending, {}
        for method, future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(InfraError(f"{self.name} died during {method}"))

    dead = False

    def _start(self, method, args):
        future: Future = Future()
        with self.lock:
            if self.dead:
                future.set_exception(InfraError(f"{self.name} died before {method}"))
                return future
            number = next(self.numbers)
            self.pending[number] = (method, future)
            try:
                self.connection.send((number, method, args))
            except OSError:
                del self.pending[number]
                future.set_exception(InfraError(f"{self.name} died before {method}"))
        return future

    def refer(self, method, *args):
        return self._start(method, args)

    async def call(self, method, *args, timeout):
        async def work():
            values = [await asyncio.wrap_future(one) if isinstance(one, Future) else one for one in args]
            return await asyncio.wrap_future(self._start(method, values))

        try:
            return await asyncio.wait_for(work(), timeout)
        except TimeoutError:
            raise InfraError(f"{self.name} did not finish {method} within {timeout:.0f} s") from None

    async def check(self):
        await asyncio.wrap_future(self._start("pulse", ()))

    def symptoms(self):
        return f"; process {self.process.pid}"

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.join(10)
        self.connection.close()

    def stop(self):
        self.signal(signal.SIGSTOP)
