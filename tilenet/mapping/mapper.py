"""What a map holds: computed tile by tile or band by band, and made values of."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.read_ahead import ReadAhead
from tilenet.geometry.bands import Band
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.geometry.windows import Window
from tilenet.mapping.blended import BlendedWindows
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.model.inputs import standardise
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.model.upload import upload
from tilenet.parallel.exchange.swept import Columns, KeptMaps
from tilenet.parallel.exchange.swept_bands import ImageSweep, sweep_band
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.storage.network_json import NetworkRecord

Output = Literal["classes", "logits", "probabilities", "values"]

Input = tuple[Tensor, NDArray[np.bool_]]  # as `Mapper.input` returns it

LEVELS = 250  # of a probability in a byte: 255 is nodata


@dataclass(frozen=True)
class Computed:
    """A piece of the map on the rank that computed it.

    Attributes:
        logits: (C, H, W), on the last device; of several turned images the mean of their scores.
        valid: Where the image has data, (H, W).
    """

    logits: Tensor
    valid: NDArray[np.bool_]


class MapSink(Protocol):
    """Takes up the pieces of a map, which come in one order on all ranks."""

    def wants(self, rank: int, window: Window) -> bool:
        """Whether this rank has to do with a piece that `rank` computes; asked of each piece."""

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Take up a piece; `computed` is None if another rank has it."""


class Mapper:
    """Computes what the map holds.

    Args:
        scaled: Whether probabilities are bytes.
        turns: Turned images over which scores are a mean; 0: the image alone.
    """

    def __init__(
        self,
        output: Output,
        record: NetworkRecord,
        image: Raster,
        tiling: Tiling,
        dtype: torch.dtype,
        *,
        scaled: bool = False,
        turns: int = 0,
    ) -> None:
        self.output, self.record, self.image = output, record, image
        self.scaled, self.turns = scaled, turns
        self.dtype = dtype
        self.tiling = tiling
        self.offset_px = tiling.rule.offset_px
        count, layer = len(record.classes), record.opaque
        notes = [] if layer is None else [layer.note]
        if turns:
            notes.append(f"the mean over {turns} turned images")
        note = "; ".join(notes) or None
        if output == "classes":
            kind = "uint8" if count <= 255 else "uint16"
            most = np.iinfo(kind).max
            nodata = record.ignore_index if count <= record.ignore_index <= most else int(most)
            self.kind = MapKind(1, kind, nodata, record.classes, note=note)
        elif scaled:
            self.kind = MapKind(count, "uint8", 255, record.classes, 1 / LEVELS, note=note)
        else:
            kind = "float64" if dtype == torch.float64 else "float32"
            nan, unit = float("nan"), record.unit
            self.kind = MapKind(count, kind, nan, record.classes, unit=unit, note=note)

    def input(self, window: Window) -> Input:
        """What the network sees of a window, (1, C, H, W), and where there is data, (H, W)."""
        return self.standardised(self.image.read(window))

    def standardised(self, pixels: Pixels) -> Input:
        """`input` of pixels."""
        mean, std = self.record.mean, self.record.std
        return standardise(pixels.values, pixels.valid, mean, std, self.dtype), pixels.valid

    def inputs(self, windows: Iterable[Window], ahead: int = 1) -> ReadAhead[Window, Input]:
        """`input` of windows, made in a thread while others before it are computed."""
        return ReadAhead(self.input, windows, ahead)

    @contextmanager
    def images(
        self,
        device: torch.device,
        note_valid: Callable[[NDArray[np.bool_]], None],
        windows: Sequence[Window],
    ) -> Iterator[Iterator[Tensor]]:
        """As `inputs`, on a device; `note_valid` hears of where there is data."""

        def placed(read: Input) -> Tensor:
            note_valid(read[1])
            return upload(read[0], device)

        with self.inputs(windows) as reads:
            yield map(placed, reads)

    def tiles(self, pipe: Pipe, tiles: Sequence[Tile], inputs: Iterator[Input]) -> list[Computed]:
        """The tiles' own pixels; takes their inputs off."""
        if not tiles:
            return []
        images, valid = zip(*islice(inputs, len(tiles)), strict=True)
        numbers = [self.tiling.number(tile.own) for tile in tiles]
        origins = [
            Origin((0,), self.tiling, (number,), micro_batch)
            for micro_batch, number in enumerate(numbers)
        ]
        with torch.inference_mode():
            if self.record.opaque is None:
                outputs = pipe(list(images), origins)
            else:
                outputs = BlendedWindows(pipe, self.record.opaque)(images, origins)
        return [
            Computed(owned(output, tile, self.offset_px)[0].to(self.dtype), owned(where, tile))
            for output, where, tile in zip(outputs, valid, tiles, strict=True)
        ]

    def strips(
        self,
        network: Network,
        band: Band,
        device: torch.device,
        precision: str,
        columns: Columns | None = None,
        kept_maps: KeptMaps | None = None,
    ) -> Generator[Computed, None, None]:
        """The own pixels of a band's tiles, one after another.

        Args:
            columns: As of `ImageSweep`.
            kept_maps: As of `ImageSweep` too.
        """
        valid: list[NDArray[np.bool_]] = []
        first = band.part.row  # of `valid`
        owns = [self.tiling.tiles[number].own for number in band.tiles]
        reads = partial(self.images, device, valid.append)
        image = ImageSweep(self.record.layers, precision, reads, columns, kept_maps)
        swept = sweep_band(image, network, self.tiling, band, owns)
        with closing(swept) as maps:
            for own, logits in zip(owns, maps, strict=True):
                rows = np.concatenate(valid)[own.row - first :]
                left = own.col - band.part.col
                where = rows[: own.height, left : left + own.width]
                yield Computed(logits[0].to(self.dtype), where)
                valid[:], first = [rows[own.height :]], own.row + own.height

    def scores(self, logits: Tensor) -> Tensor:
        """Probabilities (C, H, W); of a regression its numbers. A mean of them is one already."""
        plain = self.record.task == "regression" or bool(self.turns)
        return logits if plain else logits.softmax(dim=0)

    def values(self, computed: Computed) -> NDArray[Any]:
        """The map's values (bands, H, W); nodata where the image has none."""
        logits = computed.logits
        if self.output == "classes":
            # Narrowed before the copy, since torch counts in int64.
            narrow = torch.uint8 if self.kind.dtype == "uint8" else torch.int16
            values = logits.argmax(dim=0, keepdim=True).to(narrow).cpu().numpy()
            values = values.view(self.kind.dtype)
        elif self.output in ("logits", "values"):
            values = logits.cpu().numpy()
        elif self.scaled:
            # In float64, which holds the products: the nearest level, whatever the precision.
            levels = self.scores(logits).double().mul_(LEVELS).round_()
            values = levels.nan_to_num_(nan=self.kind.nodata).cpu().numpy()
        else:
            values = self.scores(logits).cpu().numpy()
        values = values.astype(self.kind.dtype)
        values[:, ~computed.valid] = self.kind.nodata
        return np.ascontiguousarray(values)
