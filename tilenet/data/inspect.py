"""What an image and its labels are, to be known before anything is trained on them.

What a raster's header says: grid, bands, what counts as data, and how its blocks lie.
"""

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from math import acos, atan2, degrees, hypot
from shlex import quote
from typing import TYPE_CHECKING, Any

from rasterio.enums import ColorInterp, MaskFlags
from rasterio.errors import CRSError

from tilenet.data.labels.facts import label_facts
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.extent import crs_name
from tilenet.data.rasters.metadata import (
    Palette,
    Places,
    array_of,
    others_of,
    palette_of,
    places_of,
)
from tilenet.data.rasters.raster import GDAL_ERRORS, Nodata, Raster
from tilenet.data.rasters.remedies import tiled_copy
from tilenet.data.rasters.stack import BandNames, stacked_paths
from tilenet.data.schedule import balanced_weights
from tilenet.data.survey import share_collars, survey
from tilenet.data.survey_record import PERCENTS, Survey
from tilenet.errors import TilenetError
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Asked", "BandInFile", "Header", "describe", "header_of"]

WINDOW_PX = 1024  # side of a window that is read
MOST_TIMES = 4.0  # pixels that are decoded for one that is wanted
MOST_TAGS = 10  # nodata tags that are said, where bands have different ones
SMALL_BYTES = 64 << 20  # GDAL's cache holds what is no larger, see `raster`


@dataclass(frozen=True)
class BandInFile:
    """One band.

    Attributes:
        number: From 1, through all stacked files.
        name: What the file calls it, or nothing.
        read: Whether it is among those that are read; alpha is not, unless asked for.
        scale, offset: What makes a physical quantity of a stored number; pixels are read as stored.
        unit: Unit of that quantity; None: the file names none.
        palette: Colours that the band's numbers stand for; None: they are no colour numbers.
    """

    number: int
    name: str
    dtype: str
    read: bool
    scale: float
    offset: float
    unit: str | None
    palette: Palette | None


@dataclass(frozen=True)
class Header:
    """What is known of a raster before a pixel is read.

    Attributes:
        num_bytes: Bytes of all its files on disk; None: they are elsewhere.
        size: Height and width of the file's pixels.
        read_size: Height and width in pixels of the resolution it is read at.
        crs: Its name; None: there is none.
        unit: Unit of its coordinates; None without a CRS.
        pixel: Width and height of a pixel at that resolution, along the pixels' own axes.
        rotation: Degrees by which rows of pixels are turned from the x axis, counterclockwise.
        mirrored: Whether it cannot be turned to be a map: rows go upwards, in an upright one.
        corner: Degrees between rows and columns; 90 unless the grid is sheared.
        lacks: What the file has instead of a place for its pixels, in words; "": it has a place,
            or nothing at all.
        places: What else says where the pixels lie, unused: control points, RPCs.
        array: Which array of a file of several is read, as in Zarr; None: there are no arrays.
        others: Names under which other rasters of the same file can be opened.
        data: What says where there is data, in words.
        block: Rows and columns of the blocks that the file is stored in.
        compression: Compression of the file; "": none; None: GDAL does not say.
        times: Pixels decoded for each that is wanted, in a window of 1024 px that lies badly.
        suits_windows: Whether these are few, or the file so small that GDAL keeps it.
    """

    driver: str
    num_bytes: int | None
    size: tuple[int, int]
    read_size: tuple[int, int]
    bands: tuple[BandInFile, ...]
    crs: str | None
    unit: str | None
    pixel: tuple[float, float]
    rotation: float
    mirrored: bool
    corner: float
    lacks: str
    places: Places
    array: str | None
    others: tuple[str, ...]
    data: str
    block: tuple[int, int]
    compression: str | None
    times: float
    suits_windows: bool


def header_of(raster: Raster) -> Header:
    """The header of an open raster."""
    stack, first, t = raster.stack, raster.dataset, raster.transform
    block = max((tuple(map(int, d.block_shapes[0])) for d in stack.datasets), key=lambda b: b[1])
    columns, rows = hypot(t.a, t.d), hypot(t.b, t.e)
    between = (t.a * t.b + t.d * t.e) / (columns * rows) if columns and rows else 0.0
    height, width = raster.size_in_file
    times = _times(block[0], height) * _times(block[1], width)
    num_values = height * width * stack.count
    return Header(
        driver=str(first.driver),
        num_bytes=_num_bytes(raster.files),
        size=raster.size_in_file,
        read_size=raster.size,
        bands=_bands(raster),
        crs=crs_name(raster.crs) if raster.crs else None,
        unit=_unit(raster.crs),
        pixel=(columns, rows),
        rotation=degrees(atan2(t.d, t.a)),
        mirrored=t.a * t.e - t.b * t.d > 0,
        corner=degrees(acos(max(-1.0, min(1.0, between)))),
        lacks=raster.ground.lacks,
        places=places_of(first),
        array=array_of(first),
        others=others_of(first),
        data=_data(raster),
        block=(block[0], block[1]),
        compression=_compression(first),
        times=times,
        suits_windows=times <= MOST_TIMES or num_values * raster.dtype.itemsize <= SMALL_BYTES,
    )


def _bands(raster: Raster) -> tuple[BandInFile, ...]:
    stack = raster.stack
    # Of each file once: rasterio asks GDAL for all bands each time.
    facts = [
        (dataset, number, *rest)
        for dataset in stack.datasets
        for number, rest in enumerate(
            zip(dataset.scales, dataset.offsets, dataset.units, dataset.colorinterp, strict=True),
            start=1,
        )
    ]
    return tuple(
        BandInFile(
            number,
            band.name,
            stack.dtypes[number - 1],
            number in raster.bands,
            float(scale),
            float(offset),
            unit or None,
            palette_of(dataset, place) if colour == ColorInterp.palette else None,
        )
        for number, (band, (dataset, place, scale, offset, unit, colour)) in enumerate(
            zip(stack.bands, facts, strict=True), start=1
        )
    )


def _compression(dataset: Any) -> str | None:
    if dataset.compression:
        return str(dataset.compression.value)
    # Other formats compress without a word: PNG, JPEG 2000, netCDF, Zarr.
    return "" if dataset.driver == "GTiff" else None


def _num_bytes(paths: tuple[str, ...]) -> int | None:
    if any(map(os.path.isdir, paths)):
        return None  # of a folder, such as Zarr's, GDAL lists not all files
    try:
        return sum(os.stat(path).st_size for path in set(paths))
    except OSError:
        return None


def _unit(crs: Any) -> str | None:
    if not crs:
        return None
    try:
        return str(crs.units_factor[0])
    except (*GDAL_ERRORS, CRSError):
        return None


def _data(raster: Raster) -> str:
    """What says where there is data."""
    if raster.nodata == "none":
        return "every pixel counts (nodata: none)"
    if raster.nodata == "collar":
        return "no data in the black collar (nodata: collar)"
    if raster.nodata is not None:
        return f"no data where all bands are {raster.nodata:g} (nodata: {raster.nodata:g})"
    kinds = dict.fromkeys(_by_the_file(dataset) for dataset in raster.stack.datasets)
    return "; ".join(kinds)


def _by_the_file(dataset: Any) -> str:
    flags = {flag for flags in dataset.mask_flag_enums for flag in flags}
    if MaskFlags.alpha in flags:
        return "no data where the alpha band is 0"
    if MaskFlags.per_dataset in flags:
        return "no data where the file's mask is 0"
    tags = ["none" if value is None else f"{value:g}" for value in dataset.nodatavals]
    if MaskFlags.nodata in flags and tags:
        if len(set(tags)) == 1:
            return f"no data where all bands are {tags[0]} (nodata tag)"
        each = ", ".join(tags[:MOST_TAGS]) + " …" * (len(tags) > MOST_TAGS)
        return f"no data where each band is its own nodata tag ({each})"
    return "every pixel counts (no nodata tag, mask or alpha band)"


def _times(block: int, size: int) -> float:
    """Pixels in the blocks that a window meets along an axis, where it lies badly, per pixel."""
    window = min(WINDOW_PX, size)
    blocks = (window - 2) // block + 2 if window > 1 else 1
    return min(size, blocks * block) / window


MOST_CLASSES = 4096


@dataclass(frozen=True)
class Asked:
    """How images and labels are to be read, and whether all their pixels are."""

    bands: BandNames | None = None
    nodata: Nodata = None
    resolution: float | None = None
    ignore_index: int = 255
    vectors: VectorKeys | None = None
    pixels: bool = False


def describe(
    path: str, labels_path: str | None, asked: Asked, comm: "MPI.Intracomm | None" = None
) -> dict[str, Any]:
    """Facts about an image, as they are printed with --json. Collective, where ranks are given.

    Never raises what is the user's to mend: `refused` then holds the sentence, and what was found
    before stands next to it.

    Args:
        labels_path: Path of its labels; None: it has none.
        comm: All ranks, which share the pixels; None: there is one and no MPI, and no pixel may
            be asked for.
    """
    found: dict[str, Any] = {"path": path}
    notes: list[str] = []
    with ExitStack() as stack:
        try:
            with _together(comm):
                image = Raster(path, asked.bands, asked.resolution, asked.nodata)
                stack.enter_context(image)
                header = header_of(image)
            found |= asdict(header)
            notes += _header_notes(path, header)
        except TilenetError as error:
            return found | {"refused": str(error)}
        labels: LabelSource | None = None
        if labels_path is not None:
            found["labels"] = {"path": labels_path}
            try:
                with _together(comm):
                    labels = open_labels(labels_path, image, asked.ignore_index, asked.vectors)
                    stack.enter_context(labels)
                    facts = label_facts(labels, image)
                bounds = None if facts.bounds is None else list(facts.bounds)
                found["labels"] |= asdict(facts) | {"bounds": bounds}
            except TilenetError as error:
                found["refused"] = str(error)
        if asked.pixels and comm is not None:
            try:
                share_collars([image], comm)
                seen = survey(
                    [image],
                    None if labels is None else [labels],
                    MOST_CLASSES,  # their number is not known
                    None,
                    comm,
                )
                found["pixels"] = _pixels(image, seen)
                notes += _pixel_notes(image, seen)
                if labels is not None:
                    found["labels"] |= _classes(seen)
                    share = sum(seen.class_pixels) / seen.num_valid
                    found["labels"]["share_labelled"] = share
                    notes += _class_notes(seen, asked.ignore_index)
            except TilenetError as error:
                found.setdefault("refused", str(error))
    return found | {"notes": notes}


def _together(comm: "MPI.Intracomm | None") -> AbstractContextManager[None]:
    return nullcontext() if comm is None else agreed(comm)


def _pixels(image: Raster, seen: Survey) -> dict[str, Any]:
    """Statistics of each band that is read."""
    number = image.height * image.width
    bands = [
        {
            "band": band,
            "mean": seen.mean[place],
            "std": seen.std[place],
            "minimum": seen.minimum[place],
            "maximum": seen.maximum[place],
            "percentiles": {
                str(percent): value
                for percent, value in zip(PERCENTS, seen.percentiles[place], strict=True)
            },
        }
        for place, band in enumerate(image.bands)
    ]
    return {
        "num_pixels": number,
        "num_valid": seen.num_valid,
        "share_without_data": 1 - seen.num_valid / number,
        "bands": bands,
    }


def _classes(seen: Survey) -> dict[str, Any]:
    """Labelled pixels with data of each class, up to the last that occurs."""
    last = max(label for label, pixels in enumerate(seen.class_pixels) if pixels)
    pixels = seen.class_pixels[: last + 1]
    return {"class_pixels": list(pixels), "class_weights": list(balanced_weights(pixels))}


def _header_notes(path: str, header: Header) -> list[str]:
    notes = []
    if not header.suits_windows:
        rows, cols = header.block
        notes.append(
            f"a window of 1024 px decodes up to {header.times:.1f} times its pixels from blocks of "
            f"{rows} × {cols} px; tile the file: {tiled_copy(quote(stacked_paths(path)[0]))}"
        )
    notes += _place_notes(path, header)
    height, width = header.read_size
    num_bands = sum(band.read for band in header.bands)
    notes.append(
        f"tiles and halos: tilenet plan --image {height}x{width} --bands {num_bands} --poolings 4, "
        "or --preset; a halo alone: tilenet halo"
    )
    return notes


def _place_notes(path: str, header: Header) -> list[str]:
    """What to do where only control points or RPCs say where the pixels lie."""
    places, name = header.places, quote(stacked_paths(path)[0])
    if header.crs is not None:
        return []
    if places.gcps:
        return [
            "ground control points are not used; where labels or several images are to lie on each "
            f"other, warp each image first: rio warp {name} warped.tif --dst-crs EPSG:…, or "
            f"gdalwarp -t_srs EPSG:… {name} warped.tif"
        ]
    if places.rpcs:
        return [
            "RPCs are not used; where labels or several images are to lie on each other, warp each "
            f"image first: gdalwarp -rpc -t_srs EPSG:… {name} warped.tif (with heights: -to "
            "RPC_DEM=dem.tif)"
        ]
    return []


def _pixel_notes(image: Raster, seen: Survey) -> list[str]:
    ends = list(zip(image.bands, seen.minimum, seen.maximum, strict=True))
    constant = [(band, low) for band, low, high in ends if low == high]
    if not constant:
        return []
    values = ", ".join(f"{band} ({low:g})" for band, low in constant)
    left = [band for band, low, high in ends if low != high]
    remedy = f"leave them out with bands: {left}" if left else "check the file"
    return [f"bands that are the same everywhere tell nothing: {values}; {remedy}"]


def _class_notes(seen: Survey, ignore_index: int) -> list[str]:
    occurring = [label for label, pixels in enumerate(seen.class_pixels) if pixels]
    if len(occurring) > 1:
        return []
    return [
        f"all labelled pixels are of one class ({occurring[0]}), of which nothing can be learned; "
        f"check the labels' values, and that none of them is ignore_index ({ignore_index})"
    ]
