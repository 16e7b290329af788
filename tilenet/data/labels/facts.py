"""Facts about labels and their place on the image, before they are read."""

from typing import TYPE_CHECKING, Any

from tilenet.data.labels.field_values import field_values
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.raster import Raster
from tilenet.errors import and_more

if TYPE_CHECKING:
    from rasterio.crs import CRS

MOST_NAMES = 4096  # of classes
MOST_FIELDS = 10  # that are named


def class_names(dataset: Any) -> dict[int, str]:
    """Names by class, from the tags `class_0`, `class_1` … of a dataset's first band.

    That is how the maps of `tilenet predict` hold them.
    """
    names = {}
    for tag, name in dataset.tags(1).items():
        number = str(tag).removeprefix("class_")
        if number != tag and number.isdecimal() and int(number) < MOST_NAMES:
            names[int(number)] = str(name)
    return dict(sorted(names.items()))


def label_facts(labels: LabelSource, image: Raster) -> dict[str, Any]:
    """Facts about open labels by name, as `tilenet info --json` prints them."""
    if isinstance(labels, Labels):
        raster = labels.raster
        rows, cols = raster.size
        placed = raster.crs is not None and image.crs is not None
        bounds = bounds_of(raster.transform, raster.whole) if placed else None
        return {
            "kind": f"raster of {rows:,} × {cols:,} px, {raster.dtype}",
            "grid": _grid(labels, image),
            **_lying(raster.crs, bounds, image),
            "names": class_names(raster.dataset),
            "values": None,
        }
    # Not at the top: see `label_files`.
    from tilenet.data.labels.polygons import VectorLabels

    assert isinstance(labels, VectorLabels)
    layer, keys = labels.layer, labels.keys
    number = f"{layer.num_features:,} " * (layer.num_features >= 0)
    chosen = f"class {keys.burn}" if keys.field is None else f"classes from field {keys.field}"
    counts = None if keys.field is None else layer.value_counts()
    return {
        "kind": f"{number}polygon{'s' * (layer.num_features != 1)} of layer {layer.name}"
        + f" (fields: {and_more(layer.fields, MOST_FIELDS)})" * bool(layer.fields),
        "grid": f"burned on the image's grid as {chosen}",
        **_lying(layer.crs, layer.bounds, image),
        "names": {},
        "values": None if counts is None else field_values(counts, keys, labels.ignore_index),
    }


def _grid(labels: Labels, image: Raster) -> str:
    if labels.resampled:
        return "another grid than the image's: resampled to it (nearest)"
    finer = f"{labels.factor} × {labels.factor} label pixels per pixel, the most frequent class"
    if labels.raster.crs is None or image.crs is None:
        where = "taken to lie on the image's grid, since a file has no CRS"
    else:
        where = "the image's own grid"
    return where if labels.factor == 1 else f"{where}; {finer}"


def _lying(crs: "CRS | None", bounds: Bounds | None, image: Raster) -> dict[str, Any]:
    """Bounds in the image's CRS, None where unknown or taken to be the image's.

    `share` is that of the image's rectangle which lies within these bounds.
    """
    own = bounds_of(image.transform, image.whole)
    # An empty layer lies nowhere.
    moved = bounds_in(bounds, crs, image.crs) if bounds and bounds.finite else None
    share = None
    if moved is not None:
        width = min(own.right, moved.right) - max(own.left, moved.left)
        height = min(own.top, moved.top) - max(own.bottom, moved.bottom)
        area = (own.right - own.left) * (own.top - own.bottom)
        share = max(width, 0.0) * max(height, 0.0) / area
    return {"crs": crs_name(crs) if crs else None, "bounds": moved, "share": share}
