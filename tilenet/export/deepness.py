"""Properties of an .onnx file from which Deepness, a plugin of QGIS, fills in its form."""

import json
from typing import Any

from tilenet.export.description import Description


def deepness_properties(about: Description) -> dict[str, str]:
    """Values as JSON by Deepness' names."""
    record = about.record
    segments = record.task != "regression"
    values: dict[str, Any] = {
        "model_type": "Segmentor" if segments else "Regressor",
        "class_names": {str(number): name for number, name in enumerate(record.classes)},
        "tiles_size": about.tile.px,  # its documentation's name
        "tile_size": about.tile.px,  # the name that it reads
        "tiles_overlap": about.tile.overlap_percent,
        # It divides pixels by 255, always, and then by this: they keep their values.
        "standardization_mean": [0.0] * len(record.bands),
        "standardization_std": [1 / 255] * len(record.bands),
    }
    if segments:
        values["seg_thresh"] = 0.0  # the largest score wins, however small
    if about.origin.pixel_m is not None:
        values["resolution"] = 100 * about.origin.pixel_m
    return {name: json.dumps(value) for name, value in values.items()}
