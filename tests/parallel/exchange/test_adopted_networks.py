"""Somebody else's networks over ranks: gates, averages of the image, corners, joins."""

from dataclasses import replace
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from shared_out import Case, assert_same, grids, shared_out, whole
from torch import Tensor, nn
from zoo import ZOO, network

from tilenet.adoption.adopt import adopt
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Layer
from tilenet.parallel.exchange import whole_maps, whole_maximum
from tilenet.parallel.exchange.placed import ByCorners

pytestmark = pytest.mark.ranks(2, (3, 4))


@pytest.fixture(scope="module")
def lists() -> dict[tuple[str, str], tuple[Layer, ...]]:
    return {
        (name, mode): adopt(network(name), 3, mode).layers  # type: ignore[arg-type]
        for name in ZOO
        for mode in ("frozen", "step")
    }


def case(layers: tuple[Layer, ...], size: int, mode: str, *of: object, **more: object) -> Case:
    """On an image of uneven sides, as large as 6 ranks in a row need."""
    context = context_of(layers)
    unit = context.alignment_px
    choices = grids(size)
    grid = choices[crc32(repr(of).encode()) % len(choices)]
    halo = context.halo_px if mode == "overlap" else 0
    least = -(-128 // unit) + 1
    return Case(layers, (least * unit, (least + 3) * unit), grid, unit, halo, mode, **more)  # type: ignore[arg-type]


@pytest.mark.ranks((2, 3, 4))
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_network(
    comm: MPI.Intracomm, lists: dict[tuple[str, str], tuple[Layer, ...]], name: str, mode: str,
    batch_norm: str,
) -> None:  # fmt: skip
    one = case(lists[name, batch_norm], comm.size, mode, name, mode, batch_norm, images=2)
    stacked = batch_norm == "step"
    assert_same(shared_out(one, comm, stacked=stacked), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.ranks((2, 4))
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("checkpointing", "partitions"), [("never", 2), ("always", 3)])
def test_partitions(
    comm: MPI.Intracomm, lists: dict[tuple[str, str], tuple[Layer, ...]], name: str,
    checkpointing: str, partitions: int,
) -> None:  # fmt: skip
    one = case(
        lists[name, "frozen"], comm.size, "exchange", name, checkpointing, partitions,
        images=2, partitions=partitions, checkpointing=checkpointing, threads=True,
    )  # fmt: skip
    assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.ranks(3)
def test_a_halo_one_unit_short_is_seen(
    comm: MPI.Intracomm, lists: dict[tuple[str, str], tuple[Layer, ...]]
) -> None:
    """By the middle one: tiles at the image's edges read as much on the other side."""
    one = case(lists["residual", "frozen"], comm.size, "overlap")
    short = replace(one, halo=one.halo - one.unit)
    with pytest.raises(AssertionError, match="output"):
        assert_same(shared_out(short, comm), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.ranks(2)
def test_a_gate_whose_gradient_stays_on_its_rank_is_seen(
    comm: MPI.Intracomm,
    lists: dict[tuple[str, str], tuple[Layer, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = case(lists["gated", "frozen"], comm.size, "exchange")
    wanted, add = whole(one), whole_maps.add_over
    calls = []

    def forward_only(comm: MPI.Intracomm | None, values: torch.Tensor) -> torch.Tensor:
        calls.append(values)
        return add(comm, values) if len(calls) == 1 else values

    monkeypatch.setattr(whole_maps, "add_over", forward_only)
    with pytest.raises(AssertionError):
        assert_same(shared_out(one, comm), wanted, 1e-12, 1e-10, comm)
    assert len(calls) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["pyramid", "resized"])
def test_corners_taken_for_the_windows_are_seen(
    comm: MPI.Intracomm,
    name: str,
    lists: dict[tuple[str, str], tuple[Layer, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(self: ByCorners, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(
            x, scale_factor=float(self.factor), mode="bilinear", align_corners=True
        )

    one = case(lists[name, "frozen"], comm.size, "overlap")
    monkeypatch.setattr(ByCorners, "forward", alone)
    with pytest.raises(AssertionError):
        assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


class Extremes(nn.Module):
    """Maxima and lengths of the whole image, of maps that look far; edges made of the map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect")
        self.far = nn.Conv2d(4, 4, (1, 9), padding=(0, 4))
        self.near = nn.Conv2d(4, 4, 3, 2, padding=1, padding_mode="replicate")
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.head = nn.Sequential(nn.Conv2d(4, 12, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = F.adaptive_max_pool2d(self.far(x), 1) + 0.01 * x.norm(dim=(2, 3), keepdim=True)
        out: Tensor = self.head(self.pool(self.near(x * gate.tanh())))
        return out


@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_extremes_of_the_image_and_edges(comm: MPI.Intracomm, mode: str) -> None:
    torch.manual_seed(6)
    one = case(adopt(Extremes(), 3).layers, comm.size, mode, mode, images=2)
    assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.ranks(2)
def test_maxima_of_a_rank_alone_are_seen(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(adopt(Extremes(), 3).layers, comm.size, "exchange")
    monkeypatch.setattr(whole_maximum, "find_largest_over", lambda _, values: values)
    with pytest.raises(AssertionError):
        assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)
