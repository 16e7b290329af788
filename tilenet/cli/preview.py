"""`tilenet preview`: see an image, with its labels on it, before anything is trained.

Which classes of labels `tilenet preview` paints, and what they are called.
"""

import difflib
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.cli.data_options import (
    WINDOW,
    add_labels,
    band_names,
    nodata_value,
    numbers,
    vectors_of,
)
from tilenet.cli.options import Arguments
from tilenet.data.labels.facts import proposed_classes
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.polygons import VectorLabels
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.vector_keys import is_whole, shown_value, text_of
from tilenet.data.rasters.metadata import class_names, colour_table
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stack import BandNames, stacked_paths
from tilenet.data.thumbnail import LabelFile, Thumbnail, thumbnail
from tilenet.errors import TilenetError, UsageError, printable
from tilenet.geometry.windows import checked_window
from tilenet.mapping.writer import class_colours
from tilenet.report.pictures import (
    Shown,
    coloured,
    drawn,
    lines,
    overlaid,
    rgba,
    stretched,
    with_legend,
)
from tilenet.storage.png import write_png

__all__ = ["Painted", "main", "painted_classes"]


@dataclass(frozen=True)
class Painted:
    """Labels and what is painted of them.

    Attributes:
        labels: Their file; of polygons with classes for all values of the field.
        names: Names of classes, as far as they have some.
        chosen: Classes that are painted; None: all but `background`.
        background: Class that is not painted unless it is chosen; None: there is none.
    """

    labels: LabelFile
    names: dict[int, str]
    chosen: frozenset[int] | None
    background: int | None

    def paints(self, label: int) -> bool:
        """Whether a class is painted."""
        return label != self.background if self.chosen is None else label in self.chosen


def painted_classes(labels: LabelFile, image: Raster, classes: Sequence[str] | None) -> Painted:
    """Look at labels for what `--classes` names: numbers, or names.

    Of label rasters class 0 is taken for the background. Polygons have none: what lies in none of
    them does not count. Where no option says which class a value of their field is, each gets one.

    Raises:
        TilenetError: They cannot be opened, or have no such class.
    """
    opened = open_labels(labels.path, image, labels.ignore_index, labels.vectors)
    with opened:
        if isinstance(opened, Labels):
            names = class_names(opened.raster.dataset)
            chosen = None if classes is None else _of_raster(classes, names, labels.path)
            return Painted(labels, names, chosen, background=0)
        assert isinstance(opened, VectorLabels)
        keys, ignore = opened.keys, labels.ignore_index
        if keys.field is None:
            numbers = {str(keys.burn): keys.burn}
            chosen = None if classes is None else _of_values(classes, numbers, labels.path)
            return Painted(labels, {}, chosen, background=None)
        if keys.classes is None:
            counts = opened.layer.value_counts()
            values = sorted(counts, key=lambda text: (-counts[text], text))
            mapping = proposed_classes(values, {}, ignore)
        else:
            mapping = {text_of(value): label for value, label in keys.classes.items()}
    known = {text: label for text, label in mapping.items() if label is not None}
    names = {}
    for text, label in known.items():
        if text != str(label):
            names[label] = f"{names[label]}, {text}" if label in names else text
    chosen = None if classes is None else _of_values(classes, known, labels.path)
    full = replace(keys, classes=dict(mapping.items()))
    return Painted(replace(labels, vectors=full), names, chosen, background=None)


def _of_raster(classes: Sequence[str], names: dict[int, str], path: str) -> frozenset[int]:
    numbers = {name: label for label, name in names.items()}
    wrong = [text for text in classes if text not in numbers and not is_whole(text)]
    if wrong:
        raise _no_class(wrong[0], list(numbers), path)
    return frozenset(numbers[text] if text in numbers else int(text) for text in classes)


def _of_values(classes: Sequence[str], known: dict[str, int], path: str) -> frozenset[int]:
    """Classes by the value that stands for them, or by their number."""
    numbers = {str(label): label for label in known.values()} | known
    wrong = [text for text in classes if text not in numbers]
    if wrong:
        raise _no_class(wrong[0], list(known), path)
    return frozenset(numbers[text] for text in classes)


def _no_class(text: str, names: list[str], path: str) -> TilenetError:
    near = difflib.get_close_matches(text, names, 1, cutoff=0)
    there = f"the nearest is {shown_value(near[0])}" if near else "it names none: give numbers"
    return TilenetError(
        f"classes to paint must be some of the labels' ({path}: no {shown_value(text)}); {there}"
    )


MOST_PX = 16384  # of a picture's side: 1 GiB of memory
MOST_CLASS = 65535
OPACITY = 0.4


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        _preview(arguments)
    except UsageError as error:
        print(f"tilenet preview: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    return 0


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
        help="of the labels, from 0: none are seen to 1: they hide the image (%(default)s)",
    )
    parser.add_argument("--no-legend", action="store_true", help="draw no legend below")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing picture")
    add_labels(parser, choice=True)
    return parser


def _preview(arguments: list[str]) -> None:
    given = _parser().parse_args(arguments)
    # Where no polygon lies the image is seen as it is.
    vectors = replace(vectors_of(given), background="ignore")
    if not 1 <= given.size <= MOST_PX:
        raise UsageError(f"--size is a number of pixels from 1 to {MOST_PX} ({given.size})")
    if not 0 <= given.opacity <= 1:
        raise UsageError(f"--opacity is a number from 0 to 1 ({given.opacity:g})")
    out = Path(given.out)
    _check_target(out, given.image, given.labels, overwrite=given.overwrite)
    painted = None
    with Raster(given.image, given.bands, None, given.nodata) as image:
        bands = given.bands or _colour_bands(image)
        window = None if given.window is None else checked_window(given.window, image.size)
        palette = _palette(image)
        if given.labels is not None:
            labels = LabelFile(given.labels, given.ignore_index, vectors)
            chosen = None if isinstance(given.classes, dict) else given.classes
            painted = painted_classes(labels, image, chosen)
    seen = thumbnail(
        given.image,
        given.size,
        bands,
        given.nodata,
        window=window,
        labels=None if painted is None else painted.labels,
        means=palette is None,
    )
    if palette is None:
        picture = stretched(seen.pixels, *given.stretch)
    else:
        picture = coloured(seen.pixels.values[0], palette)
    classes: list[Shown] = []
    if painted is not None and seen.labels is not None:
        _check_labels(seen.labels, given.labels, given.ignore_index)
        classes = _shown(painted, seen.labels)
        known = np.isin(seen.labels, [one.label for one in classes if one.colour is not None])
        picture = overlaid(picture, seen.labels, known, given.opacity)
    strip = None if given.no_legend else drawn(classes, picture.shape[2])
    write_png(with_legend(rgba(picture, seen.pixels.valid), strip), out)
    _say(out, seen, painted, classes)


def _shown(painted: Painted, labels: NDArray[np.int64]) -> list[Shown]:
    """The classes of a picture."""
    counted = labels[labels != painted.labels.ignore_index]
    numbers, counts = np.unique(counted, return_counts=True)
    colours = class_colours(int(numbers.max()) + 1) if len(numbers) else []
    return [
        Shown(
            label,
            painted.names.get(label, ""),
            colours[label][:3] if painted.paints(label) else None,
            count / counted.size,
        )
        for label, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]


def _say(out: Path, seen: Thumbnail, painted: Painted | None, classes: list[Shown]) -> None:
    height, width = seen.size
    whole = seen.window.height, seen.window.width
    of = "all pixels" if seen.size == whole else "of {:,} × {:,}".format(*whole)
    print(f"{printable(str(out))}: {height} × {width} px, {of}")
    for line in lines(classes):
        print(line)
    if painted is not None and all(one.colour is None for one in classes):
        print(
            "  no labels are seen: class 0 of a raster is painted if --classes names it, "
            f"{painted.labels.ignore_index} (--ignore-index) never"
        )


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
    """Red, green and blue by what the file says of its bands, else the first three, else one."""
    names = [image.band_colours.get(colour) for colour in ("red", "green", "blue")]
    if None not in names:
        return [band for band in names if band is not None]
    return image.bands[:3] if len(image.bands) >= 3 else image.bands[:1]


def _palette(image: Raster) -> NDArray[np.uint8] | None:
    """Colours of the numbers of an image's only band; None: it holds no such numbers."""
    if len(image.bands) > 1 or len(image.stack.datasets) > 1:
        return None
    return colour_table(image.dataset, image.bands[0])


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
    if not out.absolute().parent.is_dir():
        raise TilenetError(
            f"a picture needs an existing directory ({out.absolute().parent} is not one); make it "
            "first"
        )


def _check_labels(labels: NDArray[np.int64], path: str, ignore: int) -> None:
    counted = labels[labels != ignore]
    if counted.size and (counted.min() < 0 or counted.max() > MOST_CLASS):
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise TilenetError(
            f"labels are classes from 0 to {MOST_CLASS} ({path}: {wrong}); name that value with "
            "--ignore-index or relabel"
        )
