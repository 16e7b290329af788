"""Patterns of image and label files, `scenes/*.tif`, and which label belongs to which image.

Nothing is opened here.
"""

import glob
import os
import re
from contextlib import suppress
from itertools import islice
from pathlib import PurePath

from tilenet.errors import TilenetError
from tilenet.storage.atomic import check_name

__all__ = ["MOST_IMAGES", "is_list_file", "is_pattern", "matched"]

MOST_IMAGES = 100_000
MOST_WILDCARDS = 8  # each doubles the ways in which a name may meet them
MOST_FOLDERS = 20_000

# GeoPackages may hold rasters too; where labels are given next to one, the raster is meant.
LISTS = (".csv", ".geojson", ".json", ".gpkg", ".shp", ".fgb")
LISTS_OR_RASTERS = (".gpkg",)

WILDCARD = re.compile(r"\*\*(?:/|$)|\*|\?|\[[^]]+\]")

WORDS = {"**/": "((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}  # as expressions


def is_list_file(path: str, *, with_labels: bool = False) -> bool:
    """Whether a file is a list of images, by its ending.

    Args:
        with_labels: Whether labels are given next to it.
    """
    ending = PurePath(path).suffix.lower()
    return ending in LISTS and not (with_labels and ending in LISTS_OR_RASTERS)


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files: a star, question mark or bracket, and no file."""
    remote = path.startswith("/vsi") or "://" in path
    return bool(WILDCARD.search(path)) and not remote and not os.path.exists(path)


def matched(images: str, labels: str) -> list[tuple[str, str]]:
    """The files of two patterns, as pairs of image and label, sorted by the image's name.

    A label belongs to the image for which the stars stand for the same words, so that a missing
    file cannot shift those after it by one.

    Raises:
        TilenetError: One of them is no pattern, its name is odd, they have different wildcards, one
            is met by no file or too many, or an image or label is left alone.
    """
    for pattern in (images, labels):
        check_name("a pattern", pattern)
    kinds = [_wildcards(pattern) for pattern in (images, labels)]
    for pattern, kind in zip((images, labels), kinds, strict=True):
        if len(kind) > MOST_WILDCARDS or sum(word.startswith("**") for word in kind) > 1:
            raise TilenetError(
                f"a pattern has at most {MOST_WILDCARDS} wildcards, and ** once ({pattern}: "
                f"{len(kind)}); list the pairs in a CSV file"
            )
    if kinds[0] != kinds[1] or not is_pattern(labels):
        raise TilenetError(
            f"patterns of images and labels need the same wildcards in the same order, since what "
            f"they stand for says which belong together (images: {images}, labels: {labels}); "
            "rename files, or list the pairs in a CSV file"
        )
    image_of, label_of = _files(images), _files(labels)
    for ours, theirs, what in ((image_of, label_of, "label"), (label_of, image_of, "image")):
        alone = sorted(path for words, path in ours.items() if words not in theirs)
        if alone:
            raise TilenetError(
                f"each image needs its label, named alike where the patterns have stars (images: "
                f"{images}, {len(image_of)} files, labels: {labels}, {len(label_of)} files; "
                f"no {what} for {alone[0]}"
                + f" and {len(alone) - 1} more" * (len(alone) > 1)
                + "); add or move files, or list the pairs in a CSV file"
            )
    return sorted((path, label_of[words]) for words, path in image_of.items())


def _wildcards(pattern: str) -> list[str]:
    return WILDCARD.findall(pattern)


def _files(pattern: str) -> dict[tuple[str, ...], str]:
    """Files that a pattern is met by, by what its wildcards stand for there."""
    pattern = re.sub("/+", "/", pattern)  # as glob writes paths
    _check_folders(pattern)
    met = list(islice(filter(os.path.isfile, glob.iglob(pattern, recursive=True)), MOST_IMAGES + 1))
    if not met:
        raise TilenetError(
            f"a pattern must be met by files ({pattern}: by none"
            + ("; stacks of several files are listed in a CSV file" if "+" in pattern else "")
            + "); check the folder, from which the run is started"
        )
    if len(met) > MOST_IMAGES:
        raise TilenetError(
            f"a run has at most {MOST_IMAGES:,} images ({pattern}: more); give a narrower pattern"
        )
    words = re.compile(_expression(pattern))
    found: dict[tuple[str, ...], str] = {}
    for path in met:
        fits = words.fullmatch(path)
        if fits is None or fits.groups() in found:
            raise TilenetError(
                f"a pattern must say for each file what its stars stand for ({pattern}: not for "
                f"{path}); list the pairs in a CSV file"
            )
        found[fits.groups()] = path
    return found


def _check_folders(pattern: str) -> None:
    """Refuse to search forever: links may lead around in circles, twice as many at each turn.

    Raises:
        TilenetError: Below the folder of `**` lie too many.
    """
    if "**" not in pattern:
        return
    start = os.path.dirname(pattern[: WILDCARD.search(pattern).start()]) or "."  # type: ignore[union-attr]
    waiting, seen = [start], 0
    while waiting:
        seen += 1
        if seen > MOST_FOLDERS:
            raise TilenetError(
                f"a pattern with ** searches at most {MOST_FOLDERS:,} folders, links to folders "
                f"counted as often as they are met ({pattern}: more); give a narrower pattern, or "
                "list the pairs in a CSV file"
            )
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            waiting += [e.path for e in entries if not e.name.startswith(".") and e.is_dir()]


def _expression(pattern: str) -> str:
    """The regular expression of a pattern, with a group for each wildcard."""
    parts, end = [], 0
    for wildcard in WILDCARD.finditer(pattern):
        parts.append(re.escape(pattern[end : wildcard.start()]))
        word = wildcard.group()
        if word.startswith("["):
            not_in = "^" * word.startswith("[!")
            inside = re.escape(word[1 + len(not_in) : -1]).replace(r"\-", "-")
            parts.append(f"([{not_in}{inside}])")
        else:
            parts.append(WORDS[word])
        end = wildcard.end()
    return "".join((*parts, re.escape(pattern[end:])))
