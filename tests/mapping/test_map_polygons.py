"""Polygons of class maps are those of GDAL on the whole raster, however blocks and ranks cut it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from mpi4py import MPI
from rasterio.control import GroundControlPoint
from rasterio.features import shapes as polygonised

from tilenet.__main__ import main
from tilenet.data.rasters import handles
from tilenet.mapping.polygons import class_polygons

Capture = pytest.CaptureFixture[str]
NODATA = 255
NAMES = ("water", "field", "road", "building")  # class 4 has none
TURNED = rasterio.Affine(0.4, 0.3, 5e5, 0.3, -0.4, 4e6)
SKEWED = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def noise(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Patches that touch by corners, and large ones with holes."""
    return rng.choice([0, 1, 3, NODATA], size, p=[0.6, 0.2, 0.15, 0.05])


def nested(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Holes in holes in holes, around two places, one of them by corners."""
    rows, cols = np.indices(size)
    (r, s), (c, d) = rng.integers(0, size[0], 2), rng.integers(0, size[1], 2)
    square = np.maximum(abs(rows - r), abs(cols - c)) // 3
    diamond = (abs(rows - s) + abs(cols - d)) // 2
    return np.where(square < diamond, square % 4, np.where(diamond % 5 == 4, NODATA, diamond % 5))


def snakes(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """One patch that goes through all rows to and fro, and a spiral's worth of others."""
    rows, cols = np.indices(size)
    turn = np.where(rows % 4 == 1, cols == size[1] - 1, cols == 0)
    return np.where((rows % 2 == 0) | turn, 2, rng.choice([0, 1], size))


def blobs(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Smooth patches with straight edges of different lengths."""
    coarse = rng.choice([0, 1, 2, 4, NODATA], [side // 5 + 1 for side in size])
    fine = coarse.repeat(5, axis=0).repeat(5, axis=1)[: size[0], : size[1]]
    return np.where(rng.random(size) < 0.05, 2, fine)


KINDS: list[Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = [
    noise, nested, snakes, blobs,
]  # fmt: skip


def write_map(
    path: Path, values: np.ndarray, transform: rasterio.Affine | None, **profile: Any
) -> str:
    if MPI.COMM_WORLD.rank == 0:
        height, width = values.shape
        size = {"count": 1, "height": height, "width": width, "dtype": values.dtype.name}
        known = {"driver": "GTiff", "nodata": NODATA, "crs": "EPSG:32630", "transform": transform}
        with rasterio.open(path, "w", **(known | size | profile)) as file:
            file.write(values, 1)
            file.update_tags(1, **{f"class_{number}": name for number, name in enumerate(NAMES)})
    MPI.COMM_WORLD.Barrier()
    return str(path)


def corners(size: tuple[int, ...]) -> list[GroundControlPoint]:
    height, width = size
    return [
        GroundControlPoint(row, col, 5e5 + 2 * col, 4e6 - 3 * row)
        for row in (0, height)
        for col in (0, width)
    ]


def polygons(*arguments: Any) -> None:
    assert main(["polygons", *map(str, arguments)]) == 0


def written(path: Path, transform: rasterio.Affine) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Polygons in columns and rows, and their attributes."""
    meta, _, geometry, columns = pyogrio.raw.read(path)
    found = shapely.from_wkb(geometry)
    assert shapely.is_valid(found).all()
    t = ~transform
    points = shapely.get_coordinates(found)
    moved = np.stack([t.c + points @ (t.a, t.b), t.f + points @ (t.d, t.e)], axis=1)
    assert abs(moved - moved.round()).max(initial=0) < 1e-5
    pixels = shapely.set_coordinates(found.copy(), moved.round() + 0.0)  # no -0.0
    return list(pixels), dict(zip(meta["fields"], columns, strict=True))


def as_set(polygons: list[Any], classes: list[int]) -> set[tuple[int, bytes]]:
    """Polygons by their very corners, with holes."""
    wkb = shapely.to_wkb(shapely.normalize(np.array(polygons, object)))
    found = set(zip(map(int, classes), wkb, strict=True))
    assert len(found) == len(polygons)
    return found


def by_gdal(values: np.ndarray, wanted: np.ndarray) -> set[tuple[int, bytes]]:
    found = list(polygonised(values.astype("int32"), wanted, connectivity=4))
    return as_set([shapely.geometry.shape(one) for one, _ in found], [n for _, n in found])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "block_px", "ending", "transform"),
    [
        ((53, 37), 7, "gpkg", SKEWED),
        ((41, 64), 16, "fgb", TURNED),
        ((2, 90), 5, "geojson", SKEWED),  # fewer rows than three ranks
        ((37, 1), 4, "fgb", TURNED),
        ((11, 13), 1, "gpkg", SKEWED),
        ((61, 60), 2048, "fgb", SKEWED),
    ],
)
def test_polygons_are_those_of_gdal_on_the_whole_map(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[np.random.Generator, tuple[int, int]], np.ndarray],
    size: tuple[int, int],
    block_px: int,
    ending: str,
    transform: rasterio.Affine,
) -> None:
    values = kind(np.random.default_rng(sum(size) + block_px), size).astype("uint8")
    path = write_map(shared_path / "map.tif", values, transform)
    out = shared_path / f"out.{ending}"
    monkeypatch.setattr(class_polygons, "BLOCK_PX", block_px)
    monkeypatch.setattr(class_polygons, "MESSAGE_POINTS", 64)
    polygons(path, out)
    shapes, columns = written(out, transform)
    assert as_set(shapes, columns["number"]) == by_gdal(values, values != NODATA)
    assert list(columns) == ["class", "number", "area"]
    assert [(*NAMES, "4")[n] for n in columns["number"]] == list(columns["class"])
    pixel = abs(transform.determinant)
    np.testing.assert_allclose(columns["area"], shapely.area(shapes) * pixel, rtol=1e-12)
    for number in range(5):  # each pixel once
        here = columns["area"][columns["number"] == number].sum()
        np.testing.assert_allclose(here, (values == number).sum() * pixel, rtol=1e-9)
    assert sorted(one.name for one in shared_path.iterdir()) == ["map.tif", out.name]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("options", [[], ["--simplify", "1.5", "--min-area", "12"]])
def test_the_file_does_not_depend_on_ranks(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    from tilenet.mapping.polygons.job import PolygonsJob, make_polygons

    values = blobs(np.random.default_rng(1), (103, 131)).astype("uint8")
    path = write_map(shared_path / "map.tif", values, SKEWED)
    monkeypatch.setattr(class_polygons, "BLOCK_PX", 24)
    for ending in ("fgb", "geojson"):
        many, one = shared_path / "many" / f"a.{ending}", shared_path / "one" / f"a.{ending}"
        for place in (many, one):
            place.parent.mkdir(exist_ok=True)
        polygons(path, many, *options)
        if comm.rank == 0:
            monkeypatch.setattr(class_polygons, "BLOCK_PX", 2048)
            numbers = map(float, options[1::2])
            sizes = dict(zip(("simplify", "min_area"), numbers, strict=False))
            assert make_polygons(PolygonsJob(path, str(one), **sizes), MPI.COMM_SELF) > 100
            monkeypatch.setattr(class_polygons, "BLOCK_PX", 24)
            assert many.read_bytes() == one.read_bytes()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [noise, nested, blobs])
def test_simplified_polygons_have_no_gaps_and_no_overlaps(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[np.random.Generator, tuple[int, int]], np.ndarray],
) -> None:
    values = kind(np.random.default_rng(4), (71, 58))
    values = np.where(values == NODATA, 0, values).astype("uint8")
    path = write_map(shared_path / "map.tif", values, TURNED)
    monkeypatch.setattr(class_polygons, "BLOCK_PX", 16)
    exact, out = shared_path / "exact.fgb", shared_path / "out.fgb"
    polygons(path, exact)
    polygons(path, out, "--simplify", "0.8")
    (_, _, before, was), (_, _, after, now) = map(pyogrio.raw.read, (exact, out))
    before, after = shapely.from_wkb(before), shapely.from_wkb(after)
    # A spatial index puts them in another order; areas are those of the pixels.
    assert sorted(zip(was[1], was[2], strict=True)) == sorted(zip(now[1], now[2], strict=True))
    moved = np.sort(shapely.area(before)) - np.sort(shapely.area(after))
    assert (abs(moved) > 1e-3).sum() > 0.1 * len(moved)
    assert shapely.is_valid(after).all()
    assert shapely.coverage_is_valid(after)
    whole = shapely.union_all(after)
    np.testing.assert_allclose(shapely.area(after).sum(), whole.area, rtol=1e-9)
    assert len(shapely.get_parts(whole)) == 1
    assert not whole.interiors


@pytest.mark.ranks(1, 2)
def test_classes_and_small_areas_are_chosen(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = blobs(np.random.default_rng(2), (45, 77)).astype("int16")
    path = write_map(shared_path / "map.tif", values, SKEWED)
    monkeypatch.setattr(class_polygons, "BLOCK_PX", 11)
    out = shared_path / "out.gpkg"
    polygons(path, out, "--classes", "road", "0")
    shapes, columns = written(out, SKEWED)
    wanted = by_gdal(values, (values == 0) | (values == 2))
    assert as_set(shapes, columns["number"]) == wanted
    assert set(columns["class"]) == {"road", "water"}
    least = 25 * abs(SKEWED.determinant)
    polygons(path, out, "--classes", "0", "road", "--min-area", least, "--overwrite")
    shapes, columns = written(out, SKEWED)
    large = {one for one in wanted if shapely.from_wkb(one[1]).area >= 25}
    assert 0 < len(large) < len(wanted)
    assert any(shapely.from_wkb(one[1]).area == 25 for one in large)
    assert as_set(shapes, columns["number"]) == large


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ending", ["gpkg", "geojson", "fgb"])
def test_a_map_without_data_has_no_polygons(
    comm: MPI.Intracomm, shared_path: Path, ending: str
) -> None:
    values = np.full((5, 9), NODATA, np.uint8)
    path = write_map(shared_path / "map.tif", values, SKEWED)
    polygons(path, shared_path / f"out.{ending}", "--simplify", "1")
    info = pyogrio.read_info(shared_path / f"out.{ending}", force_feature_count=True)
    assert info["features"] == 0
    assert info["crs"] == "EPSG:32630"
    assert info["layer_name"] == "out"


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_done_is_one_sentence(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture
) -> None:
    values = np.random.default_rng(3).integers(0, 4, (9, 8)).astype("uint8")
    degrees = rasterio.Affine(1e-4, 0, 9, 0, -1e-4, 50)
    path = write_map(shared_path / "map.tif", values, SKEWED)
    globe = write_map(shared_path / "globe.tif", values, degrees, crs="EPSG:4326")
    floats = write_map(shared_path / "floats.tif", values.astype("float32"), SKEWED)
    large = write_map(shared_path / "large.tif", values.astype("uint32"), SKEWED)
    points = write_map(shared_path / "points.tif", values, None, gcps=corners(values.shape))
    bare = write_map(shared_path / "bare.tif", values, None)
    out = shared_path / "out.gpkg"
    polygons(globe, out)
    comm.allgather(capfd.readouterr())
    nowhere, wrong = shared_path / "no" / "out.fgb", shared_path / "out.shp"
    fresh, held = shared_path / "fresh.gpkg", len(handles.RECENT)
    for arguments, code, said in (
        ([path, out], 1, "a file of polygons is not overwritten unasked"),
        ([path, nowhere], 1, "a file of polygons needs an existing directory"),
        ([path, wrong], 1, "the ending of a file of polygons says its format"),
        ([floats, fresh], 1, "a class map has one band of whole numbers"),
        ([large, fresh], 1, "at most 32 bits"),
        ([path, fresh, "--classes", "road", "rood"], 1, "water, field, road, building); name one"),
        ([path, fresh, "--classes", "4"], 1, "--classes are names or numbers"),
        ([globe, fresh, "--min-area", "10"], 1, "--min-area needs a CRS"),
        ([points, fresh], 1, "4 ground control points, but no transform); put it on the ground"),
        ([bare, fresh], 1, "a CRS, but no transform); give it its transform"),
        ([shared_path / "none.tif", fresh], 1, "a raster must be a file"),
        ([path, fresh, "--simplify", "nan"], 2, "expected a number from 0 on"),
    ):
        assert comm.allgather(main(["polygons", *map(str, arguments)])) == [code] * comm.size
        printed = "".join(comm.allgather(capfd.readouterr().err))
        assert said in printed
        assert printed.count("\n") == 1
        assert not fresh.exists()
        assert len(handles.RECENT) == held  # no rank keeps the map open


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ending", ["gpkg", "geojson", "fgb"])
def test_a_full_disk_leaves_no_part_of_a_file(
    small_disk: Callable[[int], Path], tmp_path: Path, capfd: Capture, ending: str
) -> None:
    values = noise(np.random.default_rng(5), (61, 60)).astype("uint8")
    path = write_map(tmp_path / "map.tif", values, SKEWED)
    polygons(path, tmp_path / f"out.{ending}")
    pages = (tmp_path / f"out.{ending}").stat().st_size // 4096  # one too few
    # A GeoPackage has holes that take no room.
    for fewer in (pages // 2,) if ending == "gpkg" else (0, 1, pages // 2):
        disk = small_disk(4 * (pages - fewer))
        assert main(["polygons", path, str(disk / f"out.{ending}")]) == 1
        assert list(disk.iterdir()) == []
        assert "a place that has room" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("crs", "ending", "read_back"),
    [
        ("EPSG:32630", "geojson", "EPSG:32630"),
        ("EPSG:4326", "geojson", "EPSG:4326"),
        ("+proj=tmerc +lat_0=50 +lon_0=10 +ellps=GRS80 +units=m", "geojson", None),
        ("+proj=tmerc +lat_0=50 +lon_0=10 +ellps=GRS80 +units=m", "gpkg", ""),
        ("+proj=longlat +ellps=bessel", "geojson", None),
        ("+proj=longlat +ellps=bessel", "fgb", ""),
    ],
)
def test_polygons_lie_where_the_map_does_or_are_refused(
    tmp_path: Path, capsys: Capture, crs: str, ending: str, read_back: str | None
) -> None:
    source = write_map(tmp_path / "map.tif", np.eye(9, dtype="uint8"), SKEWED, crs=crs)
    out = tmp_path / f"out.{ending}"
    assert main(["polygons", source, str(out)]) == (read_back is None)
    if read_back is None:
        assert "GeoJSON names a CRS by its code" in capsys.readouterr().err
        assert not out.exists()
        return
    with rasterio.open(source) as file:
        expected = file.crs
    assert rasterio.crs.CRS.from_user_input(pyogrio.read_info(out)["crs"]) == expected


@pytest.mark.parametrize("name", ["gpkg_a.gpkg", "SQLITE_b.gpkg", ".c.gpkg", "d.gpkg"])
def test_a_file_may_have_names_that_its_layer_may_not(tmp_path: Path, name: str) -> None:
    source = write_map(tmp_path / "map.tif", np.eye(9, dtype="uint8"), SKEWED)
    polygons(source, tmp_path / name)
    ((layer, _),) = pyogrio.list_layers(tmp_path / name)
    assert layer == ("d" if name == "d.gpkg" else "polygons")


def test_polygons_of_just_the_least_area_stay(tmp_path: Path) -> None:
    values = np.full((30, 30), NODATA, np.uint8)
    values[5:15, 5:15] = 1
    side = rasterio.Affine(0.7, 0, 0, 0, -0.7, 0)
    assert 100 * abs(side.determinant) < 49  # as floats have it
    source = write_map(tmp_path / "map.tif", values, side)
    for least, count in ((49, 1), (49.001, 0)):
        polygons(source, tmp_path / "out.gpkg", "--min-area", least, "--overwrite")
        assert pyogrio.read_info(tmp_path / "out.gpkg")["features"] == count
