"""The layout of a run: its network, the tiles of its images, the ranks and the pipeline."""

from dataclasses import dataclass

from torch import Tensor

from tilenet.adoption.adopt import Adopted
from tilenet.choices import Checkpointing, HaloMode, Pipelining
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.compatibility import needs_all_tiles
from tilenet.planning.mesh import MeshShape
from tilenet.storage.network_json import NetworkRecord

Shape = tuple[tuple[int, ...], tuple[int, int]]  # an image's bands; its height and width


@dataclass(frozen=True)
class RunPlan:
    """The layout of a run.

    Attributes:
        record: The network; its statistics are filled in after the survey of the images.
        rule: Halo and alignment of the tiles.
        mesh: Layout of the ranks.
        requested: Requested grid or size of the tiles of an image.
        balance: Layers per partition.
        micro_batches: Most tiles of a rank in the pipeline at once.
        checkpointing: Micro-batches that are computed again in backward.
        pipeline: Order of micro-batches in the partitions, `gpipe` or `1f1b`.
        merged: Number of micro-batches of crops that are computed as one, see `stacking`.
        crop_px: Side of the crops of a step; None: a step has whole images.
        uncut: Tiles before they were cut into sub-tiles, one per micro-batch; None: not cut.
        cell_px: Side of the grid cells for which the survey keeps the classes labelled there.
        adopted: The adopted user module; None: a U-Net of tilenet.
        note: A sentence on the module's loaded weights.
        swept: Whether tiles are swept.
        strip_rows: Rows of a strip; None: the number that takes the least memory.
    """

    record: NetworkRecord
    rule: HaloRule
    mesh: MeshShape
    requested: Cut
    balance: tuple[int, ...]
    micro_batches: int = 1
    checkpointing: Checkpointing = "never"
    pipeline: Pipelining = "gpipe"
    merged: int = 1
    crop_px: int | None = None
    uncut: Cut | None = None
    cell_px: int = 0
    adopted: Adopted | None = None
    note: str = ""
    swept: bool = False
    strip_rows: int | None = None

    @property
    def halo_mode(self) -> HaloMode:
        """Source of the tiles' context."""
        if self.record.opaque is not None:
            return "windows"
        if self.swept:
            return "sweep"
        return "exchange" if self.rule.exchanged else "overlap"

    @property
    def needs_all_tiles(self) -> bool:
        """Whether some layer needs data of the other tiles of an image."""
        return self.rule.exchanged or needs_all_tiles(self.record.layers, self.halo_mode)

    def checkpoint_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network's `state_dict()` under the names that checkpoints have for it."""
        return weights if self.adopted is None else self.adopted.module_state(weights)

    def tiling(self, height: int, width: int) -> Tiling:
        """The tiles of an image or crop; of a small one fewer than were asked for."""
        unit = self.rule.alignment_px
        grid = self.requested.grid
        if grid is not None:
            grid = min(grid[0], -(-height // unit)), min(grid[1], -(-width // unit))
        return cut(height, width, Cut(grid, self.requested.size_px), self.rule)
