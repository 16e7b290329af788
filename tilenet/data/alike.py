"""Whether the images of a network are alike: bands, scale and offset tags, units of pixels.

A file's value is stored number × scale + offset. Pixels of images are read as stored: standardising
takes a scale and an offset away, if all images have the same. Where those of two images differ,
equal numbers mean different values, as in packed netCDF files, each of which has its own.
"""

from collections.abc import Sequence
from math import isclose, radians

from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import MOVE
from tilenet.errors import TilenetError

RELATIVE = 1e-6  # some programs write tags as float32
DEGREE = round(radians(1), 12)

Unit = tuple[bool, float] | None  # whether an angle, its length in radians or metres; None: no CRS


def check_bands(images: Sequence[Raster], *, chosen: bool) -> None:
    """Refuse images whose bands differ from those of the first, in number, order or their tags.

    Args:
        chosen: Whether the run says which bands are read; their names may stand in any order then.

    Raises:
        TilenetError: Names the first such image.
    """
    first, *others = images
    for other in others:
        if len(other.bands) != len(first.bands):
            raise TilenetError(
                f"all images need the same number of bands ({first.path}: {len(first.bands)}, "
                f"{other.path}: {len(other.bands)}); choose some with bands"
            )
        if not chosen:
            check_order(other, first.descriptions, first.path)
        check_scaling(other, first.scaling, first.path)


def check_order(image: Raster, expected: Sequence[str], of: str) -> None:
    """Refuse an image that names the bands of a network's other images, in another order.

    Args:
        expected: Descriptions of the bands, empty where they have none; not colours, which GDAL
            gives to bands of many files by itself.
        of: What has these bands, in words.

    Raises:
        TilenetError: The order differs.
    """
    names = image.descriptions
    own, others = ([name.casefold() for name in some] for some in (names, expected))
    named = all(others) and len(set(others)) == len(others)
    if named and own != others and sorted(own) == sorted(others):
        raise TilenetError(
            "bands are stacked in the order of the files, so images that name them have one order "
            f"({of}: {', '.join(expected)}, {image.path}: {', '.join(names)}); name the bands "
            f"(bands: [{', '.join(expected)}])"
        )


def band_notes(images: Sequence[Raster]) -> list[str]:
    """Sentences on what is no error, but perhaps a mistake: alpha bands, numbers of other types."""
    notes = []
    named = [image for image in images if image.stack.alpha and image.nodata is None]
    if masked := next(iter(named), None):
        band = masked.stack.alpha[0]
        name = masked.stack.bands[band - 1].description
        unread = ", and it is not read" * (band not in masked.bands)
        notes.append(
            f"band {band}{f' ({name})' * bool(name)} of {masked.path} is alpha by its colour, so "
            f"pixels where it is 0 have no data{unread}; if it is a band of the image, say so with "
            f"gdal_edit -colorinterp_{band} undefined"
        )
    first = images[0]
    if other := next((image for image in images if image.dtype != first.dtype), None):
        notes.append(
            f"images of one network hold numbers of one scale, whatever their type ({first.path}: "
            f"{first.dtype}, {other.path}: {other.dtype}); check that equal numbers mean the same"
        )
    return notes


def check_scaling(image: Raster, expected: tuple[tuple[float, float], ...], of: str) -> None:
    """Refuse an image whose numbers mean other values than those that a network is trained on.

    Args:
        image: As many bands of it are read as `expected` has scales and offsets.
        of: What has that scaling, in words.

    Raises:
        TilenetError: Scale or offset of a band differ.
    """
    for band, own, other in zip(image.bands, image.scaling, expected, strict=True):
        if not all(isclose(a, b, rel_tol=RELATIVE) for a, b in zip(own, other, strict=True)):
            raise TilenetError(
                "pixels are read as stored, so all images of a network need the same scale and "
                f"offset tags ({of}: {scaling_text(other)}, band {band} of {image.path}: "
                f"{scaling_text(own)}); write the values themselves with gdal_translate -unscale "
                "-ot Float32, or correct the tags with gdal_edit -scale 1 -offset 0"
            )


def scaling_text(band: tuple[float, float]) -> str:
    """A band's scale and offset, as `× 0.1 -5`."""
    return "× {:g} {:+g}".format(*band)


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
