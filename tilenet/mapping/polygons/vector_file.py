"""Polygons as a GeoPackage, GeoJSON or FlatGeobuf."""

import os
import warnings
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import shapely
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.storage.atomic import put

__all__ = ["check_ending", "write_polygons"]

DRIVERS = {".gpkg": "GPKG", ".geojson": "GeoJSON", ".json": "GeoJSON", ".fgb": "FlatGeobuf"}
END = b"]\n}\n"


def check_ending(path: str) -> None:
    """Refuse a file with an ending that stands for no format.

    Raises:
        TilenetError: It names the endings that do.
    """
    if Path(path).suffix.lower() not in DRIVERS:
        raise TilenetError(
            f"the ending of a file of polygons says its format ({path}); name it "
            f"{', '.join(DRIVERS)}"
        )


def write_polygons(
    path: str, shapes: NDArray[Any], columns: dict[str, NDArray[Any]], crs: str | None
) -> None:
    """Write a layer that has the file's name; the file is whole or not there.

    Args:
        shapes: (N,), polygons.
        columns: Names and values (N,) of their attributes.
        crs: The CRS as WKT; None: not known.

    Raises:
        TilenetError: It cannot be written.
    """
    place = Path(os.path.abspath(path))
    part = place.with_name(f".{place.stem}.part{place.suffix}")
    part.unlink(missing_ok=True)  # of a job that was killed: GDAL would add to it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'crs' was not provided")
            pyogrio.raw.write(
                part,
                shapely.to_wkb(shapes),
                list(columns.values()),
                np.array(list(columns), object),
                layer=place.stem,
                driver=DRIVERS[place.suffix.lower()],
                geometry_type="Polygon",
                crs=crs,
            )
        if DRIVERS[place.suffix.lower()] == "GeoJSON":
            _check_end(part)
        put(part, place)
    except (RuntimeError, OSError) as error:  # pyogrio's errors are RuntimeErrors
        raise TilenetError(
            f"polygons must be written to a place that has room ({path}: {error}); name another one"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _check_end(part: Path) -> None:
    """GDAL does not notice that the last bytes of a GeoJSON file found no room."""
    with part.open("rb") as file:
        file.seek(-len(END), os.SEEK_END)
        if file.read() != END:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
