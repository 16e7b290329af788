"""Polygons as a GeoPackage, GeoJSON or FlatGeobuf."""

import os
import re
import warnings
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyogrio
import shapely
from numpy.typing import NDArray

from tilenet.data.rasters.bounds import crs_name
from tilenet.errors import TilenetError
from tilenet.storage.atomic import put

if TYPE_CHECKING:
    from rasterio.crs import CRS

DRIVERS = {".gpkg": "GPKG", ".geojson": "GeoJSON", ".json": "GeoJSON", ".fgb": "FlatGeobuf"}
# Names that a GeoPackage keeps for itself, or does not take.
RESERVED = re.compile(r"gpkg|sqlite_|\.", re.IGNORECASE)
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


def crs_text(path: str, crs: "CRS | None") -> str | None:
    """The map's CRS as the file is to hold it; None: it has none.

    Raises:
        TilenetError: The file is GeoJSON, which holds a CRS by its code alone, and this has none.
    """
    if crs is None or _driver(Path(path)) != "GeoJSON":
        return crs and str(crs.to_wkt())
    if (code := crs.to_authority()) is None:
        raise TilenetError(
            f"GeoJSON names a CRS by its code ({path}: {crs_name(crs)}), or else it would be taken "
            "for degrees; name the file .gpkg or .fgb"
        )
    return ":".join(code)


def _driver(place: Path) -> str:
    return DRIVERS[place.suffix.lower()]


def write_polygons(
    path: str, shapes: NDArray[Any], columns: dict[str, NDArray[Any]], crs: str | None
) -> None:
    """Write a layer that has the file's name, if it may; the file is whole or not there.

    Args:
        shapes: (N,), polygons.
        columns: Names and values (N,) of their attributes.
        crs: The CRS, see `crs_text`.

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
                layer="polygons" if RESERVED.match(place.stem) else place.stem,
                driver=_driver(place),
                geometry_type="Polygon",
                crs=crs,
            )
        if _driver(place) == "GeoJSON":
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
