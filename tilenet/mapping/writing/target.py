"""The place of a map: checked before any work, locked while it lasts, taken at its end."""

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import rasterio
from rasterio.drivers import raster_driver_extensions

from tilenet.data.rasters.opening import quiet
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError
from tilenet.mapping.writing.class_colours import class_colours
from tilenet.storage.atomic import check_name, put
from tilenet.storage.lock import Lock
from tilenet.storage.map_style import put_style, style_text

# Files next to a GeoTIFF from which GDAL takes names, statistics, masks and overviews.
SIDE_FILES = ".aux.xml", ".msk", ".msk.ovr", ".ovr"


def check_target(
    path: str,
    *,
    overwrite: bool,
    image: str | None = None,
    what: str = "a map",
    ending: str = ".tif",
) -> None:
    """Refuse a map that exists, or a directory that cannot be written, before any work is done.

    Args:
        image: Image that it is computed from.
        what: Kind of the file, for errors.
        ending: Ending of a legal name, for errors.

    Raises:
        TilenetError: The map cannot be written there; the error names the remedy.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if (
        image is not None
        and os.path.exists(path)
        and os.path.realpath(path) in map(os.path.realpath, _files_of(image))
    ):
        raise TilenetError(f"{what} may not replace its image ({path}); give it another name")
    if os.path.isdir(path) or not os.path.basename(path):
        raise TilenetError(
            f"{what} is a file ({path!r} is a directory); give it a name ending in {ending}"
        )
    kind = raster_driver_extensions().get(os.path.splitext(path)[1].lower()[1:], "GTiff")
    if ending == ".tif" and kind != "GTiff":
        raise TilenetError(f"{what} is a GeoTIFF ({path}: {kind}); give it a name ending in .tif")
    if os.path.exists(path) and not overwrite:
        raise TilenetError(
            f"{what} is not overwritten unasked ({path} exists); add --overwrite or another name"
        )
    if not os.path.isdir(folder):
        raise TilenetError(f"{what} needs an existing directory ({folder} is not); make it first")
    check_name(what, path)
    name = os.path.basename(path)
    probe = os.path.join(folder, f".{name}.probe.part")
    try:
        with open(probe, "wb"):
            pass
        os.remove(probe)
    except OSError as error:
        raise TilenetError(
            f"{what} needs a directory that can be written ({folder}: {error.strerror}); choose "
            "another one"
        ) from error


def claim_target(path: str, image: str, stack: ExitStack, *, overwrite: bool) -> Lock:
    """Check the place of a map, and lock it; `stack` releases the lock.

    Raises:
        TilenetError: See `check_target`; or another job writes the map.
    """
    check_target(path, overwrite=overwrite, image=image)
    lock = stack.enter_context(lock_target(path))
    # Once more: another job may have made the map while this one waited for the lock.
    check_target(path, overwrite=overwrite, image=image)
    return lock


def lock_target(path: str) -> Lock:
    """Lock a map, next to which other jobs would write the same files.

    Raises:
        TilenetError: Another job writes it.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return Lock(Path(folder, f".{name}.lock.part"), f"the map {path}")


def _files_of(image: str) -> list[str]:
    """All that a name of an image may stand for, the file in NETCDF:"file":variable too."""
    parts = (image, *stacked_paths(image))
    return [piece for part in parts for piece in (part, *re.split('[":!?]+', part)) if piece]


def put_map(aside: str, path: str, categories: tuple[str, ...], crs: Any = None) -> None:
    """Put a finished map in its place, next to it names of values for GDAL, a style for QGIS.

    What stands next to an older map would be taken for this one's, and is removed.

    Args:
        aside: The map, on the same disk.
        path: Its place.
        categories: Meanings of the values 0, 1, …; empty: they have none.
        crs: rasterio's CRS of the map; it too stands next to the map where GeoTIFF has no keys for
            it, as for rotated poles.
    """
    side_file, names = f"{path}.aux.xml", f"{aside}.names"
    try:
        parts = _crs_part(f"{aside}.crs.tif", crs) if crs else ""
        if categories:
            entries = "".join(f"<Category>{escape(name)}</Category>" for name in categories)
            parts += (
                f'<PAMRasterBand band="1"><CategoryNames>{entries}</CategoryNames></PAMRasterBand>'
            )
        if parts:
            with open(names, "w", encoding="utf-8") as file:
                file.write(f"<PAMDataset>{parts}</PAMDataset>\n")
        for older in filter(os.path.exists, (path + ending for ending in SIDE_FILES)):
            os.remove(older)
        if parts:
            put(names, side_file)
        colours = class_colours(len(categories))
        put_style(path, style_text(categories, colours) if categories else None)
        put(aside, path)  # last: a job that is killed before goes on with it
    finally:
        if os.path.exists(names):
            os.remove(names)


def _crs_part(path: str, crs: Any) -> str:
    """The element for a CRS that GDAL writes next to a GeoTIFF that cannot hold it; "": it can."""
    side_file = f"{path}.aux.xml"
    try:
        profile = {"driver": "GTiff", "height": 1, "width": 1, "count": 1, "dtype": "uint8"}
        with quiet(), rasterio.open(path, "w", crs=crs, **profile):
            pass
        if not os.path.exists(side_file):
            return ""
        element = ElementTree.parse(side_file).find("SRS")
        return "" if element is None else ElementTree.tostring(element, encoding="unicode")
    finally:
        for file in filter(os.path.exists, (path, side_file)):
            os.remove(file)
