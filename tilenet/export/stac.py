"""A STAC item of an exported network, by the extension for machine-learning models (MLM)."""

import re
from typing import Any

import torch

from tilenet.export.description import Description

__all__ = ["stac_item"]

MLM = "https://stac-extensions.github.io/mlm/v1.5.2/schema.json"
ARTIFACTS = {"pt2": "torch.export.save", "onnx": "torch.onnx.export"}


def stac_item(about: Description) -> dict[str, Any]:
    """The item as plain values; its asset is the file, which lies next to it."""
    stem, _, ending = about.file.rpartition(".")
    name = f"tilenet-{_letters(stem)}".rstrip("-._")
    bands = _bands(about)
    return {
        "type": "Feature",
        "stac_version": "1.1.0",
        "stac_extensions": [MLM],
        "id": name,
        "geometry": None,
        "properties": {
            "datetime": about.trained,
            "bands": [{"name": band} for band in bands],
            **_model(about, name, bands),
            **_of_ours(about),
        },
        "assets": {
            "model": {
                "href": f"./{about.file}",
                "title": f"{about.origin.architecture} trained by tilenet",
                "type": "application/octet-stream; framework=pytorch",
                "roles": ["mlm:model"],
                "mlm:artifact_type": ARTIFACTS[ending],
            }
        },
        "links": [],
    }


def _model(about: Description, name: str, bands: list[str]) -> dict[str, Any]:
    record = about.record
    tasks = ["regression" if record.task == "regression" else "semantic-segmentation"]
    open_sizes = about.any_size
    images, taken = (-1, -1) if open_sizes else (1, about.tile.px)
    given = -1 if open_sizes else taken - 2 * record.context().offset_px
    classes = [
        {"value": number, "name": _letters(one) or str(number), "description": one or str(number)}
        for number, one in enumerate(record.classes)
    ]
    return {
        "mlm:name": name,
        "mlm:architecture": about.origin.architecture,
        "mlm:tasks": tasks,
        "mlm:framework": "PyTorch",
        "mlm:framework_version": torch.__version__,
        "mlm:total_parameters": about.num_parameters,
        "mlm:input": [
            {
                "name": "pixels as files hold them: mean and deviation are taken off inside",
                "bands": bands,
                "input": {
                    "shape": [images, len(bands), taken, taken],
                    "dim_order": ["batch", "bands", "height", "width"],
                    "data_type": about.dtype,
                },
                "value_scaling": None,
            }
        ],
        "mlm:output": [
            {
                "name": about.output if classes and tasks != ["regression"] else "values",
                "tasks": tasks,
                "result": {
                    "shape": [images, len(classes), given, given],
                    "dim_order": ["batch", "class", "height", "width"],
                    "data_type": about.dtype,
                },
                "classification:classes": [] if tasks == ["regression"] else classes,
            }
        ],
    }


def _of_ours(about: Description) -> dict[str, Any]:
    """What a program needs that cuts an image into windows, and fills in pixels without data."""
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


def _bands(about: Description) -> list[str]:
    """Their names, or numbers where they have none."""
    return [str(band) for band in about.record.wanted_bands]


def _letters(text: str) -> str:
    """A text of the letters that names of models and classes have."""
    return re.sub(r"[^0-9A-Za-z_-]+", "-", text)
