"""What `tilenet predict` was asked for, and what it opened for it."""

import copy
import hashlib
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tilenet.data.rasters.opening import opened
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.opaque import Opaque, no_code
from tilenet.geometry.tiles import HaloRule, Tiling, halo_rule
from tilenet.geometry.windows import Part, Window
from tilenet.mapping.mapper import Computed, Mapper, Output
from tilenet.mapping.turns import Turned, turns_of
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import Network, check_weight_count, load_weights, network_to_fill
from tilenet.model.opaque import opaque_network
from tilenet.planning.maps import MapQuestion
from tilenet.storage.checkpoints import load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.whole_checkpoint import checked_checkpoint

__all__ = ["GivenNetwork", "MapSource", "Prediction", "saved_network"]


@dataclass(frozen=True)
class GivenNetwork:
    """A network that no checkpoint holds.

    Attributes:
        name: For people.
        record: Its layers, bands and classes.
        network: With its weights, on the CPU.
    """

    name: str
    record: NetworkRecord
    network: Network


@dataclass(frozen=True)
class Prediction:
    """What to map and how.

    Attributes:
        network: Folder of a checkpoint, or of a training run; or a network that none holds.
        image: Any raster with the bands that the network reads, or files joined by plus signs.
        out: Path of the map; None: rank 0 keeps its values.
        output: Class numbers, or one band per class of logits or probabilities; of a regression
            its values. None: classes, or values.
        tile_px: Largest own size; None: as much as memory allows. With norms over the whole image
            it selects passes tile after tile.
        halo: `exact`, `epsilon` or pixels.
        precision: None: that of the training run.
        device: `auto`, `cpu` or `cuda`, or a list with one device per partition.
        partitions: Devices per rank.
        balance: Layers per partition; None: the fastest by the roofline.
        nodata: As in run files; None: as in training.
        bands: As in run files; None: as in training, those asked for by name found by name.
        scaled: Probabilities as bytes: the nearest of 0, 1/250 … 1, which GDAL unscales.
        bbox: xmin, ymin, xmax, ymax in the image's CRS: map the pixels under it; None: all.
        window: Row, column, height and width of the pixels to map, instead of `bbox`.
        resume: Continue what an interrupted map left, and leave what is done when interrupted.
        overwrite: Whether an existing map may be replaced.
        prove: Whether, with a user's network, a small image is first compared with the whole one.
        tta: Mean over turned images of the probabilities, or of a regression's numbers: `flips`
            (4) or `all` (8); None: the image alone.
        module: The module of a checkpoint that holds its weights alone (`halo_mode: windows`);
            None: it holds the layers too.
        hang_seconds: End the job when a round of tiles takes longer; 0: never.
    """

    network: str | GivenNetwork
    image: str
    out: str | None
    output: Output | None = None
    tile_px: int | None = None
    halo: int | str = "exact"
    precision: str | None = None
    device: str | list[str] = "auto"
    partitions: int = 1
    balance: tuple[int, ...] | None = None
    nodata: float | str | None = None
    bands: tuple[int | str, ...] | None = None
    scaled: bool = False
    bbox: tuple[float, ...] | None = None
    window: tuple[int, ...] | None = None
    resume: bool = False
    overwrite: bool = False
    prove: bool = True
    tta: Turned | None = None
    module: nn.Module | None = None
    hang_seconds: float = 1800.0

    def check(self) -> None:
        """Refuse choices that do not go together.

        Raises:
            TilenetError: With the first of them.
        """
        if self.resume and (self.out is None or isinstance(self.network, GivenNetwork)):
            raise TilenetError(
                "a map that may be interrupted is a file, of a network that a checkpoint holds "
                "(resume: True); leave resume out, or save the network first"
            )
        if self.partitions < 1:
            raise TilenetError(
                f"a network has at least one partition (partitions: {self.partitions}); leave "
                "--partitions out for one"
            )
        if isinstance(self.device, list) and len(self.device) != self.partitions:
            raise TilenetError(
                f"a list of devices names one per partition (device: {self.device}, "
                f"partitions: {self.partitions}); one device may be named several times"
            )
        if self.scaled and self.output != "probabilities":
            raise TilenetError(
                f"only probabilities are scaled to bytes (output: {self.output}); "
                "leave --scaled out or add --output probabilities"
            )
        if self.tta not in (None, "flips", "all") or (self.tta and self.output == "logits"):
            raise TilenetError(
                f"turned images are flips or all, and their mean is of probabilities (tta: "
                f"{self.tta}, output: {self.output}); leave --tta out or use --output probabilities"
            )
        if self.bbox is not None and self.window is not None:
            raise TilenetError(
                "a part of an image is named once, by --bbox or by --window; leave one of them out"
            )

    def checkpoint(self) -> Path:
        """The folder of the checkpoint, all of it read and compared with its checksums.

        No link: a run that saves meanwhile has its links name another checkpoint.

        Raises:
            TilenetError: There is none, or a file of it is broken.
        """
        if isinstance(self.network, GivenNetwork):
            return Path(self.network.name)
        return checked_checkpoint(Path(self.network)).resolve()


@dataclass(frozen=True)
class MapSource:
    """A checkpoint and an image, opened for a map.

    Attributes:
        folder: Folder of the checkpoint, or the network's name.
        record: The network's.
        network: With its weights, on the CPU.
        image: Its pixels.
        window: Pixels of the image to map.
        precision: Precision in which the network computes.
        rule: How tiles read.
        output: What the map holds.
    """

    folder: Path
    record: NetworkRecord
    network: Network
    image: Raster
    window: Window
    precision: str
    rule: HaloRule
    output: Output

    def question(self, wanted: Prediction) -> MapQuestion:
        """What is to be mapped."""
        return MapQuestion(
            self.record.layers,
            self.image.size,
            self.rule,
            halo_asked=wanted.halo != "exact",
            tile_px=wanted.tile_px,
            item_bytes=parameter_dtype(self.precision).itemsize,
            steady=wanted.resume,
            exchanges=True,
            turned=wanted.tta is not None,
        )

    def mapper(self, tiling: Tiling, wanted: Prediction) -> Mapper:
        """What computes tiles of the map."""
        how = self.output, self.record, self.image, tiling, parameter_dtype(self.precision)
        return Mapper(*how, scaled=wanted.scaled, turns=len(turns_of(wanted.tta)))

    @classmethod
    def open(cls, wanted: Prediction, folder: Path, stack: ExitStack) -> "MapSource":
        """Open both; `stack` closes the image.

        Args:
            folder: As `wanted.checkpoint` found it.

        Raises:
            TilenetError: A file is missing, broken, or does not fit the network.
        """
        record, network = _opened(wanted, folder)
        nodata = record.nodata if wanted.nodata is None else wanted.nodata
        bands = wanted.bands or record.wanted_bands
        image = stack.enter_context(Raster(wanted.image, bands, record.resolution, nodata))
        if len(image.bands) != len(record.bands):
            raise TilenetError(
                f"the network reads as many bands as it was trained on (trained on: "
                f"{len(record.bands)}, bands: {len(image.bands)}); name each of them in order"
            )
        precision = wanted.precision or record.precision
        rule = halo_rule(wanted.halo, record.context(), record.layers, record.epsilon_px)
        window = image.window_of(Part(wanted.bbox, wanted.window))
        output = _output(wanted.output, record, folder)
        return cls(folder, record, network.eval(), image, window, precision, rule, output)

    def check_finite(self, window: Window, computed: Computed) -> None:
        """Refuse a network that diverged, whose map of classes would look like any other.

        Args:
            window: Where the piece lies.

        Raises:
            TilenetError: With the first pixel.
        """
        finite = computed.logits.isfinite().all(dim=0).cpu().numpy() | ~computed.valid
        if not finite.all():
            row, col = np.argwhere(~finite)[0]
            raise TilenetError(
                f"a network must give finite logits ({self.folder} in {self.precision}: nan or "
                f"infinite at row {window.row + row}, column {window.col + col}); map an earlier "
                "checkpoint or with a wider --precision, or train again with a smaller optimizer.lr"
            )

    def made_of(
        self, tiling: Tiling, method: str, device: str, *, scaled: bool, tta: Turned | None
    ) -> dict[str, Any]:
        """All that the pixels of a map depend on, by names for people."""
        return {
            "the version of torch": torch.__version__,
            "the network": _hash_of(self.folder / "network.json"),
            "the weights": _hash_of(self.folder / "weights.safetensors"),
            "the image": _file_facts(_with_nested(self.image.files)),
            "bands": self.image.bands,
            "nodata": self.image.nodata,
            "output": [self.output, scaled],
            "the turned images": tta,
            "precision": self.precision,
            "the device": device,
            "the method": method,
            "the tiles": [
                [astuple(span) for span in spans] for spans in (tiling.rows, tiling.cols)
            ],
            "the part of the image": astuple(self.window),
        }


def _output(asked: Output | None, record: NetworkRecord, folder: Path) -> Output:
    """What the map holds.

    Raises:
        TilenetError: The network does not give it.
    """
    numbers = record.task == "regression"
    if asked is not None and numbers != (asked == "values"):
        raise TilenetError(
            f"a regression is mapped as values, classes as classes, logits or probabilities "
            f"(output: {asked}, {folder}: {record.task}); leave --output out"
        )
    return asked or ("values" if numbers else "classes")


def _opened(wanted: Prediction, folder: Path) -> tuple[NetworkRecord, Network]:
    """The network's record, and itself with its weights."""
    if isinstance(wanted.network, GivenNetwork):
        return wanted.network.record, wanted.network.network
    return saved_network(folder, wanted.precision, wanted.module)


def saved_network(
    folder: Path, precision: str | None, module: nn.Module | None
) -> tuple[NetworkRecord, Network]:
    """A checkpoint's record, and its network with its weights, on the CPU.

    Args:
        precision: In which it computes; None: that of the training run.
        module: Of a checkpoint that holds its weights alone; None: it holds the layers too.

    Raises:
        TilenetError: A file is missing or broken, or a module is needed.
    """
    record = NetworkRecord.from_json(load_json(folder / "network.json"))
    weights = load_tensors(folder / "weights.safetensors")
    precision = precision or record.precision
    if (layer := record.opaque) is not None:
        network = opaque_network(_code_of(layer, module, folder), 0, precision)
    else:
        check_weight_count(record.layers, weights, str(folder), record.names)
        network = network_to_fill(record.layers, parameter_dtype(precision))
    load_weights(network, weights, str(folder), record.names)
    return record, network


def _code_of(layer: Opaque, module: nn.Module | None, folder: Path) -> nn.Module:
    """The module whose weights a checkpoint holds.

    Raises:
        TilenetError: None was given: a file may not say which code is run.
    """
    if module is None:
        raise no_code(layer, str(folder))
    return copy.deepcopy(module).cpu()


def _with_nested(paths: Iterable[str]) -> list[str]:
    """Files that VRTs read through other VRTs too, of which GDAL does not tell."""
    found = list(paths)
    for path in found:  # which grows
        if path.lower().endswith(".vrt"):
            with suppress(TilenetError), opened(path) as inner:
                found += [one for one in map(str, inner.files) if one not in found]
    return found


def _file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """Of each file its name, bytes and time of its last change; the name alone of no local file."""
    facts: list[list[Any]] = []
    for path in paths:
        facts.append([os.path.basename(path)])
        with suppress(OSError):
            found = os.stat(path)
            facts[-1] += [found.st_size, found.st_mtime_ns]
    return facts


def _hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        TilenetError: It cannot be read.
    """
    try:
        found = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    except OSError as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error.strerror}); use another checkpoint"
        ) from error
    return found.hexdigest()
