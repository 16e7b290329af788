"""Facts on an exported network that the checkpoint's record does not hold."""

from dataclasses import dataclass
from math import hypot
from pathlib import Path

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.export.tile import ExportTile
from tilenet.report.run_view import RunView
from tilenet.storage.network_json import NetworkRecord


@dataclass(frozen=True)
class Origin:
    """Facts from the folder of the training run.

    Attributes:
        pixel_m: Side of a pixel that the network was trained on, in metres; None: not known.
    """

    architecture: str
    pixel_m: float | None


@dataclass(frozen=True)
class Description:
    """A network as it stands in a file.

    Attributes:
        file: Name of the file.
        output: `logits` or `probabilities`.
        tile: The windows that it is run on.
        least_px: Least side of other windows that it takes; None: it takes no others.
        dtype: dtype of its input and output, by numpy's name.
        trained: Time at which its checkpoint was written, in UTC by RFC 3339.
        origin: Facts on the training run.
    """

    file: str
    record: NetworkRecord
    output: str
    tile: ExportTile
    least_px: int | None
    dtype: str
    num_parameters: int
    trained: str
    origin: Origin


def origin_of(checkpoint: Path, record: NetworkRecord) -> Origin:
    """The origin of a checkpoint, as far as its run's folder and first image are still there."""
    view = RunView(checkpoint.parent.parent)  # run/checkpoints/step-…
    module = None if view.run is None else view.run.network.module
    architecture = "U-Net" if record.names is None else "module"
    return Origin(module or architecture, _pixel_m(view, record))


def _pixel_m(view: RunView, record: NetworkRecord) -> float | None:
    if view.run is None:
        return None
    images = view.run.images
    path = view.path_of(images if isinstance(images, str) else images[0])
    try:
        with Raster(path, resolution=record.resolution) as image:
            crs, transform = image.crs, image.transform
    except TilenetError:  # moved, say
        return None
    if not crs or not crs.is_projected:
        return None
    return float(crs.linear_units_factor[1]) * hypot(transform.a, transform.d)
