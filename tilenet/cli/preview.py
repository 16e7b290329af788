"""`tilenet preview`: see an image, with its labels on it, before anything is trained."""

import difflib
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.data import WINDOW, band_names, nodata_value, numbers
from tilenet.cli.options.labels import add_labels, vectors_of
from tilenet.data.labels.facts import class_names
from tilenet.data.labels.field_values import proposed_classes
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.polygons import VectorLabels
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.vector_keys import classes_by_text, is_whole, quoted
from tilenet.data.rasters.bands import BandNames
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.data.thumbnail import LabelFile, thumbnail
from tilenet.errors import TilenetError, UsageError, one_line, printable
from tilenet.geometry.windows import checked_window
from tilenet.mapping.writing.class_colours import class_colours
from tilenet.report.pictures import overlaid, rgba, stretched, write_picture

MOST_PX = 4096  # of a picture's side
MOST_CLASS = 65535
MOST_CLASSES = 40  # that are named
MOST_LETTERS = 40  # of a name
OPACITY = 0.4


@dataclass(frozen=True)
class Classes:
    """Classes of labels.

    Attributes:
        labels: The file; of polygons with classes for all values of the field.
        names: Names by class, of the classes that have one.
        numbers: Classes by the names that `--classes` may give.
        background: Class that is painted only where `--classes` names it, or None.
    """

    labels: LabelFile
    names: dict[int, str]
    numbers: dict[str, int]
    background: int | None


def _classes_of(labels: LabelFile, image: Raster) -> Classes:
    """Look at labels for classes and their names.

    Of label rasters class 0 is taken for the background. Polygons have none: pixels outside of them
    do not count. Where no option names the class of a value of their field, each value gets one.

    Raises:
        TilenetError: They cannot be opened.
    """
    with open_labels(labels.path, image, labels.ignore_index, labels.vectors) as opened:
        if isinstance(opened, Labels):
            names = class_names(opened.raster.dataset)
            return Classes(labels, names, {name: n for n, name in names.items()}, background=0)
        assert isinstance(opened, VectorLabels)
        keys = opened.keys
        if keys.field is None:
            return Classes(labels, {}, {str(keys.burn): keys.burn}, background=None)
        mapping: Mapping[str, int | None]
        if keys.classes is None:
            counts = opened.layer.value_counts()
            values = sorted(counts, key=lambda text: (-counts[text], text))
            mapping = proposed_classes(values, {}, labels.ignore_index)
        else:
            mapping = classes_by_text(keys.classes.items())
    known = {text: label for text, label in mapping.items() if label is not None}
    names = {}
    for text, label in known.items():
        if text != str(label):
            names[label] = f"{names[label]}, {text}" if label in names else text
    full = replace(labels, vectors=replace(keys, classes=dict(mapping.items())))
    return Classes(full, names, {str(label): label for label in known.values()} | known, None)


def _chosen(classes: Classes, names: tuple[str, ...]) -> set[int]:
    """The classes that `--classes` names: by numbers, or names.

    Raises:
        TilenetError: The labels have no such class.
    """
    numbers = classes.numbers
    for text in names:
        # A raster's classes may be without names.
        if text in numbers or (classes.background is not None and is_whole(text)):
            continue
        near = difflib.get_close_matches(text, list(numbers), 1, cutoff=0)
        remedy = f"the nearest is {quoted(near[0])}" if near else "it names none: give numbers"
        raise TilenetError(
            f"classes to paint must be some of the labels' ({classes.labels.path}: no "
            f"{quoted(text)}); {remedy}"
        )
    return {numbers[text] if text in numbers else int(text) for text in names}


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet preview",
        description="Write a picture of an image, of any size, under its labels, which are half "
        "transparent in the colours of maps. Not painted are --ignore-index, what lies in no "
        "polygon, and class 0 of label rasters unless --classes names it. The classes are printed "
        "with their colours, and drawn below the picture. Pixels "
        "without data are transparent.",
    )
    parser.add_argument("image", help="raster, or files of one place: R.tif+G.tif+B.tif")
    parser.add_argument("labels", nargs="?", help="label raster, or a file of polygons")
    parser.add_argument("out", help="picture to write: a PNG")
    parser.add_argument(
        "--bands", type=_bands, metavar="R,G,B", help="names or numbers; one of them: grey"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=1024,
        metavar="PX",
        help="larger side of the picture, where the image has more pixels (%(default)s)",
    )
    parser.add_argument(
        "--nodata",
        type=nodata_value,
        help="value without data, none, or collar (default: what the file says)",
    )
    parser.add_argument(
        "--window", type=numbers(int, WINDOW), metavar=WINDOW, help="pixels to show (default: all)"
    )
    parser.add_argument(
        "--stretch",
        type=_stretch,
        default=(2.0, 98.0),
        metavar="LOW,HIGH",
        help="percentiles of each band that become black and white (2,98)",
    )
    parser.add_argument(
        "--opacity",
        type=float,
        default=OPACITY,
        help="of the labels, from 0: invisible to 1: they hide the image (%(default)s)",
    )
    parser.add_argument("--no-legend", action="store_true", help="draw no legend below")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing picture")
    add_labels(parser, choice=True)
    return parser


@command("preview")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    # Where no polygon lies the image is seen as it is.
    vectors = replace(vectors_of(options), background="ignore")
    if not 1 <= options.size <= MOST_PX:
        raise UsageError(f"--size is a number of pixels from 1 to {MOST_PX} ({options.size})")
    if not 0 <= options.opacity <= 1:
        raise UsageError(f"--opacity is a number from 0 to 1 ({options.opacity:g})")
    out, classes, chosen = Path(options.out), None, None
    _check_target(out, options.image, options.labels, overwrite=options.overwrite)
    with Raster(options.image, options.bands, None, options.nodata) as image:
        bands = options.bands or _colour_bands(image)
        window = image.whole
        if options.window is not None:
            window = checked_window(options.window, image.size)
        if options.labels is not None:
            labels = LabelFile(options.labels, options.ignore_index, vectors)
            classes = _classes_of(labels, image)
            if isinstance(options.classes, tuple):
                chosen = _chosen(classes, options.classes)
    label_file = None if classes is None else classes.labels
    thumb = thumbnail(options.image, label_file, options.size, bands, options.nodata, window)
    picture = stretched(thumb.pixels, *options.stretch)
    legend: list[tuple[str, str]] = []
    lines: list[str] = []
    if classes is not None and thumb.labels is not None:
        legend, lines, painted = _legend(classes, chosen, thumb.labels)
        picture = overlaid(picture, thumb.labels, painted, options.opacity)
    picture = rgba(picture, thumb.pixels.valid)
    write_picture(picture, [] if options.no_legend else legend, out)
    height, width = thumb.pixels.valid.shape
    whole = window.height, window.width
    of = "all pixels" if (height, width) == whole else "of {:,} × {:,}".format(*whole)
    print("\n".join([f"{printable(str(out))}: {height} × {width} px, {of}", *lines]))


def _legend(
    classes: Classes, chosen: set[int] | None, labels: NDArray[np.int64]
) -> tuple[list[tuple[str, str]], list[str], NDArray[np.bool_]]:
    """Return classes' names and colours, a line for each class, and a mask of painted pixels."""
    ignore = classes.labels.ignore_index
    counted = labels[labels != ignore]
    _check_labels(counted, classes.labels.path)
    numbers, counts = np.unique(counted, return_counts=True)
    painted = set(numbers.tolist()) - {classes.background} if chosen is None else chosen
    colours = class_colours(int(numbers.max(initial=-1)) + 1)
    legend, rows = [], []
    for label, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        text = f"{label} {one_line(classes.names.get(label, ''))[:MOST_LETTERS]}".strip()
        colour = "#{:02x}{:02x}{:02x}".format(*colours[label])
        rows.append(
            (text, colour if label in painted else "not painted", f"{count / counted.size:7.2%}")
        )
        legend += [(text, colour)] * (label in painted)
    widest = max((len(text) for text, *_ in rows[:MOST_CLASSES]), default=0)
    lines = [f"  {row[0]:<{widest}}  {row[1]:<11}  {row[2]}" for row in rows[:MOST_CLASSES]]
    if len(rows) > MOST_CLASSES:
        lines.append(f"  and {len(rows) - MOST_CLASSES:,} more classes")
    if not legend:
        lines.append(
            "  no labels are painted: class 0 of a raster is painted if --classes names it, "
            f"{ignore} (--ignore-index) never"
        )
    where = np.isin(labels, [*painted.intersection(numbers.tolist())])
    return legend[:MOST_CLASSES], lines, where


def _bands(text: str) -> tuple[int | str, ...]:
    bands = band_names(text)
    if len(bands) not in (1, 3):
        raise ArgumentTypeError(f"three bands make colours and one makes grey ({text})")
    return bands


def _stretch(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low < high <= 100:
        raise ArgumentTypeError(f"two percentiles, 0 ≤ low < high ≤ 100 ({text})")
    return low, high


def _colour_bands(image: Raster) -> BandNames:
    """Return red, green and blue as the file names its bands, else the first three, else one."""
    names = [image.band_colours.get(colour) for colour in ("red", "green", "blue")]
    if None not in names:
        return [band for band in names if band is not None]
    return image.bands[:3] if len(image.bands) >= 3 else image.bands[:1]


def _check_target(out: Path, image: str, labels: str | None, *, overwrite: bool) -> None:
    if out.suffix.lower() != ".png":
        raise TilenetError(f"a preview is a PNG ({out}); give it a name ending in .png")
    sources = [*stacked_paths(image), *([labels] if labels else [])]
    if out.exists() and os.path.realpath(out) in map(os.path.realpath, sources):
        raise TilenetError(f"a preview may not replace what it shows ({out}); choose another name")
    if out.is_dir() or (out.exists() and not overwrite):
        raise TilenetError(
            f"a picture is not overwritten unasked ({out} exists); add --overwrite or another name"
        )


def _check_labels(counted: NDArray[np.int64], path: str) -> None:
    if counted.size and (counted.min() < 0 or counted.max() > MOST_CLASS):
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise TilenetError(
            f"labels are classes from 0 to {MOST_CLASS} ({path}: {wrong}); name that value with "
            "--ignore-index or relabel"
        )
