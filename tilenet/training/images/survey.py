"""The survey of a run's images: the one kept in its folder if nothing changed, or a new one.

A survey reads all pixels, which takes long for large images; a run that goes on, or starts over
with another network, would find the same. A survey that ends in an error is not kept.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rasterio import __gdal_version__

from tilenet.data import survey as surveys
from tilenet.data.class_weights import balanced_weights
from tilenet.data.holdout import HeldOut
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.fingerprint import fingerprint
from tilenet.data.rasters.raster import Raster
from tilenet.data.survey_record import Survey, load_survey, save_survey
from tilenet.errors import TilenetError, and_more
from tilenet.geometry.halo import Context
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.images.open import RunImages
from tilenet.training.setup.run_plan import RunPlan

SURVEY = "survey.safetensors"
VERSION = 5  # raise it whenever a survey of the same files gives other numbers


def run_survey(
    opened: RunImages,
    plan: RunPlan,
    reading: Mapping[str, object],
    folder: Path | None,
    control: RankControl,
) -> Survey:
    """Survey the images, or load the kept survey. Collective; rank 0 reads and writes the file.

    Args:
        opened: Images and labels; held-out blocks enter no statistics.
        plan: The network, and the side of the grid cells.
        reading: Keys of the run file that say how files are read, see `survey_key`.
        folder: Folder of the run, which exists; None: the survey is not kept.
        control: The ranks; the watchdog is armed for each block.

    Raises:
        AgreedError, StopAgreed: See `survey`.
    """
    comm = control.comm
    path, key, survey = None if folder is None else folder / SURVEY, None, None
    key_of = partial(survey_key, opened, plan.record.context(), plan.cell_px, reading)
    if comm.rank == 0 and path is not None:
        key = key_of()
        survey = None if key is None or path is None else _load_kept(path, key)
    survey = comm.bcast(survey)
    if isinstance(survey, Survey):
        _say_notes(opened.images, survey, comm)
        return survey
    mask = None if opened.held_out is None else opened.held_out.mask
    files, number = (opened.images, opened.labels), len(plan.record.classes)
    survey = surveys.survey(*files, number, plan.cell_px, control, mask)
    # If a file changed while it was read, the key is not that of the survey.
    if path is not None and key is not None and key == key_of():
        try:
            save_survey(survey, path, key)
        except TilenetError as error:
            say(f"the survey of the images is not kept, and will be made again: {error}")
    _say_notes(opened.images, survey, comm)
    return survey


def class_weights(
    weights_key: Sequence[float] | str | None,
    names: Sequence[str],
    pixels: Sequence[int],
    comm: Intracomm,
) -> tuple[float, ...] | None:
    """Weights of the classes (None: 1 for all); rank 0 prints them, or the labelled pixels.

    Args:
        weights_key: The key `class_weights` of the run file; `auto`: balanced by labelled pixels.
        names: Names of the classes.
        pixels: Labelled pixels of each class.
    """
    labelled = [name for name, count in zip(names, pixels, strict=True) if count]
    if comm.rank == 0 and len(labelled) == 1 < len(names):
        say(
            f"{labelled[0]} alone is labelled, so nothing else is learned; check the labels and "
            "ignore_index: in a mask of 0 and 255, for instance, 255 does not count"
        )
    if weights_key == "auto":
        weights = balanced_weights(pixels)
        if comm.rank == 0:
            classes = zip(names, weights, pixels, strict=True)
            each = (f"{name} {weight:.17g} ({count:,} px)" for name, weight, count in classes)
            say(f"class_weights: auto: {', '.join(each)}")
        return tuple(weights)
    if comm.rank == 0:
        total = max(sum(pixels), 1)
        counts = zip(names, pixels, strict=True)
        shares = (f"{name} {count:,} ({count / total:.2%})" for name, count in counts)
        say(f"labelled pixels of each class: {', '.join(shares)}")
    assert not isinstance(weights_key, str)
    return None if weights_key is None else tuple(weights_key)


def _say_notes(images: Sequence[Raster], survey: Survey, comm: Intracomm) -> None:
    """Print what is no error, but probably a mistake: images without labels, nodata amid data."""
    if comm.rank == 0 and (note := surveys.nodata_note(images, survey)):
        say(note)
    bare = [
        image.path
        for image, cells in zip(images, survey.classes_in_cells, strict=True)
        if not cells.any()
    ]
    if bare and comm.rank == 0:
        say(
            f"no pixel with data of {and_more(bare)} is labelled, so nothing is learned there; "
            "leave such images out, or check their labels and ignore_index"
        )


def _load_kept(path: Path, key: str) -> Survey | None:
    """Load the kept survey if its key fits, and print so; None: there is none."""
    if not path.exists():
        return None
    try:
        survey = load_survey(path, key)
    except TilenetError as error:
        say(f"all pixels are looked at again: {error}")
        return None
    if survey is None:
        say(f"all pixels are looked at again: files or keys are not those of {path}")
    else:
        say(f"statistics and labelled places are those of {path}: files and keys are the same")
    return survey


def survey_key(
    opened: RunImages, context: Context, cell_px: int, reading: Mapping[str, object]
) -> str | None:
    """A digest of all that a survey depends on; None: a file has no date to identify it.

    Args:
        context: Context of the network.
        cell_px: Side of the grid cells.
        reading: How files are read: resolution, nodata, vectors, ignore_index, classes, part.
    """
    images, labels, held_out = opened.images, opened.labels, opened.held_out
    sources: list[Raster | LabelSource] = [*images, *labels]
    files = [fingerprint(source.files) for source in sources]
    if not all(files):  # of some formats GDAL names no files
        return None
    depends = {
        "version": VERSION,
        "gdal": __gdal_version__,
        "block_px": surveys.BLOCK_PX,
        "files": files,
        # Of a file that holds several rasters.
        "names": [os.path.basename(source.path) for source in sources],
        "bands": [image.bands for image in images],
        "cell_px": cell_px,
        "held_out": None if held_out is None else _hidden(held_out, context),
        **reading,
    }
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def _hidden(held_out: HeldOut, context: Context) -> list[object]:
    """Identity of the labels hidden from training: held-out blocks and their surroundings."""
    chosen = [hashlib.blake2b(blocks.tobytes()).hexdigest() for blocks in held_out.chosen]
    return [held_out.block_px, context.context_any_pixel_px, chosen]
