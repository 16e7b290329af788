"""Pipes and devices that GDAL would open with a file are refused before it opens anything."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyogrio.raw
import pytest
import shapely

from tilenet.data.image_list import read_image_list
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.mapping.writer import check_target

Write = Callable[..., str]
PIXELS = np.random.default_rng(0).integers(1, 200, (37, 41), dtype=np.uint8)
# All but the last line were waited for; GDAL opens those where drivers or formats are others.
SIDE_FILES = (
    *("x.tif.ovr", "x.tif.OVR", "x.tif.msk", "x.tif.aux.xml", "x.aux", "x.tif.aux", "x.rpc"),
    *("x.IMD", "x.imd", "x.RPB", "x.rpb", "x.XML", "x.xml", "x_RPC.TXT", "x_rpc.txt", "x.pass"),
    *("x_metadata.txt", "x_MTL.txt", "x_metadata.xml", "summary.txt", "METADATA.DIM"),
    *("x.tfw", "x.tifw", "x.wld", "x.hdr", "x.pvl", "x.txt", "RPC_foo.XML", "DIM_foo.XML"),
)
VRT = (
    '<VRTDataset rasterXSize="41" rasterYSize="37"><VRTRasterBand dataType="Byte" band="1">'
    '<SimpleSource><SourceFilename relativeToVRT="1">{}</SourceFilename></SimpleSource>'
    "</VRTRasterBand></VRTDataset>"
)


@pytest.mark.parametrize("name", SIDE_FILES)
@pytest.mark.usefixtures("in_time")
def test_pipes_beside_an_image(tmp_path: Path, write_raster: Write, name: str) -> None:
    path = write_raster("x.tif", PIXELS)
    os.mkfifo(tmp_path / name)
    for use in (Raster, lambda path: open_labels(path, None, 255)):
        with pytest.raises(TilenetError, match=rf"{name} is a pipe, device or socket\); move"):
            use(path)


@pytest.mark.usefixtures("in_time")
def test_links_to_devices_beside_an_image(tmp_path: Path, write_raster: Write) -> None:
    path = write_raster("x.tif", PIXELS)
    (tmp_path / "x.tif.aux.xml").symlink_to("/dev/zero")
    with pytest.raises(TilenetError, match=r"x\.tif\.aux\.xml is a pipe, device"):
        Raster(path)


@pytest.mark.usefixtures("in_time")
def test_what_belongs_to_other_files_does_not_matter(tmp_path: Path, write_raster: Write) -> None:
    path = write_raster("x.tif", PIXELS)
    for name in ("pipe", "x2.tif.ovr", "other.tif.aux.xml", "tif", "notes.txt"):
        os.mkfifo(tmp_path / name)
    os.symlink(tmp_path / "gone", tmp_path / "x.tif.ovr")
    with Raster(path) as raster:
        assert np.array_equal(raster.read(raster.whole).values[0], PIXELS)


@pytest.mark.usefixtures("in_time")
def test_a_pipe_made_later_is_seen(tmp_path: Path, write_raster: Write) -> None:
    path = write_raster("x.tif", PIXELS)
    os.utime(tmp_path, (1e9, 1e9))  # so that what was listed is kept
    for _ in range(2):
        Raster(path).close()
    os.mkfifo(tmp_path / "x.tif.msk")
    with pytest.raises(TilenetError, match=r"x\.tif\.msk is a pipe"):
        Raster(path)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("ESRI Shapefile", "l.dbf"),
        ("ESRI Shapefile", "l.shx"),
        ("ESRI Shapefile", "l.prj"),
        ("ESRI Shapefile", "l.cpg"),
        ("ESRI Shapefile", "l.qix"),
        ("GPKG", "l.gpkg-wal"),
        ("GPKG", "l.gpkg-journal"),
        ("GPKG", "l.gpkg.aux.xml"),
    ],
)
@pytest.mark.usefixtures("in_time")
def test_pipes_beside_polygons(tmp_path: Path, write_raster: Write, driver: str, name: str) -> None:
    path = tmp_path / ("l.shp" if driver == "ESRI Shapefile" else "l.gpkg")
    shape = np.array([shapely.to_wkb(shapely.box(5e5, 4e6 - 30, 5e5 + 40, 4e6))], object)
    kinds = [np.array(["a.tif"], object), np.array(["b.tif"], object)]
    pyogrio.raw.write(
        str(path),
        shape,
        kinds,
        ["image", "label"],
        geometry_type="Polygon",
        crs="EPSG:32630",
        driver=driver,
    )
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with (
        Raster(write_raster("x.tif", PIXELS)) as image,
        pytest.raises(TilenetError, match=f"{name} is a pipe"),
    ):
        open_labels(str(path), image, 255)
    with pytest.raises(TilenetError, match=f"{name} is a pipe"):
        read_image_list(str(path))


@pytest.fixture
def nest(tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pipes, and virtual rasters that lead to them."""
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.tif", "side.tif.ovr"):
        os.mkfifo(name)
    for name in ("x.tif", "side.tif", "o.tif", "q.tif"):
        write_raster(name, PIXELS)
    sources = {"a.vrt": "pipe.tif", "b.vrt": "a.vrt", "c": "b.vrt", "self.vrt": "self.vrt"}
    sources |= {"side.vrt": "side.tif", "gz.vrt": "/vsigzip/pipe", "good.vrt": "x.tif"}
    sources |= {"o.tif.ovr": "a.vrt", "stdin.vrt": "/vsistdin/"}
    for name, source in sources.items():
        (tmp_path / name).write_text(VRT.format(source))
    (tmp_path / "q.tif.aux.xml").write_text(
        '<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">pipe.tif</MDI>'
        "</Metadata></PAMDataset>"
    )
    (tmp_path / "z.zarr").mkdir()
    os.mkfifo("z.zarr/.zarray")
    with zipfile.ZipFile("k.zip", "w") as archive:
        archive.write("x.tif")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.vrt", "pipe.tif"),
        ("b.vrt", "pipe.tif"),
        ("c", "pipe.tif"),
        ("o.tif", "pipe.tif"),
        ("q.tif", "pipe.tif"),
        ("gz.vrt", "pipe"),
        ("side.vrt", "side.tif.ovr"),
        ("/vsigzip/pipe", "pipe"),
        ("/vsigzip/{}/pipe", "pipe"),
        ("/vsisubfile/0_100,pipe", "pipe"),
        ("/vsisubfile/0_100,{}/pipe", "pipe"),
        ("/vsizip/pipe.tif/x.tif", "pipe.tif"),
        ("/vsizip/vsigzip/pipe.tif/x.tif", "pipe.tif"),
        ("zip://pipe.tif!x.tif", "pipe.tif"),
        ("vrt://pipe.tif?bands=1", "pipe.tif"),
        ("vrt://{}/b.vrt", "pipe.tif"),
        ("NETCDF:pipe:x", "pipe"),
        ("GTIFF_DIR:1:pipe.tif", "pipe.tif"),
        ("DERIVED_SUBDATASET:AMPLITUDE:b.vrt", "pipe.tif"),
        ("x.tif+pipe.tif", "pipe.tif"),
        ("z.zarr", ".zarray"),
        ('ZARR:"z.zarr"', ".zarray"),
        ("stdin.vrt", "standard input"),
        ("/vsistdin/", "standard input"),
        ("/vsigzip//vsistdin/", "standard input"),
    ],
)
@pytest.mark.usefixtures("in_time")
def test_pipes_behind_other_names(nest: Path, name: str, found: str) -> None:
    name = name.format(nest)
    for use in (Raster, lambda path: open_labels(path, None, 255)):
        if "+" in name and use is not Raster:
            continue
        with pytest.raises(TilenetError, match=rf"{found} is a pipe, device or socket\); move"):
            use(name)


@pytest.mark.parametrize(
    "name",
    [
        "good.vrt",
        "vrt://x.tif?bands=1",
        "zip://./k.zip!x.tif",
        "/vsizip/k.zip/x.tif",
        "/vsizip/{{{}/k.zip}}/x.tif",
        "/vsisubfile/0_99999,x.tif",
        "file://{}/x.tif",
        "GTIFF_DIR:1:x.tif",
        "GTIFF_DIR:1:x.tif+vrt://x.tif?bands=1",
    ],
)
@pytest.mark.usefixtures("nest", "in_time")
def test_other_names_of_files_are_read(tmp_path: Path, name: str) -> None:
    with Raster(name.format(tmp_path)) as raster:
        assert np.array_equal(raster.read(raster.whole).values[0][0], PIXELS[0])


@pytest.mark.usefixtures("nest", "in_time")
def test_a_virtual_raster_of_itself_ends() -> None:
    Raster("self.vrt").close()


@pytest.mark.parametrize("name", [".m.tif.probe.part", ".m.tif.cog.part", ".m.tif.raw.part.ovr"])
@pytest.mark.usefixtures("in_time")
def test_pipes_where_a_map_is_made(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(TilenetError, match=f"{name} is a pipe"):
        check_target(str(tmp_path / "m.tif"), overwrite=False)


@pytest.mark.usefixtures("in_time")
def test_a_folder_is_listed_once(
    tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_raster(f"x{number}.tif", PIXELS) for number in range(30)]
    os.utime(tmp_path, (1e9, 1e9))
    listed: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    for path in paths:
        Raster(path).close()
    assert listed == [str(tmp_path)]
