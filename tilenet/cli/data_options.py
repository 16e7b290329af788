"""What options say of rasters: bands, what counts as data, numbers of windows and boxes.

Options by which commands are told what labels mean.
"""

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import UsageError

__all__ = [
    "WINDOW",
    "add_labels",
    "band_names",
    "nodata_value",
    "numbers",
    "vectors_of",
    "with_values",
]

WINDOW = "ROW,COL,HEIGHT,WIDTH"

Number = TypeVar("Number", int, float)


def band_names(text: str) -> tuple[int | str, ...]:
    """Names or numbers of bands."""
    return tuple(int(band) if band.isdigit() else band for band in text.split(","))


def nodata_value(text: str) -> float | str:
    """A value without data, or a word for it."""
    if text in ("none", "collar"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(
            f"nodata is a number, nan, none or collar (nodata: {text}); give one of these"
        ) from None


def numbers(kind: Callable[[str], Number], metavar: str) -> Callable[[str], tuple[Number, ...]]:
    """What reads numbers joined by commas; how many they must be, their user says."""

    def read(text: str) -> tuple[Number, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            which = "whole numbers" if kind is int else "numbers"
            raise ArgumentTypeError(
                f"it takes {which} joined by commas ({text}); write {metavar}"
            ) from None

    return read


def with_values(arguments: list[str]) -> list[str]:
    """argparse takes `-5.2,41,-5.1,42` for an option, unless it is joined to the one before it."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--bbox", "--window", "--nodata") and argument[:1] == "-":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def add_labels(parser: argparse.ArgumentParser, *, choice: bool = False) -> None:
    """Add the options that `vectors_of` reads, and `--ignore-index`.

    Args:
        choice: Whether `--classes` may name classes instead of mapping values to them.
    """
    mapped = "polygons: classes of its values, or ignore; else these are class numbers"
    chosen = "classes to show, by name or number; VALUE=CLASS,… says what values of --field mean"
    parser.add_argument(
        "--ignore-index", type=int, default=255, help="label that does not count (255)"
    )
    parser.add_argument("--field", help="polygons: attribute that holds the class; else all are 1")
    parser.add_argument(
        "--classes",
        type=_mapping_or_choice if choice else _mapping,
        metavar="CLASS,…" if choice else "VALUE=CLASS,…",
        help=chosen if choice else mapped,
    )
    parser.add_argument("--layer", help="polygons: layer, where the file has several")
    parser.add_argument(
        "--label-crs", help="polygons: their CRS where the file has none (EPSG:…, or image)"
    )
    parser.add_argument(
        "--all-touched", action="store_true", help="polygons: every pixel they touch"
    )


def vectors_of(given: argparse.Namespace) -> VectorKeys:
    """How polygons are burned.

    Raises:
        UsageError: Options contradict each other.
    """
    classes = given.classes if isinstance(given.classes, dict) else None
    if classes and given.field is None:
        raise UsageError("--classes maps the values of a field; name it with --field")
    return VectorKeys(
        field=given.field,
        classes=classes,
        layer=given.layer,
        crs=given.label_crs,
        all_touched=given.all_touched,
    )


def _mapping_or_choice(
    text: str,
) -> dict[str | int | float | bool | None, int | None] | tuple[str, ...]:
    return _mapping(text) if "=" in text else tuple(part.strip() for part in text.split(","))


def _mapping(text: str) -> dict[str | int | float | bool | None, int | None]:
    """`road=1,water=ignore` as `VectorKeys.classes`."""
    pairs = [pair.rpartition("=") for pair in text.split(",")]
    try:
        return {value: None if label == "ignore" else int(label) for value, _, label in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a class is a whole number or ignore ({text}); write for instance road=1,ruin=ignore"
        ) from None
