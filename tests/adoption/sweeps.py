"""A module's list of layers, swept: maps with their passes, and a step of training."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from tilenet.adoption.adopt import Adopted
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.geometry.windows import Window
from tilenet.mapping.job import MapJob, Placement
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.swept_training import Measure, SweptPipe
from tilenet.parallel.health.watchdog import Watchdog
from tilenet.planning.maps.passes import plan_passes
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.memory.sweeps.trained_sweeps import maps_to_keep

__all__ = ["sweep_step", "swept_map", "whole"]

STRIPS = 7
CPU = torch.device("cpu")


class InMemory(Mapper):
    """Reads an image that is in memory."""

    def __init__(self, adopted: Adopted, tiling: Tiling, image: Tensor) -> None:
        self.record: Any = SimpleNamespace(layers=adopted.layers)
        self.tiling, self.image, self.dtype, self.offset_px = tiling, image, image.dtype, 0

    def input(self, window: Window) -> Any:
        rows = slice(window.row, window.row + window.height)
        cols = slice(window.col, window.col + window.width)
        return self.image[:, :, rows, cols].clone(), np.ones((window.height, window.width), bool)


class Keeping:
    """Puts a map together."""

    def __init__(self) -> None:
        self.strips: list[Tensor] = []

    def wants(self, rank: int, window: Window) -> bool:
        return True

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        assert computed is not None
        self.strips.append(computed.logits)


def swept_map(adopted: Adopted, image: Tensor) -> Tensor:
    """Logits of an image (1, C, H, W) in evaluation, as `tilenet predict` finds them."""
    size, unit = (image.shape[2], image.shape[3]), adopted.context.alignment_px
    rule = HaloRule(0, unit)  # one rank sweeps all
    tiling = cut(*size, Cut(grid=(min(STRIPS, size[0] // unit), 1)), rule)
    asked = MapQuestion(
        adopted.layers, size, rule, halo_asked=False, tile_px=None, num_ranks=1, item_bytes=8,
        budget_bytes=0, most_px=0, sweep_bytes=1 << 40,
    )  # fmt: skip
    plan = MapPlan("sweep", tiling, ratio=1.0)
    if asked.of_whole_image and len(tiling.tiles) > 1:
        plan = plan_passes(asked, tiling, "", 1.0)
    network, sink = adopted.network(torch.float64).eval(), Keeping()
    mapper = InMemory(adopted, tiling, image)
    placement = Placement((len(adopted.layers),), (CPU,), "float64")
    job = MapJob(plan, mapper, network, placement, Watchdog(0))
    job.map(job.fix_statistics(MPI.COMM_SELF), MPI.COMM_SELF, sink)
    return torch.cat(sink.strips, 1)[None]


def sweep_step(adopted: Adopted, network: Network, image: Tensor) -> Tensor:
    """Logits of an image (1, C, H, W) in training, whose backward is that of a sweep."""
    size, unit = (image.shape[2], image.shape[3]), adopted.context.alignment_px
    tiling = cut(*size, Cut(grid=(1, 1)), HaloRule(0, unit))
    height = -(-size[0] // unit // STRIPS) * unit or unit
    sweeps = Sweeps(strip_edges(size[0], height), maps_to_keep(adopted.layers, *size))
    pipe = SweptPipe(network, adopted.layers, [CPU], "float64", lambda rows, cols: sweeps)
    return pipe(image, Origin((10,), tiling, (0,)), whole(size))


def whole(size: tuple[int, int]) -> Measure:
    """Lays logits into a map of zeros, so that their sum is the map of the image."""

    def laid(own: Tensor, window: Window) -> Tensor:
        behind = size[1] - window.col - window.width, size[0] - window.row - window.height
        return F.pad(own, (window.col, behind[0], window.row, behind[1]))

    return laid
