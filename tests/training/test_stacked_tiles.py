"""Tiles that a layer takes in one batch: what kernels can count is their sum."""

from dataclasses import replace
from typing import Any

import pytest
from questions import small_machine

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.micro_batches import most_micro_batches, most_stacked, stacks
from tilenet.planning.plan import Question
from tilenet.planning.search import Search
from tilenet.training.config.keys import NetworkKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.decide import plan_run

SIDE = 2912  # of these pixels, 128 channels of one tile are less than 2³¹ elements, of two more


def plan(norm: str, images: int, ranks: int, **more: Any) -> None:
    names = [f"{number}.tif" for number in range(images)]
    network = NetworkKeys(poolings=4, base=64, norm=norm)  # type: ignore[arg-type]
    given = {"classes": 2, "output": "out", "steps": 1, "batch_size": images, **more}
    run = RunFile(images=names, labels=names, network=network, **given)
    rows = 2 if "tiles" in more else 1
    plan_run(run, (((1, 2, 3), (rows * SIDE, SIDE)),) * images, ranks)


def test_a_stacked_batch_that_kernels_cannot_count_is_refused() -> None:
    plan("batch", 1, 1)
    plan("batch", 2, 2)
    with pytest.raises(TilenetError, match=r"elements for 2 × 2912 × 2912 px\); use more ranks"):
        plan("batch", 2, 1)
    plan("instance", 2, 1)  # images go one by one, but not the tiles of one
    with pytest.raises(TilenetError, match=r"elements for 2 × \d+ × 2912 px"):
        plan("instance", 1, 1, tiles=TileKeys(2, 1))
    plan("none", 2, 1, tiles=TileKeys(2, 1))


@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
def test_as_many_tiles_are_stacked_as_a_step_stacks(norm: str) -> None:
    layers = unet_layers(UNetOptions(poolings=1, base=2, norm=norm))  # type: ignore[arg-type]
    images = [number for number in range(3) for _ in range(4)]
    stacked = stacks(layers, range(12), images)
    assert most_stacked(layers, 4, 3) == max(map(len, stacked))
    assert most_micro_batches(layers, 4, 3) == len(stacked)


def test_a_planner_knows_of_stacks() -> None:
    alone = UNetOptions(poolings=1, base=64, bands=3, classes=2, norm="none")
    machine = small_machine(1, 2**43)
    asked = Question(alone, 0, (SIDE, SIDE), machine, 1, 2, batch_size=2, grid=(1, 1))
    assert Search(asked).leanest() is not None
    assert Search(replace(asked, options=replace(alone, norm="batch"))).leanest() is None
