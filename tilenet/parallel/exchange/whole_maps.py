"""Averages over the whole image when its tiles lie on several ranks.

Each rank sums over its own cells, and the sums are added over the ranks of the image and divided
once: all have the same whole map, and the mean of equal whole numbers is that number. The layers
after it are computed on every rank, and a rank's gradient is that of its own pixels; the gradients
of the averages are added over the ranks, so each counts once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilenet.geometry.layers import GlobalPool
from tilenet.geometry.windows import Window
from tilenet.model.upload import upload
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.norm import Cells
from tilenet.parallel.sums.all_reduce import add_over


def bin_cells(first: int, count: int, whole: int, bins: int) -> Tensor:
    """1 for each cell of a span in each bin of an axis that it lies in, (bins, count), float64.

    Bin i averages the cells from ⌊i · whole / bins⌋ to ⌈(i + 1) · whole / bins⌉ − 1, as torch's
    adaptive pooling does; neighbouring bins may share a cell.
    """
    cells = torch.zeros(bins, count, dtype=torch.float64)
    for number in range(bins):
        start, stop = number * whole // bins, -(-(number + 1) * whole // bins)
        cells[number, max(start - first, 0) : max(stop - first, 0)] = 1
    return cells


def bin_counts(size: tuple[int, int], layer: GlobalPool) -> Tensor:
    """Cells of a whole map that each bin averages, by which sums are divided; 1 of a sum."""
    if layer.takes == "sum":
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.outer(*(bin_cells(0, cells, cells, layer.bins).sum(1) for cells in size))


@dataclass(frozen=True)
class AveragedOver:
    """The cells of a micro-batch's map that are averaged.

    Attributes:
        cells: Own window of each sample, counted from the map's first cell, and its image.
        firsts: Row and column of the whole map at which each sample's window begins.
        size: Rows and columns of the whole map.
    """

    cells: Cells
    firsts: tuple[tuple[int, int], ...]
    size: tuple[int, int]

    @classmethod
    def part(cls, x: Tensor, first: tuple[int, int], whole: tuple[int, int]) -> "AveragedOver":
        """The cells of a part (1, C, H, W) that begins at row and column `first` of a whole map."""
        return cls(Cells((Window(0, 0, x.shape[2], x.shape[3]),), (0,)), (first,), whole)

    def in_bins(
        self, sample: int, layer: GlobalPool, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`bin_cells` of a sample's own rows (bins, H), and of its columns (bins, W)."""
        own, (row, col) = self.cells.own[sample], self.firsts[sample]
        rows = bin_cells(row, own.height, self.size[0], layer.bins)
        cols = bin_cells(col, own.width, self.size[1], layer.bins)
        return upload(rows, device), upload(cols, device)


class WholeImagePool(nn.Module):
    """Adaptive averages over all ranks, (B, C, H, W) to (B, C, bins, bins). Collective.

    Args:
        layer: Says how many bins there are, and whether cells are averaged or summed.
        where: Returns the own cells of the micro-batch that the thread computes.
        comm: The ranks that hold the same images, for one partition; None for a rank alone.
    """

    def __init__(
        self, layer: GlobalPool, where: Callable[[], AveragedOver], comm: Intracomm | None
    ) -> None:
        super().__init__()
        self.layer, self.where, self.comm = layer, where, comm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Average.apply(x, self.layer, self.where(), self.comm)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return f"{self.layer.bins}"


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: GlobalPool, where: AveragedOver, comm: Intracomm | None
    ) -> Tensor:
        ctx.shape, ctx.layer, ctx.where, ctx.comm = x.shape, layer, where, comm
        sums = sum_images(bin_sums(x, layer, where), where, comm)
        return (sums / upload(bin_counts(where.size, layer), x.device)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        where: AveragedOver = ctx.where
        total = sum_images(grads[0], where, ctx.comm)
        total = total / upload(bin_counts(where.size, ctx.layer), total.device)
        to_x = grads[0].new_zeros(ctx.shape)
        with _without_autocast(to_x):
            for sample, part in enumerate(where.cells.of(to_x)):
                rows, cols = where.in_bins(sample, ctx.layer, to_x.device)
                lines = (rows.T @ total[sample]).to(_wide(to_x))
                part[0].copy_(lines @ cols.to(lines.dtype))
        return to_x, None, None, None


def bin_sums(x: Tensor, layer: GlobalPool, where: AveragedOver) -> Tensor:
    """Sums of the own cells of a map (B, C, H, W) in each bin: (B, C, bins, bins), float64."""
    sums = []
    with _without_autocast(x):
        for sample, own in enumerate(where.cells.of(x)):
            rows, cols = where.in_bins(sample, layer, x.device)
            # Rows of cells in the map's own precision, at least float32; their sums in float64.
            lines = own[0].to(_wide(x)) @ cols.T.to(_wide(x))
            sums.append(rows @ lines.double())
    return torch.stack(sums)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Switch autocast off, so that products keep the precision of their factors."""
    return torch.autocast(x.device.type, enabled=False)


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def sum_images(values: Tensor, where: AveragedOver, comm: Intracomm | None) -> Tensor:
    """Sums of samples' values (B, …) over their images and the ranks, (B, …), float64."""
    images = upload(torch.tensor(where.cells.images), values.device)
    sums = values.new_zeros(
        (max(where.cells.images) + 1, *values.shape[1:]), dtype=torch.float64
    ).index_add(0, images, values.double())
    return add_over(comm, sums).index_select(0, images)
