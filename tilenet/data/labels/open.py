"""Open labels: pixels or polygons, whichever their file holds."""

from collections.abc import Sequence

from tilenet.data.labels.raster import Labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.opening import why_no_raster
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import CHECK, VECTOR_INFO
from tilenet.errors import TilenetError
from tilenet.storage.atomic import check_name


def open_labels(
    path: str, image: Raster, ignore_index: int, keys: VectorKeys | None = None
) -> LabelSource:
    """Open a label raster or vector for an image.

    A GeoPackage may hold both; then `keys.layer` says that the polygons are meant.

    Args:
        path: Any file that GDAL reads.
        image: The image; labels are read on its grid.
        ignore_index: Label of pixels that do not count.
        keys: Keys to burn polygons; None: as class 1.

    Raises:
        TilenetError: The file is neither, or does not fit the image.
    """
    keys = keys or VectorKeys()
    check_name("labels", path)
    if keys.layer is None:
        try:
            return Labels(path, image, ignore_index)
        except TilenetError:
            if why_no_raster(path) is None:
                raise
    # Not at the top: most runs have label rasters, and thousands of ranks load what they import.
    from tilenet.data.labels.polygons import VectorLabels
    from tilenet.data.labels.vector_layer import VECTOR_ERRORS

    try:
        return VectorLabels(path, image, ignore_index, keys)
    except VECTOR_ERRORS as error:
        # pyogrio adds advice of its own after the first semicolon.
        reasons = dict.fromkeys((why_no_raster(path), str(error).partition(";")[0].strip()))
        why = "; as a vector: ".join(text for text in reasons if text)
        raise TilenetError(
            f"labels must be a raster or a vector file that GDAL can open ({path}: "
            f"{why}); check the path, and the file with {CHECK}, or {VECTOR_INFO}"
        ) from error


def resampling_note(labels: Sequence[LabelSource]) -> str | None:
    """A sentence on labels that lie on another grid than their image; None: all lie on its grid."""
    paths = [part.path for part in labels if isinstance(part, Labels) and part.resampled]
    if not paths:
        return None
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"labels of {paths[0]}{more} lie on another grid than the image and are resampled to it "
        "(nearest); where they do not reach, pixels do not count"
    )
