"""Pictures of large files are read in parts: the same pixels as at once."""

from collections.abc import Callable

import numpy as np
import pytest

from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.resample import PART_PX, sample_parts
from tilenet.geometry.windows import Window

Patch = pytest.MonkeyPatch
Write = Callable[..., str]


@pytest.mark.parametrize(
    ("window", "size", "block"),
    [
        (Window(3, 5, 1200, 9000), (400, 3000), (512, 512)),
        (Window(0, 0, 10_000, 10_000), (625, 625), (512, 512)),
        (Window(7, 0, 4096, 60_000), (8, 6000), (1, 60_000)),
        (Window(0, 0, 2048, 59_997), (512, 8571), (512, 60_000)),
        (Window(0, 0, 70, 70), (70, 70), (16, 16)),
    ],
)
def test_parts_cover_the_picture_once_and_stay_small(
    window: Window, size: tuple[int, int], block: tuple[int, int]
) -> None:
    parts = sample_parts(window, size, block)
    high, wide = window.height // size[0], window.width // size[1]
    seen = np.zeros(size, int)
    for rows, cols, part in parts:
        seen[rows, cols] += 1
        height, width = seen[rows, cols].shape
        place = window.row + rows.start * high, window.col + cols.start * wide
        assert part == Window(*place, height * high, width * wide)
        assert part.height * part.width <= PART_PX or part.width < block[1] + wide
        assert part.width >= block[1] or cols.stop == size[1]  # or blocks are decoded for many
    assert (seen == 1).all()


def test_uneven_pictures_are_one_part() -> None:
    window = Window(1, 2, 100, 90)
    assert sample_parts(window, (33, 30), (16, 16)) == [(slice(0, 33), slice(0, 30), window)]


def test_a_picture_has_the_pixels_that_gdal_takes(write_raster: Write, monkeypatch: Patch) -> None:
    monkeypatch.setattr("tilenet.data.rasters.resample.PART_PX", 700)
    rng = np.random.default_rng(3)
    values = rng.integers(1, 5000, (3, 120, 150), dtype=np.uint16)
    path = write_raster("image.tif", values, tiled=True, blockxsize=32, blockysize=32)
    with Raster(path) as image:
        for window, size in (
            (Window(0, 0, 120, 150), (24, 30)),
            (Window(9, 6, 66, 81), (22, 27)),
            (Window(4, 1, 100, 140), (33, 60)),
        ):
            found = image.sample(window, size).values
            wanted = image._files.read(image.bands, window, size)
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)
    assert len(sample_parts(Window(0, 0, 120, 150), (24, 30), (32, 32))) > 10
