"""Broadcast to other processes, GPUs and hosts: rank 0 is the policy, each engine one more rank; gloo on CPUs, NCCL
on GPUs.

    policy   pack 0 │ pack 1 │ pack 2 ...            two buffers: one is packed while the other is sent
                    │ send 0 │ send 1 │ send 2
    engine                   │ take 0 │ take 1 ...   likewise

The group is one of its own, apart from any default group, and lives from sync to sync as long as every sync is
complete; after one that is not, both sides drop it and the next sync makes a new one. Every bucket begins with a
header that says which it is, so one that is out of turn is refused. Forming the group and every operation in it give
up after ``stall_s``: a party that is dead or stopped costs the others that long at most, and a closed connection is
noticed at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gymloop.errors import GymloopError, InfraError
from gymloop.weights.layout import ALIGN, Entry, bucket_ranges, lay_out, overlaps, read_range, total_bytes
from gymloop.weights.offer import MAX_REASON, Offer, SyncAborted, SyncRequest
from gymloop.weights.source import Piece, whole_tensors

if TYPE_CHECKING:
    import torch

    from gymloop.weights.receiver import WeightReceiver

_MAGIC = 0x67796D6C6F6F70
SENDER_RANK = 0


class Channel:
    """One process's end of a group.

    Args:
        key: names the group; both sides compare it.
        store: where the ranks find each other.
        rank: of this process.
        size: ranks in all.
        device: ``cpu`` or ``cuda``.
        address: of this process's sockets, on a CPU.
        stall_s: bounds the forming and every operation.

    Raises:
        RuntimeError: not all ranks came in time (torch's own error).
    """

    def __init__(self, key: str, store: Any, rank: int, size: int, device: str, address: str, stall_s: float) -> None:
        import torch.distributed as dist

        self.key = key
        self.device = device
        self._store = store  # lives as long as the group
        self._limit = timedelta(seconds=stall_s)
        prefixed = dist.PrefixStore(key, store)
        self._group: Any
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = self._limit
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)

    def begin(self, buffer: torch.Tensor) -> Any:
        """Begin to send, on rank 0, or receive ``buffer``; returns what ``finish`` takes.

        Raises:
            RuntimeError: another thread has closed the group, or a rank died (torch's own error).
        """
        import torch.distributed as dist

        group = self._group
        if group is None:
            raise RuntimeError("the group was closed")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.timeout = self._limit
        return group.broadcast([buffer], options)

    def finish(self, work: Any) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: a rank died or stalled (torch's own error).
        """
        work.wait(self._limit)  # given explicitly: NCCL otherwise waits on the device only

    def close(self) -> None:
        """Close the connections, which the other ranks notice. Safe to call twice, and while an operation runs."""
        group, self._group = self._group, None
        if group is not None:
            # Whatever the library says about a group that is broken already.
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._store = None


@dataclass(frozen=True, slots=True)
class ChannelCarrier:
    """Where the group meets.

    Attributes:
        key: names the group.
        host, port: of the policy's store.
        size: ranks.
        device: ``cpu`` or ``cuda``.
        bucket_bytes: of one bucket.
    """

    key: str
    host: str
    port: int
    size: int
    device: str
    bucket_bytes: int
    whole = False
    light = True

    @contextmanager
    def opened(self, offer: Offer, receiver: WeightReceiver, rank: int) -> Iterator[ChannelSource]:
        """Join the group, or go on in it; see ``Carrier.opened``. Left before the last bucket, it is closed."""
        channel = self._channel(offer, receiver, rank)
        source = ChannelSource(offer, channel, self.bucket_bytes)
        try:
            yield source
        finally:
            if not source.complete:
                receiver.channel = None
                channel.close()

    def _channel(self, offer: Offer, receiver: WeightReceiver, rank: int) -> Channel:
        import torch.distributed as dist

        if receiver.channel is not None:
            if receiver.channel.key == self.key:
                return receiver.channel
            receiver.channel.close()
            receiver.channel = None
        with aborting("could not join the policy's group"):
            limit = timedelta(seconds=offer.stall_s)
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=limit)
            address = _address_towards(self.host, self.port, offer.stall_s)
            channel = Channel(self.key, store, rank, self.size, self.device, address, offer.stall_s)
        receiver.channel = channel
        return channel


class ChannelSource:
    """The buckets as they come in; a ``WeightSource`` that is read once.

    Attributes:
        complete: whether the last bucket has been taken.
    """

    def __init__(self, offer: Offer, channel: Channel, bucket_bytes: int) -> None:
        self._offer = offer
        self._channel = channel
        self._ranges = bucket_ranges(offer.nbytes, bucket_bytes)
        self.complete = False

    @property
    def manifest(self) -> tuple[Entry, ...]:
        """One entry per parameter."""
        return self._offer.manifest

    @property
    def nbytes(self) -> int:
        """Of the flat space."""
        return self._offer.nbytes

    def pieces(self) -> Iterator[Piece]:
        """Every parameter, in pieces; see ``WeightSource.pieces``."""
        works: list[Any] = []
        try:
            yield from self._take(works)
        finally:
            works.clear()  # an operation that never ended would hold the group's connections
        self.complete = True

    def _take(self, works: list[Any]) -> Iterator[Piece]:
        import torch

        buffers = bucket_buffers(self._ranges, self._channel.device)
        for index, (begin, end) in enumerate(self._ranges):
            what = f"bucket {index + 1} of {len(self._ranges)}"
            with aborting(f"{what} did not arrive"):
                if not works:
                    works.append(self._channel.begin(_of(buffers[0], begin, end)))
                self._channel.finish(works[0])
                works.clear()
                if index + 1 < len(self._ranges):
                    works.append(self._channel.begin(_of(buffers[(index + 1) % 2], *self._ranges[index + 1])))
            buffer = buffers[index % 2]
            check_header(buffer, self._offer.version, index, begin, end)
            for entry, low, high in overlaps(self.manifest, begin, end):
                at = ALIGN + entry.offset + low - begin
                values = buffer[at : at + high - low].view(getattr(torch, entry.dtype))
                yield Piece(entry, low // values.element_size(), values)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, whole; see ``WeightSource.tensors``."""
        return whole_tensors(self.manifest, self.pieces())


class BroadcastSender:
    """The policy's side: sends from a thread of its own, so that the offer can go out meanwhile."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._carrier: ChannelCarrier | None = None
        self._sending: _Sending | None = None

    def offer(
        self, named: list[tuple[str, torch.Tensor]], request: SyncRequest, checksums: tuple[int, ...] | None
    ) -> Offer:
        """Say where the group meets, and begin to send to whoever comes.

        Raises:
            InfraError: no socket could be had.
        """
        if self._sending is not None:
            self.release(False, 0.0)
        manifest = lay_out(named)
        on_gpus = request.device == "cuda" and all(tensor.is_cuda for _, tensor in named)
        device, size, store = "cuda" if on_gpus else "cpu", request.receivers + 1, None
        carrier = self._carrier
        if carrier is None or (carrier.size, carrier.device) != (size, device):
            self.close()
            store, port = _open_store(request.address, request.stall_s)
            carrier = ChannelCarrier(uuid.uuid4().hex, request.address, port, size, device, request.bucket_bytes)
            self._carrier = carrier
        nbytes = total_bytes(manifest)
        offer = Offer(request.version, manifest, nbytes, checksums, request.stall_s, carrier)
        self._sending = _Sending(dict(named), offer, carrier, self._channel, store)
        self._sending.start()
        return offer

    def release(self, complete: bool, timeout: float) -> None:
        """The sync is over; where it is not complete the group is closed, which ends whoever is still in it.

        Raises:
            SyncAborted: all engines said that they have the weights, and yet they were not all sent.
        """
        sending, self._sending = self._sending, None
        if sending is None:
            return
        if complete:
            sending.join(timeout)
        self._channel = sending.channel
        if complete and sending.done:
            return
        sending.abandon()
        self.close()
        if complete:
            raise SyncAborted(f"the policy's sending did not end: {sending.error or f'{timeout:.0f} s passed'}")

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.abandon()
        if self._channel is not None:
            self._channel.close()
        self._channel = self._carrier = None


class _Sending:
    """One sync's sending, on a thread; ``abandon`` lets it end by itself, at the latest at its next operation."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        offer: Offer,
        carrier: ChannelCarrier,
        channel: Channel | None,
        store: Any,
    ) -> None:
        self.channel = channel
        self.done = False
        self.error: str | None = None
        self._tensors = tensors
        self._offer = offer
        self._carrier = carrier
        self._store = store
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gymloop-weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def abandon(self) -> None:
        self._abandoned.set()
        if self.channel is not None:
            self.channel.close()

    def _run(self) -> None:
        try:
            with aborting("the policy could not send its weights"):
                self._send()
        except GymloopError as error:
            self.error = str(error)

    def _send(self) -> None:
        carrier = self._carrier
        if self.channel is None:
            self.channel = Channel(
                carrier.key, self._store, SENDER_RANK, carrier.size, carrier.device, carrier.host, self._offer.stall_s
            )
        channel = self.channel
        ranges = bucket_ranges(self._offer.nbytes, carrier.bucket_bytes)
        buffers = bucket_buffers(ranges, carrier.device)
        work: Any = None
        for index, (begin, end) in enumerate(ranges):
            if self._abandoned.is_set():
                channel.close()
                return
            buffer = _of(buffers[index % 2], begin, end)
            pack(buffer, self._tensors, self._offer, index, begin, end)
            if work is not None:
                channel.finish(work)
            work = channel.begin(buffer)
        if work is not None:
            channel.finish(work)
        self.done = True


def pack(
    buffer: torch.Tensor, tensors: dict[str, torch.Tensor], offer: Offer, index: int, begin: int, end: int
) -> None:
    """Write header and range of one bucket into ``buffer``, uint8 [64 + end - begin]; done when it returns."""
    import torch

    header = torch.tensor([_MAGIC, offer.version, index, begin, end, 0, 0, 0], dtype=torch.int64)
    buffer[:ALIGN].view(torch.int64).copy_(header)
    read_range(tensors, offer.manifest, begin, end, buffer[ALIGN:])
    if not buffer.is_cuda and any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()


def check_header(buffer: torch.Tensor, version: int, index: int, begin: int, end: int) -> None:
    """Check that a bucket is the one that is due.

    Raises:
        InfraError: it is another one, of this sync or of one before.
    """
    import torch

    found = buffer[:ALIGN].view(torch.int64).tolist()
    if found != [_MAGIC, version, index, begin, end, 0, 0, 0]:
        raise InfraError(
            f"a bucket out of turn arrived: version {found[1]}, number {found[2]}; "
            f"version {version}, number {index} was due"
        )


def bucket_buffers(ranges: Sequence[tuple[int, int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers that take any of these buckets with its header."""
    import torch

    longest = max((end - begin for begin, end in ranges), default=0)
    first = torch.zeros(ALIGN + longest, dtype=torch.uint8, device=device)
    return first, torch.zeros_like(first) if len(ranges) > 1 else first


@contextmanager
def aborting(what: str) -> Iterator[None]:
    """torch's errors about a group become one sentence.

    Raises:
        SyncAborted: in their place.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:  # DistError and its children are RuntimeErrors
        # Calls that have ended hold the operation, and that the connections, for as long as anybody keeps the error.
        traceback.clear_frames(error.__traceback__)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:MAX_REASON]
        raise SyncAborted(f"{what}: {reason}") from error


def _of(buffer: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return buffer[: ALIGN + end - begin]


def _open_store(address: str, stall_s: float) -> tuple[Any, int]:
    """A store on a port of the kernel's choice, bound to one address only."""
    import torch.distributed as dist

    try:
        listening = socket.create_server((address, 0))
    except OSError as error:
        raise InfraError(f"no socket could be bound to {address} for the weight sync: {error}") from error
    port = listening.getsockname()[1]
    with aborting("the store of the weight sync could not be opened"):
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=stall_s),
            master_listen_fd=listening.detach(),
        )
    return store, port


def _address_towards(host: str, port: int, timeout: float) -> str:
    """The address of this machine that ``host`` can answer."""
    with socket.create_connection((host, port), timeout) as connection:
        return str(connection.getsockname()[0])
