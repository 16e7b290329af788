"""A few places: image, label, map and errors next to one another."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part, Window
from tilenet.report.maps import NO_CLASS, ComputedMap, FinishedMap, SmallMap, overlaps
from tilenet.report.parts import Legend, Note, PlaceRow, Section
from tilenet.report.pictures import class_picture, error_picture, rgba, stretched
from tilenet.report.run_view import RunView
from tilenet.storage.png import data_uri
from tilenet.training.config.run_file import RunFile

__all__ = ["places"]

MOST_PLACES = 4
MOST_LOOKS = 48  # windows whose labels are looked at
MOST_MAP_LOOKS = 400  # of a finished map, which costs no computing
LEAST_LABELLED = 0.05  # share of a place's pixels
PATIENCE_S = 20.0  # no further place is computed after so long
MOST_KEYS = 24  # classes of the legend


@dataclass(frozen=True)
class Place:
    """A window with what is known of it.

    Attributes:
        window: Window of the image.
        labels: (H, W).
        found: Classes of the map, (H, W), -1 where there is none.
        errors: Labelled pixels of another class in the map.
        counted: Labelled pixels with a class in the map.
    """

    window: Window
    labels: NDArray[np.int64]
    found: NDArray[np.int64]
    errors: int
    counted: int


def places(view: RunView, map_path: str | None = None, *, compute: bool = True) -> Section:
    """Places with many errors: of a finished map, or of windows that the network maps now.

    Args:
        view: The run.
        map_path: A class map of one of its images; None: the network is asked.
        compute: Whether it may be.

    Raises:
        TilenetError: `map_path` is no map of this run.
    """
    title, run = "Places", view.run
    if run is None:
        missing = "There is no run.yaml that says where images and labels are."
        return Section(title, [Note(missing)])
    if view.numbers:
        if map_path is not None:
            raise TilenetError(
                f"places are shown of maps of classes ({view.folder}: task regression); leave the "
                "map out"
            )
        return Section(title, [Note("Of a regression no places are shown.")])
    if map_path is None and not compute:
        again = f"tilenet report {view.folder} maps some"
        return Section(title, [Note(f"No place was mapped, since the run was stopped; {again}.")])
    with ExitStack() as stack:
        try:
            if map_path is None:
                image, whence, found = _computed(view, run, stack)
            else:
                image, whence, found = _finished(view, run, map_path, stack)
            side = max((max(place.labels.shape) for place in found), default=1)
            drawn = [_drawn(image, place, run, side) for place in found]
        except (TilenetError, RuntimeError) as error:  # torch's, of a device that is full
            if map_path is not None:
                raise
            return Section(title, [Note(f"No place is shown: {error}.")])
    if not drawn:
        none = f"No place {whence} {image.path} that was tried is labelled."
        return Section(title, [Note(none)])
    by = ""
    if map_path is None and view.checkpoint is not None:
        by = f", as the checkpoint {view.checkpoint.resolve().name} maps them"
    if len(drawn) > 1:
        by += ", those with the most errors first"
    count = f"{len(drawn)} place{'s' * (len(drawn) > 1)}"
    return Section(title, [Note(f"{count} {whence} {image.path}{by}."), _legend(run), *drawn])


def _finished(
    view: RunView, run: RunFile, map_path: str, stack: ExitStack
) -> tuple[Raster, str, list[Place]]:
    """Places of a finished map: its image, where it is from in words, and the places."""
    keys = run.validation
    files = list(zip(keys.image_paths, keys.label_paths, strict=True))
    files += zip(run.image_paths, run.label_paths, strict=True)
    image, labels, mapped = _matching(view, run, map_path, files, stack)
    return image, "of the map of", _with_most_errors(mapped, labels)


def _computed(view: RunView, run: RunFile, stack: ExitStack) -> tuple[Raster, str, list[Place]]:
    """Places that the network maps: of what was held out, where something was."""
    keys, whence = run.validation, "of an image that was held out:"
    blocks: list[Window] = []
    if not keys.image_paths:
        blocks, whence = _held_out(view), "of a training image:"
    first = (keys.image_paths or run.image_paths)[0], (keys.label_paths or run.label_paths)[0]
    if blocks:
        facts = view.facts["held_out"]
        first = str(facts["image"]), str(facts["labels"])
        whence = "of blocks that were held out of"
    image, labels = _opened(view, run, *first, stack, run.part)
    mapped = ComputedMap(view, image)
    if blocks:
        mapped.windows = overlaps(mapped.windows, blocks)
    return image, whence, _with_most_classes(mapped, labels)


def _legend(run: RunFile) -> Legend:
    names = run.class_names
    colours = class_picture(np.arange(len(names))[None], len(names))[:, 0].T
    shown = zip(colours[:MOST_KEYS].tolist(), names, strict=False)
    return Legend([(f"rgb({r},{g},{b})", name) for (r, g, b), name in shown])


def _held_out(view: RunView) -> list[Window]:
    """Blocks that were held out of one of the training images."""
    try:
        return [Window(*(int(n) for n in one)) for one in view.facts["held_out"]["windows"]]
    except (KeyError, TypeError, ValueError):
        return []


def _opened(
    view: RunView,
    run: RunFile,
    image_path: str,
    label_path: str,
    stack: ExitStack,
    part: Part | None,
) -> tuple[Raster, LabelSource]:
    record = view.record
    bands = run.bands if record is None else record.wanted_bands
    keys = bands, run.resolution, run.nodata, part
    image = stack.enter_context(Raster(view.path_of(image_path), *keys))
    path = view.path_of(label_path)
    return image, stack.enter_context(open_labels(path, image, run.ignore_index, run.vectors))


def _matching(
    view: RunView, run: RunFile, map_path: str, files: list[tuple[str, str]], stack: ExitStack
) -> tuple[Raster, LabelSource, SmallMap]:
    """The first image, or part of it that the run is about, on whose grid the map lies."""
    first: TilenetError | None = None
    for pair, part in product(files, dict.fromkeys((run.part, None))):
        with ExitStack() as tried:
            try:
                image, labels = _opened(view, run, pair[0], pair[1], tried, part)
                mapped = FinishedMap(map_path, image)
            except TilenetError as error:
                first = first or error
                continue
            tried.callback(mapped.close)
            stack.enter_context(tried.pop_all())
            return image, labels, mapped
    assert first is not None, "a run has at least one image"
    raise first


def _with_most_errors(mapped: SmallMap, labels: LabelSource) -> list[Place]:
    """Places with most errors among many windows of a finished map, spread over it."""
    counted: list[tuple[int, Window]] = []
    for window in _spread(mapped.windows, MOST_MAP_LOOKS):
        truth = labels.read(window)
        if (truth != labels.ignore_index).mean() >= LEAST_LABELLED:
            place = _place(mapped, window, truth, labels.ignore_index)
            if place.counted:
                counted.append((place.errors, window))
    counted.sort(key=lambda pair: -pair[0])  # places are read again: all of them need much memory
    chosen = [window for _, window in counted[:MOST_PLACES]]
    return [_place(mapped, one, labels.read(one), labels.ignore_index) for one in chosen]


def _with_most_classes(mapped: SmallMap, labels: LabelSource) -> list[Place]:
    """Where each map costs computing: few windows, chosen by their labels."""
    known: list[tuple[float, Window]] = []
    for window in _spread(mapped.windows, MOST_LOOKS):
        truth = labels.read(window)
        if (truth != labels.ignore_index).mean() >= LEAST_LABELLED:
            known.append((_variety(truth, labels.ignore_index), window))
    known.sort(key=lambda pair: -pair[0])
    chosen = sorted((one for _, one in known[:MOST_PLACES]), key=lambda w: (w.row, w.col))
    done: list[Place] = []
    began = time.monotonic()
    for window in chosen:
        if done and time.monotonic() - began > PATIENCE_S:
            break
        done.append(_place(mapped, window, labels.read(window), labels.ignore_index))
    return sorted(done, key=lambda place: -place.errors)


def _spread(windows: list[Window], most: int) -> list[Window]:
    places = np.linspace(0, len(windows) - 1, min(most, len(windows)))
    return [windows[int(place)] for place in places]


def _variety(labels: NDArray[np.int64], ignore: int) -> float:
    """Entropy of the classes times their pixels: high where there are many, none of them rare."""
    _, counts = np.unique(labels[labels != ignore], return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum() * counts.sum())


def _place(mapped: SmallMap, window: Window, labels: NDArray[np.int64], ignore: int) -> Place:
    found = mapped.read(window)
    counts = (labels != ignore) & (found != NO_CLASS)
    return Place(window, labels, found, int((found != labels)[counts].sum()), int(counts.sum()))


def _drawn(image: Raster, place: Place, run: RunFile, side: int) -> PlaceRow:
    """One place; `side` pixels are as wide as a picture can be, so that all have one scale."""
    window, classes, ignore = place.window, len(run.class_names), run.ignore_index
    pixels = image.sample(window)
    picture = stretched(pixels)
    labels = np.where(place.labels == ignore, NO_CLASS, place.labels)
    rows = f"rows {window.row:,} to {window.row + window.height - 1:,}"
    where = f"{rows}, columns {window.col:,} to {window.col + window.width - 1:,}"
    share = f" ({place.errors / place.counted:.1%})" if place.counted else ""
    pictures = (
        ("image", rgba(picture, pixels.valid)),
        ("label", class_picture(labels, classes)),
        ("map", class_picture(place.found, classes)),
        ("errors", error_picture(place.labels, place.found, ignore)),
    )
    told = f"{where}: {place.errors:,} of {place.counted:,} labelled pixels are wrong{share}"
    shown = [(name, f"{name}, {where}", data_uri(values)) for name, values in pictures]
    return PlaceRow(told, shown, f"{100 * window.width / side:.1f}")
