"""The units in which images give the size of their pixels."""

from collections.abc import Sequence
from math import radians

from tilenet.errors import TilenetError
from tilenet.files.raster import Raster
from tilenet.files.tools import MOVE

__all__ = ["check_units"]

DEGREE = round(radians(1), 12)

Unit = tuple[bool, float] | None  # whether an angle, its length in radians or metres; None: no CRS


def check_units(images: Sequence[Raster], resolution: float) -> None:
    """Refuse one resolution for images whose units differ: 0.5 m is not 0.5°.

    Raises:
        TilenetError: With the first image of another unit.
    """
    first = _unit(images[0])
    for image in images:
        unit = _unit(image)
        if unit != first:
            raise TilenetError(
                f"resolution is one number in the units of all images (resolution: {resolution:g}, "
                f"{images[0].path}: {_shown(first)}, {image.path}: {_shown(unit)}); leave "
                f"resolution out, or bring the images to one unit with {MOVE}"
            )


def _unit(image: Raster) -> Unit:
    if not image.crs:
        return None
    return bool(image.crs.is_geographic), round(image.crs.units_factor[1], 12)


def _shown(unit: Unit) -> str:
    """Not the CRS's name of it: there are several for a metre."""
    if unit is None:
        return "no CRS"
    named = {(False, 1.0): "metres", (True, DEGREE): "degrees"}
    return named.get(unit, f"units of {unit[1]:.9g} {'radians' if unit[0] else 'm'}")
