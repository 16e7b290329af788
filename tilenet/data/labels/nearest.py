"""A raster of any grid and CRS on an image's grid: the nearest pixel, or no data."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rasterio.enums import Resampling
from rasterio.errors import CRSError
from rasterio.vrt import WarpedVRT

from tilenet.data.rasters.bounds import bounds_of
from tilenet.data.rasters.extent import check_overlap
from tilenet.data.rasters.onto_grid import TOLERANCE_PX
from tilenet.data.rasters.opening import GDAL_ERRORS, reason
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.rasters.remedies import NEAREST
from tilenet.data.rasters.rereading import read_window
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window


class NearestPixels:
    """The pixels of a raster of one band on an image's grid, at the resolution it is read at.

    Raises:
        TilenetError: They lie elsewhere than the image, or cannot be moved to its CRS.
    """

    def __init__(self, raster: Raster, image: Raster) -> None:
        self._raster, self._image = raster, image
        place = Window(0, 0, *raster.size_in_file)
        check_overlap(raster.path, bounds_of(raster.coarser(1), place), raster.crs, image)
        self._warped()

    def _warped(self) -> Any:
        return self._raster.stack.view(self, self._opened)

    def _opened(self, files: list[Any]) -> Any:
        image = self._image
        try:
            return WarpedVRT(
                files[0],
                crs=image.crs,
                transform=image.transform,
                height=image.height,
                width=image.width,
                resampling=Resampling.nearest,
                tolerance=TOLERANCE_PX,
                add_alpha=True,  # 0 beyond the raster and where it has no data
            )
        except (*GDAL_ERRORS, CRSError) as error:
            raise TilenetError(
                f"labels must be in a CRS that can be moved to the image's ({self._raster.path}: "
                f"{reason(error)}); put them on the image's grid with {NEAREST}"
            ) from error

    def read(self, window: Window) -> Pixels:
        """Pixels of a window within the image; not valid beyond the raster and for nodata.

        Raises:
            TilenetError: The file cannot be read there.
        """
        # Both bands as they are: rasterio's mask knows alpha in 8 and 16 unsigned bits only.
        values: NDArray[Any] = read_window(
            self._raster.path,
            window,
            lambda place: self._warped().read(window=place),
            grid="the image",
        )
        return Pixels(values[:1], np.asarray(values[1] != 0))
