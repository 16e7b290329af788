"""Windows of rasters are cut from the whole, whatever lies in the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.enums import ColorInterp

from tilenet.data.rasters import raster as raster_module
from tilenet.data.rasters import stack
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

Write = Callable[..., str]
HEIGHT, WIDTH = 37, 53


def pixels_of(dtype: str, bands: int = 3, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype[0] == "f":
        return rng.normal(5, 9, (bands, HEIGHT, WIDTH)).astype(dtype)
    top = min(np.iinfo(dtype).max, 9000)
    return rng.integers(1, top, (bands, HEIGHT, WIDTH)).astype(dtype)


def windows(height: int, width: int, beyond: int, count: int = 40) -> list[Window]:
    rng = np.random.default_rng(7)
    found = []
    for _ in range(count):
        row, col = rng.integers(-beyond, (height + beyond // 2, width + beyond // 2))
        rows, cols = rng.integers(1, (height + beyond, width + beyond))
        found.append(Window(int(row), int(col), int(rows), int(cols)))
    return found


def seen_in(whole: np.ndarray, window: Window, margin: int) -> np.ndarray:
    """What numpy's own reflection shows in the window."""
    edges = [(0, 0)] * (whole.ndim - 2) + [(margin, margin)] * 2
    padded = np.pad(whole, edges, mode="reflect")
    row, col = window.row + margin, window.col + margin
    return padded[..., row : row + window.height, col : col + window.width]


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "uint16", "int32", "float32", "float64"]
)
def test_any_window_is_cut_from_the_whole_reflected_beyond_its_edges(
    write_raster: Write, dtype: str
) -> None:
    values = pixels_of(dtype)
    hole = np.random.default_rng(2).random((HEIGHT, WIDTH)) < 0.2
    values[:, hole] = 0
    with Raster(write_raster("a.tif", values, nodata=0, compress="deflate")) as raster:
        assert raster.size == raster.size_in_file == (HEIGHT, WIDTH)
        assert raster.dtype == dtype
        for window in windows(HEIGHT, WIDTH, 90):
            pixels = raster.read(window)
            assert pixels.values.dtype == dtype
            assert np.array_equal(pixels.values, seen_in(values, window, 300))
            assert np.array_equal(pixels.valid, seen_in(~hole, window, 300))


@pytest.mark.parametrize(("factor", "strip_bytes"), [(3, 1), (2, 1 << 26), (5, 1 << 26)])
def test_no_coarse_pixel_depends_on_the_window_that_it_is_read_in(
    write_raster: Write, factor: int, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raster_module, "STRIP_BYTES", strip_bytes)
    values = pixels_of("uint16")
    hole = np.random.default_rng(2).random((HEIGHT, WIDTH)) < 0.5
    hole[: 2 * factor, : 3 * factor] = True
    values[:, hole] = 0
    path = write_raster("a.tif", values, nodata=0)
    height, width = -(-HEIGHT // factor), -(-WIDTH // factor)
    expected = np.zeros((3, height, width))
    some = np.zeros((height, width), bool)
    for row, col in np.ndindex(height, width):
        block = values[:, row * factor :, col * factor :][:, :factor, :factor].reshape(3, -1)
        block = block[:, (block != 0).any(axis=0)]
        some[row, col] = block.shape[1] > 0
        expected[:, row, col] = block.mean(axis=1) if block.shape[1] else 0
    with Raster(path, resolution=factor * np.hypot(2, 0.1)) as raster:
        assert raster.factor == factor
        assert raster.size == (height, width)
        assert raster.dtype == np.float32
        whole = raster.read(raster.whole)
        assert whole.values == pytest.approx(expected, rel=6e-8)
        assert np.array_equal(whole.valid, some)
        for window in windows(height, width, 25):
            pixels = raster.read(window)
            assert np.array_equal(pixels.values, seen_in(whole.values, window, 90))
            assert np.array_equal(pixels.valid, seen_in(whole.valid, window, 90))


@pytest.mark.parametrize("factor", [1, 3])
def test_a_region_is_reflected_at_its_own_edges(write_raster: Write, factor: int) -> None:
    path = write_raster("a.tif", pixels_of("uint16"))
    with Raster(path, resolution=factor * np.hypot(2, 0.1)) as raster:
        region = Window(3, 5, 8, 11)
        inside = raster.read(region).values
        for window in windows(8, 11, 30):
            assert np.array_equal(raster.read(window, region).values, seen_in(inside, window, 120))


def test_one_row_is_reflected_into_itself(write_raster: Write) -> None:
    values = pixels_of("uint8")[:, :1]
    with Raster(write_raster("a.tif", values)) as raster:
        found = raster.read(Window(-3, 2, 7, 9)).values
    assert np.array_equal(found, np.repeat(values[:, :, 2:11], 7, axis=1))


def test_the_grid_is_the_files_scaled(write_raster: Write) -> None:
    path = write_raster("a.tif", pixels_of("uint8"))
    own = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    with Raster(path) as raster, Raster(path, resolution=3 * np.hypot(2, 0.1)) as coarse:
        assert raster.transform == raster.coarser(1) == coarse.coarser(1) == own
        assert coarse.transform == raster.coarser(3) == own @ Affine.scale(3)
        assert raster.crs == coarse.crs == "EPSG:32630"
        # the corner of coarse pixel (4, 7) is that of fine pixel (12, 21)
        assert coarse.transform @ (7, 4) == pytest.approx(own @ (21, 12), rel=1e-15)


# --- bands


@pytest.mark.parametrize("bands", [(1,), (3, 1), (2, 2, 3), (4, 3, 2, 1)])
def test_bands_are_read_in_the_order_that_is_asked_for(
    write_raster: Write, bands: tuple[int, ...]
) -> None:
    values = pixels_of("uint16", bands=4)
    with Raster(write_raster("a.tif", values), bands) as raster:
        assert raster.bands == bands
        assert raster.stack.count == 4
        found = raster.read(raster.whole).values
    assert np.array_equal(found, values[[band - 1 for band in bands]])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"bands": (0,)}, r"a.tif has 3\); leave out \[0\]"),
        ({"bands": (1, 4)}, r"a.tif has 3\); leave out \[4\]"),
        ({"bands": (-1, 2, 9)}, r"a.tif has 3\); leave out \[-1, 9\]"),
        ({"bands": ()}, "at least one band"),
        ({"nodata": "black"}, r"a number, none, or collar \(nodata: black\)"),
        ({"resolution": 5}, "whole multiple.*nearest: 4 or 6$"),
        ({"resolution": 3.0}, "whole multiple.*nearest: 2 or 4$"),
        ({"resolution": 1}, "whole multiple.*nearest: 2$"),
        ({"resolution": 2.2}, "whole multiple.*nearest: 2 or 4$"),
        ({"resolution": 0}, "whole multiple.*nearest: 2$"),
        ({"resolution": -4}, "whole multiple.*nearest: 2$"),
        ({"resolution": 2e300}, "whole multiple.*nearest: "),
        ({"resolution": float("inf")}, "whole multiple.*nearest: "),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(
    write_raster: Write, asked: dict[str, Any], said: str
) -> None:
    path = write_raster("a.tif", pixels_of("uint8"), transform=Affine(2, 0, 5e5, 0, -2, 4e6))
    with pytest.raises(TilenetError, match=said):
        Raster(path, **asked)


# --- what is valid


def test_alpha_is_a_mask_and_no_band(write_raster: Write) -> None:
    values = pixels_of("uint8", bands=4)
    values[3] = np.random.default_rng(3).choice([0, 1, 128, 255], (HEIGHT, WIDTH))
    path = write_raster("a.tif", values, photometric="RGB", alpha="YES")
    with rasterio.open(path) as file:
        assert file.colorinterp[3] == ColorInterp.alpha
    with Raster(path) as raster:
        assert raster.bands == (1, 2, 3)
        for window in windows(HEIGHT, WIDTH, 20, 10):
            pixels = raster.read(window)
            assert np.array_equal(pixels.valid, seen_in(values[3] > 0, window, 80))
            assert np.array_equal(pixels.values, seen_in(values[:3], window, 80))


def test_a_mask_in_the_file_counts(write_raster: Write) -> None:
    values, mask = pixels_of("uint8"), np.random.default_rng(3).random((HEIGHT, WIDTH)) < 0.7
    path = write_raster("a.tif", values)
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(path, "r+") as file:
        file.write_mask(mask)
    with Raster(path) as raster:
        assert np.array_equal(raster.read(raster.whole).valid, mask)


def test_a_pixel_is_nodata_where_all_bands_are(write_raster: Write) -> None:
    values = pixels_of("int16")
    values[0, 4, 5] = values[1, 6, 7] = -99
    values[:, 8, 9] = -99
    path = write_raster("a.tif", values)
    with Raster(path) as unasked, Raster(path, nodata=-99) as asked:
        assert unasked.read(unasked.whole).valid.all()
        found = asked.read(asked.whole).valid
    assert np.argwhere(~found).tolist() == [[8, 9]]


def test_the_users_nodata_replaces_the_files(write_raster: Write) -> None:
    values = np.random.default_rng(3).integers(0, 3, (1, HEIGHT, WIDTH)).astype("uint8")
    path = write_raster("a.tif", values, nodata=0)
    for nodata, valid in ((None, values[0] != 0), (2, values[0] != 2), (7.5, values[0] >= 0)):
        with Raster(path, nodata=nodata) as raster:
            assert np.array_equal(raster.read(raster.whole).valid, valid)
    with Raster(path, nodata="none") as raster:
        assert raster.read(raster.whole).valid.all()


def test_numbers_that_are_not_finite_are_no_data(write_raster: Write) -> None:
    values = pixels_of("float32")
    values[0, 1, 2], values[1, 3, 4], values[2, 5, 6] = np.nan, np.inf, -np.inf
    for nodata in (None, "none", -1.0, float("nan")):
        with Raster(write_raster("a.tif", values), nodata=nodata) as raster:
            found = raster.read(raster.whole)
        assert np.argwhere(~found.valid).tolist() == [[1, 2], [3, 4], [5, 6]]


# --- resolution


@pytest.mark.parametrize(("asked", "factor"), [(2, 1), (2.08, 1), (1.92, 1), (5.9, 3), (8.3, 4)])
def test_a_resolution_may_be_five_percent_off(
    write_raster: Write, asked: float, factor: int
) -> None:
    plain = Affine(2, 0, 5e5, 0, -2, 4e6)
    with Raster(write_raster("a.tif", pixels_of("uint8"), transform=plain), None, asked) as raster:
        assert raster.factor == factor


# --- files


@pytest.mark.parametrize(("name", "driver"), [("a.png", "PNG"), ("a.jpg", "JPEG")])
def test_plain_pictures_are_read(write_raster: Write, name: str, driver: str) -> None:
    values = pixels_of("uint8")
    path = write_raster(name, values, driver=driver, crs=None, transform=None)
    with Raster(path) as raster:
        assert raster.crs is None
        assert raster.size == (HEIGHT, WIDTH)
        found = raster.read(Window(-4, 3, 20, 20))
    assert found.valid.all()
    if driver == "PNG":
        assert np.array_equal(found.values, seen_in(values, Window(-4, 3, 20, 20), 50))


@pytest.mark.parametrize("factor", [1, 2])
def test_a_truncated_file_is_refused_with_the_rows_that_are_lost(
    tmp_path: Path, write_raster: Write, factor: int
) -> None:
    values = pixels_of("uint16")
    whole = Path(write_raster("whole.tif", values, compress="deflate", blockysize=4))
    (tmp_path / "cut.tif").write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    with Raster(str(tmp_path / "cut.tif"), resolution=factor * np.hypot(2, 0.1)) as raster:
        first = raster.read(Window(0, 0, 4, raster.width)).values
        if factor == 1:
            assert np.array_equal(first, values[:, :4])
        rows = Window(24 // factor, 0, 8 // factor, raster.width)
        with pytest.raises(TilenetError, match="rows 24 to 31, columns 0 to 52") as raised:
            raster.read(rows)
    assert "\n" not in str(raised.value)
    assert "cut.tif" in str(raised.value)


def test_a_raster_can_be_closed_twice(write_raster: Write) -> None:
    raster = Raster(write_raster("a.tif", pixels_of("uint8")))
    raster.close()
    raster.close()
    Path(raster.path).unlink()
    with pytest.raises(TilenetError, match=r"a\.tif"):
        raster.read(Window(0, 0, 2, 2))


# --- real imagery


@pytest.mark.real
def test_the_alpha_band_of_a_drone_map_is_its_mask(real: Path) -> None:
    path = str(real / "pix4d_rgba_alpha.tif")
    with rasterio.open(path) as file:
        alpha = file.read(4)
    with Raster(path) as raster:
        assert raster.bands == (1, 2, 3)
        valid = raster.read(raster.whole).valid
    assert np.array_equal(valid, alpha > 0)
    assert 0.1 < 1 - valid.mean() < 0.15


@pytest.mark.real
def test_coarse_pixels_of_a_drone_map_do_not_depend_on_the_window(real: Path) -> None:
    with Raster(str(real / "pix4d_rgba_alpha.tif"), resolution=3 * 0.35) as raster:
        assert raster.factor == 3
        whole = raster.read(raster.whole)
        for window in windows(*raster.size, 60, 15):
            pixels = raster.read(window)
            assert np.array_equal(pixels.values, seen_in(whole.values, window, 400))
            assert np.array_equal(pixels.valid, seen_in(whole.valid, window, 400))


@pytest.mark.real
def test_nodata_of_a_satellite_image_is_its_tag(real: Path) -> None:
    path = str(real / "satsense_s2_4band_uint16.tif")
    with rasterio.open(path) as file:
        assert file.nodata == 9999
        values = file.read()
    with Raster(path) as raster, Raster(path, nodata=9999) as asked:
        window = Window(-200, -200, 560, 560)  # far wider than the image
        pixels, same = raster.read(window), asked.read(window)
    assert np.array_equal(pixels.values, seen_in(values, window, 500))
    assert np.array_equal(pixels.valid, seen_in((values != 9999).any(axis=0), window, 500))
    assert np.array_equal(pixels.valid, same.valid)


def test_bands_of_several_dtypes_become_one_that_holds_both(
    write_raster: Write, tmp_path: Path
) -> None:
    small, wide = pixels_of("uint8", 1), pixels_of("uint16", 1, seed=2)
    write_raster("a.tif", small)
    write_raster("b.tif", wide)
    band = (
        '<VRTRasterBand dataType="{}" band="{}"><SimpleSource><SourceFilename relativeToVRT="1">'
        "{}.tif</SourceFilename><SourceBand>1</SourceBand></SimpleSource></VRTRasterBand>"
    )
    bands = band.format("Byte", 1, "a") + band.format("UInt16", 2, "b")
    text = f'<VRTDataset rasterXSize="{WIDTH}" rasterYSize="{HEIGHT}">{bands}</VRTDataset>'
    (tmp_path / "both.vrt").write_text(text)
    with Raster(str(tmp_path / "both.vrt")) as raster:
        pixels = raster.read(raster.whole)
    assert pixels.values.dtype == np.uint16
    assert np.array_equal(pixels.values, np.concatenate([small, wide]))


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [
        *(("uint8", tag) for tag in (0, 3, 255)),
        *(("int16", tag) for tag in (0, -9999)),
        *(("uint32", tag) for tag in (3, 255)),
        *(("int64", tag) for tag in (3, -9999)),
        *(("float32", tag) for tag in (0, 2.5, float("nan"))),
    ],
)
def test_the_tag_says_of_values_what_gdal_says(write_raster: Write, dtype: str, tag: float) -> None:
    values = np.random.default_rng(4).integers(0, 4, (3, 30, 41)).astype(dtype)
    path = write_raster("a.tif", values, nodata=tag)
    with rasterio.open(path) as file:
        wanted = file.dataset_mask() != 0
    assert wanted.all() == (tag not in (0, 3))
    for bands in (None, [2], [3, 1, 2], [1, 1, 1]):
        with Raster(path, bands) as raster:
            assert np.array_equal(raster.read(raster.whole).valid, wanted)


@pytest.mark.parametrize("dtype", ["int16", "int32", "float32", "float64"])
def test_alpha_of_a_type_that_gdal_takes_for_no_mask_is_one(
    write_raster: Write, dtype: str
) -> None:
    """As `gdalwarp -dstalpha` makes it of such an image."""
    values = pixels_of(dtype, 4)
    values[3, : HEIGHT // 2] = 0
    path = write_raster("a.tif", values)
    with rasterio.open(path, "r+") as file:
        file.colorinterp = [*[ColorInterp.gray] * 3, ColorInterp.alpha]
    with rasterio.open(path) as file:
        assert file.colorinterp[3] == ColorInterp.alpha
        assert file.dataset_mask().all()
    with Raster(path) as raster:
        assert len(raster.bands) == 3
        for window in windows(HEIGHT, WIDTH, 20, 10):
            assert np.array_equal(raster.read(window).valid, seen_in(values[3] != 0, window, 80))


@pytest.mark.parametrize("masked", ["", "alpha", "file"])
def test_the_mask_is_read_where_there_is_one(
    write_raster: Write, monkeypatch: pytest.MonkeyPatch, masked: str
) -> None:
    rng = np.random.default_rng(5)
    # Of four bands of bytes GDAL takes the last for alpha.
    values = rng.integers(0, 255, (4 if masked == "alpha" else 3, 30, 41)).astype(np.uint8)
    path = write_raster("a.tif", values)
    with rasterio.open(path, "r+") as file:
        if masked == "file":
            file.write_mask(rng.random(values.shape[1:]) < 0.5)
        wanted = file.dataset_mask() != 0
    assert wanted.all() == (not masked)
    reads: list[str] = []
    read_mask = stack._read_mask
    monkeypatch.setattr(stack, "_read_mask", lambda *args: reads.append("") or read_mask(*args))
    with Raster(path, [1, 2, 3]) as raster:
        assert np.array_equal(raster.read(raster.whole).valid, wanted)
    assert bool(reads) == bool(masked)
