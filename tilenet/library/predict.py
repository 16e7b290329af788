"""`tilenet.predict`: a map of a file or of an array, by a run, a checkpoint or a module."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from torch import nn

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.opaque import take_as_it_is
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.library.names import check_names
from tilenet.library.run import Run
from tilenet.mapping.predict import predict as predict_as_said
from tilenet.mapping.prediction import GivenNetwork, Prediction
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import load_weights, network_to_fill
from tilenet.parallel.ranks.comm import agreed, end_where_uncaught, world
from tilenet.parallel.ranks.meeting import check_alike
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import together
from tilenet.storage.class_names import check_class_names
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.share import share_adopted

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Map", "given_network", "module_record", "predict", "predict_given"]

Source = Run | nn.Module | Adopted | str | os.PathLike[str]
IGNORED = 255  # the value of nodata in maps of classes
LISTS = "bands", "balance", "bbox", "window"


@dataclass(frozen=True, repr=False)
class Map:
    """A map that was written.

    Attributes:
        path: The file.
        facts: How it was made: size, method, tiles, halo, peak bytes of each rank.
        finished: Whether all of it is there; one that was stopped goes on with `resume`.
    """

    path: str
    facts: dict[str, Any]
    finished: bool = True

    def __fspath__(self) -> str:
        return self.path

    @property
    def _said(self) -> dict[str, str]:
        height, width = self.facts["size"]
        size = {"size": f"{height} × {width} px", "method": str(self.facts["method"])}
        stopped = {} if self.finished else {"stopped": "resume=True goes on"}
        return {"path": self.path, **size, "halo": f"{self.facts['halo_px']} px", **stopped}

    def __repr__(self) -> str:
        return f"<Map {', '.join(f'{name}: {value}' for name, value in self._said.items())}>"

    def _repr_html_(self) -> str:
        cells = (f"<tr><th>{n}</th><td>{escape(v)}</td></tr>" for n, v in self._said.items())
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
    **ways: Any,
) -> Any:
    """Map an image of any size. Collective: all ranks of the job call it alike.

        tilenet.predict(run, "scene.tif", "map.tif", tile_px=1024)
        scores = tilenet.predict(net, array, output="probabilities")

    Args:
        net: A run, the folder of one or of a checkpoint, a module that takes images
            (B, bands, H, W) and gives maps (B, classes, H, W), or what `tilenet.adopt` made of it;
            that of rank 0 counts. It maps as in evaluation.
        image: A raster, or an array (bands, H, W), the same on all ranks, of any dtype; NaN has no
            data.
        out: The map to write, a cloud-optimised GeoTIFF; None: the map is returned.
        classes: Names of a module's classes; None: their numbers.
        mean: Per band, of a module: it gets pixels less `mean`, divided by `std`. None: 0.
        std: None: 1.
        window_px: Of a module that cannot be cut exactly, such as a transformer: it maps windows of
            this side, which overlap by half and are blended. None: the map is exact.
        ways: `output` (`classes`, `logits`, `probabilities`), `tile_px`, `halo`, `precision`,
            `device`, `partitions`, `balance`, `nodata`, `bands`, `scaled`, `tta`, `bbox`,
            `window`, `resume`, `overwrite`, `prove`, `hang_seconds`, as of `tilenet predict`;
            `module`, of a run with `halo_mode="windows"`, whose weights alone are in its folder.

    Returns:
        What was written (`Map`); without `out` the map itself, on each rank: (H, W) of classes,
        255 where the image has no data, or (classes, H, W), NaN there.

    Raises:
        TilenetError: On all ranks, for what any rank found wrong.
    """
    comm = world()
    end_where_uncaught()
    own = {"classes": classes, "mean": mean, "std": std, "window_px": window_px}
    check_alike(comm, type(net).__name__, repr(own))
    if isinstance(net, nn.Module | Adopted):

        def source(path: str) -> str | GivenNetwork:
            return given_network(
                net, path, classes, (mean, std), ways.get("bands"), window_px, comm
            )

    else:
        with agreed(comm):
            _check_nothing(own)

        def source(path: str) -> str | GivenNetwork:
            return os.fspath(net)

    return _predicted(source, image, out, ways, comm)


def predict_given(net: GivenNetwork, image: Any, out: Any, ways: dict[str, Any]) -> Any:
    """As `predict`, with a network that has its classes and statistics. Collective."""
    return _predicted(lambda _: net, image, out, ways, world())


def _predicted(
    source: Callable[[str], str | GivenNetwork],
    image: Any,
    out: Any,
    ways: dict[str, Any],
    comm: "MPI.Intracomm",
) -> Any:
    """Map by the network that `source` gives for the image's path. Collective."""
    shown = image if isinstance(image, str | os.PathLike) else np.shape(image)
    check_alike(comm, str(shown), str(out), repr(sorted(ways.items())))
    with ExitStack() as stack:
        with agreed(comm):
            check_names(ways, [part.name for part in fields(Prediction)][3:], "predict")
            if isinstance(image, str | os.PathLike):
                path = os.fspath(image)
            else:
                path = stack.enter_context(_file_of(image))
        ways |= {name: tuple(ways[name]) for name in LISTS if ways.get(name) is not None}
        written = None if out is None else os.fspath(out)
        done = predict_as_said(Prediction(source(path), path, written, **ways), comm)
    if written is not None:
        return Map(written, done, finished=not done["stopped"])
    return _shared(done.get("values"), comm)


def _check_nothing(own: dict[str, Any]) -> None:
    if any(value is not None for value in own.values()):
        said = ", ".join(f"{name}: {value}" for name, value in own.items())
        raise TilenetError(
            f"a checkpoint has its own classes, mean, std and window ({said}); leave them out"
        )


@contextmanager
def _file_of(image: Any) -> Iterator[str]:
    """An array as a file of GDAL's in memory, which the readers of rasters open."""
    values = np.asarray(image)
    if values.ndim != 3 or 0 in values.shape or values.dtype.kind not in "uif":
        raise TilenetError(
            f"an image is an array (bands, H, W) of real numbers (shape: {values.shape}, dtype: "
            f"{values.dtype}); give one, or the path of a file"
        )
    if values.dtype == np.float16:  # which GDAL's files lack
        values = values.astype(np.float32)
    count, height, width = values.shape
    form = {"driver": "GTiff", "count": count, "dtype": values.dtype.name, "tiled": True}
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
    comm: "MPI.Intracomm",
) -> GivenNetwork:
    """A network and what it takes and gives, as rank 0 has it. Collective.

    Args:
        net: Needed on rank 0; on all ranks where it maps windows.
        path: The image.
        names: Of the classes.
        window_px: As of `predict`.

    Raises:
        AgreedError: It cannot be cut, or does not fit the image.
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
            return GivenNetwork(adopted.name, record, adopted.around(module, 0, adopted.precision))
        network = network_to_fill(adopted.layers, parameter_dtype(adopted.precision))
        # Not the one to be trained: where layers share a weight, devices of a map have it each.
        load_weights(network, adopted.state, adopted.name, adopted.names)
        return GivenNetwork(adopted.name, record, network)


def _module_of(net: nn.Module | Adopted | None) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise TilenetError(
            f"windows are mapped by a module as it is (window_px is given, net: "
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
    """What a module takes and gives.

    Args:
        path: What has the bands, for the sentence.
        numbers: Of the bands.
        names: Of the classes; None: their numbers.
        statistics: Mean and std per band; None: 0 and 1.

    Raises:
        TilenetError: These are other than the network's channels.
    """
    count = len(numbers)
    mean, std = (
        (default,) * count if given is None else tuple(map(float, given))
        for given, default in zip(statistics, (0.0, 1.0), strict=True)
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


def _shared(values: NDArray[Any] | None, comm: "MPI.Intracomm") -> NDArray[Any]:
    """Rank 0's map on all ranks, its bands left out where there is one. Collective."""
    cells = {} if values is None else {"map": torch.from_numpy(values.reshape(-1).view(np.uint8))}
    kind, shape = comm.bcast(None if values is None else (values.dtype.name, values.shape))
    found: NDArray[Any] = share_tensors(cells, comm)["map"].numpy().view(kind).reshape(shape)
    return found.reshape(shape[1:]) if shape[0] == 1 else found
