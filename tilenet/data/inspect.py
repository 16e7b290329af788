"""Facts about an image and its labels, as `tilenet info` prints them before training.

Facts are plain values by name, as `--json` prints them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import hypot
from shlex import quote
from typing import Any

from rasterio.enums import MaskFlags

from tilenet.data.alike import scaling_text
from tilenet.data.class_weights import balanced_weights
from tilenet.data.collars import share_collars
from tilenet.data.labels.facts import label_facts
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.bands import BandNames
from tilenet.data.rasters.bounds import crs_name, unit_name
from tilenet.data.rasters.raster import Nodata, Raster
from tilenet.data.rasters.remedies import tiled_copy
from tilenet.data.rasters.stack import wide_alpha
from tilenet.data.survey import nodata_note, survey
from tilenet.data.survey_record import Survey
from tilenet.errors import TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl

WINDOW_PX = 1024  # side of a window that is read
MOST_TIMES = 4.0  # pixels that are decoded for one that is wanted
MOST_TAGS = 10  # nodata tags that are said, where bands have different ones
SMALL_BYTES = 64 << 20  # GDAL's cache holds what is no larger, see `raster`
MOST_CLASSES = 4096


@dataclass(frozen=True)
class InfoRequest:
    """Options for reading images and labels."""

    bands: BandNames | None = None
    nodata: Nodata = None
    resolution: float | None = None
    ignore_index: int = 255
    vectors: VectorKeys | None = None
    pixels: bool = False


def describe(
    path: str, labels_path: str | None, request: InfoRequest, comm: Intracomm | None = None
) -> dict[str, Any]:
    """Facts about an image. Collective, where ranks are given.

    Errors in a file are not raised: `refused` holds the sentence, next to the facts from before.

    Args:
        labels_path: Path of its labels; None: it has no labels.
        comm: All ranks, which share the pixels; None: one process without MPI, and no `pixels`.
    """
    facts: dict[str, Any] = {"path": path}
    labels: LabelSource | None = None
    with ExitStack() as stack:
        with _refusals(facts, comm):
            image = stack.enter_context(
                Raster(path, request.bands, request.resolution, request.nodata)
            )
            facts |= header_of(image)
        if "refused" in facts:
            return facts
        facts["notes"] = _header_notes(image, facts)
        if labels_path is not None:
            facts["labels"] = {"path": labels_path}
            with _refusals(facts, comm):
                labels = stack.enter_context(
                    open_labels(labels_path, image, request.ignore_index, request.vectors)
                )
                facts["labels"] |= label_facts(labels, image)
        if "refused" in facts:
            labels = None
        if request.pixels and comm is not None:
            with _refusals(facts, None):  # all ranks raise the same
                share_collars([image], comm)
                # The number of classes is not known.
                stats = survey(
                    [image], [labels] if labels else None, MOST_CLASSES, None, RankControl(comm)
                )
                facts["pixels"] = _pixels(image, stats)
                facts["notes"] += _pixel_notes(image, stats)
                if labels is not None:
                    facts["labels"] |= _classes(stats)
                    facts["notes"] += _class_notes(stats, request.ignore_index)
    return facts


@contextmanager
def _refusals(facts: dict[str, Any], comm: Intracomm | None) -> Iterator[None]:
    """Keep the first sentence that is raised on any rank."""
    try:
        with nullcontext() if comm is None else agreed(comm):
            yield
    except TilenetError as error:
        facts.setdefault("refused", str(error))


def header_of(raster: Raster) -> dict[str, Any]:
    """Facts about an open raster before a pixel is read.

    Among others the `pixel` size along the pixels' own axes, and `times`: pixels decoded for each
    that is wanted in a window that lies badly.
    """
    stack, t = raster.stack, raster.transform
    rows, cols = max(
        (tuple(map(int, d.block_shapes[0])) for d in stack.on_grid), key=lambda block: block[1]
    )
    num_rows, num_cols = raster.size_in_file
    times = _times(rows, num_rows) * _times(cols, num_cols)
    num_bytes = num_rows * num_cols * stack.count * raster.dtype.itemsize
    return {
        "size": raster.size_in_file,
        "read_size": raster.size,
        "bands": [
            {"number": n, "name": band.name, "dtype": dtype, "read": n in raster.bands}
            for n, (band, dtype) in enumerate(zip(stack.bands, stack.dtypes, strict=True), start=1)
        ],
        "resampled": [
            {"path": view.path, "size": view.size, "crs": view.crs, "method": view.method}
            for view in stack.resampled
        ],
        "crs": crs_name(raster.crs) if raster.crs else None,
        "unit": unit_name(raster.crs),
        "pixel": (hypot(t.a, t.d), hypot(t.b, t.e)),
        "lacks": raster.georeferencing.missing,
        "data": _data(raster),
        "block": (rows, cols),
        "times": times,
        "suits_windows": times <= MOST_TIMES or num_bytes <= SMALL_BYTES,
    }


def _data(raster: Raster) -> str:
    """Say which pixels hold data, and by which rule."""
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
    if MaskFlags.alpha in flags or wide_alpha(dataset):
        return "no data where the alpha band is 0"
    if MaskFlags.per_dataset in flags:
        return "no data where the file's mask is 0"
    tags = ["none" if value is None else f"{value:g}" for value in dataset.nodatavals]
    if MaskFlags.nodata in flags and tags:
        if len(set(tags)) == 1:
            return f"no data where all bands are {tags[0]} (nodata tag)"
        return f"no data where each band is its own nodata tag ({', '.join(tags[:MOST_TAGS])})"
    return "every pixel counts (no nodata tag, mask or alpha band)"


def _times(block: int, size: int) -> float:
    """Pixels in the blocks that a window meets along an axis, where it lies badly, per pixel."""
    window = min(WINDOW_PX, size)
    blocks = (window - 2) // block + 2 if window > 1 else 1
    return min(size, blocks * block) / window


def _pixels(image: Raster, stats: Survey) -> dict[str, Any]:
    """Statistics of each band that is read."""
    columns = zip(image.bands, stats.mean, stats.std, stats.minimum, stats.maximum, strict=True)
    names = ("band", "mean", "std", "minimum", "maximum")
    number = image.height * image.width
    return {
        "num_pixels": number,
        "num_valid": stats.num_valid,
        "share_without_data": 1 - stats.num_valid / number,
        "bands": [dict(zip(names, band, strict=True)) for band in columns],
    }


def _classes(stats: Survey) -> dict[str, Any]:
    """Labelled pixels with data of each class, up to the last that occurs."""
    last = max(label for label, pixels in enumerate(stats.class_pixels) if pixels)
    pixels = stats.class_pixels[: last + 1]
    return {
        "class_pixels": list(pixels),
        "class_weights": list(balanced_weights(pixels)),
        "share_labelled": sum(pixels) / stats.num_valid,
    }


def _header_notes(raster: Raster, header: dict[str, Any]) -> list[str]:
    notes, name = [], quote(raster.files[0])
    if not header["suits_windows"]:
        rows, cols = header["block"]
        notes.append(
            f"a window of 1024 px decodes up to {header['times']:.1f} times its pixels from blocks "
            f"of {rows} × {cols} px; tile the file: {tiled_copy(name)}"
        )
    if missing := raster.georeferencing.missing:
        notes.append(f"the image has {missing}: {raster.georeferencing.remedy}")
    pairs = zip(raster.bands, raster.scaling, strict=True)
    scaled = [f"{band} ({scaling_text(pair)})" for band, pair in pairs if pair != (1.0, 0.0)]
    if scaled:
        notes.append(
            f"bands with a scale or an offset tag are read as stored: {', '.join(scaled)}; only "
            "labels of a regression are scaled"
        )
    height, width = header["read_size"]
    num_bands = sum(band["read"] for band in header["bands"])
    notes.append(
        f"tiles and halos: tilenet plan --image {height}x{width} --bands {num_bands} --poolings 4, "
        "or --preset; a halo alone: tilenet halo"
    )
    return notes


def _pixel_notes(image: Raster, stats: Survey) -> list[str]:
    ends = list(zip(image.bands, stats.minimum, stats.maximum, strict=True))
    constant = [(band, low) for band, low, high in ends if low == high]
    notes = [*filter(None, [nodata_note([image], stats)])]
    if not constant:
        return notes
    values = ", ".join(f"{band} ({low:g})" for band, low in constant)
    left = [band for band, low, high in ends if low != high]
    remedy = f"leave them out with bands: {left}" if left else "check the file"
    return [*notes, f"bands that are the same everywhere tell nothing: {values}; {remedy}"]


def _class_notes(stats: Survey, ignore_index: int) -> list[str]:
    occurring = [label for label, pixels in enumerate(stats.class_pixels) if pixels]
    if len(occurring) > 1:
        return []
    return [
        f"all labelled pixels are of one class ({occurring[0]}), of which nothing can be learned; "
        f"check the labels' values, and that none of them is ignore_index ({ignore_index})"
    ]
