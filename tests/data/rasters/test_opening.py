"""Files that hold rasters but are no image, unknown formats, dtypes without a name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.shutil

from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.opening import dtypes_of
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.writing.target import check_target

Write = Callable[..., str]


def pixels(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 99, (count, 23, 31)).astype("uint8")


@pytest.fixture
def container(tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch) -> str:
    """A netCDF file with a variable for each of 11 bands."""
    monkeypatch.chdir(tmp_path)
    grid = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)  # netCDF has no sheared ones
    plain = write_raster("bands.tif", pixels(11), transform=grid)
    rasterio.shutil.copy(plain, "c.nc", driver="netCDF")
    return "c.nc"


def test_a_container_is_refused_with_what_it_holds(container: str) -> None:
    said = (
        r"a file of several rasters is no image itself \(c\.nc, netCDF, holds NETCDF:c\.nc:Band1, "
        r".*NETCDF:c\.nc:Band8 and 3 more\); name one of these"
    )
    with pytest.raises(TilenetError, match=said):
        Raster(container)
    with Raster("bands.tif") as image, pytest.raises(TilenetError, match=said):
        open_labels(container, image, 255)


@pytest.mark.usefixtures("container")
def test_what_a_container_holds_is_read_and_stacked() -> None:
    for name, bands in (
        ("NETCDF:c.nc:Band3", (2,)),
        ("NETCDF:c.nc:Band11+NETCDF:c.nc:Band2", (10, 1)),
    ):
        with Raster(name) as raster:
            assert np.array_equal(raster.read(raster.whole).values, pixels(11)[list(bands)])
            assert raster.crs == "EPSG:32630"


def test_what_gdal_does_not_know_is_refused_with_its_words(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.hdf", b"\x0e\x03\x13\x01" + bytes(range(60)), r"rio env --formats lacks its format"),
        ("b.tif", b"", r"b\.tif.*not recognized"),
        ("c.tif", b"these are no pixels", r"c\.tif.*not recognized"),
        ("d.tif", None, r"No such file or directory\); check the path"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TilenetError, match=said) as raised:
            Raster(str(tmp_path / name))
        assert "\n" not in str(raised.value)
        # What is there has the right path
        assert str(raised.value).endswith("check the path") == (content is None)


def test_a_map_may_not_replace_the_container_of_its_image(container: str) -> None:
    with pytest.raises(TilenetError, match="a map may not replace its image"):
        check_target(container, overwrite=True, image=f"NETCDF:{container}:Band3")


@pytest.mark.parametrize("dtype", ["complex_int16", "complex64", "complex128"])
@pytest.mark.parametrize("nodata", [None, 0])
def test_complex_pixels_are_refused_and_their_amplitude_read(
    tmp_path: Path, write_raster: Write, dtype: str, nodata: int | None
) -> None:
    real, imaginary = pixels(2).astype("float64")
    path = write_raster("slc.tif", pixels(1), dtype=dtype, nodata=nodata)
    with rasterio.open(path, "r+") as file:
        file.write((real + 1j * imaginary).astype("complex128")[None])
    with pytest.raises(TilenetError, match=rf"band 1 of .*slc\.tif is {dtype}\); name its ampl"):
        Raster(path)
    with Raster(f"DERIVED_SUBDATASET:AMPLITUDE:{path}") as raster:
        found = raster.read(raster.whole).values[0]
    assert np.allclose(found, np.hypot(real, imaginary), rtol=1e-6)


def test_complex_bands_beside_real_ones_may_be_left_out(write_raster: Write) -> None:
    one = write_raster("one.tif", pixels(1), nodata=5)
    two = write_raster("two.tif", pixels(1), dtype="complex_int16", nodata=0)
    with Raster(f"{one}+{two}", (1,)) as raster:
        assert np.array_equal(raster.read(raster.whole).values, pixels(1))


def test_dtypes_without_a_name_are_refused_in_one_sentence() -> None:
    class Half:
        """What rasterio makes of half floats, that only newer GDALs than here have."""

        name = "half.tif"

        @property
        def dtypes(self) -> tuple[str, ...]:
            raise KeyError(15)

    class Odd(Half):
        dtypes = ("complex_half",)

    class Unknown(Half):
        dtypes = ("bfloat17",)

    assert dtypes_of(Odd()) == ("complex_half",)
    for dataset in (Half(), Unknown()):
        with pytest.raises(TilenetError, match=r"numpy and rasterio know \(half\.tif"):
            dtypes_of(dataset)


def sparse(path: Path, side: int, **profile: Any) -> str:
    """A raster of zeros that takes no room on the disk."""
    grid = {
        "crs": "EPSG:32630",
        "transform": rasterio.Affine(1, 0, 5e5, 0, -1, 4e6),
        "SPARSE_OK": True,
    }
    size = {"height": side, "width": side, "count": 1, "dtype": "uint8", "compress": "deflate"}
    with rasterio.open(path, "w", driver="GTiff", **(grid | size | profile)):
        return str(path)


def test_blocks_larger_than_memory_are_refused(tmp_path: Path) -> None:
    block = {"tiled": True, "blockxsize": 33_024, "blockysize": 33_024}
    path = sparse(tmp_path / "a.tif", 33_000, **block)
    with pytest.raises(TilenetError, match=r"blocks of 33024 × 33024 px, 1040 MiB\).*TILED=YES"):
        Raster(path)
    small = sparse(tmp_path / "b.tif", 100_000, tiled=True)
    with Raster(small) as image:
        assert image.read(Window(99_000, 99_000, 9, 9)).values.shape == (1, 9, 9)


@pytest.mark.parametrize("a", [float("nan"), float("inf")])
def test_a_transform_without_numbers_is_refused(write_raster: Write, a: float) -> None:
    with pytest.raises(TilenetError, match="transform must give pixels a place"):
        Raster(write_raster("a.tif", pixels(1), transform=rasterio.Affine(a, 0, 5e5, 0, -1, 4e6)))
