"""`tilenet preview`: see an image, with its labels on it, before anything is trained."""

import os
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.commands.command_line import Arguments
from tilenet.commands.label_arguments import add_labels, vectors_of
from tilenet.commands.raster_arguments import band_names, numbers
from tilenet.errors import TilenetError, UsageError, printable
from tilenet.files.bands import BandNames
from tilenet.files.png import write_png
from tilenet.files.raster import Raster
from tilenet.files.stack import stacked_paths
from tilenet.files.thumbnail import LabelFile, thumbnail
from tilenet.geometry.bbox import checked_window
from tilenet.report.pictures import overlaid, rgba, stretched

__all__ = ["main"]

MOST_PX = 16384  # of a picture's side: 1 GiB of memory
MOST_CLASS = 65535
WINDOW = "ROW,COL,HEIGHT,WIDTH"


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
        description="Write a picture of an image, of any size, with its labels half transparent "
        "in the colours of maps, but for --ignore-index and what lies in no polygon. Pixels "
        "without data are transparent.",
    )
    parser.add_argument("image", help="raster, or files on one grid: R.tif+G.tif+B.tif")
    parser.add_argument("labels", nargs="?", help="label raster, or a file of polygons")
    parser.add_argument("out", help="picture to write: a PNG")
    parser.add_argument(
        "--bands", type=_bands, metavar="R,G,B", help="names or numbers; one of them: grey"
    )
    parser.add_argument(
        "--size", type=int, default=1024, metavar="PX", help="largest side (%(default)s)"
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
    parser.add_argument("--overwrite", action="store_true", help="replace an existing picture")
    add_labels(parser)
    return parser


def _preview(arguments: list[str]) -> None:
    given = _parser().parse_args(arguments)
    # Beside polygons the image is seen as it is.
    vectors = replace(vectors_of(given), background="ignore")
    if not 1 <= given.size <= MOST_PX:
        raise UsageError(f"--size is a number of pixels from 1 to {MOST_PX} ({given.size})")
    out = Path(given.out)
    _check_target(out, given.image, given.labels, overwrite=given.overwrite)
    with Raster(given.image, given.bands) as image:
        bands = given.bands or _colour_bands(image)
        window = None if given.window is None else checked_window(given.window, image.size)
    labels = None
    if given.labels is not None:
        labels = LabelFile(given.labels, given.ignore_index, vectors)
    seen = thumbnail(given.image, given.size, bands, window=window, labels=labels)
    picture = stretched(seen.pixels, *given.stretch)
    if seen.labels is not None:
        _check_labels(seen.labels, given.labels, given.ignore_index)
        picture = overlaid(picture, seen.labels, given.ignore_index)
    write_png(rgba(picture, seen.pixels.valid), out)
    height, width = picture.shape[1:]
    print(
        f"{printable(str(out))}: {height} × {width} px, "
        + (f"one of {seen.factor} × {seen.factor} pixels" if seen.factor > 1 else "all pixels")
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
            f"a picture needs an existing directory ({out.absolute().parent} is none); make it "
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
