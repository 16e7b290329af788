"""Vector files that cannot be labels are refused in one sentence with a remedy."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from affine import Affine
from polygons import burned, burned_by_hand, moved, random_polygons

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.polygons import VectorLabels
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError

Write = Callable[..., str]
SIZE = 60, 80
GRID = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
SHAPES = random_polygons(GRID, SIZE, 12, 1)
VALUES = [n % 3 for n in range(12)]
LINE = shapely.LineString([GRID @ (10, 10), GRID @ (40, 50)])


@pytest.fixture
def image(write_raster: Write) -> Iterator[Raster]:
    with Raster(write_raster("image.tif", np.zeros(SIZE, "uint8"))) as raster:
        yield raster


def refusal(path: str, image: Raster, keys: VectorKeys) -> str:
    with pytest.raises(TilenetError) as raised, open_labels(path, image, 255, keys) as labels:
        labels.read(image.whole)
    words = str(raised.value)
    assert path in words
    assert "\n" not in words
    assert ";" in words  # a remedy
    return words


@pytest.mark.parametrize(
    ("written", "keys", "said"),
    [
        ({}, {"field": "clas"}, r"must be a field .*layer a: no clas\); the nearest is class"),
        ({"values": None}, {"field": "class"}, r"no class\); it has no fields"),
        ({"values": list("abcdefghijkl")}, {}, r"whole numbers.*class: a, b, c, d, e …\); map"),
        ({"values": [1.5] * 12}, {}, r"whole numbers.*class: 1\.5\)"),
        ({"values": [None, "1"] * 6}, {}, r"whole numbers.*class: null\)"),
        ({}, {"classes": {0: 1, 1: 0}}, r"must stand under vectors.classes .*class: 2\); add it"),
        (
            {"values": ["road", "", None, " b"] * 3},
            {"classes": {"road": 1}},
            r'"", " b", null\); add',
        ),
        ({"shapes": [shapely.Point(5e5, 4e6)] * 12}, {}, r"polygons .*Point\); buffer"),
        ({"shapes": [shapely.MultiPoint([GRID @ (3, 3)])] * 12}, {}, r"polygons .*MultiPoint\)"),
        ({"shapes": [LINE] * 12}, {}, r"polygons .*LineString\); buffer"),
        ({"shapes": [*SHAPES[:-1], LINE]}, {}, r"polygons .*LineString\); buffer"),
        (
            {"shapes": [*SHAPES[:-1], shapely.GeometryCollection([SHAPES[0], LINE])]},
            {},
            r"polygons .*LineString\); buffer",
        ),
        ({"crs": None}, {}, r"need a CRS .*none\); name it with vectors.crs"),
        ({"crs": None}, {"crs": "nonsense"}, r"must be a CRS \(vectors.crs: nonsense\).* \(|;"),
        ({}, {"crs": "EPSG:32631"}, r"contradict .*EPSG:32631, .*a.gpkg: EPSG:32630\); leave"),
        (
            {"crs": "EPSG:32631"},
            {},
            r"overlap .*a.gpkg: x 1\d+.* to .*, y .*image.tif: x 500000 to 500166, y .*EPSG:32630",
        ),
        ({}, {"layer": "b"}, r"layer with geometries \(.*no b\); it has a$"),
    ],
    ids=str,
)
def test_what_cannot_be_burned_is_refused(
    write_vector: Write, image: Raster, written: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    arguments = {"shapes": SHAPES, "values": VALUES} | written
    kinds = {shape.geom_type for shape in arguments["shapes"]}
    kind = kinds.pop() if len(kinds) == 1 else "Unknown"
    path = write_vector("a.gpkg", geometry_type=kind, **arguments)
    keys = {"field": "class"} | keys
    if keys.get("crs") == "nonsense":
        with pytest.raises(TilenetError, match=r"must be a CRS \(vectors.crs: nonsense\); write"):
            open_labels(path, image, 255, VectorKeys(**keys))
        return
    assert re.search(said, refusal(path, image, VectorKeys(**keys)))


def test_the_layer_must_be_named_where_there_are_several(
    write_vector: Write, image: Raster
) -> None:
    path = write_vector("a.gpkg", SHAPES[:6], VALUES[:6], layer="roads")
    write_vector("a.gpkg", SHAPES[6:], VALUES[6:], layer="houses", append=True)
    words = refusal(path, image, VectorKeys())
    assert "labels come from one layer" in words
    assert "has 2: roads, houses" in words
    assert "vectors.layer" in words
    found = burned(path, image, 255, VectorKeys(layer="houses"))
    assert np.array_equal(found, burned_by_hand(SHAPES[6:], [1] * 6, GRID, SIZE))


@pytest.mark.parametrize(
    ("name", "there", "written", "given"),
    [
        ("a.gpkg", "EPSG:32630", None, "EPSG:32630"),
        ("a.gpkg", "EPSG:32630", None, "image"),
        ("a.gpkg", "EPSG:32630", None, "+proj=utm +zone=30 +datum=WGS84"),
        ("a.shp", "EPSG:32630", None, "EPSG:32630"),
        ("a.shp", "EPSG:32630", None, "image"),
        ("a.geojson", "EPSG:32630", None, "EPSG:32630"),
        ("a.geojson", "EPSG:32630", None, "image"),
        ("a.geojson", "EPSG:4326", None, None),  # JSON is in degrees if it can be
        ("a.gpkg", "EPSG:4326", "EPSG:4326", "EPSG:4326"),  # as the file says itself
    ],
)
def test_the_user_names_the_crs_that_a_file_lacks(
    write_vector: Write,
    image: Raster,
    name: str,
    there: str,
    written: str | None,
    given: str | None,
) -> None:
    path = write_vector(name, moved(SHAPES, "EPSG:32630", there), VALUES, crs=written)
    found = burned(path, image, 255, VectorKeys(crs=given))
    assert np.array_equal(found, burned_by_hand(SHAPES, [1] * 12, GRID, SIZE))


def test_json_without_a_crs_is_in_degrees(write_vector: Write, image: Raster) -> None:
    path = write_vector("metres.geojson", SHAPES, VALUES, crs=None)
    words = refusal(path, image, VectorKeys())
    assert re.search(r"in degrees \(RFC 7946;.*x 49.*vectors\.crs", words)
    degrees = moved(SHAPES, "EPSG:32630", "EPSG:4326")
    path = write_vector("degrees.geojson", degrees, VALUES, crs=None)
    assert "contradict" in refusal(path, image, VectorKeys(crs="EPSG:32630"))


def test_an_image_without_a_crs_takes_polygons_without(
    write_raster: Write, write_vector: Write
) -> None:
    path = write_raster("picture.tif", np.zeros(SIZE, "uint8"), crs=None)
    with Raster(path) as picture:
        found = burned(write_vector("a.shp", SHAPES, crs=None), picture, 255)
        assert np.array_equal(found, burned_by_hand(SHAPES, [1] * 12, GRID, SIZE))
        words = refusal(write_vector("b.gpkg", SHAPES), picture, VectorKeys())
        assert "an image with vector labels needs a CRS" in words


@pytest.mark.parametrize("name", ["a.gpkg", "a.geojson"])
@pytest.mark.parametrize("damage", ["half", "empty", "noise", "missing"])
def test_files_that_cannot_be_opened_are_refused(
    write_vector: Write, image: Raster, name: str, damage: str
) -> None:
    path = Path(write_vector(name, SHAPES, VALUES))
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        noise = np.random.default_rng(1).bytes(len(data))
        path.write_bytes({"half": data[: len(data) // 2], "empty": b"", "noise": noise}[damage])
    words = refusal(str(path), image, VectorKeys())
    assert "labels must be a raster or a vector file that GDAL can open" in words


def test_damage_behind_the_first_pages_is_found_when_it_is_read(
    write_vector: Write, image: Raster
) -> None:
    path = Path(write_vector("a.gpkg", random_polygons(GRID, SIZE, 3000, 2)))
    data = bytearray(path.read_bytes())
    with open_labels(str(path), image, 255) as labels:
        pages = slice(200_000, 500_000)
        data[pages] = np.random.default_rng(1).bytes(300_000)
        path.write_bytes(bytes(data))
        with pytest.raises(TilenetError, match=r"readable everywhere \(.*a.gpkg.*ogrinfo -al"):
            labels.read(image.whole)


def test_a_geopackage_may_hold_pixels_or_polygons_or_both(
    write_raster: Write, write_vector: Write
) -> None:
    truth = np.random.default_rng(3).integers(0, 4, SIZE).astype("uint8")
    grid = Affine(2, 0, 5e5, 0, -2, 4e6)
    path = write_raster("a.gpkg", truth, driver="GPKG", transform=grid, crs="EPSG:32630")
    image_path = write_raster("image.tif", truth, transform=grid)
    with Raster(image_path) as image:
        with pytest.raises(TilenetError, match="one band of whole numbers"):  # GDAL adds alpha
            open_labels(path, image, 255)
        shapes = random_polygons(grid, SIZE, 5, 4)
        write_vector("a.gpkg", shapes, layer="polygons", append=True)
        with open_labels(path, image, 255, VectorKeys(layer="polygons")) as labels:
            assert isinstance(labels, VectorLabels)
            assert np.array_equal(
                labels.read(image.whole), burned_by_hand(shapes, [1] * 5, grid, SIZE)
            )
        with open_labels(write_raster("b.tif", truth, transform=grid), image, 255) as labels:
            assert isinstance(labels, Labels)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_corners_that_are_no_numbers_are_refused(
    write_vector: Write, image: Raster, number: float
) -> None:
    corners = [GRID @ (3, 3), (5e5 + 20, number), GRID @ (30, 40), GRID @ (5, 20)]
    path = write_vector("a.gpkg", [*SHAPES, shapely.Polygon(corners)])
    words = refusal(path, image, VectorKeys())
    assert "corners of polygons must be numbers" in words
    assert "feature 13" in words


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"field": "f", "classes": {"a": 3}}, r"vectors.classes.a: 3, classes: 0 to 2"),
        ({"field": "f", "classes": {"a": -1}}, "vectors.classes.a: -1"),
        ({"burn": 3}, r"vectors.burn: 3, classes: 0 to 2, ignore_index: 255\); change it"),
        ({"background": 7}, "vectors.background: 7"),
        ({"priority": [1, 9]}, r"vectors.priority\[1\]: 9"),
        ({"classes": {"a": 1}}, r"maps the values of a field .*name it with vectors.field"),
        ({"field": "f", "classes": {1: 0, "1": 2}}, r"each value once, .* \(1: 0 and 2\); delete"),
        ({"field": "f", "classes": {None: 1, float("nan"): None}}, r"\(null: 1 and None\)"),
        ({"priority": [1, 2, 1]}, r"names each class once \(vectors.priority: \[1, 2, 1\]\)"),
    ],
    ids=str,
)
def test_keys_that_contradict_the_run_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        VectorKeys(**keys).check(3, 255)


def test_keys_may_name_classes_and_what_does_not_count() -> None:
    VectorKeys("f", {"a": 2, "b": None, "c": 255}, [2, 255, 0], background="ignore").check(3, 255)
    VectorKeys("f", burn=77).check(3, 255)  # stands aside where there is a field
    VectorKeys(burn=2, background=255).check(3, 255)


@pytest.mark.parametrize("value", ["1" * 5000, "9" * 19])
def test_class_numbers_without_end_are_refused(value: str) -> None:
    with pytest.raises(TilenetError, match="must be whole numbers"):
        VectorKeys(field="class").classes_of([value], 255, "a.gpkg")
    assert VectorKeys(field="class").classes_of(["9" * 18], 255, "a.gpkg") == [10**18 - 1]


def test_what_gdal_mends_of_polygons_is_not_said(tmp_path: Path, image: Raster) -> None:
    ring = [[500001, 3999999], [500009, 3999999], [500009, 3999985], [500001, 3999985]]
    shape = {"type": "Polygon", "coordinates": [ring]}
    feature = {"type": "Feature", "id": 3, "properties": {"class": 1}, "geometry": shape}
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32630"}}
    path = tmp_path / "a.geojson"
    entry = {"type": "FeatureCollection", "crs": crs, "features": [feature, feature]}
    path.write_text(json.dumps(entry))
    with (
        warnings.catch_warnings(),
        open_labels(str(path), image, 255, VectorKeys(field="class")) as labels,
    ):
        warnings.simplefilter("error")
        assert (labels.read(image.whole) == 1).any()
