"""⟨Fx, y⟩ = ⟨x, F*y⟩ of everything that travels between ranks: what goes back is the adjoint.

x and y are shared out, so both products are sums over ranks.
"""

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from shared_out import grids
from torch import Tensor, nn

from tilenet.geometry.layers import Conv, Layer, Norm, Pool, TransposedConv, Upsample
from tilenet.geometry.ownership import AxisShares, LayerHalo, axis_shares, halo_of
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network
from tilenet.parallel.exchange.conv import Shape, convolve
from tilenet.parallel.exchange.halo import HaloChannel, HaloExchange, extend, part_of
from tilenet.parallel.exchange.layers import spatial_layer
from tilenet.parallel.exchange.norm import Cells, WholeImageNorm
from tilenet.parallel.sums.all_reduce import sum_with_gradient

pytestmark = pytest.mark.ranks(2, 3, 4, 6)

EXACT = 1e-13  # of float64 sums of some thousand products, relative to |Fx|·|y|


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def cut_at_random(cells: int, parts: int, least: int, seed: int) -> list[int]:
    """Edges of parts of at least `least` cells, as uneven as it goes."""
    spare = np.random.default_rng(seed).multinomial(cells - parts * least, [1 / parts] * parts)
    return [0, *(int(edge) for edge in np.cumsum(spare + least))]


def dot(comm: MPI.Intracomm, *pairs: tuple[Tensor, Tensor]) -> float:
    """The products of what is shared out, over all ranks."""
    return float(comm.allreduce(sum(float((a.detach() * b).sum()) for a, b in pairs)))


def assert_adjoint(
    comm: MPI.Intracomm, transform: Callable[[Tensor], Tensor], x: Tensor, seed: int
) -> None:
    x = x.detach().clone().requires_grad_()
    out = transform(x)
    y = drawn(*out.shape, seed=100 * seed + comm.rank)
    out.backward(y)
    there, back = dot(comm, (out, y)), dot(comm, (x, x.grad))
    size = (dot(comm, (out, out.detach())) * dot(comm, (y, y))) ** 0.5
    assert size > 0, "zeros prove nothing"
    assert abs(there - back) <= EXACT * size


class Around:
    """Stands in for `SpatialContext`: one layer on the ranks' shares of a map."""

    def __init__(
        self, layer: Layer, edges: tuple[list[int], list[int]], comm: MPI.Intracomm
    ) -> None:
        rows, cols = (axis_shares((layer,), axis[-1], tuple(axis))[0] for axis in edges)
        place = divmod(comm.rank, len(edges[1]) - 1)
        self.halo = halo_of(rows, cols, place)
        self.channel = HaloChannel(comm)

    def exchange(self, index: int) -> HaloExchange:
        return HaloExchange(self.halo, self.channel, 2 * index)


def asymmetric_halo(
    grid: tuple[int, int], reach: tuple[int, int, int, int], rank: int, seed: int
) -> LayerHalo:
    """Of ranks that look so far up, down, left and right of their own cells; less, if negative."""
    axes = []
    for axis, parts in enumerate(grid):
        before, behind = reach[2 * axis : 2 * axis + 2]
        edges = cut_at_random(parts * 7 + 5, parts, 7, seed + axis)
        needs = tuple((a - before, b + behind) for a, b in pairwise(edges))
        axes.append(AxisShares(1, edges[-1], tuple(edges), tuple(edges), needs))  # type: ignore[arg-type]
    return halo_of(axes[0], axes[1], divmod(rank, grid[1]))


REACHES = {
    "symmetric": (2, 2, 2, 2),
    "up to the neighbour's width": (7, 7, 7, 7),
    "up only": (3, 0, 0, 0),
    "asymmetric": (1, 3, 0, 2),
    "less than own": (-2, -1, -1, -3),
    "more here, less there": (3, -2, -1, 4),
    "nothing": (0, 0, 0, 0),
}


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_extend(comm: MPI.Intracomm, reach: tuple[int, int, int, int]) -> None:
    for seed, grid in enumerate(grids(comm.size)):
        halo = asymmetric_halo(grid, reach, comm.rank, seed)
        exchange = HaloExchange(halo, HaloChannel(comm), 4)
        x = drawn(2, 3, halo.own.height, halo.own.width, seed=seed + comm.rank)
        assert_adjoint(comm, lambda x, exchange=exchange: extend(x, exchange, 0.0), x, seed)


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_extend_gives_the_window_of_the_whole_map(
    comm: MPI.Intracomm, reach: tuple[int, int, int, int]
) -> None:
    for seed, grid in enumerate(grids(comm.size)):
        halo = asymmetric_halo(grid, reach, comm.rank, seed)
        whole = drawn(2, 3, grid[0] * 7 + 5, grid[1] * 7 + 5, seed=seed)
        found = extend(
            part_of(whole, halo.own, 0, 0), HaloExchange(halo, HaloChannel(comm), 4), 9.0
        )
        padded = nn.functional.pad(whole, (9, 9, 9, 9), value=9.0)
        top, bottom, left, right = halo.border
        window = Window(
            halo.need.row - top,
            halo.need.col - left,
            top + halo.need.height + bottom,
            left + halo.need.width + right,
        )
        wrong = not torch.equal(found, part_of(padded, window, -9, -9))
        assert not comm.allreduce(wrong, op=MPI.LOR)


@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (5, 1), (3, 3), (7, 2)])
def test_convolution(comm: MPI.Intracomm, kernel: int, dilation: int) -> None:
    """In its input, and in its weight, whose gradients ranks add."""
    shape = Shape(kernel, dilation)
    layer = Conv(2, 3, kernel=kernel, dilation=dilation, padding=shape.halo)
    for seed, grid in enumerate(grids(comm.size)):
        edges = tuple(
            cut_at_random(parts * shape.halo + 9, parts, shape.halo, seed + axis)
            for axis, parts in enumerate(grid)
        )
        around = Around(layer, edges, comm)  # type: ignore[arg-type]
        own, exchange = around.halo.own, around.exchange(3)
        x = drawn(2, 2, own.height, own.width, seed=seed + comm.rank)
        weight = drawn(3, 2, kernel, kernel, seed=seed)

        def of_x(x: Tensor, weight: Tensor = weight, exchange: HaloExchange = exchange) -> Tensor:
            return convolve(x, weight, None, shape, exchange)

        assert_adjoint(comm, of_x, x, seed)

        weight.requires_grad_()
        out = convolve(x, weight, None, shape, exchange)
        y = drawn(*out.shape, seed=7 + seed + comm.rank)
        out.backward(y)
        there = dot(comm, (out, y))
        back = dot(comm, (weight, weight.grad))  # the sum over ranks of ⟨w, its part⟩
        size = (dot(comm, (out, out.detach())) * dot(comm, (y, y))) ** 0.5
        assert abs(there - back) <= EXACT * size


LAYERS: dict[str, Layer] = {
    "stride 2": Conv(2, 3, stride=2, padding=1),
    "stride 3, kernel 5": Conv(2, 3, kernel=5, stride=3, padding=2),
    "even kernel": Conv(2, 3, kernel=4, stride=2, padding=1),
    "wide padding": Conv(2, 3, kernel=3, padding=3),
    "stride 2 of kernel 1": Conv(2, 3, kernel=1, stride=2),
    "average pool 2": Pool(2, 2, mode="average"),
    "overlapping average pool": Pool(2, 2, kernel=3, stride=2, padding=1, mode="average"),
    # max(a·x) = a·max(x) for a > 0: such a function is its own derivative applied to x.
    "overlapping max-pool": Pool(2, 2, kernel=3, stride=2, padding=1),
    "bilinear": Upsample(2, 2, mode="bilinear"),
    "bilinear by 3": Upsample(2, 2, factor=3, mode="bilinear"),
    "bicubic by 3": Upsample(2, 2, factor=3, mode="bicubic"),
    "transposed k2 s2": TransposedConv(2, 3),
    "transposed k3 s2 p1": TransposedConv(2, 3, 3, 2, 1, 1),
    "transposed k4 s2 p1": TransposedConv(2, 3, 4, 2, 1),
    "transposed k5 s3 p2": TransposedConv(2, 3, 5, 3, 2, 1),
    "transposed k2 s3": TransposedConv(2, 3, 2, 3),
    "transposed k1 s3": TransposedConv(2, 3, 1, 3),  # nothing spreads to the first of some
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(comm: MPI.Intracomm, name: str) -> None:
    layer = LAYERS[name]
    for seed, grid in enumerate(grids(comm.size)):
        edges = tuple(
            cut_at_random(parts * 7 + 6, parts, 7, seed + axis) for axis, parts in enumerate(grid)
        )
        around: Any = Around(layer, edges, comm)  # type: ignore[arg-type]
        plain = build_network((layer,), seed, torch.float64)[0]
        module = spatial_layer(layer, 0, plain, around)
        whole = drawn(2, 2, edges[0][-1], edges[1][-1], seed=seed)
        x = part_of(whole, around.halo.own, 0, 0)
        with torch.no_grad():
            found, wanted = module(x), part_of(plain(whole), around.halo.out, 0, 0)
        gap = inf if found.shape != wanted.shape else float((found - wanted).abs().max())
        assert comm.allreduce(gap, op=MPI.MAX) <= EXACT
        assert_adjoint(comm, module, x, seed)


@pytest.mark.parametrize("shape", [(), (7,), (3, 3, 5)])
def test_sum_with_gradient(comm: MPI.Intracomm, shape: tuple[int, ...]) -> None:
    x = drawn(*shape, seed=comm.rank)
    assert_adjoint(comm, lambda x: sum_with_gradient(x, comm), x, 3)
    total = sum(drawn(*shape, seed=rank) for rank in range(comm.size))
    wrong = float((sum_with_gradient(x, comm) - total).abs().max())
    assert comm.allreduce(wrong, op=MPI.MAX) <= 1e-14


def plain_norm(x: Tensor, layer: Norm, weight: Tensor, bias: Tensor) -> Tensor:
    """The formula, over whole images (B, C, H, W)."""
    images, channels = x.shape[:2]
    if layer.norm == "batch":
        flat = x.transpose(0, 1).reshape(1, channels, -1)
    else:
        groups = layer.groups if layer.norm == "group" else channels
        flat = x.reshape(images, groups, -1)
    centred = flat - flat.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if layer.norm == "batch":
        normal = normal.reshape(channels, images, *x.shape[2:]).transpose(0, 1)
    return normal.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize("halo", [0, 3], ids=["exchange", "overlap"])
@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
def test_linearised_norm(comm: MPI.Intracomm, norm: str, halo: int) -> None:
    """What ranks make of cells that several have read is added, as by the whole image's adjoint."""
    layer = Norm(6, 6, norm=norm, groups=2, affine=True)  # type: ignore[arg-type]
    for seed, grid in enumerate(grids(comm.size)):
        rows, cols = (cut_at_random(n * 4 + 5, n, 4, seed + n) for n in grid)
        row, col = divmod(comm.rank, grid[1])
        top, left = max(rows[row] - halo, 0), max(cols[col] - halo, 0)
        stop = min(rows[row + 1] + halo, rows[-1]), min(cols[col + 1] + halo, cols[-1])
        read = Window(top, left, stop[0] - top, stop[1] - left)
        own = Window(
            rows[row] - top, cols[col] - left, rows[row + 1] - rows[row], cols[col + 1] - cols[col]
        )
        whole = drawn(2, 6, rows[-1], cols[-1], seed=seed) * 3 + 40
        whole.requires_grad_()
        weight, bias = drawn(6, seed=5) + 1, drawn(6, seed=6)
        ys = [torch.zeros_like(whole) for _ in range(comm.size)]
        y = part_of(ys[comm.rank], read, 0, 0)
        y.copy_(drawn(*y.shape, seed=50 + comm.rank))
        all_y = torch.zeros_like(whole)
        comm.Allreduce(ys[comm.rank].numpy(), all_y.numpy())
        wanted = plain_norm(whole, layer, weight, bias)
        wanted.backward(all_y)

        plain = build_network((layer,), 1, torch.float64)[0]
        with torch.no_grad():
            plain.weight.copy_(weight)  # type: ignore[operator]
            plain.bias.copy_(bias)  # type: ignore[operator]
        cells = Cells((own, own), (0, 1))
        module = WholeImageNorm(plain, layer, lambda cells=cells: cells, comm)  # type: ignore[misc]
        x = part_of(whole.detach(), read, 0, 0).clone().requires_grad_()
        out = module(x)
        out.backward(y)
        mine = torch.zeros_like(whole.detach())
        part_of(mine, read, 0, 0).copy_(x.grad)
        total = torch.empty_like(mine)
        comm.Allreduce(mine.numpy(), total.numpy())
        gaps = (
            (out - part_of(wanted, read, 0, 0)).detach().abs().max(),
            (total - whole.grad).abs().max() / whole.grad.abs().max(),
        )
        assert max(comm.allreduce(float(gap), op=MPI.MAX) for gap in gaps) <= 1e-12
