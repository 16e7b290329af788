"""`tilenet.evaluate`: scores of a map of classes or numbers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import TilenetError, UsageError, printable
from tilenet.mapping.evaluate import confusion_matrix, sum_errors
from tilenet.mapping.map_facts import holds_numbers, read_class_names, read_unit
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.scores import number_scores, scores

MOST_LETTERS = 40  # longer class names are cut in the table


@dataclass(frozen=True, repr=False)
class Scores:
    """Agreement of a map with labels, over all labelled pixels with data in the map.

    Attributes:
        accuracy: Share of the pixels with the label as their class in the map.
        mean_iou: Mean of `iou` over the classes that occur.
        mean_f1: Mean of `f1` over the classes that occur.
        iou: Per class |labelled ∩ mapped| / |labelled ∪ mapped|; None: the class does not occur.
        f1: Per class 2·|labelled ∩ mapped| / (|labelled| + |mapped|); None as in `iou`.
        label_pixels: Labelled pixels per class.
        map_pixels: Mapped pixels per class.
        num_pixels: Labelled pixels with data in the map.
        num_unmapped: Labelled pixels where the map has no data; they do not count.
        confusion: Pixels by label (rows) and class in the map (columns).
        classes: Names of the classes that the map names.
    """

    accuracy: float
    mean_iou: float
    mean_f1: float
    iou: list[float | None]
    f1: list[float | None]
    label_pixels: list[int]
    map_pixels: list[int]
    num_pixels: int
    num_unmapped: int
    confusion: list[list[int]]
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"<Scores mean_iou: {self.mean_iou:.4f}, mean_f1: {self.mean_f1:.4f}, accuracy: "
            f"{self.accuracy:.4f}, pixels: {self.num_pixels:,}>"
        )

    def __str__(self) -> str:
        names = [_name(index, self.classes) for index in range(len(self.iou))]
        wide = max(5, *map(len, names))
        lines = [f"{'class':<{wide}}      IoU       F1    labelled      mapped"]
        for index, (iou, f1) in enumerate(zip(self.iou, self.f1, strict=True)):
            score = f"{iou:8.4f} {f1:8.4f}" if iou is not None else f"{'–':>8} {'–':>8}"
            labelled, mapped = self.label_pixels[index], self.map_pixels[index]
            lines.append(f"{names[index]:<{wide}} {score} {labelled:11,} {mapped:11,}")
        lines.append(f"{'mean':<{wide}} {self.mean_iou:8.4f} {self.mean_f1:8.4f}")
        lines.append(f"accuracy {self.accuracy:.4f} of {self.num_pixels:,} labelled pixels")
        if self.num_unmapped:
            lines.append(
                f"{self.num_unmapped:,} labelled pixels are nodata in the map and do not count"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, repr=False)
class NumberScores:
    """Agreement of a map of numbers with labels, over all labelled pixels with data in the map.

    Attributes:
        rmse: Root of the mean square of the errors, map less label.
        mae: Mean of their absolute values.
        bias: Mean of the errors.
        r2: 1 − Σ error² / Σ (label − mean label)²; None: all labels are the same number.
        num_pixels: Labelled pixels with data in the map.
        num_unmapped: Labelled pixels where the map has no data; they do not count.
        unit: Unit of the map's numbers; None: the map names none.
    """

    rmse: float
    mae: float
    bias: float
    r2: float | None
    num_pixels: int
    num_unmapped: int
    unit: str | None

    def __repr__(self) -> str:
        return f"<NumberScores {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        unit = "" if self.unit is None else f" {printable(self.unit)}"
        r2 = "–" if self.r2 is None else f"{self.r2:.4f}"
        text = (
            f"RMSE {self.rmse:.6g}{unit}, MAE {self.mae:.6g}{unit}, bias {self.bias:.6g}{unit}, "
            f"R² {r2}, of {self.num_pixels:,} labelled pixels"
        )
        if self.num_unmapped:
            text += (
                f"\n{self.num_unmapped:,} labelled pixels are nodata in the map and do not count"
            )
        return text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def evaluate(
    map_: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    *,
    ignore_index: int = 255,
    vectors: Mapping[str, Any] | VectorKeys | None = None,
    window: tuple[int, ...] | None = None,
    watchdog: Watchdog = NEVER,
) -> Scores | NumberScores:
    """Compare a map of classes or numbers with labels. Not collective: call it on one rank.

        keys = {"field": "kind", "classes": {"road": 1}}
        tilenet.evaluate("map.tif", "roads.gpkg", vectors=keys).mean_iou

    Args:
        map_: A map written by `tilenet.predict`.
        labels: A raster on any grid and in any CRS, or polygons; for a map of numbers a raster on
            the map's grid. Labels outside of the map do not count.
        ignore_index: Label that does not count.
        vectors: Keys to burn polygons: `field`, `classes`, `layer`, `crs`, `all_touched`, as
            in run files.
        window: Row, column, height and width of the part of the map that is scored; None: all.
        watchdog: Armed for each block of pixels.

    Raises:
        TilenetError: A file cannot be read, map and labels do not overlap, the window is not inside
            of the map, keys of polygons are not understood or contradict one another, or no pixel
            with data in the map is labelled.
    """
    keys = _read_keys(vectors) if isinstance(vectors, Mapping) else vectors
    if keys is not None:
        keys.check_alone()
    path, truth = os.fspath(map_), os.fspath(labels)
    if holds_numbers(path):
        if ignore_index != 255 or keys not in (None, VectorKeys()):
            raise TilenetError(
                f"labels of a map of numbers are numbers, which have no classes ({path}: one band "
                "of floats); leave ignore_index and what polygons mean out"
            )
        errors = number_scores(*sum_errors(path, truth, watchdog, window))
        return NumberScores(**errors, unit=read_unit(path))
    names = read_class_names(path)
    if 0 <= ignore_index < len(names) and names[ignore_index]:
        raise TilenetError(
            f"ignore_index may not be a class (ignore_index: {ignore_index}, {path}: classes 0 to "
            f"{len(names) - 1}); name another number, with --ignore-index"
        )
    # Other programs list 256 names, most of them empty.
    named = max((number for number, name in enumerate(names, start=1) if name), default=0)
    all_named = named > 1 and all(names[:named])
    matrix = confusion_matrix(
        path, truth, ignore_index, keys, watchdog, window, named, all_named=all_named
    )
    return Scores(**scores(matrix), classes=names)


def _read_keys(keys: Mapping[str, Any]) -> VectorKeys:
    # Not at the top: the command has no dictionary of keys, and starts without a parser.
    from tilenet.training.config.read import read_vector_keys

    try:
        return read_vector_keys(keys)
    except UsageError as error:
        raise TilenetError(str(error)) from None


def _name(index: int, names: Sequence[str]) -> str:
    """A class's number and, if the map names it, its name."""
    name = names[index] if index < len(names) else ""
    if name in ("", str(index)):
        return str(index)
    return printable(f"{index} {name if len(name) <= MOST_LETTERS else f'{name[:MOST_LETTERS]}…'}")
