"""Options on rasters: bands, nodata, windows and boxes, and readers of their numbers."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

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
    """Return a reader of numbers joined by commas, which does not check their count."""

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
