"""A tile of a turned region shows what the region shows, turned in memory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_raster import HEIGHT, WIDTH, pixels_of, seen_in

from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.tiles import Tile
from tilenet.geometry.windows import SYMMETRIES, Symmetry, Window
from tilenet.training.images.workload import read_turned

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
