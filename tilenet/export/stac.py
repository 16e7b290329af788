"""A STAC item of an exported network, by the extension for machine-learning models (MLM)."""

import re
from typing import Any

import torch

from tilenet.export.description import Description
from tilenet.storage.network_json import NetworkRecord

MLM = "https://stac-extensions.github.io/mlm/v1.5.2/schema.json"
# Kinds of files: the framework that reads them, and the function that writes them.
ARTIFACTS = {"pt2": ("pytorch", "torch.export.save"), "onnx": ("onnx", "torch.onnx.export")}


def stac_item(about: Description) -> dict[str, Any]:
    """The item as plain values; its asset is the exported file in the same folder."""
    stem, _, ending = about.file.rpartition(".")
    framework, artifact_type = ARTIFACTS[ending]
    name = f"tilenet-{_letters(stem)}".rstrip("-._")
    bands = [str(band) for band in about.record.wanted_bands]
    # MLM looks for bands in the item's properties, STAC itself in the asset.
    entries = [{"name": band} for band in bands]
    return {
        "type": "Feature",
        "stac_version": "1.1.0",
        "stac_extensions": [MLM],
        "id": name,
        "geometry": None,
        "properties": {
            "datetime": about.trained,
            "bands": entries,
            **_model(about, name, bands),
            **_own_properties(about),
        },
        "assets": {
            "model": {
                "href": f"./{about.file}",
                "title": f"{about.origin.architecture} trained by tilenet",
                "type": f"application/octet-stream; framework={framework}",
                "roles": ["mlm:model"],
                "bands": entries,
                "mlm:artifact_type": artifact_type,
            }
        },
        "links": [],
    }


def _model(about: Description, name: str, bands: list[str]) -> dict[str, Any]:
    """The properties of MLM."""
    record = about.record
    is_regression = record.task == "regression"
    tasks = ["regression" if is_regression else "semantic-segmentation"]
    images, in_px, out_px = 1, about.tile.px, about.tile.px - 2 * record.context().offset_px
    if about.least_px is not None:
        images = in_px = out_px = -1  # MLM's sign for any number
    classes = [
        {"value": number, "name": name, "description": text or str(number)}
        for number, (name, text) in enumerate(zip(_names(record), record.classes, strict=True))
    ]
    return {
        "mlm:name": name,
        "mlm:architecture": about.origin.architecture,
        "mlm:tasks": tasks,
        "mlm:framework": "PyTorch",  # which trained it, whatever runs it
        "mlm:framework_version": torch.__version__,
        "mlm:total_parameters": about.num_parameters,
        "mlm:input": [
            {
                "name": "pixels as files hold them: mean and deviation are taken off inside",
                "bands": bands,
                "input": {
                    "shape": [images, len(bands), in_px, in_px],
                    "dim_order": ["batch", "bands", "height", "width"],
                    "data_type": about.dtype,
                },
                "value_scaling": None,
            }
        ],
        "mlm:output": [
            {
                "name": "values" if is_regression else about.output,
                "tasks": tasks,
                "result": {
                    "shape": [images, len(classes), out_px, out_px],
                    "dim_order": ["batch", "class", "height", "width"],
                    "data_type": about.dtype,
                },
                "classification:classes": [] if is_regression else classes,
            }
        ],
    }


def _own_properties(about: Description) -> dict[str, Any]:
    """Properties for programs that cut an image into windows and fill in pixels without data."""
    record, context = about.record, about.record.context()
    values: dict[str, Any] = {
        "tilenet:halo_px": context.halo_px,
        "tilenet:alignment_px": context.alignment_px,
        "tilenet:offset_px": context.offset_px,
        "tilenet:tile_px": about.tile.px,
        "tilenet:overlap_percent": about.tile.overlap_percent,
        "tilenet:mean": list(record.mean),
        "tilenet:std": list(record.std),
    }
    if about.origin.pixel_m is not None:
        values["gsd"] = about.origin.pixel_m
    return values


def _names(record: NetworkRecord) -> list[str]:
    """Names of the classes for the item, unlike each other."""
    names: list[str] = []
    for number, text in enumerate(record.classes):
        name = _letters(text).strip("-_") or str(number)
        while name in names:
            name = f"{name}-{number}"
        names.append(name)
    return names


def _letters(text: str) -> str:
    """Replace characters that names of models and classes may not contain by hyphens."""
    return re.sub(r"[^0-9A-Za-z_-]+", "-", text)
