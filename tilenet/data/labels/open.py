"""Open labels: pixels or polygons, whichever their file holds."""

from collections.abc import Sequence
from dataclasses import fields

from tilenet.data.labels.raster import Labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys, name_of
from tilenet.data.rasters.opening import why_no_raster
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import CHECK, VECTOR_INFO
from tilenet.errors import TilenetError, and_more
from tilenet.storage.atomic import check_name


def open_labels(
    path: str, image: Raster, ignore_index: int, keys: VectorKeys | None = None
) -> LabelSource:
    """Open a label raster or vector for an image.

    A GeoPackage may hold both; then `keys.layer` says that the polygons are meant.

    Args:
        path: Any file that GDAL reads.
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


def check_vectors(labels: Sequence[LabelSource], keys: VectorKeys) -> None:
    """Refuse keys of polygons where all labels are rasters.

    Raises:
        TilenetError: The error names the first of these keys.
    """
    values = {key.name: getattr(keys, key.name) for key in fields(keys)}
    changed = [key.name for key in fields(keys) if values[key.name] != key.default]
    if changed and all(isinstance(part, Labels) for part in labels):
        name = changed[0]
        raise TilenetError(
            f"{name_of(name)} is read only where labels are polygons (vectors.{name}: "
            f"{values[name]}, labels: {labels[0].path}, a raster); leave it out, or give polygons "
            f"(of a GeoPackage that holds both, by {name_of('layer')})"
        )


def resampling_note(labels: Sequence[LabelSource]) -> str | None:
    """A sentence on labels that lie on another grid than their image; None: all lie on its grid."""
    paths = [part.path for part in labels if isinstance(part, Labels) and part.resampled]
    if not paths:
        return None
    return (
        f"labels of {and_more(paths)} lie on another grid than the image and are resampled to it "
        "(nearest); where they do not reach, pixels do not count"
    )
