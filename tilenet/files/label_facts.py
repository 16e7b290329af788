"""What labels are, and how they lie to their image, before they are read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilenet.files.extents import Bounds, bounds_in, bounds_of, crs_name
from tilenet.files.label_source import LabelSource
from tilenet.files.labels import Labels
from tilenet.files.raster import Raster
from tilenet.geometry.tiles import Window

if TYPE_CHECKING:
    from rasterio.crs import CRS

__all__ = ["LabelFacts", "label_facts"]

MOST_FIELDS = 10  # that are named


@dataclass(frozen=True)
class LabelFacts:
    """Labels, in words.

    Attributes:
        kind: Pixels or polygons, and how many.
        crs: Its name; None: there is none.
        grid: How they get to the image's pixels.
        bounds: Where they lie, in the image's CRS; None: unknown, or taken to be the image's.
        share: Of the image's rectangle, how much lies within these.
    """

    kind: str
    crs: str | None
    grid: str
    bounds: Bounds | None
    share: float | None


def label_facts(labels: LabelSource, image: Raster) -> LabelFacts:
    """Say what open labels are."""
    if isinstance(labels, Labels):
        raster = labels.raster
        rows, cols = raster.size
        kind = f"raster of {rows} × {cols} px, {raster.dtype}"
        placed = raster.crs is not None and image.crs is not None
        there = bounds_of(raster.transform, Window(0, 0, rows, cols)) if placed else None
        return _lying(kind, raster.crs, _grid(labels, image), there, image)
    # Not at the top: see `label_files`.
    from tilenet.files.vector_labels import VectorLabels

    assert isinstance(labels, VectorLabels)
    layer = labels.layer
    number = f"{layer.num_features:,} polygons" if layer.num_features >= 0 else "polygons"
    shown = ", ".join(layer.fields[:MOST_FIELDS])
    more = f" and {len(layer.fields) - MOST_FIELDS} more" * (len(layer.fields) > MOST_FIELDS)
    kind = f"{number} of layer {layer.name}" + (f" ({shown}{more})" if shown else "")
    field = labels.keys.field
    chosen = f"class {labels.keys.burn}" if field is None else f"classes from field {field}"
    grid = f"burned on the image's grid as {chosen}"
    return _lying(kind, layer.crs, grid, layer.bounds, image)


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
    moved = None if there is None else bounds_in(there, crs, image.crs)
    share = None
    if moved is not None:
        width = min(own.right, moved.right) - max(own.left, moved.left)
        height = min(own.top, moved.top) - max(own.bottom, moved.bottom)
        whole = (own.right - own.left) * (own.top - own.bottom)
        share = max(width, 0.0) * max(height, 0.0) / whole
    return LabelFacts(kind, crs_name(crs) if crs else None, grid, moved, share)
