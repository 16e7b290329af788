"""Whether labels meet their image, and whether the pixels of images are measured in one unit."""

from collections.abc import Sequence
from math import radians
from typing import TYPE_CHECKING

from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import MOVE
from tilenet.errors import TilenetError

if TYPE_CHECKING:
    from rasterio.crs import CRS

__all__ = ["check_overlap", "check_units"]


def check_overlap(path: str, labels: Bounds, crs: "CRS | None", image: Raster) -> None:
    """Refuse labels that lie elsewhere than the image.

    Args:
        path: File of the labels.
        labels: Bounds of the labels.
        crs: CRS of these bounds.
        image: The image.

    Raises:
        TilenetError: They do not meet.
    """
    own = bounds_of(image.transform, image.whole)
    # In the labels' CRS: an image is small enough to be moved, a country may not be.
    moved = bounds_in(own, image.crs, crs)
    if moved is None or not labels.finite or moved.meets(labels):
        return
    moved_labels = bounds_in(labels, crs, image.crs)
    place = moved_labels or labels
    where = f", in {crs_name(image.crs)}" if moved_labels and image.crs else ""
    raise TilenetError(
        f"labels must overlap their image ({path}: {place}; {image.path}: {own}{where}); check "
        "that they belong together and that both files name the right CRS"
    )


DEGREE = round(radians(1), 12)

Unit = tuple[bool, float] | None  # whether an angle, its length in radians or metres; None: no CRS


def check_units(images: Sequence[Raster], resolution: float) -> None:
    """Refuse one resolution for images whose units differ: 0.5 m is not 0.5°.

    Raises:
        TilenetError: Names the first image of another unit.
    """
    first = _unit(images[0])
    for image in images:
        unit = _unit(image)
        if unit != first:
            raise TilenetError(
                f"resolution is one number in the units of all images (resolution: {resolution:g}, "
                f"{images[0].path}: {_unit_name(first)}, {image.path}: {_unit_name(unit)}); leave "
                f"resolution out, or bring the images to one unit with {MOVE}"
            )


def _unit(image: Raster) -> Unit:
    if not image.crs:
        return None
    return bool(image.crs.is_geographic), round(image.crs.units_factor[1], 12)


def _unit_name(unit: Unit) -> str:
    """Not the CRS's name of it: there are several for a metre."""
    if unit is None:
        return "no CRS"
    names = {(False, 1.0): "metres", (True, DEGREE): "degrees"}
    return names.get(unit, f"units of {unit[1]:.9g} {'radians' if unit[0] else 'm'}")
