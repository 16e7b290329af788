"""Polygons become the same labels in any window, and those that a loop over pixels gives."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import shapely
from affine import Affine
from polygons import burned, burned_by_hand, moved, random_polygons
from rasterio.features import rasterize

from tilenet.data.labels import polygons as vector_labels
from tilenet.data.labels import reproject, vector_layer
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.polygons import VectorLabels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.block_cache import BlockCache
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part, Window

Write = Callable[..., str]
SIZE = 600, 1100  # of two and three blocks
GRIDS = {
    "sheared": Affine(2, 0.1, 5e5, 0.1, -2, 4e6),
    "rotated": Affine.translation(5e5, 4e6) @ Affine.rotation(-35) @ Affine.scale(0.3, -0.5),
    "upside down": Affine(0.3, 0, 5e5, 0, 0.3, 4e6),
}


@pytest.fixture(params=GRIDS)
def image(write_raster: Write, request: pytest.FixtureRequest) -> Iterator[Raster]:
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=GRIDS[request.param])
    with Raster(path) as raster:
        yield raster


@pytest.fixture
def plain(write_raster: Write) -> Iterator[Raster]:
    with Raster(write_raster("image.tif", np.zeros(SIZE, "uint8"))) as raster:
        yield raster


@pytest.mark.parametrize("crs", ["EPSG:32630", "EPSG:4326", "EPSG:3035"])
def test_pixels_whose_middle_is_inside_are_burned(
    write_vector: Write, image: Raster, crs: str
) -> None:
    shapes = random_polygons(image.transform, SIZE, 40, 1)
    values = np.random.default_rng(2).integers(1, 5, len(shapes))
    path = write_vector("a.gpkg", moved(shapes, "EPSG:32630", crs), values, crs)
    found = burned(path, image, 255, VectorKeys(field="class"))
    expected = burned_by_hand(shapes, values.tolist(), image.transform, SIZE)
    # There and back again, corners are off by less than a micrometre.
    assert (found != expected).sum() <= (0 if crs == "EPSG:32630" else 1)
    assert set(np.unique(found)) == {0, 1, 2, 3, 4}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a.gpkg", "a.geojson", "a.shp", "a.fgb"])
def test_every_format_gives_the_same_labels(write_vector: Write, plain: Raster, name: str) -> None:
    shapes = random_polygons(plain.transform, SIZE, 60, 3, "EPSG:4326")
    values = [f"k{number % 4}" for number in range(len(shapes))]
    keys = VectorKeys(field="class", classes={"k0": 3, "k1": 1, "k2": None, "k3": 0})
    numbers = [(3, 1, 255, 0)[number % 4] for number in range(len(shapes))]
    path = write_vector(name, shapes, values, "EPSG:4326")
    found = burned(path, plain, 255, keys)
    there = moved(shapes, "EPSG:4326", "EPSG:32630")
    order = range(len(shapes))
    if name == "a.fgb":  # its writer sorts features along a curve
        order = np.argsort([_place_in(path, shape) for shape in shapes]).tolist()
    expected = burned_by_hand(
        [there[n] for n in order], [numbers[n] for n in order], plain.transform, SIZE
    )
    assert np.array_equal(found, expected)


def _place_in(path: str, shape: shapely.Polygon) -> int:
    import pyogrio

    wkb = pyogrio.raw.read(path)[2]
    return next(n for n, s in enumerate(shapely.from_wkb(wkb)) if s.equals_exact(shape, 1e-12))


@pytest.mark.parametrize("all_touched", [False, True])
def test_blocks_leave_no_seams(write_vector: Write, image: Raster, all_touched: bool) -> None:
    shapes = random_polygons(image.transform, SIZE, 80, 4)
    path = write_vector("a.gpkg", shapes, list(range(1, 81)))
    found = burned(path, image, 255, VectorKeys("class", all_touched=all_touched))
    pairs = zip(shapes, range(1, 81), strict=True)
    at_once = rasterize(pairs, SIZE, transform=image.transform, all_touched=all_touched)
    assert np.array_equal(found, at_once)


def _on_middles(transform: Affine, seed: int) -> list[shapely.Polygon]:
    """Rectangles and triangles whose corners and edges run through middles of pixels."""
    rng = np.random.default_rng(seed)
    shapes = []
    for _ in range(150):
        col, row = rng.integers(-20, (SIZE[1], SIZE[0])) + 0.5
        width, height = rng.integers(3, 90, 2)
        corners = [(col, row), (col + width, row), (col + width, row + height), (col, row + height)]
        shapes.append(shapely.Polygon([transform @ c for c in corners[: rng.integers(3, 5)]]))
    return shapes


@pytest.mark.parametrize("all_touched", [False, True])
@pytest.mark.parametrize("name", ["a.gpkg", "a.geojson"])
def test_labels_do_not_depend_on_the_window(
    write_vector: Write, image: Raster, all_touched: bool, name: str
) -> None:
    shapes = _on_middles(image.transform, 5)
    path = write_vector(name, shapes, [n % 7 for n in range(len(shapes))])
    keys = VectorKeys("class", all_touched=all_touched, priority=[3, 2])
    truth = np.pad(burned(path, image, 99, keys), 200, constant_values=99)
    rng = np.random.default_rng(6)
    for turn in range(16):
        row, col = rng.integers(-100, SIZE).tolist()
        rows, cols = rng.integers(1, 200, 2).tolist()
        expected = truth[row + 200 : row + 200 + rows, col + 200 : col + 200 + cols]
        if turn % 8 == 0:  # as another rank, which has burned nothing yet
            fresh = open_labels(path, image, 99, keys)
        assert np.array_equal(fresh.read(Window(row, col, rows, cols)), expected)
    region = Window(300, 400, 77, 88)
    found = fresh.read(Window(-9, 60, 100, 100), region)
    expected = np.full((100, 100), 99)
    expected[9:86, :28] = truth[500:577, 660:688]
    assert np.array_equal(found, expected)


def test_coarse_labels_are_burned_at_the_resolution_that_is_read(
    write_raster: Write, write_vector: Write
) -> None:
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=GRIDS["upside down"])
    with Raster(path, resolution=0.9) as coarse:
        shapes = random_polygons(coarse.transform, coarse.size, 30, 7)
        with open_labels(write_vector("a.gpkg", shapes), coarse, 255) as labels:
            assert (labels.height, labels.width) == coarse.size == (200, 367)
            expected = burned_by_hand(shapes, [1] * 30, coarse.transform, coarse.size)
            assert np.array_equal(labels.read(coarse.whole), expected)


def test_the_order_of_the_file_decides_and_priority_overrules_it(
    write_vector: Write, plain: Raster
) -> None:
    shapes = random_polygons(plain.transform, SIZE, 300, 8)
    values = np.random.default_rng(9).integers(0, 4, len(shapes)).tolist()
    path = write_vector("a.gpkg", shapes, values)
    for priority in (None, [2, 0], [3, 1, 0, 2]):
        order = list(range(len(shapes)))
        if priority:
            order.sort(key=lambda n: priority.index(values[n]) if values[n] in priority else -1)
        expected = burned_by_hand(
            [shapes[n] for n in order], [values[n] for n in order], plain.transform, SIZE, 255
        )
        keys = VectorKeys("class", priority=priority, background="ignore")
        assert np.array_equal(burned(path, plain, 255, keys), expected)


@pytest.mark.parametrize(
    ("values", "classes", "numbers"),
    [
        ([4, 1, 0, 4], None, [4, 1, 0, 4]),
        (["4", "1", "255", "0"], None, [4, 1, 255, 0]),
        ([4.0, 1.0, 0.0, 2.0], None, [4, 1, 0, 2]),
        ([4, 1, 0, 4], {4: 1, "1": 2, 0: None}, [1, 2, 255, 1]),
        ([1.5, np.nan, 2.0, 1.5], {1.5: 3, "null": 1, 2: 0}, [3, 1, 0, 3]),
        (["a b", None, "", "ä"], {"a b": 3, None: None, "": 1, "ä": 2}, [3, 255, 1, 2]),
        ([True, False, True, False], {True: 2, "false": 3}, [2, 3, 2, 3]),
    ],
    ids=str,
)
def test_values_become_classes(
    write_vector: Write,
    plain: Raster,
    values: list[object],
    classes: dict[object, int | None],
    numbers: list[int],
) -> None:
    boxes = [
        shapely.box(*(plain.transform @ (100 * n, 60)), *(plain.transform @ (100 * n + 50, 10)))
        for n in range(4)
    ]
    path = write_vector("a.gpkg", boxes, values)
    with open_labels(path, plain, 255, VectorKeys("class", classes)) as labels:  # type: ignore[arg-type]
        found = labels.read(Window(0, 0, 80, 400))
    assert [int(found[35, 100 * n + 25]) for n in range(4)] == numbers


def test_without_a_field_all_are_one_class(write_vector: Write, plain: Raster) -> None:
    shapes = random_polygons(plain.transform, SIZE, 9, 10)
    found = burned(write_vector("a.gpkg", shapes), plain, 255, VectorKeys(burn=3, background=2))
    assert np.array_equal(found, burned_by_hand(shapes, [3] * 9, plain.transform, SIZE, 2))


def test_broken_polygons_are_burned_by_the_even_odd_rule(
    write_vector: Write, plain: Raster
) -> None:
    def placed(*corners: tuple[float, float]) -> list[tuple[float, float]]:
        return [plain.transform @ corner for corner in corners]

    bow_tie = shapely.Polygon(placed((3, 4), (90.3, 80.2), (91, 5), (2, 77.7)))
    twice = shapely.Polygon(
        placed((120, 9.3), (180, 9.7), (180.1, 80), (120, 81), (120, 9.3))
        + placed((140, 30), (160, 30), (160, 60), (140, 60), (140, 30), (120, 9.3))
    )
    hole_outside = shapely.Polygon(
        placed((200, 10), (240, 10.2), (241, 50)), [placed((250, 10), (280, 11), (281.3, 40))]
    )
    triangle = shapely.Polygon(placed((300, 300), (399.3, 310.1), (333, 440)))
    shapes = [bow_tie, twice, hole_outside, shapely.MultiPolygon([triangle, bow_tie])]
    assert not any(shape.is_valid for shape in shapes[:3])
    nothing = [None, shapely.Polygon(), shapely.MultiPolygon()]
    path = write_vector("a.gpkg", [*nothing, *shapes], geometry_type="Unknown")
    expected = burned_by_hand(shapes, [1] * 4, plain.transform, SIZE)
    assert np.array_equal(burned(path, plain, 255), expected)
    assert not burned(write_vector("nothing.gpkg", nothing), plain, 255).any()


@pytest.mark.parametrize(
    ("crs", "most"),
    [("EPSG:4326", (180, 90)), ("EPSG:3857", (20037508, 20048966)), ("EPSG:32630", (1e12, 1e12))],
)
def test_what_reaches_behind_the_earth_is_burned_around_the_image(
    write_vector: Write, plain: Raster, crs: str, most: tuple[float, float]
) -> None:
    hole = random_polygons(plain.transform, SIZE, 1, 11)[0].exterior
    there = moved([hole], "EPSG:32630", crs)[0]
    corners = [(-most[0], -most[1]), (most[0], -most[1]), most, (-most[0], most[1])]
    path = write_vector("a.gpkg", [shapely.Polygon(corners, [there.coords])], crs=crs)
    expected = 1 - burned_by_hand([shapely.Polygon(hole)], [1], plain.transform, SIZE)
    assert 0 < expected.sum() < expected.size
    assert np.array_equal(burned(path, plain, 255), expected)


@pytest.mark.parametrize(
    ("crs", "middle"), [("EPSG:32660", (651e3, 7e6)), ("EPSG:3413", (0, 0))], ids=["180°", "pole"]
)
@pytest.mark.parametrize("name", ["a.gpkg", "a.geojson"])
def test_labels_in_degrees_are_found_where_degrees_begin(
    write_raster: Write, write_vector: Write, crs: str, middle: tuple[float, float], name: str
) -> None:
    transform = Affine(50, 0, middle[0] - 25 * SIZE[1], 0, -50, middle[1] + 25 * SIZE[0])
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=transform, crs=crs)
    shapes = moved(random_polygons(transform, SIZE, 60, 12), crs, "EPSG:4326")
    # Those that are cut by the line itself are other shapes in degrees.
    shapes = [s for s in shapes if s.bounds[2] - s.bounds[0] < 20]
    assert {s.bounds[0] > 0 for s in shapes} == {True, False}
    expected = burned_by_hand(moved(shapes, "EPSG:4326", crs), [1] * len(shapes), transform, SIZE)
    file = write_vector(name, shapes, crs="EPSG:4326")
    with Raster(path) as image, open_labels(file, image, 255) as labels:
        assert np.array_equal(labels.read(image.whole), expected)
        part = labels.read(Window(100, 500, 300, 200))
    assert np.array_equal(part, expected[100:400, 500:700])


@pytest.mark.parametrize(
    ("left", "width", "crs", "at", "fits"),
    [
        (0, 360, "EPSG:4326", [-60, 60], False),
        (0, 360, "EPSG:3857", [-60, 60], False),
        (0, 360, "EPSG:4326", [60], True),
        (0, 360, "EPSG:4326", [60, 240], True),
        (-180.5, 361, "EPSG:4326", [-60, 60], True),
        (160, 30, "EPSG:4326", [165], True),
        (160, 30, "EPSG:4326", [165, -175], False),
    ],
)
def test_polygons_in_the_west_are_not_left_out_of_images_that_go_on_eastwards(
    write_raster: Write,
    write_vector: Write,
    left: float,
    width: float,
    crs: str,
    at: list[float],
    fits: bool,
) -> None:
    transform = Affine(width / SIZE[1], 0, left, 0, -60 / SIZE[0], 60)
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=transform, crs="EPSG:4326")
    shapes = [shapely.box(x, 20, x + 4, 40) for x in at]
    file = write_vector("a.gpkg", moved(shapes, "EPSG:4326", crs), crs=crs)
    with Raster(path) as image:
        if fits:
            with open_labels(file, image, 255) as labels:
                expected = burned_by_hand(shapes, [1] * len(shapes), transform, SIZE)
                assert np.array_equal(labels.read(image.whole), expected)
        else:
            with pytest.raises(TilenetError, match="must count longitudes alike"):
                open_labels(file, image, 255)


def test_windows_whose_edges_are_bent_in_the_files_crs_find_their_polygons(
    write_raster: Write, write_vector: Write
) -> None:
    crs, transform = "EPSG:3035", Affine(1000, 0, 4321e3 - 768e3, 0, -1000, 5.2e6)
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=transform, crs=crs)
    rng = np.random.default_rng(14)
    places = rng.uniform(0, 1, (3000, 1, 2)) * SIZE[::-1] + rng.uniform(-3, 3, (3000, 3, 2))
    x, y = transform @ tuple(np.moveaxis(places, -1, 0))
    shapes = moved(shapely.polygons(np.stack([x, y], axis=-1)), crs, "EPSG:4326")
    expected = burned_by_hand(moved(shapes, "EPSG:4326", crs), [1] * 3000, transform, SIZE)
    file = write_vector("a.gpkg", shapes, crs="EPSG:4326")
    with Raster(path) as image:
        for row, col in ((0, 0), (0, 600), (550, 500)):  # of one block each
            with open_labels(file, image, 255) as labels:
                found = labels.read(Window(row, col, 500 - row % 500, 512 - col % 512))
            height, width = found.shape
            height = min(height, SIZE[0] - row)
            wanted = expected[row : row + height, col : col + width]
            assert np.array_equal(found[:height], wanted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a.gpkg", "a.geojson"])
def test_long_edges_are_burned_where_they_lie_in_the_images_crs(
    write_raster: Write, write_vector: Write, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Between corners 55 km apart the parallel of 60° lies 420 px south of the straight edge."""
    monkeypatch.setattr(reproject, "MOST_BOXES", 7)
    crs, degrees = "EPSG:32633", "EPSG:4326"
    middle = moved([shapely.Point(15, 60)], degrees, crs)[0]
    transform = Affine(0.25, 0, middle.x - 140, 0, -0.25, middle.y + 130)
    path = write_raster("image.tif", np.zeros(SIZE, "uint8"), transform=transform, crs=crs)
    rng = np.random.default_rng(15)
    places = rng.uniform(0, 1, (90, 1, 2)) * SIZE[::-1] + rng.uniform(-30, 30, (90, 3, 2))
    x, y = transform @ tuple(np.moveaxis(places, -1, 0))
    shapes = moved(shapely.polygons(np.stack([x, y], axis=-1)), crs, degrees)
    # Amid them in the file: over those before it, under those that follow.
    shapes[40:40] = [shapely.box(14.5, 59, 15.5, 60)]
    values = [1 + n % 5 for n in range(91)]
    expected = burned_by_hand(moved(shapes, degrees, crs), values, transform, SIZE)
    assert (expected[120:500] == 1).mean() > 0.5
    counts, keys = [], VectorKeys("class")
    original = vector_layer.shapes_on_image

    def spy(shapes: np.ndarray, *more: Any) -> np.ndarray:
        counts.append(len(shapes))
        return original(shapes, *more)

    monkeypatch.setattr(vector_layer, "shapes_on_image", spy)
    file = write_vector(name, shapes, values, degrees)
    with Raster(path) as image:
        for row, col in ((0, 0), (0, 1024), (512, 512)):  # of one block each
            with open_labels(file, image, 255, keys) as labels:
                found = labels.read(Window(row, col, 88, 76))
            assert np.array_equal(found, expected[row : row + 88, col : col + 76])
        assert name != "a.gpkg" or max(counts) < 60
    lone = write_vector(f"lone-{name}", shapes[40:41], [1], degrees)
    expected = burned_by_hand(moved(shapes[40:41], degrees, crs), [1], transform, SIZE)
    # North of the parallel, which bounds the layer.
    with Raster(path, part=Part(window=(80, 300, 60, 60))) as part:
        assert np.array_equal(burned(lone, part, 255, keys), expected[80:140, 300:360])
    said = pytest.raises(TilenetError, match="labels must overlap their image")
    with Raster(path, part=Part(window=(0, 300, 50, 60))) as part, said:
        open_labels(lone, part, 255, keys)


def test_all_is_read_where_gdal_cannot_say_which_part_of_a_file_is_needed(
    write_vector: Write, plain: Raster, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = random_polygons(plain.transform, SIZE, 9, 10)
    there = moved(shapes, "EPSG:32630", "EPSG:4326")
    path = write_vector("a.gpkg", [None, shapely.Polygon(), *there], crs="EPSG:4326")
    expected = burned_by_hand(shapes, [1] * 9, plain.transform, SIZE)
    with open_labels(path, plain, 255) as labels:
        monkeypatch.setattr(vector_layer, "bounds_in", lambda *_: None)
        assert np.array_equal(labels.read(plain.whole), expected)


def test_no_more_is_read_or_burned_than_a_block_needs(
    write_vector: Write, plain: Raster, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = random_polygons(plain.transform, SIZE, 400, 13)
    sizes = []

    def spy(given: list[object], out_shape: tuple[int, int], **more: object) -> np.ndarray:
        sizes.append((len(given), *out_shape))
        return rasterize(given, out_shape, **more)

    monkeypatch.setattr(vector_labels, "rasterize", spy)
    with open_labels(write_vector("a.gpkg", shapes), plain, 255) as labels:
        assert isinstance(labels, VectorLabels)
        first = labels.read(Window(10, 20, 30, 40))
        assert len(sizes) == 1
        side = vector_labels.BLOCK_PX + 2 * vector_labels.MARGIN_PX
        assert sizes[0][1:] == (side, side)
        assert 100 < sizes[0][0] < 350
        assert np.array_equal(labels.read(Window(10, 20, 30, 40)), first)
        assert len(sizes) == 1  # burned once
        labels.read(plain.whole)
        assert len(sizes) == 6
        before = vector_labels.BLOCKS.num_bytes
    assert vector_labels.BLOCKS.num_bytes == before - 6 * vector_labels.BLOCK_PX**2


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    rng = np.random.default_rng(1)
    blocks = [rng.integers(0, top, (10, 10)) for top in (200, 200, 200, 70000, 200)]
    blocks[4][0, 0] = -1  # needs two bytes
    cache = BlockCache(350)

    def kept(owner: int, number: int) -> bool:
        found = cache.get(owner, number, 0)
        assert found is None or np.array_equal(found, blocks[number])
        return found is not None

    for number, block in enumerate(blocks[:3]):
        cache.put(1, number, 0, block)
    assert (cache.num_bytes, kept(1, 0)) == (300, True)
    cache.put(2, 4, 0, blocks[4])
    assert cache.num_bytes == 300
    assert [kept(1, 0), kept(1, 1), kept(1, 2), kept(2, 4)] == [True, False, False, True]
    cache.put(2, 3, 0, blocks[3])  # larger than all that is allowed: kept, alone
    assert (cache.num_bytes, kept(2, 3), kept(2, 4)) == (400, True, False)
    cache.drop(2)
    assert (cache.num_bytes, kept(2, 3)) == (0, False)
