"""STAC item collections as lists of images: `items.json#red+nir`, one image per item.

An item collection is GeoJSON; its features, the items, name files, their assets. Keys of assets
stand after the #; plus signs stack their files. No address is asked here.
"""

import os
from pathlib import Path
from typing import Any

from tilenet.data.lists.image_list import ImageList, listed
from tilenet.data.lists.image_patterns import is_items
from tilenet.errors import TilenetError
from tilenet.storage.strict_json import parsed_json


def read_items(images: str, labels: str) -> ImageList:
    """The images of the items of a file, and their labels, as a list names them.

    Args:
        images: A file and keys of assets.
        labels: The same file and other keys; or a name with * for the id of an item.

    Raises:
        TilenetError: The file is no item collection, an item lacks an asset, labels are assets of
            another file, or see `listed`.
    """
    path, _, assets = images.partition("#")
    if is_items(labels) and labels.partition("#")[0] != path:
        raise TilenetError(
            f"an image and its labels are assets of one item (images: {images}, labels: {labels}); "
            "name one file, or give labels as labels/*.tif, where * is the item's id"
        )
    rows: list[dict[str, Any]] = []
    for item in _items(path):
        name = labels.replace("*", str(item["id"]))
        if is_items(labels):
            name = _hrefs(path, item, labels.partition("#")[2])
        elif "://" not in name:  # names in a list are relative to it, this one is not
            name = os.path.abspath(name)
        rows.append({"image": _hrefs(path, item, assets), "label": name})
        rows[-1]["split"] = item["properties"].get("split")
    if all(row["split"] is None for row in rows):
        rows = [{"image": row["image"], "label": row["label"]} for row in rows]
    return listed(path, rows)


def _items(path: str) -> list[dict[str, Any]]:
    try:
        items: list[dict[str, Any]] = parsed_json(Path(path).read_bytes())["features"]
        for item in items:
            _ = item["id"], item["assets"].items(), item["properties"].items()
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise TilenetError(
            "before # stands a STAC item collection, a file here with features that have id, "
            f"properties and assets ({path}: {type(error).__name__}: {error}); check the path, or "
            "save what a STAC API answers to a search"
        ) from error
    return items


def _hrefs(path: str, item: dict[str, Any], keys: str) -> str:
    """Names of the files of some assets, joined by plus signs."""
    try:
        return "+".join(str(item["assets"][key]["href"]) for key in keys.split("+"))
    except (LookupError, TypeError) as error:
        raise TilenetError(
            f"each item needs the assets that are named after # ({path}, {item['id']}: {keys}, has "
            f"{', '.join(item['assets']) or 'none'}); name these, or take the item out"
        ) from error
