"""Whether labels lie where their image does."""

from typing import TYPE_CHECKING

from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError

if TYPE_CHECKING:
    from rasterio.crs import CRS

HALF_TURN = 180.0  # degrees
SLACK = 4.0  # a hundredth of a full turn, which moved bounds are wider by


def check_overlap(path: str, labels: Bounds, crs: "CRS | None", image: Raster) -> None:
    """Refuse labels that lie elsewhere than the image.

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


def check_longitudes(path: str, labels: Bounds, crs: "CRS | None", image: Raster) -> None:
    """Refuse polygons in −180° to 180° for an image that goes on to 360°: half would be missing.

    Of rasters the image's pixels are looked for, not the other way around: none is taken wrongly.

    Raises:
        TilenetError: They count longitudes differently.
    """
    own = bounds_of(image.transform, image.whole)
    # Grids whose pixels have their middles at −180° and 180° reach half a pixel further.
    if not image.crs or not image.crs.is_geographic or own.right < HALF_TURN + image.transform.a:
        return
    moved = bounds_in(labels, crs, image.crs) if labels.finite else None
    if moved is None or moved.right > HALF_TURN + SLACK:
        return
    turned = moved._replace(left=moved.left + 2 * HALF_TURN, right=moved.right + 2 * HALF_TURN)
    if turned.meets(own._replace(left=max(own.left, HALF_TURN))):
        raise TilenetError(
            f"labels and their image must count longitudes alike ({path}: {moved}; {image.path}: "
            f"{own}); bring an image of all longitudes to −180° to 180° with gdalwarp -t_srs "
            "EPSG:4326 -wo SOURCE_EXTRA=1000 --config CENTER_LONG 0, or any other and its labels "
            "to one projection around it"
        )
