"""Open one raster, or say in a sentence why it cannot be read: missing, a container, no driver.

What a file is by its first bytes, and which of GDAL's drivers would read it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import rasterio
from rasterio._err import CPLE_BaseError
from rasterio.enums import Interleaving
from rasterio.env import Env
from rasterio.errors import NotGeoreferencedWarning, RasterioError

from tilenet.data.rasters.remedies import CHECK, SET_TRANSFORM, SOME_BANDS, TILED
from tilenet.data.rasters.special_files import local_paths, refuse_special_files
from tilenet.errors import TilenetError
from tilenet.storage.atomic import check_name

__all__ = [
    "GDAL_ERRORS",
    "Format",
    "cannot_open",
    "check_header",
    "dtypes_of",
    "format_of",
    "opened",
    "quiet",
    "reason",
    "why_no_raster",
]


class Format(NamedTuple):
    """A format of rasters.

    Attributes:
        name: As people call it.
        drivers: GDAL's, of which one is enough.
    """

    name: str
    drivers: tuple[str, ...]


HDF4 = Format("HDF4", ("HDF4",))
HDF5 = Format("HDF5 or netCDF-4", ("HDF5", "netCDF", "KEA", "BAG"))
NETCDF = Format("netCDF", ("netCDF",))
JPEG_2000 = Format("JPEG 2000", ("JP2OpenJPEG", "JP2ECW", "JP2KAK", "JP2MrSID", "JP2Lura"))
JPEG_XL = Format("JPEG XL", ("JPEGXL",))

FIRST_BYTES = 16
# Where they begin, the bytes, and what begins so.
SIGNATURES = (
    (0, b"\x0e\x03\x13\x01", HDF4),
    (0, b"\x89HDF\r\n\x1a\n", HDF5),
    (0, b"CDF\x01", NETCDF),
    (0, b"CDF\x02", NETCDF),
    (0, b"CDF\x05", NETCDF),
    (0, b"\x00\x00\x00\x0cjP  ", JPEG_2000),
    (0, b"\xff\x4f\xff\x51", JPEG_2000),
    (0, b"\x00\x00\x00\x0cJXL ", JPEG_XL),
    (0, b"\xff\x0a", JPEG_XL),
    (0, b"GRIB", Format("GRIB", ("GRIB",))),
    (0, b"msid", Format("MrSID", ("MrSID",))),
    (4, b"ftypavi", Format("AVIF", ("AVIF", "HEIF"))),
    (4, b"ftyphei", Format("HEIF", ("HEIF",))),
    (4, b"ftypmif1", Format("HEIF", ("HEIF",))),
    (0, b"SIMPLE  =", Format("FITS", ("FITS",))),
    (0, b"\x76\x2f\x31\x01", Format("OpenEXR", ("EXR",))),
    (0, b"PAR1", Format("Parquet", ("Parquet",))),
    (0, b"DDS ", Format("DDS", ("DDS",))),
    (0, b"%PDF", Format("PDF", ("PDF",))),
    (8, b"WEBP", Format("WebP", ("WEBP",))),
    (0, b"II*\x00", Format("TIFF", ("GTiff",))),
    (0, b"MM\x00*", Format("TIFF", ("GTiff",))),
    (0, b"\x89PNG", Format("PNG", ("PNG",))),
    (0, b"\xff\xd8\xff", Format("JPEG", ("JPEG",))),
)
# Of names such as HDF4_SDS:UNKNOWN:file:0.
PREFIXES = {
    "HDF4_SDS": HDF4,
    "HDF4_EOS": HDF4,
    "HDF5": HDF5,
    "NETCDF": NETCDF,
    "FITS": Format("FITS", ("FITS",)),
    "TILEDB": Format("TileDB", ("TileDB",)),
    "ZARR": Format("Zarr", ("Zarr",)),
}


def format_of(name: str, file: str | None) -> Format | None:
    """What a name for GDAL says that a file is, or else its first bytes; None: unknown.

    Args:
        name: As it is handed to GDAL.
        file: The file that it leads to, which is no pipe; None: it is elsewhere.
    """
    prefix = PREFIXES.get(name.partition(":")[0].upper())
    if prefix is not None or file is None:
        return prefix
    try:
        with open(file, "rb") as opened:
            head = opened.read(FIRST_BYTES)
    except OSError:
        return None
    starts = (f for at, found, f in SIGNATURES if head[at : at + len(found)] == found)
    # ECW's has no more than a byte for itself, and its ending.
    ecw = Format("ECW", ("ECW",)) if file.lower().endswith(".ecw") and head[:1] == b"e" else None
    return next(starts, ecw)


# What rasterio raises for GDAL's errors; some reach the caller as the private kind.
# Where a broken file's words are no UTF-8, rasterio cannot say them.
GDAL_ERRORS = (RasterioError, OSError, CPLE_BaseError, UnicodeError)

MOST_BLOCK_BYTES = 1 << 30
MOST_BANDS = 4096
MOST_NAMED = 8  # subdatasets
MOST_LETTERS = 120  # of the name of one


def opened(path: str) -> Any:
    """rasterio's open file.

    Raises:
        TilenetError: GDAL cannot open it, or would wait for what it opens with it.
    """
    check_name("a raster", path)
    refuse_special_files(path)
    try:
        with quiet():
            return rasterio.open(path)
    except GDAL_ERRORS as error:
        raise cannot_open(path, error) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without rasterio's warning of files that lie nowhere; what matters is said in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        yield


def why_no_raster(path: str) -> str | None:
    """GDAL's reason why it cannot open a raster; None: it can.

    Raises:
        TilenetError: It would wait for what it opens with it.
    """
    try:
        opened(path).close()
    except TilenetError as error:
        if isinstance(error.__cause__, GDAL_ERRORS):
            return reason(error.__cause__)
        raise
    return None


def reason(error: BaseException) -> str:
    """GDAL's own words: rasterio keeps them in the cause."""
    return " ".join(str(error.__cause__ or error).split())


def cannot_open(path: str, error: Exception) -> TilenetError:
    """The sentence for a file that GDAL does not open."""
    files = [file for file in local_paths(path) if os.path.isfile(file)]
    kind = format_of(path, files[0] if files else None)
    with Env() as env:
        lacking = kind is not None and not set(kind.drivers) & set(env.drivers())
    if kind is not None and lacking:
        return TilenetError(
            f"a raster must be in a format that GDAL has a driver for here ({path}: {kind.name}, "
            f"GDAL {rasterio.__gdal_version__} of rasterio has no driver "
            f"{' or '.join(kind.drivers)}); convert it to GeoTIFF with gdal_translate of a GDAL "
            "that has it, such as conda-forge's"
        )
    why = reason(error).removeprefix(f"{path}: ")
    remedy = f"copy the file again, or check it with {CHECK}" if files else "check the path"
    return TilenetError(f"a raster must be a file that GDAL can open ({path}: {why}); {remedy}")


def check_header(dataset: Any) -> None:
    """Refuse rasters that cannot be read window by window, or that lie nowhere.

    Raises:
        TilenetError: It holds other rasters and no pixels, a block takes more memory than a rank
            may give to it, a coordinate is no number, or there are too many bands.
    """
    if not dataset.count:
        raise _no_pixels(dataset)
    if dataset.count > MOST_BANDS:
        raise TilenetError(
            f"a raster has at most {MOST_BANDS} bands ({dataset.name}: {dataset.count}); write "
            f"those that are needed to a file of their own with {SOME_BANDS}"
        )
    numbers = tuple(dataset.transform)[:6]
    if not all(map(isfinite, numbers)) or not dataset.transform.determinant:
        raise TilenetError(
            f"a raster's transform must give pixels a place and a size ({dataset.name}: "
            f"{numbers}); correct it with {SET_TRANSFORM}"
        )
    rows, cols = dataset.block_shapes[0]
    joined = dataset.count if dataset.interleaving == Interleaving.pixel else 1
    num_bytes = rows * cols * joined * _item_bytes(dtypes_of(dataset)[0])
    if num_bytes > MOST_BLOCK_BYTES:
        raise TilenetError(
            f"a raster is read block by block, each of at most {MOST_BLOCK_BYTES >> 20} MiB "
            f"({dataset.name}: blocks of {rows} × {cols} px, {num_bytes >> 20} MiB); cut it into "
            f"tiles with {TILED}"
        )


def dtypes_of(dataset: Any) -> tuple[str, ...]:
    """What rasterio calls the dtypes of the bands.

    Raises:
        TilenetError: It has no name for one, as for half floats of newer GDALs.
    """
    try:
        names = tuple(str(name) for name in dataset.dtypes)
        for name in names:
            _item_bytes(name)
    except (KeyError, TypeError) as error:
        raise TilenetError(
            f"pixels must be of a type that numpy and rasterio know ({dataset.name}: {error}); "
            "write them as Float32 to a new file with gdal_translate -ot"
        ) from error
    return names


def _item_bytes(dtype: str) -> int:
    # GDAL's complex numbers of 16 bits have no name in numpy.
    return 16 if "complex" in dtype else np.dtype(dtype).itemsize


def _no_pixels(dataset: Any) -> TilenetError:
    """The sentence for a netCDF or HDF file of several rasters, or of none."""
    tags = dataset.tags(ns="SUBDATASETS")
    names = [tags[key] for key in sorted(tags, key=_number) if key.endswith("_NAME")]
    # Quotes are needed around names of files with colons only, and shells take them away.
    bare = [name.replace('"', "") if name.count(":") == 2 else name for name in names]
    shown = [n if len(n) <= MOST_LETTERS else f"{n[:MOST_LETTERS]}…" for n in bare[:MOST_NAMED]]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    if not shown:
        return TilenetError(
            f"a raster must have pixels ({dataset.name}, {dataset.driver}: none); name another file"
        )
    return TilenetError(
        f"a file of several rasters is no image itself ({dataset.name}, {dataset.driver}, holds "
        f"{', '.join(shown)}{more}); name one of these, or some of one grid joined by plus signs"
    )


def _number(key: str) -> int:
    """The number in SUBDATASET_12_NAME."""
    return int("".join(filter(str.isdigit, key)) or 0)
