"""Open one raster, or say in a sentence why it cannot be read: missing, broken, a container."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from typing import Any

import numpy as np
import rasterio
from rasterio._err import CPLE_BaseError
from rasterio.enums import Interleaving
from rasterio.errors import NotGeoreferencedWarning, RasterioError

from tilenet.data.rasters.location import is_remote, looked_for, remedy_when_opened
from tilenet.data.rasters.remedies import SET_TRANSFORM, TILED
from tilenet.errors import TilenetError, and_more
from tilenet.storage.atomic import check_name

# What rasterio raises for GDAL's errors; some reach the caller as the private kind.
# Where a broken file's words are no UTF-8, rasterio cannot say them.
GDAL_ERRORS = (RasterioError, OSError, CPLE_BaseError, UnicodeError)

MOST_BLOCK_BYTES = 1 << 30
MOST_NAMED = 8  # subdatasets
MOST_LETTERS = 120  # of the name of one


def opened(path: str, *, alone: bool = False, placed: bool = True) -> Any:
    """rasterio's open file.

    Args:
        alone: See `looked_for`.
        placed: See `looked_for`.

    Raises:
        TilenetError: GDAL cannot open it.
    """
    check_name("a raster", path)
    try:
        options = looked_for(path, alone=alone, placed=placed)
        with quiet(), rasterio.Env.from_defaults(**options):
            # Credentials, which rasterio.open looks for, take as long as a small header.
            return rasterio.open(path) if is_remote(path) else rasterio.DatasetReader(path)
    except GDAL_ERRORS as error:
        raise cannot_open(path, error) from error


def files_of(datasets: Iterable[Any]) -> list[str]:
    """The files that open ones are read from, and those that VRTs read through other VRTs.

    GDAL does not list these.
    """
    files = [str(path) for dataset in datasets for path in dataset.files]
    for path in files:  # which grows
        if path.lower().endswith(".vrt"):
            with suppress(TilenetError), opened(path) as inner:
                files += [file for file in map(str, inner.files) if file not in files]
    return files


@contextmanager
def quiet() -> Iterator[None]:
    """Hide rasterio's warning of files without georeferencing, which errors of ours name."""
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
    why = reason(error).removeprefix(f"{path}: ")
    return TilenetError(
        f"a raster must be a file that GDAL can open ({path}: {why}); {remedy_when_opened(path)}"
    )


def check_header(dataset: Any) -> None:
    """Refuse rasters that cannot be read window by window, or that lie nowhere.

    Raises:
        TilenetError: It holds other rasters and no pixels, a block takes more memory than a rank
            may give to it, or a coordinate is no number.
    """
    if not dataset.count:
        raise _no_pixels(dataset)
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
    """rasterio's names of the dtypes of the bands.

    Raises:
        TilenetError: rasterio lacks a name for one, as for half floats of newer GDALs.
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
    short = [name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}…" for name in bare]
    if not short:
        return TilenetError(
            f"a raster must have pixels ({dataset.name}, {dataset.driver}: none); name another file"
        )
    return TilenetError(
        f"a file of several rasters is no image itself ({dataset.name}, {dataset.driver}, holds "
        f"{and_more(short, MOST_NAMED)}); name one of these, or some of one grid joined by plus "
        "signs"
    )


def _number(key: str) -> int:
    """The number in SUBDATASET_12_NAME."""
    return int("".join(filter(str.isdigit, key)) or 0)
