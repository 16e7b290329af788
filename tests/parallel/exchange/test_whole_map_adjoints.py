"""Averages of the image, what enlarges them, and corners: the whole image's, and its adjoint.

Tiles are cut as unevenly as it goes. A whole map is the same on all ranks, and each rank has a
gradient of its own for it: what belongs to the map is the sum of these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from mpi4py import MPI
from shared_out import grids
from test_adjoints import EXACT, assert_adjoint, cut_at_random, drawn
from torch import Tensor, nn
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.tracker import use_skip_tracker

from tilenet.choices import HaloMode
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Conv, Expand, GlobalPool, Layer, Pool, Stash, Upsample
from tilenet.geometry.tiles import Span, Tiling
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network
from tilenet.model.origin import Origin, OriginTracker
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.exchange.network import SpatialNetwork, spatial_network
from tilenet.parallel.exchange.norm import Cells
from tilenet.parallel.exchange.placed import ByCorners
from tilenet.parallel.exchange.whole_maps import (
    AveragedOver,
    WholeImagePool,
    bin_cells,
    bin_counts,
    bin_sums,
)
from tilenet.parallel.exchange.whole_maximum import WholeImageMaximum

pytestmark = pytest.mark.ranks(2, 3)

LEAST = 5  # units of a tile, at least
HALO = 4  # of the overlapping tiles, in units
MODES: tuple[HaloMode, ...] = ("exchange", "overlap")
BINS = (1, 2, 3, 6)


def pool_of(bins: int) -> GlobalPool:
    return GlobalPool(1, 1, bins)


def uneven_tiling(grid: tuple[int, int], mode: HaloMode, seed: int, unit: int) -> Tiling:
    """Tiles of an image of uneven sides, none of which but by chance is as large as another."""
    axes, sizes = [], []
    halo = HALO * unit if mode == "overlap" else 0
    for axis, parts in enumerate(grid):
        units = cut_at_random(parts * LEAST + 8 + 3 * axis, parts, LEAST, seed + axis)
        edges = [edge * unit for edge in units]
        most = edges[-1]
        reads = [(max(a - halo, 0), min(b + halo, most)) for a, b in pairwise(edges)]
        axes.append(
            tuple(
                Span(start, stop - start, a, b - a)
                for (start, stop), (a, b) in zip(reads, pairwise(edges), strict=True)
            )
        )
        sizes.append(most)
    rule = HaloRule(halo, unit, exchanged=mode == "exchange")
    return Tiling(sizes[0], sizes[1], axes[0], axes[1], rule)


class OnTiles(nn.Module):
    """A network over the ranks of an image; two images make its micro-batch."""

    def __init__(self, network: SpatialNetwork, tiling: Tiling, rank: int) -> None:
        super().__init__()
        self.network = network
        self.layout = inspect_skip_layout([network])
        self.origin = Origin((4, 7), tiling, (rank, rank))

    def forward(self, x: Tensor) -> Tensor:
        with use_skip_tracker(OriginTracker(self.layout, self.origin)):
            out: Tensor = self.network(x)
        return out


@contextmanager
def on_tiles(
    layers: tuple[Layer, ...], tiling: Tiling, mode: HaloMode, comm: MPI.Intracomm
) -> Iterator[OnTiles]:
    plain = build_network(layers, 2, torch.float64)
    network = spatial_network(plain, layers, [len(layers)], mode, comm)
    yield OnTiles(network, tiling, comm.rank)
    network.close()


def tilings(comm: MPI.Intracomm, mode: HaloMode, unit: int = 1) -> list[Tiling]:
    return [uneven_tiling(grid, mode, seed, unit) for seed, grid in enumerate(grids(comm.size))]


def sum_over(comm: MPI.Intracomm, values: Tensor) -> Tensor:
    total = torch.empty_like(values)
    comm.Allreduce(values.detach().contiguous().numpy(), total.numpy())
    return total


def assert_close(comm: MPI.Intracomm, found: Tensor, wanted: Tensor, bound: float) -> None:
    """On all ranks, relative to the largest wanted value of them. Collective."""
    assert comm.allreduce(found.shape == wanted.shape, op=MPI.LAND)
    gap, most = (
        comm.allreduce(float(values.detach().abs().max()), op=MPI.MAX)
        for values in (found - wanted, wanted)
    )
    assert most > 0, "zeros prove nothing"
    assert gap <= bound * most


def assert_same_map(
    comm: MPI.Intracomm,
    found: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    windows: tuple[Window, Window],
) -> None:
    """The own part of a map of the image's size, and what its gradient makes of the image.

    Args:
        found: What a tile reads, and its own part of the map.
        wanted: The same of the whole image.
        windows: What the tile reads, and owns.
    """
    (x, part), (whole, large), (read, own) = found, wanted, windows
    y = drawn(*large.shape, seed=70)
    large.backward(y)  # type: ignore[no-untyped-call]
    part.backward(part_of(y, own, 0, 0))  # type: ignore[no-untyped-call]
    assert_close(comm, part, part_of(large, own, 0, 0), EXACT)
    assert_gradients_add(comm, x, whole, read)


def assert_gradients_add(comm: MPI.Intracomm, x: Tensor, whole: Tensor, read: Window) -> None:
    """Up to the whole image's. Collective."""
    assert x.grad is not None
    assert whole.grad is not None
    mine = torch.zeros_like(whole.detach())
    part_of(mine, read, 0, 0).copy_(x.grad)
    assert_close(comm, sum_over(comm, mine), whole.grad, EXACT)


def assert_same_pool(
    comm: MPI.Intracomm, network: Any, whole: Tensor, wanted: Tensor, read: Window
) -> None:
    """A pool over tiles that read these windows, and its gradients. Collective."""
    y = drawn(*wanted.shape, seed=60 + comm.rank)
    wanted.backward(sum_over(comm, y))  # type: ignore[no-untyped-call]
    x = part_of(whole.detach(), read, 0, 0).clone().requires_grad_()
    found = network(x)
    found.backward(y)
    assert_close(comm, found, wanted, EXACT)
    assert_gradients_add(comm, x, whole, read)


# --- averages of the whole image


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bins", BINS)
def test_averages_are_torchs_and_their_gradients_too(
    comm: MPI.Intracomm, bins: int, mode: HaloMode
) -> None:
    layers = (GlobalPool(3, 3, bins),)
    for seed, tiling in enumerate(tilings(comm, mode)):
        whole = drawn(2, 3, *tiling.extended, seed=seed).requires_grad_()
        wanted = nn.functional.adaptive_avg_pool2d(whole, bins)
        with on_tiles(layers, tiling, mode, comm) as network:
            assert isinstance(network.network[0], WholeImagePool)
            assert_same_pool(comm, network, whole, wanted, tiling.tiles[comm.rank].read)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bins", BINS)
def test_adjoint_of_averages(comm: MPI.Intracomm, bins: int, mode: HaloMode) -> None:
    layers = (GlobalPool(3, 3, bins),)
    for seed, tiling in enumerate(tilings(comm, mode)):
        read = tiling.tiles[comm.rank].read
        x = drawn(2, 3, read.height, read.width, seed=seed + comm.rank)
        with on_tiles(layers, tiling, mode, comm) as network:
            assert_adjoint(comm, network, x, seed)


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_have_the_very_same_averages(comm: MPI.Intracomm, mode: HaloMode) -> None:
    """To the last bit: what ranks compute of a whole map may not drift apart."""
    tiling = tilings(comm, mode)[-1]
    read = tiling.tiles[comm.rank].read
    with on_tiles((GlobalPool(3, 3, 3),), tiling, mode, comm) as network:
        found = network(drawn(2, 3, read.height, read.width, seed=comm.rank))
    assert found.abs().min() > 0
    assert len(set(comm.allgather(found.numpy().tobytes()))) == 1


@pytest.mark.ranks(1)
@pytest.mark.parametrize("bins", BINS)
def test_tiles_of_one_image_in_one_micro_batch_are_averaged_together(bins: int) -> None:
    """Three tiles of two images, some with a frame of cells that belong to other tiles."""
    images = [drawn(1, 3, 9, 14, seed=seed) for seed in (1, 2)]
    places = [(0, Window(0, 0, 9, 8)), (1, Window(0, 0, 9, 14)), (0, Window(0, 8, 9, 6))]
    x = drawn(3, 3, 11, 16, seed=3)  # what is not own may be anything
    own = []
    for sample, (image, window) in enumerate(places):
        own.append(Window(sample % 2, 1, window.height, window.width))
        part_of(x[sample, None], own[-1], 0, 0).copy_(part_of(images[image], window, 0, 0))
    firsts = tuple((window.row, window.col) for _, window in places)
    where = AveragedOver(Cells(tuple(own), (0, 1, 0)), firsts, (9, 14))
    found = WholeImagePool(pool_of(bins), lambda: where, None)(x)
    wanted = nn.functional.adaptive_avg_pool2d(torch.cat([images[i] for i, _ in places]), bins)
    assert float((found - wanted).abs().max()) <= 1e-14
    comm = MPI.COMM_SELF
    assert_adjoint(comm, WholeImagePool(pool_of(bins), lambda: where, None), x, 5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("whole", [1, 2, 5, 6, 7, 23])
def test_cells_of_spans_are_those_of_the_whole_axis(whole: int) -> None:
    """Of bins that share cells, and of more bins than cells."""
    cells = torch.eye(whole, dtype=torch.float64)[:, None, :, None].expand(-1, -1, -1, whole)
    for bins in (1, 2, 3, 6, 8):
        wanted = nn.functional.adaptive_avg_pool2d(cells, (bins, 1))[:, 0, :, 0].T
        every = bin_cells(0, whole, whole, bins)
        assert float((every / every.sum(1, keepdim=True) - wanted).abs().max()) <= 1e-15
        for first in range(whole):
            for count in range(whole - first + 1):
                found = bin_cells(first, count, whole, bins)
                assert torch.equal(found, every[:, first : first + count])


# --- maxima of the whole image


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_equal_maxima_are_torchs(
    comm: MPI.Intracomm, shared: bool, mode: HaloMode
) -> None:
    """One channel has its maxima on one tile, one on several, and one a single time."""
    layers = (GlobalPool(3, 3, takes="maximum", shared=shared),)
    for seed, tiling in enumerate(tilings(comm, mode)):
        whole = drawn(2, 3, *tiling.extended, seed=seed).clamp(-1, 0.5)
        whole[:, 0, 1, 2:5], whole[:, 1, -1, -1] = 2, 2
        whole.requires_grad_()
        wanted = build_network(layers, 2, torch.float64)(whole)
        assert (whole == wanted).sum((0, 2, 3)).tolist()[:2] == [6, 2]
        with on_tiles(layers, tiling, mode, comm) as network:
            assert isinstance(network.network[0], WholeImageMaximum)
            assert_same_pool(comm, network, whole, wanted, tiling.tiles[comm.rank].read)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [False, True])
def test_where_a_cell_is_nan_the_maximum_is(
    comm: MPI.Intracomm, shared: bool, mode: HaloMode
) -> None:
    """On all ranks, of the channel that has it; others' gradients are torch's."""
    layers = (GlobalPool(3, 3, takes="maximum", shared=shared),)
    for seed, tiling in enumerate(tilings(comm, mode)):
        whole = drawn(2, 3, *tiling.extended, seed=seed)
        whole[1:, 1, -1, -1] = torch.nan
        whole.requires_grad_()
        wanted = build_network(layers, 2, torch.float64)(whole)
        read = tiling.tiles[comm.rank].read
        x = part_of(whole.detach(), read, 0, 0).clone().requires_grad_()
        with on_tiles(layers, tiling, mode, comm) as network:
            found = network(x)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            found.sum().backward()
        wanted.sum().backward()
        assert x.grad is not None
        assert whole.grad is not None
        (ours, theirs) = (g[:, [0, 2]] for g in (x.grad, part_of(whole.grad, read, 0, 0)))
        own = tiling.tiles[comm.rank].own
        inside = Window(own.row - read.row, own.col - read.col, own.height, own.width)
        torch.testing.assert_close(
            part_of(ours, inside, 0, 0), part_of(theirs, inside, 0, 0) * comm.size
        )


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bins", BINS)
def test_the_mean_of_equal_whole_numbers_is_that_number(
    comm: MPI.Intracomm, bins: int, mode: HaloMode
) -> None:
    """A comparison with it is the same on any number of ranks."""
    for tiling in tilings(comm, mode):
        read = tiling.tiles[comm.rank].read
        x = torch.tensor([3.0, 255.0, 65535.0], dtype=torch.float64).view(1, 3, 1, 1)
        with on_tiles((pool_of(bins),), tiling, mode, comm) as network:
            found = network(x.expand(2, 3, read.height, read.width))
        assert torch.equal(found, x.expand(2, 3, bins, bins))


# --- enlargement by corners

by_corners = partial(nn.functional.interpolate, mode="bilinear", align_corners=True)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("enlarges", [True, False])
def test_corners_are_those_of_the_whole_map(
    comm: MPI.Intracomm, factor: int, mode: HaloMode, enlarges: bool
) -> None:
    """The tile's own part of a map made small and large again, and its gradient's share."""
    layers: tuple[Layer, ...] = Pool(2, 2, factor, factor, mode="corners"), Upsample(2, 2, factor)
    if enlarges:
        smaller = Conv(2, 2, kernel=factor, stride=factor)
        layers = smaller, Upsample(2, 2, factor, "bilinear", corners=True)
    for seed, tiling in enumerate(tilings(comm, mode, factor)):
        read, own = tiling.tiles[comm.rank].read, tiling.tiles[comm.rank].own
        whole = drawn(2, 2, *tiling.extended, seed=seed).requires_grad_()
        if enlarges:
            small = build_network(layers, 2, torch.float64)[0](whole)
            wanted = by_corners(small, tiling.extended)
        else:
            small = by_corners(whole, [cells // factor for cells in tiling.extended])
            wanted = nn.functional.interpolate(small, scale_factor=factor)
        x = part_of(whole.detach(), read, 0, 0).clone().requires_grad_()
        with on_tiles(layers, tiling, mode, comm) as network:
            assert isinstance(network.network[int(enlarges)], ByCorners)
            found = part_of(network(x), own, read.row, read.col)
            assert_same_map(comm, (x, found), (whole, wanted), (read, own))


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_adjoint_of_corners(comm: MPI.Intracomm, factor: int) -> None:
    layers = (Upsample(2, 2, factor, "bilinear", corners=True),)
    for seed, tiling in enumerate(tilings(comm, "exchange")):
        own = tiling.tiles[comm.rank].own
        x = drawn(2, 2, own.height, own.width, seed=seed + comm.rank)
        with on_tiles(layers, tiling, "exchange", comm) as network:
            assert_adjoint(comm, network, x, seed)


# --- enlargement of averages

WAYS: tuple[tuple[Any, bool], ...] = (("nearest", False), ("bilinear", False), ("bilinear", True))


def expanded(bins: int, mode: Any, corners: bool, stride: int) -> tuple[Layer, ...]:
    """Averages of a map that may be smaller than the image, enlarged to its size again."""
    before = (Conv(3, 3, stride=stride, padding=1),) if stride > 1 else ()
    return (
        *before,
        Stash(3, 3, "size", sizes=True),
        GlobalPool(3, 3, bins),
        Expand(3, 3, "size", mode, corners),
    )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("way", "corners"), WAYS)
@pytest.mark.parametrize("bins", BINS)
def test_adjoint_of_averages_that_are_enlarged(
    comm: MPI.Intracomm, bins: int, way: str, corners: bool, mode: HaloMode
) -> None:
    for seed, tiling in enumerate(tilings(comm, mode)):
        tile = tiling.tiles[comm.rank]
        read, own = tile.read, tile.own
        whole = drawn(2, 3, *tiling.extended, seed=seed).requires_grad_()
        options = {} if way == "nearest" else {"align_corners": corners}
        wanted = nn.functional.interpolate(
            nn.functional.adaptive_avg_pool2d(whole, bins), tiling.extended, mode=way, **options
        )
        x = part_of(whole.detach(), read, 0, 0).clone().requires_grad_()
        with on_tiles(expanded(bins, way, corners, 1), tiling, mode, comm) as network:
            assert_adjoint(comm, network, x, seed)
            found = part_of(network(x), own, read.row, read.col)
            assert_same_map(comm, (x, found), (whole, wanted), (read, own))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("way", "corners"), WAYS)
def test_averages_of_a_smaller_map_are_enlarged_to_its_size(
    comm: MPI.Intracomm, way: str, corners: bool
) -> None:
    """Behind a stride ranks share cells, not pixels: uneven, and some on the way to a neighbour."""
    layers = expanded(3, way, corners, 2)
    plain = build_network(layers, 2, torch.float64)
    for seed, tiling in enumerate(tilings(comm, "exchange")):
        whole = drawn(2, 3, *tiling.extended, seed=seed)
        x = part_of(whole, tiling.tiles[comm.rank].own, 0, 0)
        with on_tiles(layers, tiling, "exchange", comm) as network:
            assert_adjoint(comm, network, x, seed)
            found = network(x).detach()
            rows, cols = (axis[-1].out_edges for axis in network.network.spatial.shares(tiling))
        row, col = divmod(comm.rank, tiling.grid[1])
        out = Window(rows[row], cols[col], rows[row + 1] - rows[row], cols[col + 1] - cols[col])
        assert_close(comm, found, part_of(plain(whole).detach(), out, 0, 0), EXACT)


@pytest.mark.parametrize("bins", BINS)
@pytest.mark.parametrize(("way", "corners"), WAYS)
def test_adjoint_of_the_enlargement_alone(
    comm: MPI.Intracomm, bins: int, way: str, corners: bool
) -> None:
    """Of a whole map that all ranks have: the sum over ranks of their gradients is the map's."""
    layers = expanded(bins, way, corners, 1)
    for seed, tiling in enumerate(tilings(comm, "exchange")):
        own = tiling.tiles[comm.rank].own
        x = drawn(2, 3, bins, bins, seed=seed)
        like = x.new_empty(2, 3, own.height, own.width)
        with on_tiles(layers, tiling, "exchange", comm) as network:
            stash, _, expand = network.network

            def enlarged(x: Tensor, network: OnTiles = network, like: Tensor = like) -> Tensor:
                with use_skip_tracker(OriginTracker(network.layout, network.origin)):
                    stash(like)  # noqa: B023 (called before the loop goes on)
                    out: Tensor = expand(x)  # noqa: B023
                return out

            assert_adjoint(comm, enlarged, x, seed)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bins", BINS)
def test_autocast_rounds_an_average_once_and_not_its_sums(bins: int, dtype: torch.dtype) -> None:
    rows, cols, edge = 61, 83, 29
    x = (1 + drawn(1, 3, rows, cols, seed=5) / 10).to(dtype)
    exact = x.double().requires_grad_()
    wanted = nn.functional.adaptive_avg_pool2d(exact, bins)
    (to_exact,) = torch.autograd.grad(wanted.sum(), exact)

    def over(row: int, height: int) -> AveragedOver:
        cells = Cells((Window(0, 0, height, cols),), (0,))
        return AveragedOver(cells, ((row, 0),), (rows, cols))

    with torch.autocast("cpu", dtype):
        top = bin_sums(x[:, :, :edge], pool_of(bins), over(0, edge))
        sums = top + bin_sums(x[:, :, edge:], pool_of(bins), over(edge, rows - edge))
        sums = sums / bin_counts((rows, cols), pool_of(bins))
        pool = WholeImagePool(pool_of(bins), lambda: over(0, rows), None)
        found = pool(x.requires_grad_())
        (to_x,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(sums, wanted.detach(), rtol=1e-6, atol=0)
    assert torch.equal(found, wanted.to(dtype))
    half_a_digit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(to_x.double(), to_exact, rtol=1.01 * half_a_digit, atol=1e-7)
