"""A few places: image, label, map and errors next to one another."""

import time
from contextlib import ExitStack
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stacked_paths import image_name
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part, Window
from tilenet.mapping.map_facts import read_image_name
from tilenet.report.maps import NO_CLASS, SmallMaps, computed_maps, finished_maps
from tilenet.report.pictures import class_picture, error_picture, picture_uri, rgba, stretched
from tilenet.report.run_view import RunView, Section
from tilenet.training.config.run_file import RunFile

MOST_PLACES = 4
LEAST_LABELLED = 0.05  # share of a place's pixels
PATIENCE_S = 20.0  # after which no further place is computed
MOST_KEYS = 24  # of the legend

# An image, its labels, and maps of its windows.
Scene = tuple[Raster, LabelSource, SmallMaps]


def places(view: RunView, map_path: str | None = None, *, compute: bool = True) -> Section:
    """Places with many errors: of a finished map, or of windows that the network maps now.

    Args:
        map_path: A class map of one of its images; None: the network makes maps of small windows.
        compute: Whether the network may run.

    Raises:
        TilenetError: `map_path` is not a map of this run.
    """
    run = view.run
    if run is None:
        return {"notes": ["There is no run.yaml that says where images and labels are."]}
    if view.numbers:
        if map_path is not None:
            raise TilenetError(
                f"places are shown of maps of classes ({view.folder}: task regression); leave the "
                "map out"
            )
        return {"notes": ["Of a regression no places are shown."]}
    if map_path is None and not compute:
        again = f"tilenet report {view.folder} maps some"
        return {"notes": [f"No place was mapped, since the run was stopped; {again}."]}
    with ExitStack() as stack:
        try:
            if map_path is None:
                whence, scene = _computed(view, run, stack)
            else:
                whence, scene = "of the map of", _finished(view, run, map_path, stack)
            drawn = _drawn(scene, run)
        except (TilenetError, RuntimeError) as error:  # torch's, of a device that is full
            if map_path is not None:
                raise
            return {"notes": [f"No place is shown: {error}."]}
    path = scene[0].path
    if not drawn:
        return {"notes": [f"No place {whence} {path} that was tried is labelled."]}
    by = ""
    if map_path is None and view.checkpoint is not None:
        by = f", as the checkpoint {view.checkpoint.resolve().name} maps them"
    note = f"{len(drawn)} place{'s' * (len(drawn) > 1)} {whence} {path}{by}, those with the most "
    return {"notes": [f"{note}errors first."], "legend": _legend(run), "places": drawn}


def _legend(run: RunFile) -> list[tuple[str, str]]:
    names = run.class_names
    colours = class_picture(np.arange(len(names))[None], len(names))[:, 0].T
    keys = zip(colours[:MOST_KEYS].tolist(), names, strict=False)
    return [(f"rgb({red},{green},{blue})", name) for (red, green, blue), name in keys]


def _computed(view: RunView, run: RunFile, stack: ExitStack) -> tuple[str, Scene]:
    """Compute maps with the run's network, of held-out pixels where there are any."""
    keys, whence = run.validation, "of an image that was held out:"
    files = (keys.image_paths or run.image_paths)[0], (keys.label_paths or run.label_paths)[0]
    blocks: list[Window] = []
    if not keys.image_paths:
        whence, held_out = "of a training image:", view.facts.get("held_out")
        if isinstance(held_out, dict):
            whence = "of blocks that were held out of"
            blocks = [Window(*map(int, block)) for block in held_out["windows"]]
            files = str(held_out["image"]), str(held_out["labels"])
    image, labels = _opened(view, run, files, run.part, stack)
    return whence, (image, labels, computed_maps(view, image, blocks))


def _finished(view: RunView, run: RunFile, map_path: str, stack: ExitStack) -> Scene:
    """Return the first image, or the run's part of it, with the grid of the finished map.

    One of the name that the map says comes before others of that grid.
    """
    keys = run.validation
    files = [*zip(keys.image_paths, keys.label_paths, strict=True)]
    files += zip(run.image_paths, run.label_paths, strict=True)
    name = read_image_name(map_path)
    files.sort(key=lambda pair: image_name(pair[0]) != name)
    first: TilenetError | None = None
    for pair, part in product(files, dict.fromkeys((run.part, None))):
        with ExitStack() as tried:
            try:
                image, labels = _opened(view, run, pair, part, tried)
                maps = finished_maps(tried.enter_context(Raster(map_path)), image)
            except TilenetError as error:
                first = first or error
                continue
            stack.enter_context(tried.pop_all())
            return image, labels, maps
    assert first is not None, "a run has at least one image"
    raise first


def _opened(
    view: RunView, run: RunFile, files: tuple[str, str], part: Part | None, stack: ExitStack
) -> tuple[Raster, LabelSource]:
    bands = run.bands if view.record is None else view.record.wanted_bands
    image = Raster(view.path_of(files[0]), bands, run.resolution, run.nodata, part)
    stack.enter_context(image)
    labels = open_labels(view.path_of(files[1]), image, run.ignore_index, run.vectors)
    return image, stack.enter_context(labels)


def _drawn(scene: Scene, run: RunFile) -> list[Section]:
    """The places of most errors, among those of most classes where each map costs computing."""
    image, labels, maps = scene
    drawn: list[tuple[int, Window, Section]] = []
    windows, began = _chosen(labels, maps, run.ignore_index), time.monotonic()
    side = max((max(window.height, window.width) for window in windows), default=1)
    for window in windows:
        if drawn and maps.computed and time.monotonic() - began > PATIENCE_S:
            break
        drawn.append(_place(image, window, labels.read(window), maps.read(window), run, side))
    return [section for *_, section in sorted(drawn, key=lambda place: (-place[0], place[1].row))]


def _chosen(labels: LabelSource, maps: SmallMaps, ignore: int) -> list[Window]:
    """Labelled windows: with most errors in a finished map, else with most classes."""
    ranked: list[tuple[float, Window]] = []
    for window in maps.windows:
        truth = labels.read(window)
        if (truth != ignore).mean() < LEAST_LABELLED:
            continue
        if maps.computed:  # entropy times pixels: high where there are many classes, none rare
            _, counts = np.unique(truth[truth != ignore], return_counts=True)
            worth = -float((counts * np.log(counts / counts.sum())).sum())
        else:
            classes = maps.read(window)
            if not (counted := (truth != ignore) & (classes != NO_CLASS)).any():
                continue
            worth = float((classes != truth)[counted].sum())
        ranked.append((worth, window))
    ranked.sort(key=lambda pair: -pair[0])
    return [window for _, window in ranked[:MOST_PLACES]]


def _place(
    image: Raster,
    window: Window,
    truth: NDArray[np.int64],
    classes: NDArray[np.int64],
    run: RunFile,
    side: int,
) -> tuple[int, Window, Section]:
    """Errors and pictures of a place; `side` pixels are as wide as a picture can be."""
    number, ignore = len(run.class_names), run.ignore_index
    counted = (truth != ignore) & (classes != NO_CLASS)
    errors, pixels = int((classes != truth)[counted].sum()), image.sample(window)
    where = (
        f"rows {window.row:,} to {window.row + window.height - 1:,}, "
        f"columns {window.col:,} to {window.col + window.width - 1:,}"
    )
    pictures = {
        "image": rgba(stretched(pixels), pixels.valid),
        "label": class_picture(np.where(truth == ignore, NO_CLASS, truth), number),
        "map": class_picture(classes, number),
        "errors": error_picture(truth, classes, ignore),
    }
    share = f" ({errors / counted.sum():.1%})" if counted.any() else ""
    place = {
        "text": f"{where}: {errors:,} of {counted.sum():,} labelled pixels are wrong{share}",
        "pictures": [
            {"name": name, "alt": f"{name}, {where}", "uri": picture_uri(values)}
            for name, values in pictures.items()
        ],
        "width": f"{100 * window.width / side:.1f}",
    }
    return errors, window, place
