"""The values of a field of polygons, how often they occur, and a class for each."""

from collections.abc import Iterable, Mapping
from typing import Any

from tilenet.data.labels.vector_keys import VectorKeys, classes_by_text, is_whole

MOST_SHOWN = 50


MOST_AS_THEY_ARE = 254  # larger whole numbers are codes or years rather than classes


NO_VALUE = ("null", "")


def field_values(counts: Mapping[str, int], keys: VectorKeys, ignore_index: int) -> dict[str, Any]:
    """Values of `keys.field` in a whole layer, and their classes; `missing` lack a class there.

    Args:
        counts: Number of features of each value; the most frequent values are listed.
    """
    order = sorted(counts, key=lambda text: (-counts[text], text))
    classes = classes_by_text((keys.classes or {}).items())
    proposed = proposed_classes(order, classes, ignore_index)
    listed = order[:MOST_SHOWN]
    return {
        "field": keys.field,
        "features": sum(counts.values()),
        "distinct": len(order),
        "counts": {text: counts[text] for text in listed},
        "classes": {text: proposed[text] for text in listed},
        "missing": [text for text in listed if keys.classes is not None and text not in classes],
    }


def proposed_classes(
    values: Iterable[str], classes: Mapping[str, int | None], ignore_index: int
) -> dict[str, int | None]:
    """A class for each value: small whole numbers as they are, else from 1 on in their order.

    Args:
        values: Values of `text_of`.
    """
    values = list(values)
    unassigned = [text for text in values if text not in NO_VALUE and text not in classes]
    numbers = [int(text) if is_whole(text) else -1 for text in unassigned]
    # A field that is 0 everywhere names no class: 0 is the class of pixels in no polygon.
    if numbers and min(numbers) >= 0 < max(numbers) <= MOST_AS_THEY_ARE:
        proposed: dict[str, int | None] = dict(zip(unassigned, numbers, strict=True))
    else:
        used = {*classes.values(), ignore_index}
        free = (label for label in range(1, len(unassigned) + len(used) + 1) if label not in used)
        proposed = dict(zip(unassigned, free, strict=False))
    proposed = {text: None if label == ignore_index else label for text, label in proposed.items()}
    return {text: classes.get(text, proposed.get(text)) for text in values}
