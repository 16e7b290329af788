"""Facts that a finished map holds: its classes, or numbers and their unit."""

import numpy as np

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.mapping.writing.map_kind import IMAGE_TAG
from tilenet.storage.class_names import names_in_map


def read_class_names(map_path: str) -> tuple[str, ...]:
    """Names of the map's values 0, 1, …, as far as it says them.

    Raises:
        TilenetError: The map cannot be opened.
    """
    with Raster(map_path) as mapped:
        return names_in_map(map_path, mapped.dataset.tags(1))


def check_class_map(mapped: Raster) -> None:
    """Refuse a map that holds no classes.

    Raises:
        TilenetError: It has several bands, or numbers that are not whole.
    """
    if len(mapped.bands) != 1 or not np.issubdtype(mapped.dtype, np.integer):
        raise TilenetError(
            f"a class map has one band of whole numbers ({mapped.path}: {len(mapped.bands)} of "
            f"{mapped.dtype}); make it with tilenet predict --output classes"
        )


def holds_numbers(map_path: str) -> bool:
    """Whether a map is of a regression: one band of floats, or of packed ones.

    Raises:
        TilenetError: It cannot be opened.
    """
    with Raster(map_path) as mapped:
        packed = mapped.scaling[0] != (1.0, 0.0)
        return len(mapped.bands) == 1 and bool(packed or np.issubdtype(mapped.dtype, np.floating))


def read_unit(map_path: str) -> str | None:
    """The unit of a map's numbers; None: it does not say."""
    with Raster(map_path) as mapped:
        unit: str | None = mapped.dataset.units[0]
        return unit or None


def read_image_name(map_path: str) -> str | None:
    """`image_name` of the image that a map is of; None: it does not say."""
    with Raster(map_path) as mapped:
        name: str | None = mapped.dataset.tags().get(IMAGE_TAG)
        return name
