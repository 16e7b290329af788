"""Halos of feature maps travel between the ranks of an image; in backward their gradients go back.

Three layers: integers list the cells that ranks send each other (`geometry.ownership.LayerHalo`), a
`HaloChannel` moves tensors, and `extend` is the autograd function: a rank's own window in, the
window that a layer needs out. Its backward is the true adjoint: a rank sends the gradients of the
cells that it took, and adds the gradients that it receives to those of the cells that it gave.

All parts of a halo, corners included, travel in one phase: each is posted before the first is
waited for, so that a layer can compute its interior meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.geometry.ownership import LayerHalo
from tilenet.geometry.windows import Window, overlap
from tilenet.mpi import Intracomm, Request
from tilenet.parallel.health.exchange_clock import EXCHANGING

Parts = Sequence[tuple[int, Tensor]]  # (rank, contiguous tensor)


class HaloChannel:
    """Moves tensors between the ranks of an image, for the layers of one partition.

    Args:
        comm: Communicator of this partition alone, since partitions compute in threads of their
            own, unless each layer has its own tags. None: nothing is sent and zeros arrive, for
            planning on fake tensors and as a benchmark's upper bound.
        device_mpi: Hand device memory to MPI directly, instead of staging it through pinned memory.

    Attributes:
        messages: Number of messages sent so far.
        bytes: Bytes sent so far.
    """

    def __init__(self, comm: Intracomm | None, *, device_mpi: bool = False) -> None:
        self.comm = comm
        self._device_mpi = device_mpi
        self.messages = 0
        self.bytes = 0

    def start(
        self, gives: Parts, takes: Sequence[tuple[int, Sequence[int]]], like: Tensor, tag: int
    ) -> "Pending":
        """Post all messages of a layer.

        Args:
            gives: Tensors to send, each with its receiver.
            takes: Shapes of the tensors to receive, each with its sender.
            like: A tensor with the dtype and the device of the tensors to receive.
            tag: Tag, the same on both sides, that no other layer or micro-batch under way uses.
        """
        if self.comm is None or not (gives or takes):
            return Pending([like.new_zeros(shape) for _, shape in takes], [], [], like.device)
        on_device = like.device.type != "cpu"
        staged = on_device and not self._device_mpi
        incoming = [
            torch.empty(shape, dtype=like.dtype, pin_memory=True)
            if staged
            else torch.empty(shape, dtype=like.dtype, device=like.device)
            for _, shape in takes
        ]
        outgoing = [_pinned(part) if staged else part for _, part in gives]
        if on_device:
            # Tensors to send must be written, and tensors to receive into no longer be read, before
            # MPI sees them.
            torch.get_device_module(like.device).current_stream(like.device).synchronize()
        ranks = [rank for rank, _ in takes], [rank for rank, _ in gives]
        with EXCHANGING:
            requests = [
                self.comm.Irecv(_buffer(part), rank, tag)
                for rank, part in zip(ranks[0], incoming, strict=True)
            ]
            requests += [
                self.comm.Isend(_buffer(part), rank, tag)
                for rank, part in zip(ranks[1], outgoing, strict=True)
            ]
        self.messages += len(outgoing)
        self.bytes += sum(part.nbytes for part in outgoing)
        return Pending(incoming, outgoing, requests, like.device)


class Pending:
    """Messages under way."""

    def __init__(
        self,
        incoming: list[Tensor],
        outgoing: list[Tensor],
        requests: list[Request],
        device: torch.device,
    ) -> None:
        self._incoming, self._outgoing = incoming, outgoing  # kept alive until MPI is done
        self._requests, self._device = requests, device

    def wait(self) -> list[Tensor]:
        """Wait for all messages; return the received tensors, on the layer's device."""
        if self._requests:
            from mpi4py import MPI

            with EXCHANGING:
                MPI.Request.Waitall(self._requests)
        self._outgoing.clear()
        return [part.to(self._device, non_blocking=True) for part in self._incoming]


def _pinned(part: Tensor) -> Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


def _buffer(part: Tensor) -> "Tensor | NDArray[np.uint8]":
    """A tensor as bytes for mpi4py: numpy knows no bfloat16."""
    raw = part.reshape(-1).view(torch.uint8)
    return raw if raw.is_cuda else raw.numpy()


@dataclass(frozen=True)
class HaloExchange:
    """One layer's exchange for one micro-batch.

    Attributes:
        halo: The windows that each rank sends and receives.
        channel: The channel that moves them.
        tag: Tag of the messages in forward; those in backward have the next one.
    """

    halo: LayerHalo
    channel: HaloChannel
    tag: int


def part_of(x: Tensor, window: Window, row: int, col: int) -> Tensor:
    """Return the cells of `window` from a map (B, C, H, W) with (row, col) as its first cell."""
    top, left = window.row - row, window.col - col
    return x[:, :, top : top + window.height, left : left + window.width]


def extend(x: Tensor, exchange: HaloExchange, fill: float) -> Tensor:
    """The window of a map that a layer needs, from the one that each rank owns. Collective.

    Args:
        x: This rank's own window, (B, C, H, W).
        exchange: Says which ranks send the rest.
        fill: Value of the cells outside of the image.

    Returns:
        (B, C, above + need.height + below, left + need.width + right).
    """
    extended: Tensor = _Extend.apply(x, exchange, fill)  # type: ignore[no-untyped-call]
    return extended


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HaloExchange, fill: float) -> Tensor:
        halo = exchange.halo
        ctx.exchange, ctx.shape = exchange, x.shape
        own, need = halo.own, halo.need
        pending = start_halos(x, exchange)
        top, bottom, left, right = halo.border
        shape = (*x.shape[:2], top + need.height + bottom, left + need.width + right)
        extended = x.new_full(shape, fill) if any(halo.border) else x.new_empty(shape)
        row, col = need.row - top, need.col - left  # of the extended window's first cell
        common = _common(own, need)
        part_of(extended, common, row, col).copy_(part_of(x, common, own.row, own.col))
        for (_, window), part in zip(halo.takes, pending.wait(), strict=True):
            part_of(extended, window, row, col).copy_(part)
        return extended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        halo: LayerHalo = ctx.exchange.halo
        own, need = halo.own, halo.need
        row, col = need.row - halo.border[0], need.col - halo.border[2]
        parts = [(rank, part_of(gradient, window, row, col)) for rank, window in halo.takes]
        pending = start_gradients(parts, gradient.shape[1], gradient, ctx.exchange)
        own_gradient = gradient.new_zeros(ctx.shape)
        common = _common(own, need)
        part_of(own_gradient, common, own.row, own.col).copy_(part_of(gradient, common, row, col))
        add_gradients(own_gradient, pending, halo)
        return own_gradient, None, None


def start_halos(x: Tensor, exchange: HaloExchange) -> Pending:
    """Send the parts of this rank's own window that others need; post receives for the halo."""
    halo = exchange.halo
    shape = x.shape[:2]
    gives = [(r, part_of(x, w, halo.own.row, halo.own.col).contiguous()) for r, w in halo.gives]
    takes = [(r, (*shape, w.height, w.width)) for r, w in halo.takes]
    return exchange.channel.start(gives, takes, x, exchange.tag)


def start_gradients(parts: Parts, channels: int, like: Tensor, exchange: HaloExchange) -> Pending:
    """Send the gradients of cells that were taken; post receives for those of cells given."""
    shape = like.shape[0], channels
    takes = [(r, (*shape, w.height, w.width)) for r, w in exchange.halo.gives]
    gives = [(r, part.contiguous()) for r, part in parts]
    return exchange.channel.start(gives, takes, like, exchange.tag + 1)


def add_gradients(gradient: Tensor, pending: Pending, halo: LayerHalo) -> None:
    """Add the gradients that arrive to that of this rank's own window."""
    for (_, window), part in zip(halo.gives, pending.wait(), strict=True):
        part_of(gradient, window, halo.own.row, halo.own.col).add_(part)


def _common(own: Window, need: Window) -> Window:
    """The cells of `need` that the rank owns."""
    return overlap(own, need) or Window(need.row, need.col, 0, 0)
