"""Loops that leave it open how tiles get their context: what is chosen, and that it is exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from scenes import SIZE, Net
from test_own_loops import SEEN, net_of, sums
from torch import nn

import tilenet
from tilenet.training.config.read import read_keys
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.halo_choice import choose_halo_mode

TWO = {"images": ["a.tif", "b.tif"], "labels": ["c.tif", "d.tif"]}
SHAPES = ((1, 2), (90, 70)), ((1, 2), SIZE)
EVEN = SIZE[0] - 1, SIZE[1] - 1  # of what is odd, a run reflects a pixel
OWN = "overlap", "each rank has images or crops of its own"


@pytest.mark.parametrize(
    ("ranks", "keys", "mode", "why"),
    [
        (1, {}, *OWN),
        (2, {"batch_size": 2}, *OWN),
        (2, {"batch_size": 4, "crop_px": 64}, *OWN),
        (2, {}, "exchange", "a tile that overlaps would compute 1.0"),
        (4, {"batch_size": 2, "crop_px": 64}, "exchange", "a tile that overlaps would compute 1.2"),
        (2, {"tiles": {"size_px": 64}}, "overlap", "ranks cannot exchange halos here: "),
    ],
)
def test_ranks_that_share_an_image_exchange(
    ranks: int, keys: dict[str, Any], mode: str, why: str
) -> None:
    run = read_keys({**SEEN, **TWO, "classes": 3, "output": ".", **keys})
    architecture = Architecture(tilenet.adopt(Net(), 2).layers)
    choice = choose_halo_mode(run, SHAPES, ranks, architecture)
    assert str(choice).startswith(f"halo_mode: {mode}, since {why}")
    assert choice.plan.halo_mode == mode


def test_ranks_whose_network_looks_nowhere_overlap() -> None:
    run = read_keys({**SEEN, **TWO, "classes": 3, "output": "."})
    architecture = Architecture(tilenet.adopt(nn.Conv2d(2, 3, 1), 2).layers)
    choice = choose_halo_mode(run, SHAPES, 2, architecture)
    assert choice.plan.halo_mode == "overlap"
    assert choice.why == "a rank that exchanges halos would compute no less"


@pytest.mark.ranks(1, 2)
def test_gradients_are_those_of_the_whole_image(
    scene: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    comm = MPI.COMM_WORLD
    job, whole = tilenet.Job(), net_of(0)
    local = job.split(net_of(comm.rank), halo_mode="auto")
    step = next(steps := job.steps(**{**SEEN, "steps": 1}, window=[0, 0, *EVEN]))
    for tile in step:
        step.add(*sums(local(tile.image)[tile.own], tile.labels))
    loss = step.apply(torch.optim.SGD(local.parameters(), 0.0))
    found = {name: one.grad for name, one in local.network.named_parameters()}
    said = [line for line in capfd.readouterr().err.splitlines() if "halo_mode" in line]
    mode = "overlap" if comm.size == 1 else "exchange"
    assert len(said) == (comm.rank == 0)
    assert all(line.startswith(f"halo_mode: {mode}, since ") for line in said)
    assert comm.allgather(local.halo_mode) == ["auto"] * comm.size

    with rasterio.open("i.tif") as file:
        image = file.read()[:, : EVEN[0], : EVEN[1]].astype(float)
    with rasterio.open("l.tif") as file:
        labels = torch.from_numpy(file.read()[:, : EVEN[0], : EVEN[1]]).long()
    image -= image.mean((1, 2), keepdims=True)
    image /= np.sqrt((image**2).mean((1, 2), keepdims=True))
    total, weight = sums(whole(torch.from_numpy(image)[None]), labels)
    (total / weight).backward()
    assert loss == pytest.approx((total / weight).item(), abs=1e-12)
    wanted = dict(whole.named_parameters())
    for own, name in local.adopted.names.items():
        assert (found[own] - wanted[name].grad).abs().max() < 1e-10
    assert list(steps) == []
