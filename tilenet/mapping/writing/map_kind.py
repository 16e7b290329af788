"""The kind of a map: facts that do not depend on its pixels."""

from dataclasses import dataclass

import numpy as np

IMAGE_TAG = "TILENET_IMAGE"  # of maps, with the name of their image


@dataclass(frozen=True)
class MapKind:
    """The bands, the pixel type and the tags of a map.

    Attributes:
        bands: Number of bands.
        dtype: Dtype of the pixels.
        nodata: Value of pixels without data.
        classes: Names of the classes: the bands' names, or the meanings of the values of a class
            map of one band, which then has a colour table.
        scale: Unit of the stored values: GDAL shows them multiplied by it.
        unit: Unit of the numbers; None: they have none.
        note: Sentence on how the map was made, where it is approximate.
    """

    bands: int
    dtype: str
    nodata: float
    classes: tuple[str, ...]
    scale: float = 1.0
    unit: str | None = None
    note: str | None = None

    @property
    def of_classes(self) -> bool:
        """Whether values are classes."""
        return self.bands == 1 and np.dtype(self.dtype).kind == "u" and self.scale == 1
