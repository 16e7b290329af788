"""What labels are, and how they lie to their image, before they are read.

The values of a field of polygons, how often they occur, and a class for each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tilenet.data.labels.raster import Labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys, is_whole, text_of
from tilenet.data.rasters.extent import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.metadata import class_names
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window

if TYPE_CHECKING:
    from rasterio.crs import CRS

__all__ = ["FieldValues", "LabelFacts", "field_values", "label_facts", "proposed_classes"]

MOST_SHOWN = 50
MOST_AS_THEY_ARE = 254  # larger whole numbers are codes or years rather than classes
NO_VALUE = ("null", "")


@dataclass(frozen=True)
class FieldValues:
    """Values of a field in a whole layer.

    Attributes:
        field: Its name.
        features: Number of features of the layer.
        distinct: Number of different values.
        counts: Number of features of each of the most frequent values.
        classes: Their classes: what the options say, else a proposal; None: it does not count.
        missing: Those of them for which the options name no class, where they name some.
    """

    field: str
    features: int
    distinct: int
    counts: dict[str, int]
    classes: dict[str, int | None]
    missing: tuple[str, ...]


def field_values(counts: Mapping[str, int], keys: VectorKeys, ignore_index: int) -> FieldValues:
    """Sum up the counts of all values of `keys.field`."""
    assert keys.field is not None
    order = sorted(counts, key=lambda text: (-counts[text], text))
    given = {text_of(value): label for value, label in (keys.classes or {}).items()}
    proposed = proposed_classes(order, given, ignore_index)
    shown = order[:MOST_SHOWN]
    return FieldValues(
        field=keys.field,
        features=sum(counts.values()),
        distinct=len(order),
        counts={text: counts[text] for text in shown},
        classes={text: proposed[text] for text in shown},
        missing=tuple(text for text in shown if keys.classes is not None and text not in given),
    )


def proposed_classes(
    values: Iterable[str], given: Mapping[str, int | None], ignore_index: int
) -> dict[str, int | None]:
    """A class for each value: small whole numbers as they are, else from 1 on in their order.

    Args:
        values: Values of `text_of`.
        given: Classes that some of them have.
        ignore_index: Label of pixels that do not count; no class.
    """
    values = list(values)
    named = [text for text in values if text not in NO_VALUE and text not in given]
    numbers = [int(text) if is_whole(text) else -1 for text in named]
    # One that is 0 everywhere names no class: it would be what lies in no polygon.
    if numbers and min(numbers) >= 0 < max(numbers) <= MOST_AS_THEY_ARE:
        found: dict[str, int | None] = dict(zip(named, numbers, strict=True))
    else:
        taken = {*given.values(), ignore_index}
        free = (label for label in range(1, len(named) + len(taken) + 1) if label not in taken)
        found = dict(zip(named, free, strict=False))
    found = {text: None if label == ignore_index else label for text, label in found.items()}
    return {text: given.get(text, found.get(text)) for text in values}


MOST_FIELDS = 10  # that are named


@dataclass(frozen=True)
class LabelFacts:
    """Labels, in words.

    Attributes:
        kind: Pixels or polygons, and how many.
        crs: Its name; None: there is none.
        grid: How they get to the image's pixels.
        bounds: Where they lie, in the image's CRS; None: unknown, or taken to be the image's.
        exact: Whether these are the labels' own bounds, not a little wider ones from another CRS.
        share: Share of the image's rectangle that lies within these.
        share_inside: Share of the labels' rectangle that lies within the image's.
        names: Names of classes, where a raster gives them.
        values: Those of the field that holds the classes of polygons.
    """

    kind: str
    crs: str | None
    grid: str
    bounds: Bounds | None
    exact: bool
    share: float | None
    share_inside: float | None
    names: dict[int, str] = field(default_factory=dict)
    values: FieldValues | None = None


def label_facts(labels: LabelSource, image: Raster) -> LabelFacts:
    """Say what open labels are."""
    if isinstance(labels, Labels):
        raster = labels.raster
        rows, cols = raster.size
        kind = f"raster of {rows:,} × {cols:,} px, {raster.dtype}"
        placed = raster.crs is not None and image.crs is not None
        there = bounds_of(raster.transform, Window(0, 0, rows, cols)) if placed else None
        facts = _lying(kind, raster.crs, _grid(labels, image), there, image)
        return replace(facts, names=class_names(raster.dataset))
    # Not at the top: see `label_files`.
    from tilenet.data.labels.polygons import VectorLabels

    assert isinstance(labels, VectorLabels)
    layer, keys = labels.layer, labels.keys
    number = f"{layer.num_features:,} polygons" if layer.num_features >= 0 else "polygons"
    if layer.num_features == 1:
        number = "1 polygon"
    shown = ", ".join(layer.fields[:MOST_FIELDS])
    more = f" and {len(layer.fields) - MOST_FIELDS} more" * (len(layer.fields) > MOST_FIELDS)
    kind = f"{number} of layer {layer.name}" + (f" (fields: {shown}{more})" if shown else "")
    chosen = f"class {keys.burn}" if keys.field is None else f"classes from field {keys.field}"
    grid = f"burned on the image's grid as {chosen}"
    facts = _lying(kind, layer.crs, grid, layer.bounds, image)
    if keys.field is None:
        return facts
    counts = layer.value_counts()
    return replace(facts, values=field_values(counts, keys, labels.ignore_index))


def _grid(labels: Labels, image: Raster) -> str:
    if labels.resampled:
        return "another grid than the image's: resampled to it (nearest)"
    finer = f"{labels.factor} × {labels.factor} label pixels per pixel, the most frequent class"
    if labels.raster.crs is None or image.crs is None:
        where = "taken to lie on the image's grid, since a file has no CRS"
    else:
        where = "the image's own grid"
    return where if labels.factor == 1 else f"{where}; {finer}"


def _lying(
    kind: str, crs: "CRS | None", grid: str, there: Bounds | None, image: Raster
) -> LabelFacts:
    own = bounds_of(image.transform, image.whole)
    # An empty layer lies nowhere.
    moved = bounds_in(there, crs, image.crs) if there and there.finite else None
    share = inside = None
    if moved is not None:
        width = min(own.right, moved.right) - max(own.left, moved.left)
        height = min(own.top, moved.top) - max(own.bottom, moved.bottom)
        common = max(width, 0.0) * max(height, 0.0)
        share = common / _area(own)
        inside = common / _area(moved) if _area(moved) else None
    name = crs_name(crs) if crs else None
    return LabelFacts(kind, name, grid, moved, moved == there, share, inside)


def _area(bounds: Bounds) -> float:
    return (bounds.right - bounds.left) * (bounds.top - bounds.bottom)
