"""A turned image: what a run decides beforehand holds for it, and its tiles show it turned."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_raster import HEIGHT, WIDTH, pixels_of, seen_in

from tilenet.cli import plan as plan_command
from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.symmetries import SYMMETRIES, Symmetry
from tilenet.geometry.tiles import Tile
from tilenet.geometry.windows import Window
from tilenet.training.config.keys import AugmentKeys, MeshKeys, NetworkKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.images.tile_reader import read_turned
from tilenet.training.setup.decide import plan_run

SIZE = 40, 200
BANDS = (1, 2, 3)
NETWORK = NetworkKeys(poolings=4, base=4)


def a_run(*, rotations: bool, **more: Any) -> RunFile:
    return RunFile(
        images="a.tif",
        labels="b.tif",
        classes=2,
        output="out",
        steps=1,
        network=NETWORK,
        augment=AugmentKeys(flips=True, rotations=rotations),
        **more,
    )


@pytest.mark.parametrize(
    ("more", "ranks", "said"),
    [
        ({"halo_mode": "exchange", "mesh": MeshKeys(1, 1, 4)}, 4, r"tiles: 1 × 3, mesh: 1 × 1 × 4"),
        ({"tiles": TileKeys(1, 12)}, 1, "40"),
    ],
    ids=["exchange", "grid"],
)
def test_tiles_that_a_turned_image_is_too_narrow_for_are_refused(
    more: dict[str, Any], ranks: int, said: str
) -> None:
    plan_run(a_run(rotations=False, **more), ((BANDS, SIZE),), ranks)
    with pytest.raises(TilenetError, match=said):
        plan_run(a_run(rotations=True, **more), ((BANDS, SIZE),), ranks)


def test_a_loss_of_the_whole_counts_the_tiles_of_turned_images() -> None:
    """40 × 200 px have 1 × 3 tiles; turned they have 3 × 1, all of one of 1 × 3 ranks."""
    more = {"tiles": TileKeys(size_px=80), "loss": "dice", "mesh": MeshKeys(1, 1, 3)}
    plan_run(a_run(rotations=False, **more), ((BANDS, SIZE),), 3)
    with pytest.raises(TilenetError, match="a rank has 3"):
        plan_run(a_run(rotations=True, **more), ((BANDS, SIZE),), 3)


def test_a_plan_must_be_large_enough_for_turned_images(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with redirect_stdout(StringIO()):
        asked = "--poolings 4 --base 4 --bands 3 --classes 2 --image 40x200 --machine local"
        options = ["--device-gib", "1", "--json", "-o", str(path)]
        assert plan_command.main([*asked.split(), *options]) == 0
    plan_run(a_run(rotations=False, plan=str(path)), ((BANDS, SIZE),), 1)
    with pytest.raises(TilenetError, match=r"200 × 40 px\); .* after a quarter turn$"):
        plan_run(a_run(rotations=True, plan=str(path)), ((BANDS, SIZE),), 1)


REGION = Window(6, 11, 21, 34)


@pytest.mark.parametrize("symmetry", SYMMETRIES, ids=str)
@pytest.mark.parametrize("region", [REGION, Window(0, 0, HEIGHT, WIDTH)], ids=["crop", "image"])
def test_tiles_of_a_turned_region(
    write_raster: Callable[..., str], symmetry: Symmetry, region: Window
) -> None:
    values = pixels_of("uint16")
    hole = np.random.default_rng(2).random((HEIGHT, WIDTH)) < 0.2
    values[:, hole] = 0
    classes = np.random.default_rng(3).integers(0, 9, (HEIGHT, WIDTH)).astype(np.uint8)
    rows = slice(region.row, region.row + region.height)
    cols = slice(region.col, region.col + region.width)
    turned = symmetry.turn(values[:, rows, cols])
    mask = symmetry.turn(~hole[rows, cols])
    edges = [(0, 50), (0, 50)]
    labelled = np.pad(symmetry.turn(classes[rows, cols]), edges, constant_values=255)
    height, width = mask.shape
    with (
        Raster(write_raster("a.tif", values, nodata=0)) as image,
        Labels(write_raster("b.tif", classes), image, 255) as labels,
    ):
        for own in [Window(4, 8, 12, 9), Window(height - 5, width - 7, 9, 11)]:
            read = Window(own.row - 6, own.col - 10, own.height + 15, own.width + 19)
            pixels, found = read_turned(image, labels, Tile(read, own), region, symmetry)
            assert np.array_equal(pixels.values, seen_in(turned, read, 60))
            assert np.array_equal(pixels.valid, seen_in(mask, read, 60))
            wanted = labelled[own.row : own.row + own.height, own.col : own.col + own.width]
            assert np.array_equal(torch.from_numpy(found).numpy(), wanted)
