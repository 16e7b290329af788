"""Which classes of labels `tilenet preview` paints, and what they are called."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilenet.errors import TilenetError
from tilenet.files.beyond_pixels import class_names
from tilenet.files.field_values import proposed_classes
from tilenet.files.label_files import open_labels
from tilenet.files.labels import Labels
from tilenet.files.raster import Raster
from tilenet.files.thumbnail import LabelFile
from tilenet.files.vector_keys import is_whole, shown_value, text_of
from tilenet.files.vector_labels import VectorLabels

__all__ = ["Painted", "painted_classes"]


@dataclass(frozen=True)
class Painted:
    """Labels and what is painted of them.

    Attributes:
        labels: Their file; of polygons with classes for all values of the field.
        names: Of classes, as far as they have some.
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
