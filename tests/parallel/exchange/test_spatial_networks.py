"""Whole networks over ranks: norms, halo modes, partitions, micro-batches and checkpointing."""

import random
import time
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from mpi4py import MPI
from shared_out import Case, assert_same, grids, shared_out, whole

from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Conv
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.parallel.exchange.network import spatial_network
from tilenet.parallel.pipeline import flow

pytestmark = pytest.mark.ranks(2, (3, 4))

NORMS = ("none", "instance", "group", "batch")
# The presets' numbers of poolings and convolutions, with few channels.
SHAPES = {"small": (5, 2), "medium-1": (5, 5), "medium-2": (6, 2), "large": (7, 2)}


def case(grid: tuple[int, int], units: tuple[int, int] = (7, 8), **more: Any) -> Case:
    """A network on an image of so many alignment units."""
    # Of fewer channels dropout leaves an image none: zeros.
    network = {"poolings": 2, "base": 6, "bands": 2, "classes": 3, "groups": 2}
    network |= {key: more.pop(key) for key in list(more) if key in UNetOptions.__dataclass_fields__}
    layers = unet_layers(UNetOptions(**network))
    context = context_of(layers)
    unit = context.alignment_px
    halo = context.halo_px if more.get("mode") == "overlap" else 0
    return Case(layers, (units[0] * unit, units[1] * unit), grid, unit, halo, **more)


def one_of(choices: list[tuple[int, int]], *of: Any) -> tuple[int, int]:
    """One of them, another for other cases, the same on all ranks and each time."""
    return choices[crc32(repr(of).encode()) % len(choices)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_network(comm: MPI.Intracomm, norm: str, mode: str, upsampling: str) -> None:
    grid = one_of(grids(comm.size), norm, mode, upsampling)
    one = case(grid, norm=norm, mode=mode, upsampling=upsampling, dropout=0.3)
    assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", ["never", "except_last", "always"])
@pytest.mark.parametrize("norm", ["none", "instance", "group"])
def test_pipeline(comm: MPI.Intracomm, partitions: int, checkpointing: str, norm: str) -> None:
    one = case(
        one_of(grids(comm.size), partitions, checkpointing, norm),
        norm=norm,
        dropout=0.3,
        images=3,
        partitions=partitions,
        checkpointing=checkpointing,
        threads=partitions > 1,
    )
    assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


FLOWS = {
    "none-2": {"norm": "none", "partitions": 2, "most": 2},
    "none-3": {"norm": "none", "partitions": 3, "most": 3, "checkpointing": "always"},
    "instance-2": {"norm": "instance", "partitions": 2, "most": 5, "checkpointing": "always"},
    "instance-3": {"norm": "instance", "partitions": 3, "most": 2},
    "group-3": {"norm": "group", "partitions": 3, "most": 3},
    "group-4": {"norm": "group", "partitions": 4, "most": 4, "checkpointing": "always"},
    "layer-2": {"norm": "group", "groups": 1, "partitions": 2, "most": 1},
    "layer-3": {
        "norm": "group", "groups": 1, "partitions": 3, "most": 3, "checkpointing": "always",
    },
}  # fmt: skip


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("name", FLOWS)
def test_flow(comm: MPI.Intracomm, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward, one backward: partitions of the ranks of an image meet in the same order,
    whichever of them are slow.
    """
    slow = random.Random(f"{name} {comm.rank}")
    for work in ("_forward", "_backward"):
        plain = getattr(flow._Worker, work)

        def late(self: Any, begun: Any, plain: Any = plain) -> None:
            time.sleep(slow.choice([0, 0, 0.01, 0.03]))
            plain(self, begun)

        monkeypatch.setattr(flow._Worker, work, late)
    grid = one_of(grids(comm.size), name, mode)
    one = case(grid, mode=mode, dropout=0.3, images=5, **FLOWS[name])
    assert_same(shared_out(one, comm), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("checkpointing", ["never", "always"])
def test_batch_norm_of_all_images_of_a_step(
    comm: MPI.Intracomm, mode: str, checkpointing: str
) -> None:
    for grid in grids(comm.size):
        one = case(grid, norm="batch", mode=mode, images=3, checkpointing=checkpointing)
        assert_same(shared_out(one, comm, stacked=True), whole(one), 1e-12, 1e-10, comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_papers_networks(comm: MPI.Intracomm, shape: str) -> None:
    poolings, convolutions = SHAPES[shape]
    grid = one_of(grids(comm.size), shape)
    for mode in ("overlap", "exchange"):
        one = case(
            grid,
            (max(grid[0], 2), max(grid[1], 2)),
            poolings=poolings,
            convolutions=convolutions,
            base=2,
            norm="instance",
            mode=mode,
            partitions=1 + comm.size % 3,
        )
        # 55 convolutions and norms: changes of 1e-15 in the image alone change outputs by 1.5e-11.
        bounds = (1e-10, 5e-9) if shape == "medium-1" else (1e-12, 1e-10)
        assert_same(shared_out(one, comm), whole(one), *bounds, comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("norm", NORMS)
def test_float32(comm: MPI.Intracomm, mode: str, norm: str) -> None:
    one = case(grids(comm.size)[-1], norm=norm, mode=mode, dtype=torch.float32)
    # Not plain float32, which is further from float64 than ours.
    wanted = whole(replace(one, dtype=torch.float64))
    assert_same(shared_out(one, comm), wanted, 1e-5, 1e-5, comm)


@pytest.mark.ranks(1)
def test_layers_are_walked_as_often_however_many_they_are(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Conv] = []
    plain = Conv.grid

    def counted(layer: Conv, grid: Grid, *kept: Grid) -> Grid:
        calls.append(layer)
        return plain(layer, grid, *kept)

    monkeypatch.setattr(Conv, "grid", counted)
    per_layer = []
    for number in (20, 100):
        calls.clear()
        layers = (Conv(4, 4, 3, padding=1),) * number
        spatial_network(build_network(layers), layers, [number], "overlap", comm, comm).close()
        per_layer.append(len(calls) / number)
    assert per_layer[0] == per_layer[1] > 0
