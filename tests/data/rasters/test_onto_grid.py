"""A file on another grid is the same on the first one's, whatever window is read of it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.crs import CRS
from rasterio.enums import ColorInterp, Resampling
from rasterio.warp import reproject, transform, transform_bounds

from tilenet.cli.info import block_of
from tilenet.data.inspect import InfoRequest, describe
from tilenet.data.rasters import onto_grid
from tilenet.data.rasters.block_cache import BlockCache
from tilenet.data.rasters.onto_grid import resampling_notes
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.same_files import check_apart, sample_files
from tilenet.data.thumbnail import thumbnail
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part, Window

Write = Callable[..., str]
Grid = tuple[str, Affine, tuple[int, int]]

FIRST = CRS.from_epsg(32630)
GRID = Affine(10, 0, 6e5, 0, -10, 5e6)
SIZE = 331, 297  # more than one block, and no whole number of them
SIDE_M = 10.0


def grid_of(epsg: int, pixel: float, turn: float = 0.0, share: float = 1.2) -> Grid:
    """A grid around the middle of the first one's, `share` times as large."""
    crs = CRS.from_epsg(epsg)
    corners = [GRID @ (col, row) for col in (0, SIZE[1]) for row in (0, SIZE[0])]
    xs, ys = zip(*corners, strict=True)
    west, south, east, north = transform_bounds(FIRST, crs, min(xs), min(ys), max(xs), max(ys))
    rows, cols = (int(share * side / pixel) + 1 for side in (north - south, east - west))
    middle = Affine.translation(
        (west + east) / 2 + pixel / 7.0373, (south + north) / 2 + pixel / 5.0419
    )
    turned = middle @ Affine.rotation(turn) @ Affine.scale(pixel, -pixel)
    return f"EPSG:{epsg}", turned @ Affine.translation(-cols / 2, -rows / 2), (rows, cols)


GRIDS: dict[str, Grid] = {
    "other zone": grid_of(32631, 10.5),
    "turned": grid_of(32630, 10.0, 23.0),
    "coarser": grid_of(32630, 3.7 * SIDE_M),
    "finer": grid_of(32630, SIDE_M / 1.97),
    "degrees": grid_of(4326, 1.15e-4),
    "smaller": grid_of(32631, 13.5, share=0.5),
}
DTYPES: dict[str, float | None] = {"uint8": None, "uint16": 0, "int16": -9999, "float32": None}
# Each grid with two of them.
CASES = [
    (name, list(DTYPES)[(place + more) % 4]) for place, name in enumerate(GRIDS) for more in (0, 2)
]


def pixels_of(grid: Grid, dtype: str, nodata: float | None) -> np.ndarray:
    """Random ones, a tenth of them without data where there is a way to say so."""
    rng = np.random.default_rng(grid[2])
    if dtype == "float32":
        values = rng.normal(300, 50, (1, *grid[2])).astype(dtype)
    else:
        values = rng.integers(1, 250 if dtype == "uint8" else 9000, (1, *grid[2])).astype(dtype)
    if nodata is not None or dtype == "float32":
        values[:, rng.random(grid[2]) < 0.1] = np.nan if nodata is None else nodata
    return values


@pytest.fixture
def first(write_raster: Write) -> str:
    values = np.random.default_rng(0).integers(1, 250, (1, *SIZE)).astype("uint8")
    return write_raster(
        "first.tif", values, transform=GRID, tiled=True, blockxsize=64, blockysize=48
    )


def written(write: Write, name: str, dtype: str, **profile: Any) -> tuple[str, np.ndarray]:
    crs, grid, _ = GRIDS[name]
    values = pixels_of(GRIDS[name], dtype, DTYPES[dtype])
    profile = {"crs": crs, "transform": grid, "nodata": DTYPES[dtype]} | profile
    return write(f"{name.replace(' ', '-')}-{dtype}.tif", values, **profile), values


def same(found: Pixels, wanted: Pixels, window: Window) -> bool:
    rows = slice(window.row, window.row + window.height)
    cols = slice(window.col, window.col + window.width)
    values, valid = wanted.values[:, rows, cols], wanted.valid[rows, cols]
    bits = values.tobytes() == np.ascontiguousarray(found.values).tobytes()
    return bits and np.array_equal(found.valid, valid)


def windows(count: int) -> list[Window]:
    rng = np.random.default_rng(count)
    tops, lefts = rng.integers(0, SIZE[0] - 1, count), rng.integers(0, SIZE[1] - 1, count)
    highs, wides = rng.integers(1, 140, count), rng.integers(1, 140, count)
    return [
        Window(row, col, min(high, SIZE[0] - row), min(wide, SIZE[1] - col))
        for row, col, high, wide in np.column_stack([tops, lefts, highs, wides]).tolist()
    ]


@cache
def cells(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns and rows in a file below the middles of the first one's pixels, (H, W) each."""
    grid = GRIDS[name]
    cols, rows = np.meshgrid(np.arange(SIZE[1]) + 0.5, np.arange(SIZE[0]) + 0.5)
    x, y = transform(FIRST, grid[0], *(part.ravel() for part in GRID @ (cols, rows)))
    return tuple(part.reshape(SIZE) for part in ~grid[1] @ (np.array(x), np.array(y)))


def by_numpy(values: np.ndarray, valid: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear: means of the valid ones of four pixels, where the one below is valid; (H, W)."""
    cols, rows = cells(name)
    height, width = GRIDS[name][2]
    left, top = np.floor(cols - 0.5).astype(int), np.floor(rows - 0.5).astype(int)
    total, weights = np.zeros(SIZE), np.zeros(SIZE)
    for down in (0, 1):
        for right in (0, 1):
            row, col = top + down, left + right
            inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
            row, col = row.clip(0, height - 1), col.clip(0, width - 1)
            weight = (1 - abs(cols - 0.5 - left - right)) * (1 - abs(rows - 0.5 - top - down))
            weight = weight * (inside & valid[row, col])
            total += np.where(weight > 0, weight * values[row, col], 0)
            weights += weight
    row, col = np.floor(rows).astype(int), np.floor(cols).astype(int)
    inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
    found = inside & valid[row.clip(0, height - 1), col.clip(0, width - 1)]
    return total / np.where(weights > 0, weights, 1), found


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_pixels_are_the_same_in_any_window(
    write_raster: Write, first: str, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    path = f"{first}+{written(write_raster, name, dtype)[0]}"
    with Raster(path) as raster:
        whole = raster.read(raster.whole)
    assert whole.valid.any()
    monkeypatch.setattr(onto_grid, "BLOCKS", BlockCache(1))  # the last block, and no other
    with Raster(path) as one, Raster(path) as other:
        for window in windows(8):
            assert same(one.read(window), whole, window)
            assert same(other.read(window), whole, window)
            with Raster(path) as fresh:
                assert same(fresh.read(window), whole, window)
            with Raster(path, (2,)) as alone:
                found = alone.read(window)
            rows, cols = slice(window.row, window.row + window.height), slice(window.col, None)
            wanted = whole.values[1, rows, cols][:, : window.width]
            assert np.array_equal(found.values[0], wanted, equal_nan=dtype == "float32")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_pixels_are_those_of_numpy(write_raster: Write, first: str, name: str, dtype: str) -> None:
    path, values = written(write_raster, name, dtype)
    tag = DTYPES[dtype]
    known = np.isfinite(values[0]) if tag is None else values[0] != tag
    wanted, valid = by_numpy(np.where(known, values[0], 0).astype(float), known, name)
    with Raster(f"{first}+{path}") as raster:
        found = raster.read(raster.whole)
    # Between two pixels either may be the one below.
    edge = np.minimum(*(abs(part - np.round(part)) for part in cells(name))) < 1e-6
    assert edge.mean() < 1e-3
    assert np.array_equal(found.valid[~edge], valid[~edge])
    counted = found.valid & ~edge
    off = abs(found.values[1].astype(float) - wanted)[counted]
    assert off.max() < (1e-3 if dtype == "float32" else 0.501)


@pytest.mark.parametrize("name", GRIDS)
def test_pixels_are_those_of_gdal_where_it_is_asked_for_all(
    write_raster: Write, first: str, name: str
) -> None:
    path, values = written(write_raster, name, "uint8")
    crs, grid, _ = GRIDS[name]
    wanted = np.zeros(SIZE, "uint8")
    reproject(
        values[0],
        wanted,
        src_transform=grid,
        src_crs=crs,
        dst_transform=GRID,
        dst_crs=FIRST,
        resampling=Resampling.bilinear,
        XSCALE=1,
        YSCALE=1,
    )
    with Raster(f"{first}+{path}") as raster:
        found = raster.read(raster.whole)
    off = abs(found.values[1].astype(int) - wanted)
    # rasterio lets GDAL draw lines that are right to an eighth of a pixel.
    assert off.max() <= (1 if crs == "EPSG:32630" else 250 / 8)
    assert (off > 0).mean() < (1e-3 if crs == "EPSG:32630" else 0.5)
    assert wanted.std() > 10


def test_neighbours_of_nan_are_interpolated_without_it(write_raster: Write, first: str) -> None:
    path, values = written(write_raster, "coarser", "float32")
    with Raster(f"{first}+{path}") as raster:
        assert np.isfinite(raster.read(raster.whole).values[1]).mean() > 0.85
    assert np.isnan(values).mean() > 0.09


def test_what_says_where_data_is_says_so_on_its_own_grid(write_raster: Write, first: str) -> None:
    path, values = written(write_raster, "coarser", "int16")
    known = values[0] != -9999
    tagged = by_numpy(values[0] * 1.0, known, "coarser")[1]
    for nodata in (None, "none", "collar", -9999):
        with Raster(f"{first}+{path}", nodata=nodata) as raster:
            assert np.array_equal(raster.read(raster.whole).valid, tagged)
    values = np.where(known, values, 77)
    other = write_raster("number.tif", values, crs="EPSG:32630", transform=GRIDS["coarser"][1])
    known = (values != 77)[0]
    for bands in (None, (2,)):
        with Raster(f"{first}+{other}", bands, nodata=77) as raster:
            pixels = raster.read(raster.whole)
            wanted = by_numpy(values[0] * 1.0, known, "coarser")
            own = raster.read(raster.whole).values[0] != 77 if bands is None else True
            assert np.array_equal(pixels.valid, wanted[1] & own)
            off = abs(pixels.values[-1] - wanted[0])[pixels.valid]
            assert off.max() < 0.501
    whole = {"crs": "EPSG:32630", "transform": GRIDS["coarser"][1], "photometric": "MINISBLACK"}
    alpha = write_raster(
        "alpha.tif",
        np.concatenate([values, np.where(known, 255, 0)[None]]).astype("uint16"),
        **whole,
    )
    with rasterio.open(alpha, "r+") as file:
        file.colorinterp = ColorInterp.gray, ColorInterp.alpha
    with Raster(f"{first}+{alpha}") as raster:
        assert raster.bands == (1, 2)
        assert np.array_equal(raster.read(raster.whole).valid, wanted[1])


def test_numbers_of_colours_are_not_mixed(write_raster: Write, first: str) -> None:
    crs, grid, size = GRIDS["turned"]
    values = np.random.default_rng(3).choice([3, 200], (1, *size)).astype("uint8")
    path = write_raster("classes.tif", values, crs=crs, transform=grid, photometric="palette")
    with rasterio.open(path, "r+") as file:
        file.write_colormap(1, {3: (9, 9, 9, 255), 200: (0, 90, 0, 255)})
    with Raster(f"{first}+{path}") as raster:
        whole = raster.read(raster.whole)
        assert set(np.unique(whole.values[1][whole.valid])) == {3, 200}
        for window in windows(9):
            assert same(raster.read(window), whole, window)
        notes = resampling_notes(raster.stack.resampled)
    assert notes == [
        f"bands of {path} lie on another grid than the image and are resampled to it (nearest); "
        "where they do not reach, pixels do not count"
    ]


def test_parts_coarser_pixels_and_collars_are_of_what_was_resampled(
    write_raster: Write, first: str
) -> None:
    path, _ = written(write_raster, "smaller", "int16")
    both = f"{first}+{path}"
    with Raster(both) as raster:
        whole = raster.read(raster.whole)
    part = Window(101, 37, 150, 201)
    with Raster(both, part=Part(window=(101, 37, 150, 201))) as raster:
        assert raster.size == (150, 201)
        assert same(raster.read(raster.whole), whole, part)
    with Raster(both, resolution=3 * SIDE_M) as raster:
        coarse = raster.read(raster.whole)
        for window in (Window(5, 7, 31, 44), Window(60, 50, 40, 40)):
            assert same(raster.read(window), coarse, window)
        counted = whole.valid[150:153, 120:123]
        mean = whole.values[1, 150:153, 120:123][counted].mean()
        assert abs(coarse.values[1, 50, 40] - mean) < 1e-3
    collar = Raster(both, nodata="collar")
    with collar, Raster(both, nodata="none") as none:
        assert np.array_equal(collar.read(collar.whole).valid, none.read(none.whole).valid)


def test_pictures_take_the_nearest_pixels(write_raster: Write, first: str) -> None:
    path, values = written(write_raster, "coarser", "uint8")
    with Raster(f"{first}+{path}") as raster:
        found = raster.sample(raster.whole, (30, 20))
        assert found.values.shape == (2, 30, 20)
        cols, rows = ((part.astype(int)) for part in cells("coarser"))
        row = np.floor((np.arange(30) + 0.5) * SIZE[0] / 30).astype(int)
        col = np.floor((np.arange(20) + 0.5) * SIZE[1] / 20).astype(int)
        near = values[0][rows, cols][row[:, None], col]
        assert (found.values[1] == near).mean() > 0.8  # the middle of a pixel, or nearly
        assert found.valid.all()
    picture = thumbnail(f"{first}+{path}", None, 64, None, None, Window(0, 0, *SIZE))
    assert picture.pixels.values.shape[0] == 2
    assert picture.pixels.valid.all()


def test_files_that_cannot_be_put_on_the_grid_are_refused(write_raster: Write, first: str) -> None:
    crs, grid, _ = GRIDS["coarser"]
    heights = np.ones((1, 20, 30), "int16")
    apart = Affine(5, 0, 9e5, 0, -5, 5e6)
    for name, profile, said in (
        (
            "nowhere.tif",
            {"crs": None},
            r"same size, unless .*: 331 × 297, .*nowhere.tif has no CRS\)",
        ),
        ("pixels.tif", {"transform": None}, r"pixels.tif has no transform\)"),
        (
            "apart.tif",
            {"transform": apart},
            r"must overlap \(.*first.tif: x 600000 to 602970, y 4996690 to 5000000, "
            r".*apart.tif: x 900000 to 900150, y 4999900 to 5000000, in EPSG:32630\)",
        ),
        (
            "fine.tif",
            {"transform": GRID @ Affine.scale(0.45) @ Affine.translation(20, 20)},
            r"at most twice as fine .*fine.tif: 2.22 of its pixels along one of .*-r average",
        ),
    ):
        path = write_raster(name, heights, **({"crs": crs, "transform": grid} | profile))
        with pytest.raises(TilenetError, match=said) as raised:
            Raster(f"{first}+{path}")
        assert "\n" not in str(raised.value)
        if name in ("nowhere.tif", "pixels.tif"):
            with pytest.raises(TilenetError, match="has no "):
                Raster(f"{path}+{first}")


def test_a_file_that_is_cut_off_is_named(write_raster: Write, first: str) -> None:
    path, _ = written(write_raster, "coarser", "int16", compress="deflate")
    with open(path, "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    with (
        Raster(f"{first}+{path}") as raster,
        pytest.raises(TilenetError, match=r"everywhere \(.*coarser-int16.tif: what lies under"),
    ):
        raster.read(raster.whole)


def test_info_says_what_is_resampled(write_raster: Write, first: str) -> None:
    path, _ = written(write_raster, "degrees", "float32")
    found = describe(f"{first}+{path}", None, InfoRequest())
    size = GRIDS["degrees"][2]
    assert found["resampled"] == [
        {"path": path, "size": size, "crs": "EPSG:4326", "method": "bilinear"}
    ]
    said = f"{path}: {size[0]} × {size[1]} px, EPSG:4326, resampled to it (bilinear)"
    assert said in block_of(found)


def test_one_file_of_heights_may_serve_images_of_both_splits(
    write_raster: Write, first: str
) -> None:
    second = write_raster("second.tif", np.ones((1, 40, 40), "uint8"), transform=GRID)
    heights, _ = written(write_raster, "coarser", "int16")
    with (
        Raster(f"{first}+{heights}") as one,
        Raster(f"{second}+{heights}") as two,
        Raster(heights) as own,
    ):
        # Labels matter as little here as they can.
        files = [
            sample_files([image], [label], split)[0]
            for image, label, split in ((one, one, "train"), (two, two, "validation"))
        ]
        check_apart(files, once=True)
        assert "bilinear, corners at" in files[0].text
        assert heights not in files[0].text
        last = sample_files([own], [own], "validation")[0]
        for some in ([files[0], last], [last, files[0]]):
            with pytest.raises(TilenetError, match="not both"):
                check_apart(some, once=False)
