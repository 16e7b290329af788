"""The survey of a run's images: the one that its folder keeps, where nothing changed, or a new one.

A survey reads all pixels, which takes long for large images; a run that goes on, or starts over
with another network, would find the same. What a survey found wrong is an error, and never kept.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rasterio import __gdal_version__

from tilenet.data import survey as surveys
from tilenet.data.holdout import HeldOut
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stack import fingerprint
from tilenet.data.survey_record import Survey, load_survey, save_survey
from tilenet.errors import TilenetError
from tilenet.geometry.halo import Context
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.training.config import RunFile

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SURVEY", "run_survey", "survey_key"]

SURVEY = "survey.safetensors"
VERSION = 2  # raise it whenever a survey of the same files gives other numbers


def run_survey(
    run: RunFile,
    images: Sequence[Raster],
    labels: Sequence[LabelSource],
    context: Context,
    cell_px: int,
    held_out: HeldOut | None,
    folder: Path,
    comm: "MPI.Intracomm",
    watchdog: Watchdog = NEVER,
    requests: StopRequests | None = None,
) -> Survey:
    """What the images hold. Collective; rank 0 reads what is kept, and writes.

    Args:
        labels: One per image; `ignore_index` where training may not look.
        context: Of the network.
        cell_px: Side of the cells.
        held_out: Blocks that enter no statistics; None: there are none.
        folder: Of the run; it exists.
        watchdog: Armed for each block.
        requests: To stop.

    Raises:
        AgreedError, StopAgreed: See `survey`.
    """
    path, key, kept = folder / SURVEY, None, None
    if comm.rank == 0:
        key = survey_key(run, images, labels, context, cell_px, held_out)
        kept = None if key is None else _kept(path, key)
    kept = comm.bcast(kept)
    if isinstance(kept, Survey):
        _say_unlabelled(images, kept, comm)
        return kept
    mask = None if held_out is None else held_out.mask
    number = len(run.class_names)
    found = surveys.survey(images, labels, number, cell_px, comm, mask, watchdog, requests)
    # A file that changed while it was read is not the one that the key is of.
    if key is not None and key == survey_key(run, images, labels, context, cell_px, held_out):
        try:
            save_survey(found, path, key)
        except TilenetError as error:
            say(f"the survey of the images is not kept, and will be made again: {error}")
    _say_unlabelled(images, found, comm)
    return found


def _say_unlabelled(images: Sequence[Raster], found: Survey, comm: "MPI.Intracomm") -> None:
    """Name images that hold no labelled pixel: they are no error, but hardly meant."""
    bare = [
        image.path
        for image, cells in zip(images, found.classes_in_cells, strict=True)
        if not cells.any()
    ]
    if bare and comm.rank == 0:
        more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
        say(
            f"no pixel with data of {bare[0]}{more} is labelled, so nothing is learned there; "
            "leave such images out, or check their labels and ignore_index"
        )


def _kept(path: Path, key: str) -> Survey | None:
    """The survey that is kept there and fits, which is said; None: there is none."""
    if not path.exists():
        return None
    try:
        kept = load_survey(path, key)
    except TilenetError as error:
        say(f"all pixels are looked at again: {error}")
        return None
    if kept is None:
        say(f"all pixels are looked at again: files or keys are not those of {path}")
    else:
        say(f"statistics and labelled places are those of {path}: files and keys are the same")
    return kept


def survey_key(
    run: RunFile,
    images: Sequence[Raster],
    labels: Sequence[LabelSource],
    context: Context,
    cell_px: int,
    held_out: HeldOut | None = None,
) -> str | None:
    """A digest of all that a survey depends on; None: files that cannot be told apart by date."""
    paths = [source.files for source in images] + [source.files for source in labels]
    files = [fingerprint(some) for some in paths]
    if None in files:
        return None
    depends = {
        "version": VERSION,
        "gdal": __gdal_version__,
        "block_px": surveys.BLOCK_PX,
        "files": files,
        "bands": [image.bands for image in images],
        "resolution": run.resolution,
        "nodata": run.nodata,
        "vectors": repr(asdict(run.vectors)),  # may hold keys of several types
        "ignore_index": run.ignore_index,
        "num_classes": len(run.class_names),
        "alignment_px": cell_px,  # which it is unless images are huge
        "held_out": None if held_out is None else _hidden(held_out, context),
    }
    if run.part is not None:
        depends["part"] = str(run.part)
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def _hidden(held_out: HeldOut, context: Context) -> list[object]:
    """What training does not see: blocks, and labels around them."""
    chosen = [hashlib.blake2b(blocks.tobytes()).hexdigest() for blocks in held_out.chosen]
    return [held_out.block_px, context.context_any_pixel_px, chosen]
