"""What a map holds, whichever its pixels are."""

from dataclasses import dataclass

import numpy as np

__all__ = ["MapKind"]


@dataclass(frozen=True)
class MapKind:
    """What a map holds.

    Attributes:
        bands: Number of bands.
        dtype: Dtype of the pixels.
        nodata: Value of pixels without data.
        classes: Names of the classes: the bands' names, or the meanings of the values of a class
            map of one band, which then has a colour table.
        scale: What values count in: GDAL shows them multiplied by it.
        unit: Unit of the numbers; None: they have none.
        note: On how the map was made, where it is approximate.
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
