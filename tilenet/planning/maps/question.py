"""What `choose_map` is asked about an image, and the plan that it returns."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilenet.geometry.halo import context_of, summed_cells
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Layer, Norm
from tilenet.geometry.tiles import Tiling
from tilenet.planning.memory.inference import inference_bytes
from tilenet.planning.memory.map_limits import countable


@dataclass(frozen=True)
class MapQuestion:
    """An image to map, and the ranks and memory to map it with.

    Attributes:
        size: Height and width of the image.
        rule: Halo and alignment of the tiles.
        halo_asked: Whether the user chose another halo than the exact one.
        tile_px: Largest own size of a tile; None: as much as memory allows.
        num_ranks: Number of ranks that map together.
        budget_bytes: Most bytes of feature maps on a rank.
        most_px: Largest own size of a tile that is chosen here, or twice the halo if that is more.
        at_once: Number of tiles that share a rank's memory.
        sweep_bytes: Most bytes of feature maps of a sweep on a rank; 0: do not sweep.
        steady: Whether another number of ranks may go on with the map, so that tiles must not
            depend on `num_ranks`.
        exchanges: Whether ranks that sweep may exchange halos.
        strip_overhead_px: Overhead of a strip, as the number of pixels computed in that time; 0:
            strips are as low as they can be.
        turned: Whether turned copies of the image are mapped too, which requires tiles.
    """

    layers: tuple[Layer, ...]
    size: tuple[int, int]
    rule: HaloRule
    halo_asked: bool = False
    tile_px: int | None = None
    num_ranks: int = 1
    item_bytes: int = 4
    budget_bytes: int = 0
    most_px: int = 0
    at_once: int = 1
    sweep_bytes: int = 0
    steady: bool = False
    exchanges: bool = False
    strip_overhead_px: int = 0
    turned: bool = False

    @cached_property
    def of_whole_image(self) -> tuple[int, ...]:
        """Numbers of the layers that need statistics or averages of the whole image."""
        return tuple(
            index
            for index in summed_cells(self.layers)
            if not (isinstance(norm := self.layers[index], Norm) and norm.norm == "batch")
        )

    @property
    def unit_px(self) -> int:
        """The network's alignment."""
        return context_of(self.layers).alignment_px

    def fits(self, height: int, width: int, times: float = 1) -> bool:
        """Whether the maps of a window are countable and fit memory, several times over."""
        need = inference_bytes(self.layers, height, width, self.item_bytes)
        return need * times <= self.budget_bytes and countable(self.layers, height, width)


@dataclass(frozen=True)
class MapPlan:
    """The method, the tiles and the passes of a map.

    Attributes:
        method: `sweep`: bands of the image, strip by strip; `tiles`: one pass, tile by tile;
            `exchange`: each rank holds its window of the image; `passes`: tile by tile, after a
            pass for each layer's statistics; `windows`: tile by tile, each from the windows of an
            opaque module that touch it.
        tiling: Tiling of the pass that maps; in a sweep, rows of tiles are its strips.
        passes: Numbers of the layers that need the whole image, with the tiling of the pass that
            computes their statistics.
        why: Reason for passes, for messages.
        work: Arithmetic of all passes, in multiples of the pass that maps.
        ratio: Pixels that a sweep reads on all ranks, or that windows compute, per pixel of the
            image; None: as many as tiles read.
        kept_maps: Numbers of the maps that a sweep keeps whole after each pass; later passes begin
            from them.
    """

    method: Literal["sweep", "tiles", "exchange", "passes", "windows"]
    tiling: Tiling
    passes: tuple[tuple[int, Tiling], ...] = ()
    why: str = ""
    work: float = 1.0
    ratio: float | None = None
    kept_maps: tuple[frozenset[int], ...] = ()

    @property
    def work_ratio(self) -> float:
        """Pixels that are read, per pixel of the image."""
        return self.tiling.work_ratio if self.ratio is None else self.ratio
