"""Training steps under a device limit: the ways to keep one, and the bytes and seconds of a step.

On a GPU the limit is torch's own. On a CPU, which has no tier below its memory, a device is played:
the bytes of all tensors that live during a step are counted (weights, gradients, the optimizer's
state, images among them), and the step trains where their peak is within the limit. What is swapped
out lies in a memory-mapped file and does not count; nor does what operations take inside.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from bench.swapping.lms_networks import Kind, labels_of
from bench.swapping.measure import measure_groups
from tilenet.errors import TilenetError
from tilenet.parallel.swap.actions import Action
from tilenet.parallel.swap.copies import CopyStreams
from tilenet.parallel.swap.host_pool import FileSlabs, PinnedSlabs, Slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.swap.groups import LayerGroup
from tilenet.swapping import swapping

__all__ = ["Place", "Seconds", "Training", "Way", "bandwidth", "peak_of", "seconds_side_by_side"]


@dataclass(frozen=True)
class Place:
    """Where is trained.

    Attributes:
        device: A GPU, or the CPU as one.
        limit_bytes: Of its memory.
        host_limit_bytes: Of what is swapped out.
        width: Channels that networks begin with.
        bandwidth: Bytes a second to the host, and as many back, as measured.
    """

    device: torch.device
    limit_bytes: int
    host_limit_bytes: int
    width: int
    bandwidth: float = 1e9

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def min_bytes(self) -> int:
        """Smaller storages are not swapped: of a device as small, what 1 MiB is of 1 GiB."""
        return min(1 << 20, self.limit_bytes >> 10)


@dataclass(frozen=True)
class Way:
    """How a step keeps the limit.

    Attributes:
        mode: `off`, `checkpointing`, `swap` or `auto`.
        saved_limit_bytes: Of saved storages on the device, where they are swapped.
        actions: Of `auto`, one per layer group and one for the loss.
    """

    mode: str
    saved_limit_bytes: int = 0
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Seconds:
    """Of a step, or the least of several.

    Attributes:
        step: What is compared. Of a CPU its processor time, which other programs disturb less: it
            works on one thread and waits for nobody but the disk, if at all.
        wall: By the clock.
    """

    step: float = inf
    wall: float = inf

    def least(self, other: "Seconds") -> "Seconds":
        """The less of both, each by itself."""
        return Seconds(min(self.step, other.step), min(self.wall, other.wall))


class Training:
    """A network, its optimizer and a batch of random images.

    Args:
        batch: Images.
        side: Pixels of their side.
    """

    def __init__(self, kind: Kind, place: Place, batch: int, side: int) -> None:
        torch.manual_seed(side + batch)
        self._place = place
        self.model = kind.build(place.width).train().to(place.device)
        self.pixels = batch * side**kind.dimensions
        shape = batch, kind.bands, *(side,) * kind.dimensions
        self._images = torch.randn(shape).to(place.device)
        self._labels = labels_of(kind, batch, side).to(place.device)
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, momentum=0.9)
        # Momentum is made by a step: by one that changes nothing.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Train one step."""
        self._backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradients(self, way: Way) -> list[Tensor]:
        """Those of the parameters; nothing is trained."""
        with self.under(way):
            self._backward()
        found = [parameter.grad for parameter in self.model.parameters()]
        self._optimizer.zero_grad()
        return [one for one in found if one is not None]

    @contextmanager
    def under(self, way: Way) -> Iterator[SwapStatistics]:
        """Steps inside go this way."""
        self.model.checkpointing = way.mode == "checkpointing"
        if way.mode in ("off", "checkpointing"):
            yield SwapStatistics()
            return
        with swapping(
            self.model,
            limit_bytes=way.saved_limit_bytes,
            min_bytes=self._place.min_bytes,
            swap_dir=None if self._place.cuda else tempfile.gettempdir(),
            host_limit_bytes=self._place.host_limit_bytes,
            actions=dict(zip(self._groups, way.actions, strict=True)) if way.actions else None,
        ) as counted:
            yield counted

    def measured(self) -> tuple[LayerGroup, ...]:
        """The layer groups, and the loss as the last one, as the planner needs them."""
        place = self._place
        swapper = Swapper(0, place.min_bytes, 0, slabs_of(place))
        found = measure_groups(self._groups, self._backward, swapper)
        swapper.close()
        self._optimizer.zero_grad()
        return found

    @property
    def fixed_bytes(self) -> int:
        """What lives beside the groups' maps: weights, gradients, momentum, the batch."""
        gradients = sum(parameter.nbytes for parameter in self.model.parameters())
        return gradients + sum(tensor.nbytes for tensor in self._before())

    @property
    def _groups(self) -> list[nn.Module]:
        return [*self.model.groups, self.model.loss]

    def _backward(self) -> None:
        self.model(self._images, self._labels).backward()

    def peak(self, way: Way) -> int:
        """Most bytes on the device in a step."""
        with self.under(way):
            if not self._place.cuda:
                with LiveBytes() as live:
                    live.charge(self._before())
                    self.step()
                most: int = live.peak
                return most
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._place.device)
            self.step()
            torch.cuda.synchronize(self._place.device)
            return torch.cuda.max_memory_allocated(self._place.device)

    def _before(self) -> list[Tensor]:
        momentum = [
            tensor
            for state in self._optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor)
        ]
        weights = [*self.model.parameters(), *self.model.buffers()]
        return [*weights, *momentum, self._images, self._labels]

    def seconds(self) -> "Seconds":
        """Of a step."""
        began, worked = time.perf_counter(), time.process_time()
        self.step()
        if self._place.cuda:
            torch.cuda.synchronize(self._place.device)
        wall, work = time.perf_counter() - began, time.process_time() - worked
        return Seconds(wall if self._place.cuda else work, wall)


def slabs_of(place: Place) -> Slabs:
    """Where `swapping` lets tensors go."""
    if place.cuda:
        return PinnedSlabs(place.host_limit_bytes)
    return FileSlabs(tempfile.gettempdir(), place.host_limit_bytes)


def peak_of(kind: Kind, place: Place, way: Way, batch: int, side: int) -> int | None:
    """Most bytes on the device in a step; None: the device or the host ran out of memory."""
    if place.cuda:
        gc.collect()  # what an earlier one left in cycles
    try:
        return Training(kind, place, batch, side).peak(way)
    except (torch.OutOfMemoryError, TilenetError):
        return None


def seconds_side_by_side(training: Training, ways: list[Way], at_least_s: float) -> list[Seconds]:
    """Least seconds of a step in each way, in turn; what else the machine does only adds to them.

    In each turn a way starts over, and its first step, which makes the room for what is swapped,
    does not count. Infinite: the device, whose memory is in pieces by now, ran out of it.

    Args:
        at_least_s: Turns are taken for so long.
    """
    least = [Seconds()] * len(ways)
    began = time.perf_counter()
    while time.perf_counter() - began < at_least_s:
        least = [
            before.least(_least_seconds(training, way))
            for before, way in zip(least, ways, strict=True)
        ]
    return least


def _least_seconds(training: Training, way: Way) -> Seconds:
    try:
        with training.under(way):
            training.step()
            return training.seconds().least(training.seconds())
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return Seconds()


def bandwidth(place: Place, num_bytes: int = 64 << 20, repeats: int = 5) -> tuple[float, float]:
    """Bytes a second out and back in, of one storage, as swapped tensors are copied."""
    slabs = slabs_of(place)
    streams = CopyStreams()
    flat = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=place.device)
    host = slabs.bytes_of(slabs.take(num_bytes), num_bytes)
    out, back = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        sent = streams.send(flat, host)
        if sent is not None:
            sent.synchronize()
        middle = time.perf_counter()
        _, arrival = streams.fetch(host, place.device, None)
        if arrival is not None:
            arrival.event.synchronize()
        out.append(middle - began)
        back.append(time.perf_counter() - middle)
    slabs.close()
    return num_bytes / statistics.median(out[1:]), num_bytes / statistics.median(back[1:])
