"""The arguments of `tilenet predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from torch import nn

from tilenet.choices import Precision
from tilenet.errors import TilenetError
from tilenet.mapping.mapper import Output
from tilenet.mapping.turns import Turned
from tilenet.model.network import Network
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.whole_checkpoint import checked_checkpoint


@dataclass(frozen=True)
class UnsavedNetwork:
    """A network that no checkpoint holds.

    Attributes:
        name: Name to show to people.
        record: Its layers, bands and classes.
        network: The network with its weights, on the CPU.
    """

    name: str
    record: NetworkRecord
    network: Network


@dataclass(frozen=True)
class Prediction:
    """The network, the image and the options of a map.

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
        device: `auto`, `cpu`, `cuda` or `xpu`, or a list with one device per partition.
        partitions: Devices per rank.
        balance: Layers per partition; None: the fastest by the roofline.
        nodata: Values without data, as in run files; None: as in training.
        bands: Bands to read, as in run files; None: those of training, named ones by their names.
        scaled: Probabilities as bytes: the nearest of 0, 1/250 … 1, which GDAL unscales.
        bbox: xmin, ymin, xmax, ymax in the image's CRS: map the pixels under it; None: all.
        window: Row, column, height and width of the pixels to map, instead of `bbox`.
        resume: Continue an interrupted map, and leave finished pieces when interrupted.
        overwrite: Whether an existing map may be replaced.
        prove: Whether, with a user's network, a small image is first compared with the whole one.
        tta: Mean over turned images of the probabilities, or of a regression's numbers: `flips`
            (4) or `all` (8); None: the image alone.
        module: The module of a checkpoint that holds its weights alone (`halo_mode: windows`);
            None: it holds the layers too.
        hang_seconds: End the job when a round of tiles takes longer; 0: never.
    """

    network: str | UnsavedNetwork
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
            TilenetError: Two choices contradict each other; the error names the first such pair.
        """
        if self.resume and (self.out is None or isinstance(self.network, UnsavedNetwork)):
            raise TilenetError(
                "a map that may be interrupted is a file, of a network that a checkpoint holds "
                "(resume: True); leave resume out, or save the network first"
            )
        words = {
            "output": (self.output, get_args(Output)),
            "precision": (self.precision, get_args(Precision)),
        }
        for name, (word, known) in words.items():
            if word is not None and word not in known:
                raise TilenetError(
                    f"{name} is one of {', '.join(known)} ({name}: {word!r}); name one of these"
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
        if isinstance(self.network, UnsavedNetwork):
            return Path(self.network.name)
        return checked_checkpoint(Path(self.network)).resolve()
