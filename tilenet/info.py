"""What an image and its labels are, to be known before anything is trained on them."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from tilenet.errors import TilenetError
from tilenet.files.bands import BandNames
from tilenet.files.header import Header, header_of
from tilenet.files.label_facts import label_facts
from tilenet.files.label_files import open_labels
from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Nodata, Raster
from tilenet.files.stack import stacked_paths
from tilenet.files.survey_record import PERCENTS, Survey
from tilenet.files.tools import tiled_copy
from tilenet.files.vector_keys import VectorKeys
from tilenet.parallel.collars import share_collars
from tilenet.parallel.mesh import agreed
from tilenet.parallel.survey import survey
from tilenet.planning.class_weights import balanced_weights

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Asked", "describe"]

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
    before stands beside it.

    Args:
        labels_path: Of its labels; None: it has none.
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
