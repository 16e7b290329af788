"""Files over a network: how they are named, how they are asked for, what is said where they end."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import rasterio
from range_server import served

from tilenet.data.rasters import rereading
from tilenet.data.rasters.fingerprint import fingerprint
from tilenet.data.rasters.location import file_name, is_remote, real_path
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

PIXELS = np.random.default_rng(4).integers(0, 60_000, (2, 512, 512)).astype(np.uint16)


@pytest.fixture
def tiled(tmp_path: Path) -> Path:
    size = {"height": 512, "width": 512, "count": 2, "dtype": "uint16"}
    blocks = {"tiled": True, "blockxsize": 64, "blockysize": 64}
    with rasterio.open(
        tmp_path / "t.tif",
        "w",
        driver="GTiff",
        crs="EPSG:32630",
        transform=rasterio.Affine(2, 0, 5e5, 0, -2, 4e6),
        **size,
        **blocks,
    ) as file:
        file.write(PIXELS)
    return tmp_path


def test_addresses_are_told_from_paths() -> None:
    remote = ["https://h/a.tif", "s3://b/a.tif", "gs://b/a", "az://c/a", "/vsicurl/http://h/a"]
    assert all(map(is_remote, [*remote, "a.tif+https://h/b.tif", 'ZARR:"/vsis3/b/a.zarr":/red']))
    assert not any(map(is_remote, ["a.tif", "/data/https.tif", "/vsizip/a.zip/b.tif", "a?b.tif"]))
    assert file_name("https://h/f/a.tif?sig=b/c") == "a.tif"
    assert file_name("f/a?b.tif") == "a?b.tif"
    assert real_path("https://h/a.tif") == "https://h/a.tif"
    assert real_path("a.tif") == os.path.realpath("a.tif")


def test_ranges_are_asked_for_at_once_and_once(tiled: Path) -> None:
    with served(tiled, 1, "slow") as server, Raster(f"{server.url}/t.tif") as raster:
        assert server.counts()["missing"] == 0
        window = Window(70, 70, 300, 130)  # 5 × 3 blocks of each band, apart in the file
        assert np.array_equal(raster.read(window).values, PIXELS[:, 70:370, 70:200])
        once = server.counts()
        assert once["most"] > 1
        raster.read(window)
        assert server.counts()["gets"] == once["gets"]


def test_what_a_file_has_next_to_it_is_asked_for_where_the_environment_says_so(
    tiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDAL_DISABLE_READDIR_ON_OPEN", "TRUE")
    with served(tiled) as server, Raster(f"{server.url}/t.tif"):
        assert server.counts()["missing"] > 10


def test_a_connection_that_breaks_each_time_is_one_sentence(
    tiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "PAUSES_S", (0.01,) * 3)
    with served(tiled, 2, "broken") as server, Raster(f"{server.url}/t.tif") as raster:
        said = r"readable everywhere \(http://.*rows 0 to 511.*; go on when its server answers"
        with pytest.raises(TilenetError, match=said):
            raster.read(Window(0, 0, 512, 512))
        assert server.counts()["failed"] > 3


def write_zarr(folder: Path) -> None:
    """Two arrays with a CRS as climate and forecast (CF) files have it, of one chunk each."""
    wkt = rasterio.crs.CRS.from_epsg(32630).to_wkt()
    arrays = {
        "y": (4e6 - 1 - 2 * np.arange(512.0), ["y"], {"standard_name": "projection_y_coordinate"}),
        "x": (5e5 + 1 + 2 * np.arange(512.0), ["x"], {"standard_name": "projection_x_coordinate"}),
        "spatial_ref": (np.int64(0), [], {"crs_wkt": wkt}),
        "red": (PIXELS[0], ["y", "x"], {"grid_mapping": "spatial_ref"}),
        "nir": (PIXELS[1], ["y", "x"], {"grid_mapping": "spatial_ref"}),
    }
    for name, (values, dimensions, more) in arrays.items():
        (folder / name).mkdir(parents=True)
        array = np.asarray(values)
        kind = {"zarr_format": 2, "shape": array.shape, "chunks": array.shape, "order": "C"}
        kind |= {"dtype": array.dtype.str, "compressor": None, "filters": None, "fill_value": None}
        (folder / name / ".zarray").write_text(json.dumps(kind))
        about = {"_ARRAY_DIMENSIONS": dimensions, **more}
        (folder / name / ".zattrs").write_text(json.dumps(about))
        (folder / name / ".".join("0" * max(array.ndim, 1))).write_bytes(array.tobytes())
    (folder / ".zgroup").write_text('{"zarr_format": 2}')


def test_arrays_of_zarr_are_stacked_with_their_crs(tmp_path: Path) -> None:
    write_zarr(tmp_path / "z.zarr")
    with served(tmp_path) as server:
        for where in (f"ZARR:{tmp_path}/z.zarr", f'ZARR:"/vsicurl/{server.url}/z.zarr"'):
            with Raster(f"{where}:/red+{where}:/nir", bands=["nir", "red"]) as raster:
                assert raster.crs.to_epsg() == 32630
                assert tuple(raster.transform)[:6] == (2, 0, 5e5, 0, -2, 4e6)
                assert np.array_equal(raster.read(Window(0, 0, 512, 512)).values, PIXELS[::-1])
                # A chunk may be written again, and the files that GDAL tells stay as they are.
                assert fingerprint(raster.files) is None
    with pytest.raises(TilenetError, match="a file of several rasters is no image itself"):
        Raster(f"{tmp_path}/z.zarr")


def test_a_plus_sign_in_an_address_is_read_in_a_stack_too(tiled: Path) -> None:
    (tiled / "t.tif").rename(tiled / "t+1.tif")
    local = str(tiled / "t+1.tif")
    with served(tiled) as server:
        stack = Raster(f"{server.url}/t+1.tif+{local}+{server.url}/t+1.tif")
        pixels = stack.read(Window(0, 0, 64, 64))
        stack.close()
    assert np.array_equal(pixels.values, np.concatenate([PIXELS[:, :64, :64]] * 3))
