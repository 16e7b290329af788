"""Images with ground control points, RPCs or a CRS alone lie nowhere; their maps keep these."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio.raw
import pytest
import rasterio
import shapely
from affine import Affine
from on_the_ground import MODEL, POINTS, place
from rasterio.control import GroundControlPoint
from rasterio.vrt import WarpedVRT
from rasterio.warp import reproject

from tilenet.data.inspect import header_of
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part, Window
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.writer import MapWriter

Write = Callable[..., str]
Nowhere = Callable[..., str]
SIZE = 47, 59


@pytest.fixture
def nowhere(write_raster: Write) -> Nowhere:
    """Write pixels without a transform."""

    def write(name: str, kind: str, values: np.ndarray | None = None) -> str:
        if values is None:
            values = np.random.default_rng(1).integers(1, 99, SIZE).astype("uint8")
        crs = "EPSG:4326" if kind == "crs" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = write_raster(name, values, crs=crs, transform=None)
            with rasterio.open(path, "r+") as file:
                if kind == "points":
                    file.gcps = POINTS, "EPSG:4326"
                if kind == "rpcs":
                    file.rpcs = MODEL
        return path

    return write


def made(path: str, like: Raster, window: Window | None = None) -> Any:
    """A map's path, whose pixels are the image's."""
    values = like.read(window or like.whole).values
    kind = MapKind(1, "float32", -1.0, ("a",))
    with MapWriter(path, like, kind, window) as writer:
        writer.write(window or like.whole, values.astype("float32"))
        writer.finish()
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [("points", "9 ground control points"), ("rpcs", "RPCs"), ("crs", "a CRS"), ("none", "")],
)
@pytest.mark.filterwarnings("error::rasterio.errors.NotGeoreferencedWarning")
def test_what_lies_nowhere_is_not_said_to_lie_somewhere(
    tmp_path: Path, nowhere: Nowhere, kind: str, said: str
) -> None:
    with Raster(nowhere("a.tif", kind)) as image:
        assert image.crs is None
        assert header_of(image)["crs"] is None
        assert image.georeferencing.missing == (f"{said}, but no transform" if said else "")
        made(str(tmp_path / "map.tif"), image)
    with Raster(str(tmp_path / "map.tif")) as copy:
        assert copy.georeferencing == image.georeferencing


def warp(file: Any, target: np.ndarray, transform: Affine) -> np.ndarray:
    """Its pixels on a grid in degrees, by its GCPs or RPCs."""
    by = {"gcps": file.gcps[0]} if file.gcps[0] else {"rpcs": file.rpcs}
    grid = {"src_crs": "EPSG:4326", "dst_crs": "EPSG:4326", "dst_transform": transform}
    pixels = file.read(1).astype("float64")
    reproject(pixels, target, init_dest_nodata=False, **grid, **by)
    return target


@pytest.mark.parametrize("kind", ["points", "rpcs"])
def test_a_part_of_a_map_is_warped_to_where_the_image_is(
    tmp_path: Path, nowhere: Nowhere, kind: str
) -> None:
    window = Window(5, 8, 31, 37)
    path = nowhere("a.tif", kind)
    with Raster(path) as image:
        part = made(str(tmp_path / "map.tif"), image, window)
    with rasterio.open(path) as whole, rasterio.open(part) as copy:
        assert copy.transform == Affine.identity()
        with WarpedVRT(whole, crs="EPSG:4326") as warped:
            size, transform = warped.shape, warped.transform
        wanted, found = (warp(file, np.full(size, -1.0), transform) for file in (whole, copy))
    inside = found != -1
    assert inside.sum() > 0.3 * (wanted != -1).sum()
    assert (found[inside] == wanted[inside]).mean() > 0.98  # nearest: some lie between two pixels


@pytest.mark.parametrize("resolution", [1, 2])
def test_points_of_a_part_lie_where_they_did(
    tmp_path: Path, nowhere: Nowhere, resolution: int
) -> None:
    window = Window(5, 8, 16, 17)
    with Raster(nowhere("a.tif", "points"), resolution=resolution) as image:
        part = made(str(tmp_path / "map.tif"), image, window)
    with rasterio.open(part) as copy:
        points, crs = copy.gcps
    assert crs == "EPSG:4326"
    assert len(points) == len(POINTS)
    for point in points:
        row, col = (point.row + window.row) * resolution, (point.col + window.col) * resolution
        assert np.allclose((point.x, point.y), place(row, col), atol=1e-12, rtol=0)
        assert point.z == 12.5


def test_rpcs_of_a_part_name_the_same_pixels(tmp_path: Path, nowhere: Nowhere) -> None:
    with Raster(nowhere("a.tif", "rpcs"), resolution=2) as image:
        part = made(str(tmp_path / "map.tif"), image, Window(3, 4, 15, 13))
    with rasterio.open(part) as copy:
        found = copy.rpcs
    # The middle of the model, in corners of pixels: that of the image's, halved and moved.
    assert found.line_off + 0.5 == pytest.approx((MODEL.line_off + 0.5) / 2 - 3)
    assert found.samp_off + 0.5 == pytest.approx((MODEL.samp_off + 0.5) / 2 - 4)
    assert (found.line_scale, found.samp_scale) == (11.5, 15)
    assert found.line_num_coeff == MODEL.line_num_coeff


def test_rpcs_stay_beside_a_transform(tmp_path: Path, write_raster: Write) -> None:
    path = write_raster("a.tif", np.random.default_rng(2).random(SIZE, np.float32))
    with rasterio.open(path, "r+") as file:
        file.rpcs = MODEL
    with Raster(path) as image:
        assert not image.georeferencing.missing
        assert image.crs == "EPSG:32630"
        copy_path = made(str(tmp_path / "map.tif"), image)
    with rasterio.open(copy_path) as copy:
        assert copy.rpcs.line_off == MODEL.line_off
        assert copy.transform == image.transform


@pytest.mark.parametrize("kind", ["points", "rpcs", "crs"])
def test_labels_on_the_same_pixels_are_accepted_others_not(
    nowhere: Nowhere, write_raster: Write, kind: str
) -> None:
    values = np.random.default_rng(4).integers(0, 5, SIZE).astype("uint8")
    with Raster(nowhere("a.tif", kind)) as image:
        for name in ("none", kind):
            with open_labels(nowhere("l.tif", name, values), image, 255) as labels:
                assert np.array_equal(labels.read(image.whole), values)
        remedy = "edit-info --transform" if kind == "crs" else "rio warp"
        for bad in (
            write_raster("bad.tif", values, crs="EPSG:4326"),
            nowhere("bad.tif", "none", values[1:]),
        ):
            with pytest.raises(TilenetError, match=remedy) as raised:
                open_labels(bad, image, 255)
            assert "-a_srs" not in str(raised.value).replace("gdalwarp -t_srs", "")


def test_labels_on_other_points_are_refused(nowhere: Nowhere) -> None:
    path = nowhere("l.tif", "points")
    with rasterio.open(path, "r+") as file:
        moved = [GroundControlPoint(p.row + 3, p.col, p.x, p.y, p.z) for p in POINTS]
        file.gcps = moved, "EPSG:4326"
    with (
        Raster(nowhere("a.tif", "points")) as image,
        pytest.raises(TilenetError, match="must lie on one pixel grid"),
    ):
        open_labels(path, image, 255)
    with pytest.raises(TilenetError, match="same ground control points"):
        Raster(f"{image.path}+{path}")


def test_labels_fit_a_part_of_their_image_and_a_coarser_map(
    tmp_path: Path, nowhere: Nowhere
) -> None:
    values = np.random.default_rng(6).integers(0, 5, SIZE).astype("uint8")
    path, truth = nowhere("a.tif", "points"), nowhere("l.tif", "points", values)
    with (
        Raster(path, part=Part(window=(7, 11, 23, 19))) as image,
        open_labels(truth, image, 255) as labels,
    ):
        assert np.array_equal(labels.read(image.whole), values[7:30, 11:30])
    with Raster(path, resolution=2) as image:
        made(str(tmp_path / "map.tif"), image)
    with Raster(str(tmp_path / "map.tif")) as coarse, open_labels(truth, coarse, 255) as labels:
        assert labels.read(coarse.whole).shape == (24, 30)


@pytest.mark.parametrize("crs", ["EPSG:4326", None])
@pytest.mark.parametrize("kind", ["points", "rpcs", "crs"])
def test_polygons_are_not_burned_on_what_lies_nowhere(
    tmp_path: Path, nowhere: Nowhere, kind: str, crs: str | None
) -> None:
    path = str(tmp_path / "l.gpkg")
    shape = np.array([shapely.to_wkb(shapely.box(9.99, 49.9, 10.1, 50.1))], object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyogrio.raw.write(path, shape, [], [], geometry_type="Polygon", crs=crs, driver="GPKG")
    with (
        Raster(nowhere("a.tif", kind)) as image,
        pytest.raises(TilenetError, match="but no transform\\); ") as raised,
    ):
        open_labels(path, image, 255)
    wanted = "edit-info --transform" if kind == "crs" else "gdalwarp -t_srs"
    assert wanted in str(raised.value)
    assert "gdal_edit -a_srs" not in str(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        '<Metadata domain="RPC"><MDI key="LINE_OFF">far</MDI></Metadata>',
        '<Metadata domain="RPC"><MDI key="LINE_OFF">3.5</MDI></Metadata>',
        '<GCPList Projection="EPSG:4326"><GCP Id="1" Pixel="nan" Line="3" X="1" Y="2"/></GCPList>',
        '<GCPList Projection="rubbish"><GCP Id="1" Pixel="2" Line="3" X="1" Y="2"/></GCPList>',
    ],
)
def test_broken_points_and_rpcs_give_no_traceback(tmp_path: Path, said: str) -> None:
    path = tmp_path / "a.vrt"
    path.write_text(
        f'<VRTDataset rasterXSize="{SIZE[1]}" rasterYSize="{SIZE[0]}">{said}'
        '<VRTRasterBand dataType="Byte" band="1"/></VRTDataset>'
    )
    with Raster(str(path)) as image:
        made(str(tmp_path / "map.tif"), image)
    with Raster(str(tmp_path / "map.tif")) as copy:
        assert copy.crs is None
        assert bool(copy.georeferencing.points) == ("rubbish" in said)


def test_rpcs_without_their_errors_are_kept(tmp_path: Path, nowhere: Nowhere) -> None:
    path = nowhere("a.tif", "none")
    texts = {name: text for name, text in MODEL.to_gdal().items() if not name.startswith("ERR")}
    with rasterio.open(path, "r+") as file:
        file.update_tags(ns="RPC", **texts)
    with Raster(path) as image:
        made(str(tmp_path / "map.tif"), image)
    with rasterio.open(tmp_path / "map.tif") as copy:
        assert copy.rpcs.line_num_coeff == MODEL.line_num_coeff
