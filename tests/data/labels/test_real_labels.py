"""Labels of real images land where GDAL's own reprojection and burning put them."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from affine import Affine
from polygons import burned
from pyproj import CRS, Transformer
from rasterio.features import rasterize
from rasterio.warp import Resampling, reproject, transform_geom

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

pytestmark = pytest.mark.real

PAIRS = {
    "sample_geotiff.tif": ("geotiff_labels.geojson", "sample_fp_mask_from_geojson.tif"),
    "fair_uganda_z21_rgb.tif": (
        "fair_uganda_z21_buildings.geojson",
        "fair_uganda_z21_buildings.tif",
    ),
    "fair_set1_z21_rgb.tif": ("fair_set1_z21_buildings.geojson", "fair_set1_z21_buildings.tif"),
}
POLYGONS = {
    "new_brunswick_2of2.tif": ("new_brunswick_BakerLake.gpkg", {"field": "Quatreclasses"}),
    "sample_geotiff_custom_proj.tif": ("geotiff_custom_proj_labels.geojson", {"crs": "image"}),
    "massachusetts_23429155_15_uint16.tif": ("massachusetts_23429155_15.gpkg", {"field": "class"}),
    "SN_Vegas_WV03-N.tif": ("SN_Vegas_WV03.gpkg", {}),
    "SN7_int16_4band.tif": ("SN7_buildings.geojson", {}),
}


@pytest.mark.parametrize("image", PAIRS)
def test_polygons_become_the_raster_that_others_made_of_them(real: Path, image: str) -> None:
    polygons, mask = PAIRS[image]
    with rasterio.open(real / mask) as file:
        made = file.read(1) > 0
    with (
        Raster(str(real / image)) as raster,
        open_labels(str(real / polygons), raster, 255) as labels,
    ):
        assert np.array_equal(labels.read(raster.whole), made)
        window = Window(raster.height // 3, raster.width // 5, 300, 211)
        rows, cols = slice(window.row, window.row + 300), slice(window.col, window.col + 211)
        assert np.array_equal(labels.read(window), made[rows, cols])
    assert made.any()


def read(path: Path, field: str | None) -> tuple[str, np.ndarray, list[int]]:
    """CRS, polygons and their classes, by pyogrio."""
    info, _, wkb, columns = pyogrio.raw.read(path, columns=[field] if field else [])
    values = [int(value) for value in columns[0]] if field else [1] * len(wkb)
    return info["crs"], shapely.from_wkb(wkb), values


@pytest.mark.parametrize("all_touched", [False, True])
@pytest.mark.parametrize("image", POLYGONS)
def test_polygons_land_where_gdal_moves_and_burns_them(
    real: Path, image: str, all_touched: bool
) -> None:
    name, keys = POLYGONS[image]
    with Raster(str(real / image)) as raster:
        found = burned(str(real / name), raster, 255, VectorKeys(**keys, all_touched=all_touched))
        crs, polygons, values = read(real / name, keys.get("field"))
        shapes = [shapely.geometry.mapping(shape) for shape in polygons]
        if "crs" not in keys:
            shapes = transform_geom(crs, raster.crs, shapes)
        expected = rasterize(
            zip(shapes, values, strict=True),
            raster.size,
            transform=raster.transform,
            all_touched=all_touched,
            dtype="int32",
        )
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) >= 2


@pytest.mark.parametrize("image", ["new_brunswick_2of2.tif", "SN7_int16_4band.tif"])
def test_middles_of_pixels_lie_in_the_polygons_that_proj_says(real: Path, image: str) -> None:
    """Without GDAL: middles of pixels are moved to the labels' CRS and looked up there."""
    name, keys = POLYGONS[image]
    with Raster(str(real / image)) as raster:
        with open_labels(str(real / name), raster, 255, VectorKeys(**keys)) as labels:
            found = labels.read(raster.whole).ravel()
        crs, polygons, values = read(real / name, keys.get("field"))
        cols, rows = np.meshgrid(np.arange(raster.width) + 0.5, np.arange(raster.height) + 0.5)
        x, y = raster.transform @ (cols.ravel(), rows.ravel())
        source = CRS.from_user_input(raster.crs.to_wkt())
        middles = Transformer.from_crs(source, crs, always_xy=True).transform(x, y)
    shapes = shapely.make_valid(polygons)
    point, shape = shapely.STRtree(shapes).query(shapely.points(*middles), predicate="within")
    expected = np.zeros(len(found), np.int64)
    for number in np.unique(shape):  # later ones over earlier ones
        expected[point[shape == number]] = values[number]
    # Edges that are straight in one CRS are not in the other.
    assert (found != expected).mean() < 1e-5


@pytest.mark.parametrize("image", ["new_brunswick_2of2.tif", "sample_geotiff_custom_proj.tif"])
@pytest.mark.skipif(
    not (shutil.which("gdal_rasterize") and shutil.which("gdalwarp")),
    reason="needs the commands gdal_rasterize and gdalwarp",
)
def test_gdals_commands_put_them_there_too(real: Path, tmp_path: Path, image: str) -> None:
    name, keys = POLYGONS[image]
    target = tmp_path / "burned.tif"
    with Raster(str(real / image)) as raster:
        profile = {"driver": "GTiff", "dtype": "int16", "count": 1, "crs": raster.crs}
        profile |= {"transform": raster.transform, "height": raster.height, "width": raster.width}
        rasterio.open(target, "w", **profile).close()
        field = keys.get("field")
        # gdal_rasterize moves from the file's CRS to the raster's
        vector, options = str(real / name), ["-a", field] if field else ["-burn", "1"]
        if keys.get("crs") == "image":
            vector = str(tmp_path / "with_crs.gpkg")
            wkt = raster.crs.to_wkt()
            subprocess.run(["ogr2ogr", "-a_srs", wkt, vector, str(real / name)], check=True)
        subprocess.run(["gdal_rasterize", "-q", *options, vector, str(target)], check=True)
        with rasterio.open(target) as file:
            found = burned(str(real / name), raster, 255, VectorKeys(**keys))
            assert np.array_equal(found, file.read(1))


@pytest.mark.parametrize(
    ("image", "crs", "pixel"),
    [
        ("new_brunswick_2of2.tif", "EPSG:2953", 0.7),
        ("new_brunswick_2of2.tif", "EPSG:4617", 6e-6),
        ("sample_geotiff_custom_proj.tif", "EPSG:4326", 2e-4),
        ("umbra_mount_yasur_rotated.tif", "EPSG:4326", 7e-6),
    ],
)
def test_rasters_land_where_gdal_warps_them(
    real: Path, tmp_path: Path, image: str, crs: str, pixel: float
) -> None:
    path = tmp_path / "labels.tif"
    with Raster(str(real / image)) as raster:
        corners = [(0, 0), (raster.width, 0), (0, raster.height), (raster.width, raster.height)]
        move = Transformer.from_crs(
            CRS.from_user_input(raster.crs.to_wkt()), crs, always_xy=True
        ).transform
        x, y = move(*np.transpose([raster.transform @ corner for corner in corners]))
        # turned a little, and not over all of the image
        grid = (
            Affine.translation(x.min(), y.max())
            @ Affine.rotation(3)
            @ Affine.scale(pixel, -pixel)
            @ Affine.translation(20, 30)
        )
        size = int(np.ptp(y) / pixel), int(np.ptp(x) / pixel)
        truth = np.random.default_rng(1).integers(0, 5, size).astype("uint8")
        profile = {"driver": "GTiff", "count": 1, "dtype": "uint8", "nodata": 4}
        profile |= {"crs": crs, "transform": grid, "height": size[0], "width": size[1]}
        with rasterio.open(path, "w", **profile) as file:
            file.write(truth, 1)
        by_gdal = np.full(raster.size, 255, np.uint8)
        source = {"src_transform": grid, "src_crs": crs, "src_nodata": 4}
        onto = {"dst_transform": raster.transform, "dst_crs": raster.crs, "dst_nodata": 255}
        reproject(truth, by_gdal, **source, **onto, resampling=Resampling.nearest)
        cols, rows = np.meshgrid(np.arange(raster.width) + 0.5, np.arange(raster.height) + 0.5)
        col, row = ~grid @ move(*(raster.transform @ (cols.ravel(), rows.ravel())))
        padded = np.full((size[0] + 2, size[1] + 2), 255, np.uint8)
        padded[1:-1, 1:-1] = np.where(truth == 4, 255, truth)
        places = (
            np.clip(np.floor(part).astype(int), -1, most) + 1
            for part, most in ((row, size[0]), (col, size[1]))
        )
        expected = padded[tuple(places)].reshape(raster.size)
        with Labels(str(path), raster, 255) as labels:
            assert np.array_equal(labels.read(raster.whole), expected)
            top, left = raster.height // 2, raster.width // 3
            found = labels.read(Window(top, left, 100, 70))
            assert np.array_equal(found, expected[top : top + 100, left : left + 70])
    # By default GDAL moves pixels as exactly as an eighth of a label pixel.
    other = (by_gdal != expected).ravel()
    to_edge = np.abs([part - np.round(part) for part in (row[other], col[other])]).min(axis=0)
    assert (to_edge < 0.13).all()
    assert other.mean() < 0.03
    assert set(np.unique(expected)) == {0, 1, 2, 3, 255}


@pytest.mark.parametrize(
    ("image", "labels", "said"),
    [
        ("santa_monica_2020_91.tif", "santa_monica_2020_91.json", r"polygons .*Point\); buffer"),
        ("claremont_2020_10.tif", "claremont_2020_10.json", r"polygons .*Point\); buffer"),
        (
            "sample_geotiff_custom_proj.tif",
            "geotiff_custom_proj_labels.geojson",
            r"in degrees .*x -663347.* vectors.crs",
        ),
        ("new_brunswick_2of2.tif", "massachusetts_23429155_15.gpkg", "must overlap their image"),
    ],
)
def test_what_cannot_be_placed_is_refused(real: Path, image: str, labels: str, said: str) -> None:
    with Raster(str(real / image)) as raster, pytest.raises(TilenetError, match=said):
        open_labels(str(real / labels), raster, 255)
