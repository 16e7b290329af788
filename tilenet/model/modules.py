"""Modules that torch does not have: norms, pooling by 2 × 2, paddings.

Pooling takes the maximum over blocks of 2 × 2 cells. Torch's own operator notes where each maximum
lies, in 8 bytes per output cell, and on a CPU it looks at one cell after another. Blocks that do
not overlap need neither: maxima of whole rows, then of columns, and in backward the same
comparisons once more. (Measured on one core, 16 channels of 512² cells, float32: forward 24 ms and
2.5 ms, both ways 36 ms and 20 ms.)
"""

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.geometry.layers import Activation, Conv
from tilenet.model.cellwise import check_kernel, hold_weights, kernel_of, taps_of
from tilenet.model.gpipe import is_recomputing


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that counts each tile once, (B, C, H, W) in and out.

    torch's updates its running statistics in every forward pass, and checkpointing makes two.

    Attributes:
        tiles: Tiles seen, where the running statistics are to be their plain average; None: torch's
            own blending. Counted here, since torch would ask the device for its count each time.
    """

    tiles: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_recomputing():
            # Copies, not None: a checkpoint wants as many tensors saved as for the first time.
            mean, var = (
                b if b is None else b.clone() for b in (self.running_mean, self.running_var)
            )
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.0, self.eps)
        if self.training and self.tiles is not None:
            self.tiles += 1
            self.momentum = 1 / self.tiles
        return super().forward(x)


class CornersPool(nn.Module):
    """Blocks of stride × stride cells made one, bilinearly with `align_corners`."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2] // self.stride, x.shape[3] // self.stride
        return F.interpolate(x, size, mode="bilinear", align_corners=True)


class BlockMaxPool(nn.MaxPool2d):
    """`MaxPool2d(2)`: the same values, and gradients to the same cells."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        return block_max(x)


def block_max(x: Tensor) -> Tensor:
    """The maximum of each block of 2 × 2 cells; (B, C, H, W) to (B, C, H // 2, W // 2).

    Of equal cells the first in the order of rows gets the gradient, as torch has it. A gradient
    that is infinite makes NaN of the cells next to it, where torch has 0; `where` would take
    longer.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _maximum(x)  # a map without backward does not keep its input
    y: Tensor = _BlockMax.apply(x)  # type: ignore[no-untyped-call]
    return y


def _maximum(x: Tensor) -> Tensor:
    rows = torch.maximum(*_halves(x, 2))  # first: these lie in memory as a whole
    return torch.maximum(*_halves(rows, 3))


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Every other row or column, and those between; an odd last one is in no block."""
    even = x.shape[dim] // 2 * 2
    if dim == 2:
        return x[:, :, 0:even:2], x[:, :, 1:even:2]
    return x[..., 0:even:2], x[..., 1:even:2]


class _BlockMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _maximum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gradient,) = grads
        (x,) = ctx.saved_tensors
        # Columns before rows, so that of equal cells the first in the order of rows wins.
        wide = torch.maximum(*_halves(x, 3))
        upper, lower = _halves(wide, 2)
        wins = upper >= lower
        to_wide = _split(gradient, wins, wide, 2)
        del wide, upper, lower
        left, right = _halves(x, 3)
        return _split(to_wide, left >= right, x, 3)


def _split(gradient: Tensor, first_wins: Tensor, like: Tensor, dim: int) -> Tensor:
    """The gradient of halves along `dim`: all of it to one of them, cell by cell."""
    whole = torch.zeros_like(like) if like.shape[dim] % 2 else torch.empty_like(like)
    first, second = _halves(whole, dim)
    torch.mul(gradient, first_wins, out=first)
    torch.sub(gradient, first, out=second)  # exact: one of them is 0
    return whole


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch normalisation with its running statistics, in training too, (B, C, H, W) in and out."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)


class PaddedConv(nn.Conv2d):
    """A convolution with further zeros below and on the right."""

    extra = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.extra, 0, self.extra)))


class ComputedConv(PaddedConv):
    """A convolution with a kernel computed from weights, or of numbers that are not trained."""

    def __init__(self, layer: Conv, *arguments: Any) -> None:
        check_kernel(layer)
        super().__init__(*arguments)
        del self.weight
        self.layer, self.taps = layer, taps_of(layer)
        hold_weights(self, layer)

    def forward(self, x: Tensor) -> Tensor:
        if self.taps:
            return take_cells(x, self.layer, self.taps, pads=True)
        if self.extra:
            x = F.pad(x, (0, self.extra, 0, self.extra))
        y: Tensor = self._conv_forward(x, kernel_of(self.layer, self, x), self.bias)
        return y


def take_cells(x: Tensor, layer: Conv, taps: tuple[tuple[int, int], ...], *, pads: bool) -> Tensor:
    """The cells on the 1 of each kernel of a convolution, (B, C, H, W) to (B, O, H′, W′).

    A sum with zeros times all other cells would be NaN next to cells that are infinite or NaN.

    Args:
        layer: A convolution that only moves cells.
        taps: Its `taps_of`.
        pads: Whether zeros lie around the map, as the layer says; else the map has all that is
            looked at.
    """
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # as a convolution has it
        x = x.to(torch.get_autocast_dtype(kind))
    rows = [_places(layer, row, x.shape[2], pads=pads) for row, _ in taps]
    cols = [_places(layer.along_cols, col, x.shape[3], pads=pads) for _, col in taps]
    y: Tensor = _TakenCells.apply(x, rows, cols)  # type: ignore[no-untyped-call]
    return y


def _places(axis: Conv, tap: int, cells: int, *, pads: bool) -> tuple[int, slice, slice]:
    """Cells that a kernel's tap gives along an axis, those that lie in the map, and these there."""
    padding, extra = (axis.padding, axis.extra) if pads else (0, 0)
    count = -(-(cells + 2 * padding + extra - axis.reach) // axis.stride)
    first, step = tap * axis.dilation - padding, axis.stride
    start = max(0, -(first // step))
    stop = max(start, min(count, -((first - cells) // step)))
    return count, slice(start, stop), slice(first + start * step, first + stop * step, step)


class _TakenCells(torch.autograd.Function):
    """Slices of a map as channels, on zeros; in backward all gradients go into one map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[Any], cols: list[Any]) -> Tensor:
        ctx.shape, ctx.rows, ctx.cols = x.shape, rows, cols
        y = x.new_zeros(x.shape[0], x.shape[1] * len(rows), rows[0][0], cols[0][0])
        for n, ((_, high, of_rows), (_, wide, of_cols)) in enumerate(zip(rows, cols, strict=True)):
            y[:, n :: len(rows), high, wide] = x[:, :, of_rows, of_cols]
        return y  # no view, over which no layer could write

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        to_x = gradient.new_zeros(ctx.shape)
        parts = gradient.reshape(*ctx.shape[:2], len(ctx.rows), *gradient.shape[2:])
        pairs = zip(ctx.rows, ctx.cols, strict=True)
        for n, ((_, high, of_rows), (_, wide, of_cols)) in enumerate(pairs):
            to_x[:, :, of_rows, of_cols] += parts[:, :, n, high, wide]
        return to_x, None, None


class GlobalSum(nn.AdaptiveAvgPool2d):
    """The sum over all cells, (B, C, H, W) to (B, C, 1, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x.shape[2] * x.shape[3])


class SharedMaximum(nn.AdaptiveMaxPool2d):
    """The largest value of all cells, (B, C, H, W) to (B, C, 1, 1); equal cells share gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3), keepdim=True)


class PaddedPool(nn.Module):
    """A pool with further cells below and on the right, of −∞ for a maximum, else of 0.

    Args:
        pool: The pool without them.
    """

    def __init__(self, pool: nn.MaxPool2d | nn.AvgPool2d, extra: int) -> None:
        super().__init__()
        self.pool, self.extra = pool, extra

    def forward(self, x: Tensor) -> Tensor:
        fill = float("-inf") if isinstance(self.pool, nn.MaxPool2d) else 0.0
        y: Tensor = self.pool(F.pad(x, (0, self.extra, 0, self.extra), value=fill))
        return y


def activation(layer: Activation, *, in_place: bool) -> nn.Module:
    """The module of an activation.

    Args:
        in_place: Whether it may write over its input.
    """
    if layer.function == "leaky_relu":
        # Of a negative slope the output does not tell the input's sign, which backward needs.
        return nn.LeakyReLU(layer.slope, inplace=in_place and layer.slope >= 0)
    return (nn.ReLU if layer.function == "relu" else nn.ReLU6)(inplace=in_place)


def out_of_place(module: nn.Module) -> nn.Module:
    """The same module, or for one that writes over its input one that does not."""
    if not getattr(module, "inplace", False):
        return module
    other = copy(module)
    setattr(other, "inplace", False)  # noqa: B010 (mypy takes attributes of modules for tensors)
    return other
