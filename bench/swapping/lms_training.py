"""Training steps under a device limit: the ways to keep one, and the bytes and seconds of a step.

On a GPU the limit is torch's own. On a CPU, which has no tier below its memory, a device is played:
the bytes of all tensors that live during a step are counted, and the step trains where their peak
is within the limit, which comes on top of weights, gradients and the optimizer's state: those of a
ResNet-50 are little of a GPU, and several times the limit here. What is swapped out lies in a
memory-mapped file and does not count; nor does what operations take inside.
"""

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from bench.swapping.lms_networks import Kind, labels_of
from tilenet.parallel.swap.host_pool import Slabs, open_slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapping import swapping
from tilenet.planning.memory.live import LiveBytes

__all__ = ["Place", "Training", "Way", "seconds_side_by_side", "slabs_of"]


@dataclass(frozen=True)
class Place:
    """Where is trained.

    Attributes:
        device: A GPU, or the CPU as one.
        limit_bytes: Of its memory; on a CPU, without weights, gradients and momentum.
        host_limit_bytes: Of what is swapped out.
        width: Channels that networks begin with.
    """

    device: torch.device
    limit_bytes: int
    host_limit_bytes: int
    width: int

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def min_bytes(self) -> int:
        """Smaller storages are not swapped: of a device as small, what 1 MiB is of 1 GiB."""
        return min(1 << 20, self.limit_bytes >> 10)

    @property
    def swap_dir(self) -> str | None:
        """Folder of the file that a CPU swaps to; None: pinned memory."""
        return None if self.cuda else tempfile.gettempdir()


@dataclass(frozen=True)
class Way:
    """How a step keeps the limit.

    Attributes:
        mode: `off`, `checkpointing` or `swap`.
        saved_limit_bytes: Of saved storages on the device, where they are swapped.
    """

    mode: str
    saved_limit_bytes: int = 0


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
        shape = batch, kind.bands, *(side,) * kind.dimensions
        self._images = torch.randn(shape).to(place.device)
        self._labels = labels_of(kind, batch, side).to(place.device)
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, momentum=0.9)
        # Momentum is made by a step: by one that changes nothing.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()

    def step(self) -> None:
        """Train one step."""
        self._backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)  # they are there from step to step

    def gradients(self, way: Way) -> list[Tensor]:
        """Those of the parameters; nothing is trained."""
        with self.under(way):
            self._backward()
        gradients = [one.grad.clone() for one in self.model.parameters() if one.grad is not None]
        self._optimizer.zero_grad(set_to_none=False)
        return gradients

    @contextmanager
    def under(self, way: Way) -> Iterator[SwapStatistics]:
        """Steps inside go this way."""
        if way.mode == "off":
            yield SwapStatistics()
            return
        if way.mode == "checkpointing":
            self.model.recomputes = True
            yield SwapStatistics()
            self.model.recomputes = False
            return
        with swapping(
            self.model,
            limit_bytes=way.saved_limit_bytes,
            min_bytes=self._place.min_bytes,
            swap_dir=self._place.swap_dir,
            host_limit_bytes=self._place.host_limit_bytes,
        ) as counted:
            yield counted

    def _backward(self) -> None:
        self.model(self._images, self._labels).backward()

    def peak(self, way: Way) -> int:
        """Most bytes on the device in a step, of those that the limit is for."""
        with self.under(way):
            if not self._place.cuda:
                with LiveBytes() as live:
                    live.charge([*self._fixed(), self._images, self._labels])
                    self.step()
                return int(live.peak) - self.fixed_bytes
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._place.device)
            self.step()
            torch.cuda.synchronize(self._place.device)
            return torch.cuda.max_memory_allocated(self._place.device)

    @property
    def fixed_bytes(self) -> int:
        """Those of weights, gradients and momentum."""
        return sum(tensor.nbytes for tensor in self._fixed())

    def _fixed(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        kept = [*self.model.buffers(), *(one.grad for one in parameters), *states]
        return [*parameters, *(one for one in kept if isinstance(one, Tensor))]

    def seconds(self) -> float:
        """Of a step.

        On a CPU its processor time, which other programs disturb less: it works on one thread and
        waits for nobody but the disk, if at all.
        """
        clock = time.perf_counter if self._place.cuda else time.process_time
        began = clock()
        self.step()
        if self._place.cuda:
            torch.cuda.synchronize(self._place.device)
        return clock() - began


def slabs_of(place: Place) -> Slabs:
    """Where `swapping` lets tensors go."""
    return open_slabs(place.swap_dir, place.host_limit_bytes, pinned=place.cuda)


def seconds_side_by_side(training: Training, ways: list[Way], at_least_s: float) -> list[float]:
    """Least seconds of a step in each way, in turn; what else the machine does only adds to them.

    In each turn a way starts over, and its first step, which makes the room for what is swapped,
    does not count. Infinite: the device, whose memory is in pieces by now, ran out of it.

    Args:
        at_least_s: Turns are taken for so long.
    """
    least = [inf] * len(ways)
    began = time.perf_counter()
    while time.perf_counter() - began < at_least_s:
        least = [
            min(before, _least_seconds(training, way))
            for before, way in zip(least, ways, strict=True)
        ]
    return least


def _least_seconds(training: Training, way: Way) -> float:
    try:
        with training.under(way):
            training.step()
            return min(training.seconds(), training.seconds())
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return inf
