"""Copies of storages in host memory or in a file: sent, fetched as often as needed, given back.

Copies run during the computation where there is a device; the memory of what leaves is held until
its copy is done, so that only few copies, and bytes, are under way at a time. Each direction has a
stream of its own, so that both lanes of the link are used. Events order them with the computation,
and not `record_stream` alone: with it memory comes back at unpredictable times. Where
there is no device a copy is done when it returns.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import SlabPart, Slabs
from tilenet.parallel.swap.in_flight import must_wait
from tilenet.parallel.swap.statistics import SwapStatistics


@dataclass
class Arrival:
    """A copy to a device, under way or done.

    Attributes:
        event: End of the copy.
        owner: Stream on which the memory was allocated.
    """

    event: torch.Event
    owner: torch.Stream

    def before_use(self, tensor: Tensor) -> None:
        """Let the stream under way wait for the bytes of a tensor."""
        stream = torch.get_device_module(tensor.device).current_stream(tensor.device)
        stream.wait_event(self.event)
        if stream != self.owner:
            tensor.record_stream(stream)

    def before_drop(self) -> None:
        """Keep this memory from other uses while the copy still writes to it."""
        self.owner.wait_event(self.event)


class CopyStreams:
    """Two streams per device, made when they are first needed."""

    def __init__(self) -> None:
        self._of: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def send(self, flat: Tensor, host: Tensor) -> torch.Event | None:
        """Begin to copy to the host.

        Args:
            flat: uint8, on any device; must live until the event.
            host: uint8, as many.

        Returns:
            The end of the copy; None if it is done.
        """
        if flat.device.type == "cpu":
            host.copy_(flat)
            return None
        # Asked before `with stream`, inside of which the answer is that stream: the wait would be
        # for nothing, and the copy of values that are not there yet.
        accelerator = torch.get_device_module(flat.device)
        computing = accelerator.current_stream(flat.device)
        out, _ = self._streams(flat.device)
        out.wait_stream(computing)
        with accelerator.stream(out):
            host.copy_(flat, non_blocking=True)
            event: torch.Event = out.record_event()
            return event

    def fetch(
        self, host: Tensor, device: torch.device, sent: torch.Event | None
    ) -> tuple[Tensor, Arrival | None]:
        """Begin to copy from the host.

        Args:
            sent: End of the copy that brought the bytes there, from whichever device; None if
                it has ended.

        Returns:
            The bytes on the device, and their arrival; None if they have arrived.
        """
        flat = torch.empty(host.shape, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            flat.copy_(host)
            return flat, None
        accelerator = torch.get_device_module(device)
        computing = accelerator.current_stream(device)
        _, back = self._streams(device)
        back.wait_stream(computing)  # which may still use the memory that `flat` has got
        if sent is not None:
            back.wait_event(sent)
        with accelerator.stream(back):
            flat.copy_(host, non_blocking=True)
            return flat, Arrival(back.record_event(), computing)

    def _streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        if device not in self._of:
            new = torch.get_device_module(device).Stream
            self._of[device] = (new(device), new(device))
        return self._of[device]


class _Leaving:
    """Copies out of a device that are under way, the oldest first."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._copies: deque[tuple[torch.Event, torch.UntypedStorage]] = deque()

    def add(self, event: torch.Event, storage: torch.UntypedStorage) -> None:
        self._copies.append((event, storage))
        self._num_bytes += storage.nbytes()
        self.wait()

    def wait(self, *, for_all: bool = False) -> None:
        """Drop those that have ended; wait for the oldest while there are too many."""
        while self._copies:
            event, storage = self._copies[0]
            full = for_all or must_wait(len(self._copies), self._num_bytes, self._most_bytes)
            if not full and not event.query():
                return
            event.synchronize()  # by the host: whichever stream owns the memory may have it then
            self._copies.popleft()
            self._num_bytes -= storage.nbytes()


@dataclass(eq=False)
class HostCopy:
    """A copy of a storage's bytes in the pool.

    Attributes:
        num_bytes: Number of bytes.
        part: Their place in the pool.
        sent: End of the copy to there; None if it has ended.
        fetches: Ends of the copies from there; the part may not be used again before.
    """

    num_bytes: int
    part: SlabPart
    sent: torch.Event | None = None
    fetches: list[torch.Event] = field(default_factory=list)

    @property
    def events(self) -> list[torch.Event]:
        """The ends of all copies to and from there."""
        return self.fetches if self.sent is None else [self.sent, *self.fetches]


class HostCopies:
    """Sends storages to a pool and fetches them back. Threads may share one.

    Args:
        slabs: The pool; closed by `close`.
        statistics: Counts copies, and the bytes in the pool.
        in_flight: Most bytes of copies under way out of each device; without a limit for devices
            that are not listed.
    """

    def __init__(
        self,
        slabs: Slabs,
        statistics: SwapStatistics,
        in_flight: Mapping[torch.device, float] | None = None,
    ) -> None:
        self.statistics = statistics
        self._in_flight = in_flight or {}
        self._slabs, self._streams = slabs, CopyStreams()
        self._lock = threading.Lock()
        self._leaving: dict[torch.device, _Leaving] = {}
        self._busy: list[HostCopy] = []
        self._released: deque[HostCopy] = deque()

    def suits(self, device: torch.device) -> bool:
        """Whether a device's storages may go to this pool."""
        return self._slabs.suits(device)

    def send(self, storage: torch.UntypedStorage) -> HostCopy:
        """Copy a storage's bytes out; the caller may drop it at once.

        Raises:
            TilenetError: There is no room.
        """
        with self._locked():
            began = perf_counter()
            copy = HostCopy(storage.nbytes(), self._take(storage.nbytes()))
            host = self._slabs.bytes_of(copy.part, copy.num_bytes)
            copy.sent = self._streams.send(_flat(storage), host)
            if copy.sent is not None:
                device = storage.device
                if device not in self._leaving:
                    self._leaving[device] = _Leaving(self._in_flight.get(device, inf))
                self._leaving[device].add(copy.sent, storage)
            self.statistics.wait_seconds += perf_counter() - began
            self.statistics.out_count += 1
            self.statistics.out_bytes += copy.num_bytes
        return copy

    def fetch(
        self, copy: HostCopy, device: torch.device
    ) -> tuple[torch.UntypedStorage, Arrival | None]:
        """A new storage with these bytes on a device, and their arrival; None if it is over."""
        with self._locked():
            began = perf_counter()
            host = self._slabs.bytes_of(copy.part, copy.num_bytes)
            flat, arrival = self._streams.fetch(host, device, copy.sent)
            if arrival is not None:
                copy.fetches.append(arrival.event)
            self.statistics.wait_seconds += perf_counter() - began
            self.statistics.in_count += 1
            self.statistics.in_bytes += copy.num_bytes
        return flat.untyped_storage(), arrival

    def release(self, copy: HostCopy) -> None:
        """Give the room of a copy back, once nothing is copied to or from it. Never waits.

        So that it may be called wherever Python frees an object, in this class' locked parts too.
        """
        self._released.append(copy)
        self._settle_if_unlocked()

    def close(self) -> None:
        """Wait for all copies, and close the pool."""
        with self._lock:
            self._settle()
            for leaving in self._leaving.values():
                leaving.wait(for_all=True)
            self._wait_for_busy()
            self._slabs.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._settle()
                for leaving in self._leaving.values():
                    leaving.wait()
                yield
        finally:
            self._settle_if_unlocked()

    def _settle_if_unlocked(self) -> None:
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._released:
            copy = self._released.popleft()
            self.statistics.host_bytes -= copy.part.size
            self._give_back(copy)

    def _take(self, num_bytes: int) -> SlabPart:
        self._give_back_idle()
        try:
            part = self._slabs.take(num_bytes)
        except TilenetError:
            if not self._busy:
                raise
            # Not full: what copies still use is room once they have ended.
            self._wait_for_busy()
            self._give_back_idle()
            part = self._slabs.take(num_bytes)
        self.statistics.host_bytes += part.size
        self.statistics.note_host_peak()
        return part

    def _give_back(self, copy: HostCopy) -> None:
        """If all its copies have ended, else look again later."""
        if all(event.query() for event in copy.events):
            self._slabs.give_back(copy.part)
        else:
            self._busy.append(copy)

    def _give_back_idle(self) -> None:
        busy, self._busy = self._busy, []
        for copy in busy:
            self._give_back(copy)

    def _wait_for_busy(self) -> None:
        for copy in self._busy:
            for event in copy.events:
                event.synchronize()


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


TRIAL_BYTES = 32 << 20


def measure_bandwidth(slabs: Slabs, device: torch.device) -> float:
    """Bytes/s of a copy out of a device or of one back, whichever is slower; closes `slabs`."""
    copies = HostCopies(slabs, SwapStatistics())
    storage = torch.zeros(TRIAL_BYTES, dtype=torch.uint8, device=device).untyped_storage()
    copies.release(copies.send(storage))  # the room is reserved, and touched, the first time
    slowest = 0.0
    for _ in range(2):
        began = perf_counter()
        copy = copies.send(storage)
        _wait(device)
        slowest = max(slowest, perf_counter() - began)
        began = perf_counter()
        copies.fetch(copy, device)
        _wait(device)
        slowest = max(slowest, perf_counter() - began)
        copies.release(copy)
    copies.close()
    return TRIAL_BYTES / slowest


def _wait(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)
