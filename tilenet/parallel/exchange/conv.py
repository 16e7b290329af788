"""A convolution on a rank's own window while the halo comes from the neighbours.

A convolution is linear, so it is the sum of the convolutions of own cells, with zeros around them,
and of the halo, which reaches only the outermost cells of the output. So nothing is copied into
a larger map: the own window is saved for backward where it stands, as without ranks, and the
interior is computed while the halo travels. In backward the halo's gradients leave first and travel
while the interior's are computed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilenet.geometry.windows import Window
from tilenet.parallel.exchange.halo import (
    HaloExchange,
    Parts,
    add_gradients,
    part_of,
    start_gradients,
    start_halos,
)


@dataclass(frozen=True)
class Shape:
    """A convolution of stride 1 that keeps sizes.

    Attributes:
        kernel: Width of the kernel, odd.
        dilation: Distance between its taps.
        groups: Number of groups of channels that are convolved apart.
    """

    kernel: int
    dilation: int
    groups: int = 1

    @property
    def half(self) -> int:
        """Taps on each side of the middle one."""
        return self.kernel // 2

    @property
    def halo(self) -> int:
        """Cells that it looks at on each side."""
        return self.half * self.dilation


@dataclass(frozen=True)
class _Strip:
    """A side of the halo, and the output cells that depend on it.

    Sides on the left and right are transposed first: kernels are made for wide rows, and take twice
    as long for high columns.

    Attributes:
        window: Window of the map; above and below corners are in it, left and right they are not.
        pad: Zeros around it (left, right, above, below), so that taps on own cells see nothing.
        taps: The taps that reach it: of the kernel's rows, or of its columns.
        along_rows: Whether it lies above or below.
        reach: Rows and columns of the output, in the own window, to which it adds.
    """

    window: Window
    pad: tuple[int, int, int, int]
    taps: slice
    along_rows: bool
    reach: tuple[slice, slice]

    def weight(self, weight: Tensor) -> Tensor:
        """The part of the kernel that reaches the strip, not transposed."""
        return weight[:, :, self.taps] if self.along_rows else weight[:, :, :, self.taps]

    def laid_out(self, x: Tensor) -> Tensor:
        """A map or a kernel (…, H, W), transposed for strips on the left and right, or back."""
        return x if self.along_rows else x.mT


def _strips(own: Window, takes: tuple[tuple[int, Window], ...], shape: Shape) -> list[_Strip]:
    """The sides of the halo that other ranks send."""
    halo, half = shape.halo, shape.half
    inner = shape.dilation * (half - 1)  # own cells that taps on the strip also look at
    everything = slice(None)
    wide = own.col - halo, own.width + 2 * halo
    before, behind = slice(0, half), slice(half + 1, shape.kernel)
    low, high = own.row - halo, own.row + own.height
    candidates = [
        _Strip(Window(low, wide[0], halo, wide[1]), (0, 0, 0, inner), before, True,
               (slice(0, halo), everything)),
        _Strip(Window(high, wide[0], halo, wide[1]), (0, 0, inner, 0), behind, True,
               (slice(own.height - halo, None), everything)),
        _Strip(Window(own.row, own.col - halo, own.height, halo), (0, inner, halo, halo), before,
               False, (everything, slice(0, halo))),
        _Strip(Window(own.row, own.col + own.width, own.height, halo), (inner, 0, halo, halo),
               behind, False, (everything, slice(own.width - halo, None))),
    ]  # fmt: skip
    return [
        strip for strip in candidates if any(_inside(window, strip.window) for _, window in takes)
    ]


def _inside(a: Window, b: Window) -> bool:
    return b.row <= a.row < b.row + b.height and b.col <= a.col < b.col + b.width


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, exchange: HaloExchange
) -> Tensor:
    """The convolution of the whole map, on this rank's own cells. Collective.

    Args:
        x: This rank's own window, (B, C, H, W), at least as wide as the halo.
        weight: (O, C / groups, kernel, kernel).
        bias: (O,) or None.
        exchange: Says which ranks send the halo.

    Returns:
        (B, O, H, W).
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        y: Tensor = _Convolve.apply(x, weight, bias, shape, exchange)  # type: ignore[no-untyped-call]
    return y


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: Shape,
        exchange: HaloExchange,
    ) -> Tensor:
        halo = exchange.halo
        pending = start_halos(x, exchange)
        y = F.conv2d(
            x, weight, bias, padding=shape.halo, dilation=shape.dilation, groups=shape.groups
        )
        arrived = list(zip((window for _, window in halo.takes), pending.wait(), strict=True))
        ctx.strips = _strips(halo.own, halo.takes, shape)
        filled = [_fill(strip, arrived, x) for strip in ctx.strips]
        for strip, values in zip(ctx.strips, filled, strict=True):
            rows, cols = strip.reach
            taps = strip.laid_out(strip.weight(weight))
            more = F.conv2d(
                strip.laid_out(values), taps, dilation=shape.dilation, groups=shape.groups
            )
            y[:, :, rows, cols] += strip.laid_out(more)
        ctx.shape, ctx.exchange, ctx.has_bias = shape, exchange, bias is not None
        ctx.save_for_backward(x, weight, *filled)
        return y

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (gradient,) = grads
        x, weight, *filled = ctx.saved_tensors
        shape, halo, strips = ctx.shape, ctx.exchange.halo, ctx.strips
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        weight_gradients, strip_gradients = [], []
        for strip, values in zip(strips, filled, strict=True):
            rows, cols = strip.reach
            to_values, to_weight, _ = torch.ops.aten.convolution_backward(
                strip.laid_out(gradient[:, :, rows, cols]), strip.laid_out(values),
                strip.laid_out(strip.weight(weight)), None, [1, 1], [0, 0],
                [shape.dilation] * 2, False, [0, 0], shape.groups, [wants_x, wants_weight, False],
            )  # fmt: skip
            weight_gradients.append(strip.laid_out(to_weight) if wants_weight else to_weight)
            strip_gradients.append(strip.laid_out(to_values) if wants_x else to_values)
        if wants_x:
            halo_gradients = _collect(halo.takes, strips, strip_gradients)
            pending = start_gradients(halo_gradients, x.shape[1], gradient, ctx.exchange)
        to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)] if ctx.has_bias else None, [1, 1], [shape.halo] * 2,
            [shape.dilation] * 2, False, [0, 0], shape.groups,
            [wants_x, wants_weight, ctx.has_bias],
        )  # fmt: skip
        if wants_weight:
            for strip, more in zip(strips, weight_gradients, strict=True):
                strip.weight(to_weight).add_(more)
        if wants_x:
            add_gradients(to_x, pending, halo)
        return to_x, to_weight, to_bias, None, None


def _fill(strip: _Strip, arrived: list[tuple[Window, Tensor]], like: Tensor) -> Tensor:
    """A strip's values, with zeros where no rank sent any."""
    left, right, above, below = strip.pad
    size = strip.window.height + above + below, strip.window.width + left + right
    # Lies in memory as it is computed.
    shape = size if strip.along_rows else size[::-1]
    values = strip.laid_out(like.new_zeros((*like.shape[:2], *shape)))
    row, col = strip.window.row - above, strip.window.col - left
    for window, part in arrived:
        if _inside(window, strip.window):
            part_of(values, window, row, col).copy_(part)
    return values


def _collect(
    takes: tuple[tuple[int, Window], ...], strips: list[_Strip], strip_gradients: list[Tensor]
) -> Parts:
    """Cut the gradients of the received windows out of the gradients of the strips."""
    halo_gradients = []
    for rank, window in takes:
        for strip, gradient in zip(strips, strip_gradients, strict=True):
            if _inside(window, strip.window):
                left, _, above, _ = strip.pad
                row, col = strip.window.row - above, strip.window.col - left
                halo_gradients.append((rank, part_of(gradient, window, row, col)))
    return halo_gradients
