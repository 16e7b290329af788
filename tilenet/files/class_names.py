"""Names that a label raster or a class map gives its classes."""

from tilenet.files.raster import Raster

__all__ = ["class_names"]

MOST_NAMES = 4096


def class_names(raster: Raster) -> dict[int, str]:
    """Names by class, from the tags `class_0`, `class_1` … of a raster's first band.

    That is how the maps of `tilenet predict` hold them.
    """
    found = {}
    for tag, name in raster.dataset.tags(1).items():
        number = str(tag).removeprefix("class_")
        if number != tag and number.isdecimal() and int(number) < MOST_NAMES:
            found[int(number)] = str(name)
    return dict(sorted(found.items()))
