"""Patterns of image and label files, `scenes/*.tif`, and which label belongs to which image.

Nothing is opened here.
"""

import glob
import os
import re
from pathlib import PurePath

from tilenet.errors import TilenetError, and_more
from tilenet.storage.atomic import check_name

# GeoPackages may hold rasters too; where labels are given next to one, the raster is meant.
LISTS = (".csv", ".geojson", ".json", ".gpkg", ".shp", ".fgb")
LISTS_OR_RASTERS = (".gpkg",)


def is_list_file(path: str, *, with_labels: bool = False) -> bool:
    """Whether a file is a list of images, by its ending.

    Args:
        with_labels: Whether labels are given next to it.
    """
    ending = PurePath(path).suffix.lower()
    return ending in LISTS and not (with_labels and ending in LISTS_OR_RASTERS)


def is_items(path: str) -> bool:
    """Whether a name is that of assets of a STAC item collection: `items.json#red+nir`."""
    return re.search(r"\.(geo)?json#.", path) is not None


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files: a star, question mark or bracket, and no file."""
    remote = path.startswith("/vsi") or "://" in path
    return glob.has_magic(path) and not remote and not os.path.exists(path)


def matched(images: str, labels: str) -> list[tuple[str, str]]:
    """The files of two patterns, as pairs of image and label, sorted by the image's name.

    Files with equal names between the patterns' fixed beginnings and ends are paired, so that a
    missing file cannot shift those after it by one.

    Raises:
        TilenetError: A pattern is none, has an odd name or meets no file, or an image or label is
            left alone.
    """
    for pattern in (images, labels):
        check_name("a pattern", pattern)
        if not is_pattern(pattern):
            raise TilenetError(
                f"a pattern of images needs one of labels (images: {images}, labels: {labels}); "
                "give patterns for both, or list the pairs in a CSV file"
            )
    image_of, label_of = _files(images), _files(labels)
    for ours, theirs, what in ((image_of, label_of, "label"), (label_of, image_of, "image")):
        alone = [path for name, path in ours.items() if name not in theirs]
        if alone:
            raise TilenetError(
                f"each image needs its label, named alike where the patterns have stars (images: "
                f"{images}, {len(image_of)} files, labels: {labels}, {len(label_of)} files; "
                f"no {what} for {and_more(alone)}); add or move files, or list the pairs in a CSV "
                "file"
            )
    return [(path, label_of[name]) for name, path in image_of.items()]


def _files(pattern: str) -> dict[str, str]:
    """Sorted files that a pattern is met by, by their names from its first wildcard to its last."""
    pattern = re.sub("/+", "/", pattern)  # as glob writes paths
    paths = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not paths:
        raise TilenetError(
            f"a pattern must be met by files ({pattern}: by none"
            + ("; stacks of several files are listed in a CSV file" if "+" in pattern else "")
            + "); check the folder, from which the run is started"
        )
    head, *_, tail = map(len, re.split(r"[][*?]", pattern))
    # Where ** stands for no folder, its slash is not there.
    return {path[head : max(head, len(path) - tail)]: path for path in paths}
