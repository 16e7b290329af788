"""Label rasters of the image's grid and of others; what does not count becomes `ignore_index`."""

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import rasterio
from affine import Affine
from pyproj import Transformer

from tilenet.data.labels import raster as module
from tilenet.data.labels.open import open_labels, resampling_note
from tilenet.data.labels.raster import Labels
from tilenet.data.rasters import raster
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.resample import block_mode
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

Write = Callable[..., str]
SIZE = 29, 41
DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"]
GRID = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


@pytest.fixture
def image(write_raster: Write) -> Iterator[Raster]:
    values = np.random.default_rng(1).integers(0, 99, (2, *SIZE)).astype("uint8")
    with Raster(write_raster("image.tif", values)) as raster:
        yield raster


def classes(dtype: str = "uint8", size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 6, size).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignore_index", [255, -1, 1000])
def test_labels_of_any_whole_type_are_read_and_nodata_is_ignored(
    write_raster: Write, image: Raster, dtype: str, ignore_index: int
) -> None:
    truth = classes(dtype)
    with Labels(write_raster("labels.tif", truth, nodata=3), image, ignore_index) as labels:
        found = labels.read(Window(3, 4, 20, 30))
    assert found.dtype == np.int64
    assert np.array_equal(found, np.where(truth == 3, ignore_index, truth.astype(int))[3:23, 4:34])


def test_beyond_the_region_labels_do_not_count(write_raster: Write, image: Raster) -> None:
    truth = classes()
    region = Window(5, 6, 11, 13)
    rng = np.random.default_rng(4)
    with Labels(write_raster("labels.tif", truth), image, 255) as labels:
        for _ in range(60):
            row, col = rng.integers(-20, 20, 2).tolist()
            rows, cols = rng.integers(1, 40, 2).tolist()
            for inside, pixels in ((None, truth), (region, truth[5:16, 6:19])):
                padded = np.pad(pixels, 80, constant_values=255)
                expected = padded[row + 80 : row + 80 + rows, col + 80 : col + 80 + cols]
                assert np.array_equal(labels.read(Window(row, col, rows, cols), inside), expected)


@pytest.mark.parametrize("strip_px", [1, 100, 1 << 22])
def test_coarse_labels_are_modes_in_any_window(
    write_raster: Write, image: Raster, strip_px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRIP_PX", strip_px)
    truth = classes()
    truth[:6, :6] = 5
    path = write_raster("labels.tif", truth, nodata=5)
    with (
        Raster(image.path, resolution=3 * np.hypot(2, 0.1)) as coarse,
        Labels(path, coarse, 255) as labels,
    ):
        assert (labels.height, labels.width) == coarse.size == (10, 14)
        whole = labels.read(coarse.whole)
        expected = block_mode(np.where(truth == 5, 255, truth.astype(np.int64)), 3, 255)
        assert np.array_equal(whole, expected)
        assert (whole[:2, :2] == 255).all()
        assert len(np.unique(whole)) > 3
        padded = np.pad(whole, 20, constant_values=255)
        for row, col, rows, cols in ((-3, 2, 9, 30), (4, -5, 12, 8), (7, 9, 3, 5)):
            found = labels.read(Window(row, col, rows, cols))
            assert np.array_equal(found, padded[row + 20 :, col + 20 :][:rows, :cols])


def test_what_is_read_coarse_takes_no_memory_of_the_fine_pixels(
    write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a survey at a sixteenth of the resolution took 9 GiB."""
    monkeypatch.setattr(module, "STRIP_PX", 1 << 13, raising=False)
    monkeypatch.setattr(raster, "STRIP_BYTES", 1 << 14)
    size = 24, 40_000
    truth = classes(size=size)
    image = write_raster("image.tif", classes("uint16", size)[None])
    labels = write_raster("labels.tif", truth)
    with (
        Raster(image, resolution=8 * np.hypot(2, 0.1)) as coarse,
        Labels(labels, coarse, 255) as found,
    ):
        tracemalloc.start()
        try:
            read = found.read(coarse.whole)
            coarse.read(coarse.whole)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < truth.size
    assert np.array_equal(read, block_mode(truth.astype(np.int64), 8, 255))


@pytest.mark.parametrize("label_factor", [1, 3])
def test_labels_of_a_coarse_map_may_be_fine_or_as_coarse(
    write_raster: Write, label_factor: int
) -> None:
    truth = classes()
    expected = block_mode(truth.astype(np.int64), 3, 255)
    coarse = GRID @ Affine.scale(3)
    made = write_raster("map.tif", expected.astype("uint8"), transform=coarse)
    path = write_raster("fine.tif", truth)
    if label_factor == 1:
        path = write_raster("coarse.tif", expected.astype("uint8"), transform=coarse)
    with Raster(made) as mapped, Labels(path, mapped, 255) as labels:
        assert np.array_equal(labels.read(mapped.whole), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"values": classes(size=(29, 40)), "crs": None},
            r"the image's size .*29 × 40.*29 × 41.*gdal_edit -a_srs",
        ),
        ({"values": classes(size=(41, 29)), "crs": None}, r"41 × 29.*rows × columns"),
        ({"values": classes(size=(58, 82)), "crs": None, "transform": None}, r"58 × 82.*29 × 41"),
        ({"values": classes(size=(57, 81)), "crs": None, "transform": None}, r"57 × 81.*29 × 41"),
        ({"values": classes("float32")}, r"1 bands of float32"),
        ({"values": np.stack([classes()] * 3)}, r"3 bands of uint8"),
        (
            {"crs": "EPSG:32631"},
            r"overlap .*labels.tif: x 1.*image.tif: x 5000.*, in EPSG:32630\); check",
        ),
        ({"transform": GRID @ Affine.translation(52, 0)}, "labels must overlap their image"),
        ({"transform": GRID @ Affine.translation(0, -41)}, "labels must overlap their image"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    write_raster: Write, image: Raster, change: dict[str, object], said: str
) -> None:
    arguments = {"values": classes()} | change
    path = write_raster("labels.tif", **arguments)
    with pytest.raises(TilenetError, match=said) as raised:
        Labels(path, image, 255)
    assert "labels.tif" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_labels_without_a_crs_or_almost_on_the_grid_lie_on_the_image(
    write_raster: Write, image: Raster
) -> None:
    truth = classes()
    rounded = {"transform": GRID @ Affine.translation(1e-4, -1e-4)}
    bare = {"driver": "PNG", "crs": None, "transform": None}
    for name, profile in (("rounded.tif", rounded), ("bare.png", bare)):
        with Labels(write_raster(name, truth, **profile), image, 255) as labels:
            assert not labels.resampled
            assert np.array_equal(labels.read(Window(0, 0, *SIZE)), truth)


@pytest.mark.parametrize(
    ("transform", "fits"),
    [
        (GRID, True),
        (GRID @ Affine.translation(0.5, 0.5), True),  # of the pixels' middles
        (Affine(1, 0, 0, 0, -1, 0), True),
        (Affine(1, 0, 0, 0, -1, SIZE[0]), True),
        (GRID @ Affine.translation(5, 0), False),
        (Affine(2e-5, 0, -3, 0, -2e-5, 36), False),
    ],
)
def test_labels_without_a_crs_have_the_coordinates_of_the_image_or_of_its_pixels(
    write_raster: Write, image: Raster, transform: Affine, fits: bool
) -> None:
    path = write_raster("labels.tif", classes(), crs=None, transform=transform)
    if not fits:
        with pytest.raises(TilenetError, match=r"coordinates, or none \(.*labels.tif: x"):
            Labels(path, image, 255)
        return
    with Labels(path, image, 255) as labels:
        assert np.array_equal(labels.read(Window(0, 0, *SIZE)), classes())


@pytest.mark.parametrize(
    ("size", "fits"), [((29, 41), True), ((10, 14), True), ((28, 40), False), ((30, 42), False)]
)
def test_labels_without_a_crs_have_the_size_of_the_file_or_of_what_is_read(
    write_raster: Write, image: Raster, size: tuple[int, int], fits: bool
) -> None:
    path = write_raster("bare.png", classes(size=size), driver="PNG", crs=None, transform=None)
    with Raster(image.path, resolution=3 * np.hypot(2, 0.1)) as coarse:
        if not fits:
            with pytest.raises(TilenetError, match="must have the image's size"):
                Labels(path, coarse, 255)
            return
        with Labels(path, coarse, 255) as labels:
            expected = block_mode(
                classes(size=size).astype(np.int64), 1 if size[0] == 10 else 3, 255
            )
            assert np.array_equal(labels.read(coarse.whole), expected)


@pytest.mark.parametrize(
    ("grid", "map_grid", "fits"),
    [
        (None, Affine.scale(3), True),
        (GRID, GRID @ Affine.scale(3), True),
        (None, Affine.identity(), False),
        (None, GRID @ Affine.scale(3), False),
        (GRID, Affine.scale(3), False),
    ],
    ids=str,
)
def test_finer_labels_without_a_crs_need_coordinates(
    write_raster: Write, grid: Affine | None, map_grid: Affine, fits: bool
) -> None:
    expected = block_mode(classes().astype(np.int64), 3, 255)
    made = write_raster("map.tif", expected.astype("uint8"), crs=None, transform=map_grid)
    path = write_raster("labels.tif", classes(), crs=None, transform=grid)
    with Raster(made) as mapped:
        if not fits:
            with pytest.raises(TilenetError, match=r"image's size .*29 × 41.*10 × 14"):
                Labels(path, mapped, 255)
            return
        with Labels(path, mapped, 255) as labels:
            assert np.array_equal(labels.read(mapped.whole), expected)


@pytest.mark.parametrize("part", [None, Window(7, 9, 20, 22)])
def test_a_part_of_an_image_has_that_part_of_labels_without_a_crs(
    write_raster: Write, image: Raster, part: Window | None
) -> None:
    path = write_raster("labels.tif", classes(), crs=None, transform=GRID)
    place = part or image.whole
    if part is not None:
        image.cut(part)
    with Labels(path, image, 255) as labels:
        rows, cols = (
            slice(place.row, place.row + place.height),
            slice(place.col, place.col + place.width),
        )
        assert np.array_equal(labels.read(image.whole), classes()[rows, cols])


OTHER = {
    "shifted": ("EPSG:32630", GRID @ Affine.translation(3, -4.3)),
    "same size": ("EPSG:32630", GRID @ Affine.translation(0.02, 0)),
    "coarser": ("EPSG:32630", GRID @ Affine.translation(-9.13, 7.23) @ Affine.scale(2.311, 1.4371)),
    "upright": ("EPSG:32630", Affine(0.7, 0, 5e5 + 3, 0, -0.9, 4e6)),
    "rotated": ("EPSG:32630", GRID @ Affine.translation(20, 9) @ Affine.rotation(40)),
    "degrees": ("EPSG:4326", Affine(2e-5, 3e-6, -3.0001, 3e-6, -1.6e-5, 36.14415)),
    "other metres": ("EPSG:3035", Affine(1.7, 0.2, 3146358.3, 0.2, -1.3, 1553034.1)),
}


def nearest_by_hand(
    pixels: np.ndarray, crs: str, grid: Affine, onto: Affine, size: tuple[int, int]
) -> np.ndarray:
    """The pixel that holds the middle of each pixel of `onto` in EPSG:32630; 255 beyond."""
    cols, rows = np.meshgrid(np.arange(size[1]) + 0.5, np.arange(size[0]) + 0.5)
    x, y = onto @ (cols.ravel(), rows.ravel())
    x, y = Transformer.from_crs("EPSG:32630", crs, always_xy=True).transform(x, y)
    col, row = (np.floor(place).astype(int) for place in ~grid @ (x, y))
    inside = (row >= 0) & (row < pixels.shape[0]) & (col >= 0) & (col < pixels.shape[1])
    found = np.full(len(x), 255)
    found[inside] = pixels[row[inside], col[inside]]
    return found.reshape(size)


@pytest.mark.parametrize("place", OTHER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_on_another_grid_are_those_of_the_nearest_pixel(
    write_raster: Write, image: Raster, place: str, dtype: str
) -> None:
    crs, grid = OTHER[place]
    truth = classes(dtype, (31, 37))
    path = write_raster("labels.tif", truth, crs=crs, transform=grid, nodata=5)
    expected = nearest_by_hand(
        np.where(truth == 5, 255, truth.astype(int)), crs, grid, image.transform, SIZE
    )
    assert {int(label) for label in np.unique(expected)} == {0, 1, 2, 3, 4, 255}
    with Labels(path, image, 255) as labels:
        assert labels.resampled
        assert (labels.height, labels.width) == SIZE
        assert np.array_equal(labels.read(image.whole), expected)


@pytest.mark.parametrize("masked", ["nodata", "mask", "no"])
def test_resampled_labels_do_not_depend_on_the_window(write_raster: Write, masked: str) -> None:
    size = 700, 1300  # more than a block of GDAL's
    image_path = write_raster("image.tif", np.zeros(size, "uint8"))
    crs, grid = OTHER["degrees"]
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 6, (800, 1500)).astype("uint8")
    path = write_raster(
        "labels.tif", truth, crs=crs, transform=grid, nodata=5 if masked == "nodata" else None
    )
    valid = truth != 5 if masked == "nodata" else np.ones(truth.shape, bool)
    if masked == "mask":
        valid = rng.random(truth.shape) < 0.7
        with rasterio.open(path, "r+") as file:
            file.write_mask(valid)
    pixels = np.where(valid, truth, 255).astype(int)
    expected = nearest_by_hand(pixels, crs, grid, GRID, size)
    padded = np.pad(expected, 300, constant_values=255)
    with Raster(image_path) as image, Labels(path, image, 255) as labels:
        for _ in range(25):
            row, col = rng.integers(-100, size).tolist()
            rows, cols = rng.integers(1, 300, 2).tolist()
            wanted = padded[row + 300 : row + 300 + rows, col + 300 : col + 300 + cols]
            assert np.array_equal(labels.read(Window(row, col, rows, cols)), wanted)
        assert np.array_equal(labels.read(image.whole), expected)


def test_labels_on_another_grid_are_resampled_to_the_resolution_that_is_read(
    write_raster: Write, image: Raster
) -> None:
    crs, grid = OTHER["upright"]
    truth = classes(size=(77, 99))
    path = write_raster("labels.tif", truth, crs=crs, transform=grid)
    with (
        Raster(image.path, resolution=3 * np.hypot(2, 0.1)) as coarse,
        Labels(path, coarse, 255) as labels,
    ):
        expected = nearest_by_hand(truth, crs, grid, coarse.transform, coarse.size)
        assert np.array_equal(labels.read(coarse.whole), expected)


def test_that_labels_are_resampled_is_said_once(write_raster: Write, image: Raster) -> None:
    same = write_raster("same.tif", classes())
    paths = [
        write_raster(f"{name}.tif", classes(), crs=OTHER[name][0], transform=OTHER[name][1])
        for name in ("shifted", "coarser")
    ]
    with open_labels(same, image, 255) as own, open_labels(paths[0], image, 255) as first:
        assert resampling_note([own]) is None
        assert "shifted.tif lie on another grid" in str(resampling_note([own, first]))
        with open_labels(paths[1], image, 255) as second:
            assert "shifted.tif and 1 more lie" in str(resampling_note([first, own, second]))


def test_rasters_around_180_degrees_are_read_there(write_raster: Write) -> None:
    """Labels in EPSG:3832, of an image that counts degrees on beyond 180."""
    grid, size = Affine(1, 0, 170, 0, -1, 10), (20, 20)
    path = write_raster("degrees.tif", np.zeros(size, "uint8"), crs="EPSG:4326", transform=grid)
    wide = Affine(111319.49, 0, 111319.49 * 10, 0, -111319.49, 111319.49 * 15)
    truth = np.broadcast_to(np.arange(40, dtype="uint8"), (30, 40))
    file = write_raster("pacific.tif", truth, crs="EPSG:3832", transform=wide)
    with Raster(path) as image, open_labels(file, image, 255) as labels:
        found = labels.read(image.whole)
    assert (np.diff(found, axis=1) == 1).all()
    assert (found != 255).all()
