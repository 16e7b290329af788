"""`tilenet.predict`: a map of a file or of an array, by a run, a checkpoint or a module."""

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from html import escape
from math import isfinite
from typing import Any

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from torch import nn

from tilenet.adoption.adopt import Adopted, adopt, own_settings
from tilenet.adoption.opaque import take_as_it_is
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError, one_line
from tilenet.library.names import check_names
from tilenet.library.run import Run
from tilenet.mapping.predict import predict as predict_file
from tilenet.mapping.prediction import Prediction, UnsavedNetwork
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import load_weights, network_to_fill
from tilenet.mpi import Intracomm
from tilenet.parallel.health.signals import handlers_come_back
from tilenet.parallel.ranks.abort import end_where_uncaught
from tilenet.parallel.ranks.comm import agreed, world
from tilenet.parallel.ranks.meeting import check_alike
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import together
from tilenet.storage.class_names import check_class_names
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.setup.share import share_adopted

Source = Run | nn.Module | Adopted | str | os.PathLike[str]
IGNORED = 255  # nodata of class maps
LIST_OPTIONS = "bands", "balance", "bbox", "window"


@dataclass(frozen=True, repr=False)
class Map:
    """A map that was written.

    Attributes:
        path: The file.
        facts: Size, method, tiles, halo, peak bytes of each rank.
        finished: Whether the map is complete; `resume` continues one that was stopped.
    """

    path: str
    facts: dict[str, Any]
    finished: bool = True

    def __fspath__(self) -> str:
        return self.path

    @property
    def _summary(self) -> dict[str, str]:
        height, width = self.facts["size"]
        size = {"size": f"{height} × {width} px", "method": str(self.facts["method"])}
        stopped = {} if self.finished else {"stopped": "resume=True goes on"}
        return {"path": self.path, **size, "halo": f"{self.facts['halo_px']} px", **stopped}

    def __repr__(self) -> str:
        return f"<Map {', '.join(f'{name}: {value}' for name, value in self._summary.items())}>"

    def _repr_html_(self) -> str:
        cells = (
            f"<tr><th>{name}</th><td>{escape(value)}</td></tr>"
            for name, value in self._summary.items()
        )
        return f"<table>{''.join(cells)}</table>"


def predict(
    net: Source,
    image: str | os.PathLike[str] | NDArray[Any],
    out: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    window_px: int | None = None,
    **options: Any,
) -> Any:
    """Map an image of any size. Collective: all ranks of the job call it alike.

        tilenet.predict(run, "scene.tif", "map.tif", tile_px=1024)
        scores = tilenet.predict(net, array, output="probabilities")

    Args:
        net: A run, the folder of a run or a checkpoint, a module that takes images
            (B, bands, H, W) and gives maps (B, classes, H, W), or the result of `tilenet.adopt`;
            rank 0's is used. It maps in evaluation mode.
        image: A raster, or an array (bands, H, W), the same on all ranks, of any dtype; NaN has no
            data.
        out: The map to write, a cloud-optimised GeoTIFF; None: the map is returned.
        classes: Names of a module's classes; None: their numbers.
        mean: Mean per band: a module gets pixels less `mean`, divided by `std`. None: 0.
        std: Standard deviation per band. None: 1.
        window_px: For a module that cannot be cut exactly, such as a transformer: side of the
            windows that it maps, which overlap by half and are blended. None: the map is exact.
        options: `output` (`classes`, `logits`, `probabilities`), `tile_px`, `halo`, `precision`,
            `device`, `partitions`, `balance`, `nodata`, `bands`, `scaled`, `tta`, `bbox`,
            `window`, `resume`, `overwrite`, `prove`, `hang_seconds`, as in `tilenet predict`;
            `module`, for a run with `halo_mode="windows"`: its folder holds the weights alone.

    Returns:
        With `out` a `Map`; without it the map itself, on each rank: (H, W) of classes, 255 where
        the image has no data, or (classes, H, W), NaN there.

    Raises:
        TilenetError: On all ranks, if any rank refuses an argument, a file or the network.
    """
    comm = world()
    end_where_uncaught()
    own = {"classes": classes, "mean": mean, "std": std, "window_px": window_px}
    check_alike(comm, type(net).__name__, repr(own))
    if isinstance(net, nn.Module | Adopted):

        def source(path: str) -> str | UnsavedNetwork:
            return given_network(
                net, path, classes, (mean, std), options.get("bands"), window_px, comm
            )

    else:
        with agreed(comm):
            _refuse_for_checkpoints(own)

        def source(path: str) -> str | UnsavedNetwork:
            return os.fspath(net)

    return _predicted(source, image, out, options, comm)


def predict_given(net: UnsavedNetwork, image: Any, out: Any, options: dict[str, Any]) -> Any:
    """`predict` with a network that has its classes and statistics. Collective."""
    return _predicted(lambda _: net, image, out, options, world())


def _predicted(
    source: Callable[[str], str | UnsavedNetwork],
    image: Any,
    out: Any,
    options: dict[str, Any],
    comm: Intracomm,
) -> Any:
    """Map with the network that `source` returns for the image's path. Collective."""
    with agreed(comm):
        image_text = _text_of(image)
    check_alike(comm, image_text, str(out), repr(sorted(options.items())))
    with ExitStack() as stack:
        with agreed(comm):
            check_names(options, [part.name for part in fields(Prediction)][3:], "predict")
            if isinstance(image, str | os.PathLike):
                path = os.fspath(image)
            else:
                path = stack.enter_context(_file_of(image))
        options |= {
            name: tuple(options[name]) for name in LIST_OPTIONS if options.get(name) is not None
        }
        out_path = None if out is None else os.fspath(out)
        with handlers_come_back(), own_settings():
            facts = predict_file(Prediction(source(path), path, out_path, **options), comm)
    if out_path is not None:
        return Map(out_path, facts, finished=not facts["stopped"])
    return _shared(facts.get("values"), comm)


def _text_of(image: Any) -> str:
    """The path of a raster, or what an array is and holds."""
    if isinstance(image, str | os.PathLike):
        return str(image)
    values = _array_of(image)
    digest = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8).hexdigest()
    return f"an array {values.shape} of {values.dtype}, {digest}"


def _array_of(image: Any) -> NDArray[Any]:
    """The numbers of an image; those that are masked are NaN.

    Raises:
        TilenetError: It is no array of three dimensions and real numbers.
    """
    if isinstance(image, np.ma.MaskedArray):  # as rasterio reads with masked=True
        exact = np.float32 if np.can_cast(image.dtype, np.float32) else np.float64
        image = np.ma.filled(image.astype(exact), np.nan)
    try:
        values = np.asarray(image)
        valid = values.ndim == 3 and 0 not in values.shape and values.dtype.kind in "uif"
        text = f"shape: {values.shape}, dtype: {values.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:  # as of a tensor that needs gradients
        valid, text = False, one_line(str(error))
    if not valid:
        raise TilenetError(
            f"an image is an array (bands, H, W) of real numbers ({text}); give one, or the path "
            "of a file"
        )
    return values


def _refuse_for_checkpoints(options: dict[str, Any]) -> None:
    if any(value is not None for value in options.values()):
        values = ", ".join(f"{name}: {value}" for name, value in options.items())
        raise TilenetError(
            f"a checkpoint has its own classes, mean, std and window ({values}); leave them out"
        )


@contextmanager
def _file_of(image: Any) -> Iterator[str]:
    """An array as an in-memory file of GDAL, which the raster readers open."""
    values = _array_of(image)
    if values.dtype == np.float16 or values.dtype.itemsize > 8:  # GDAL has no such dtypes
        values = values.astype(np.float32 if values.dtype == np.float16 else np.float64)
    count, height, width = values.shape
    form = {"driver": "GTiff", "count": count, "dtype": values.dtype.name, "tiled": True}
    form["photometric"] = "MINISBLACK"  # or else GDAL takes the fourth band of uint8 for alpha
    with rasterio.MemoryFile(filename="array.tif") as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with file.open(height=height, width=width, **form) as dataset:
                dataset.write(values)
        yield str(file.name)


def given_network(
    net: nn.Module | Adopted | None,
    path: str,
    names: Sequence[str] | None,
    statistics: tuple[Sequence[float] | None, Sequence[float] | None],
    bands: tuple[int | str, ...] | None,
    window_px: int | None,
    comm: Intracomm,
) -> UnsavedNetwork:
    """Rank 0's network with its classes and statistics, for an image. Collective.

    Args:
        net: Needed on rank 0; on all ranks if it maps windows.
        names: Names of the classes; None: their numbers.
        statistics: Mean and std per band; None: 0 and 1.
        bands: Bands to read; None: all but alpha.
        window_px: See `predict`.

    Raises:
        AgreedError: The network cannot be cut, or does not fit the image.
    """
    adopted: Adopted | None = None
    numbers: tuple[int, ...] = ()
    with agreed(comm):
        if comm.rank == 0:
            with Raster(path, bands) as image:
                numbers = tuple(image.bands)
    numbers = comm.bcast(numbers)
    with together(comm):  # ranks that wait leave the cores to rank 0
        if window_px is not None:
            module = _module_of(net)
            adopted = take_as_it_is(module, len(numbers), window_px, type(module).__name__)
        elif comm.rank == 0:
            assert net is not None
            adopted = net if isinstance(net, Adopted) else adopt(net, len(numbers))
    adopted = share_adopted(adopted if comm.rank == 0 else None, comm)
    with agreed(comm):
        record = module_record(adopted, path, numbers, names, statistics)
        if window_px is not None:
            module = copy.deepcopy(_module_of(net)).cpu()
            return UnsavedNetwork(
                adopted.name, record, adopted.around(module, 0, adopted.precision)
            )
        network = network_to_fill(adopted.layers, parameter_dtype(adopted.precision))
        # Not the network for training: layers that share a weight there have a copy each in maps.
        load_weights(network, adopted.state, adopted.name, adopted.names)
        return UnsavedNetwork(adopted.name, record, network)


def _module_of(net: nn.Module | Adopted | None) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise TilenetError(
            f"windows are mapped by an opaque module (window_px is given, net: "
            f"{type(net).__name__}); give the module"
        )
    return net


def module_record(
    adopted: Adopted,
    path: str,
    numbers: tuple[int, ...],
    names: Sequence[str] | None,
    statistics: tuple[Sequence[float] | None, Sequence[float] | None],
) -> NetworkRecord:
    """The record of a module: its bands, classes and statistics.

    Args:
        path: Name of the image or module, for the error.
        numbers: Numbers of the bands.
        names: Names of the classes; None: their numbers.
        statistics: Mean and std per band; None: 0 and 1.

    Raises:
        TilenetError: Bands, classes or statistics do not fit the network's channels.
    """
    count = len(numbers)
    mean, std = (
        (default,) * count if values is None else tuple(map(float, values))
        for values, default in zip(statistics, (0.0, 1.0), strict=True)
    )
    classes = tuple(map(str, range(adopted.classes)) if names is None else names)
    sizes = adopted.bands, len(mean), len(std), len(classes)
    finite = all(map(isfinite, (*mean, *std)))
    if sizes != (count, count, count, adopted.classes) or not finite or not min(std) > 0:
        raise TilenetError(
            f"a network has a mean and a std above 0 for each band, a name for each class "
            f"(bands of {path}: {count}, of the network: {adopted.bands}, mean: {len(mean)}, "
            f"std: {list(std)}, classes: {len(classes)} of {adopted.classes}); give as many"
        )
    check_class_names(classes, "classes")
    return NetworkRecord(
        adopted.layers,
        numbers,
        classes,
        IGNORED,
        mean,
        std,
        resolution=None,
        nodata=None,
        precision=adopted.precision,
        epsilon_px=0,
        names=adopted.names,
    )


def _shared(values: NDArray[Any] | None, comm: Intracomm) -> NDArray[Any]:
    """Rank 0's map on all ranks, (H, W) if it has one band. Collective."""
    cells = {} if values is None else {"map": torch.from_numpy(values.reshape(-1).view(np.uint8))}
    kind, shape = comm.bcast(None if values is None else (values.dtype.name, values.shape))
    shared: NDArray[Any] = share_tensors(cells, comm)["map"].numpy().view(kind).reshape(shape)
    return shared.reshape(shape[1:]) if shape[0] == 1 else shared
