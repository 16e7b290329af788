"""Pictures of large images: pixels are the file's, evenly spaced, labels those below."""

from collections.abc import Callable

import numpy as np
import pytest
import shapely
from affine import Affine

from tilenet.data.thumbnail import LabelFile, Thumbnail, thumbnail
from tilenet.geometry.windows import Window

Write = Callable[..., str]
SIZE = 97, 131
ROWS, COLS = np.indices(SIZE)
# Upright, so that polygons are easy to write down
GRID = Affine(2, 0, 5e5, 0, -2, 4e6)
LABELS = ((ROWS // 8 + COLS // 12) % 4).astype(np.uint8)


def an_image(write_raster: Write, **profile: object) -> str:
    values = np.stack([ROWS + 1, COLS + 1]).astype(np.uint16)
    return write_raster("image.tif", values, transform=GRID, **profile)


def a_picture(
    path: str,
    most: int,
    labels: LabelFile | None = None,
    nodata: float | str | None = None,
    window: Window = Window(0, 0, *SIZE),  # noqa: B008
) -> Thumbnail:
    return thumbnail(path, labels, most, None, nodata, window)


def places(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns that the picture's pixels were taken from."""
    return values[0].astype(int) - 1, values[1].astype(int) - 1


@pytest.mark.parametrize("most", [200, 65, 43, 32, 9, 1])  # 131 columns hold them evenly
@pytest.mark.parametrize("layout", [{}, {"tiled": True, "blockxsize": 16, "blockysize": 16}])
def test_pixels_and_labels_are_taken_from_their_blocks(
    write_raster: Write, most: int, layout: dict[str, object]
) -> None:
    image = an_image(write_raster, **layout)
    labels = LabelFile(write_raster("labels.tif", LABELS, transform=GRID), 255)
    seen = a_picture(image, most, labels)
    factor = max(1, max(SIZE) // most)
    assert seen.labels is not None
    height, width = seen.labels.shape
    assert (height, width) == tuple(max(1, side // factor) for side in SIZE)
    rows, cols = places(seen.pixels.values)
    assert np.array_equal(rows // factor, np.indices((height, width))[0])
    assert np.array_equal(cols // factor, np.indices((height, width))[1])
    assert np.array_equal(seen.labels, LABELS[rows, cols])
    assert seen.pixels.valid.all()


@pytest.mark.parametrize("most", [130, 101, 66, 48, 31])
def test_a_picture_is_as_large_as_asked(write_raster: Write, most: int) -> None:
    labels = LabelFile(write_raster("labels.tif", LABELS, transform=GRID), 255)
    seen = a_picture(an_image(write_raster), most, labels)
    factor = 131 // most
    between = [side // factor for side in SIZE]
    size = round(between[0] * most / between[1]), most
    assert seen.pixels.valid.shape == size
    rows, cols = places(seen.pixels.values)
    assert seen.labels is not None
    assert np.array_equal(seen.labels, LABELS[rows, cols])
    for found, axis in ((rows, 0), (cols, 1)):  # evenly, in a block below the pixel's middle
        middles = (np.indices(size)[axis] + 0.5) * between[axis] / size[axis]
        assert np.array_equal(found // factor, np.floor(middles))


@pytest.mark.parametrize(("most", "factor"), [(200, 1), (20, 4)])
def test_a_window_is_taken_where_it_lies(write_raster: Write, most: int, factor: int) -> None:
    window = Window(30, 40, 60, 80)
    seen = a_picture(an_image(write_raster), most, window=window)
    rows, cols = places(seen.pixels.values)
    assert abs(rows[0, 0] - 30) < factor
    assert abs(cols[0, 0] - 40) < factor
    assert rows.max() < 90
    assert cols.max() < 120
    assert seen.pixels.valid.shape == (60 // factor, 80 // factor)


@pytest.mark.parametrize(
    ("nodata", "profile"),
    [(None, {"nodata": 5}), (5.0, {}), ("none", {"nodata": 5}), ("collar", {})],
)
@pytest.mark.parametrize("most", [200, 32])
def test_nodata_is_what_training_takes_for_it(
    write_raster: Write, most: int, nodata: float | str | None, profile: dict[str, object]
) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(6, 99, (2, *SIZE)).astype(np.uint16)
    hole = np.zeros(SIZE, bool)
    hole[:40, 50:] = True
    values[:, hole] = 0 if nodata == "collar" else 5
    seen = a_picture(write_raster("image.tif", values, **profile), most, nodata=nodata)
    shown = (seen.pixels.values[0] != (0 if nodata == "collar" else 5)) | (nodata == "none")
    assert np.array_equal(seen.pixels.valid, shown)
    assert seen.pixels.valid.all() == (nodata == "none")


def test_labels_on_another_grid_and_polygons_lie_there_too(
    write_raster: Write, write_vector: Write
) -> None:
    image = an_image(write_raster)
    moved = Affine(1, 0, 5e5 - 7, 0, -1, 4e6 + 9)  # finer, and begun elsewhere
    x = (np.arange(300) + 0.5 - 7) // 2
    y = (np.arange(230) + 0.5 - 9) // 2
    fine = np.where((y[:, None] // 8 + x[None] // 12) % 2 == 1, 1, 0).astype(np.uint8)
    other = LabelFile(write_raster("other.tif", fine, transform=moved), 255)
    seen = a_picture(image, 43, other)
    middle = np.indices(seen.labels.shape) * 3 + 1  # of three by three pixels
    assert np.array_equal(seen.labels, (middle[0] // 8 + middle[1] // 12) % 2)
    box = shapely.box(5e5 + 2 * 30, 4e6 - 2 * 60, 5e5 + 2 * 90, 4e6 - 2 * 9)
    seen = a_picture(image, 43, LabelFile(write_vector("polygons.gpkg", [box]), 255))
    inside = (middle[0] >= 9) & (middle[0] < 60) & (middle[1] >= 30) & (middle[1] < 90)
    assert np.array_equal(seen.labels, inside.astype(int))
