"""The planner's closed form for the runs of bench/speed/model.py, with what was measured here."""

import math
from dataclasses import dataclass, replace
from typing import Any

from tilenet.geometry.layers import Conv, Layer
from tilenet.geometry.unet import NormKind, UNetOptions, unet_layers
from tilenet.planning.estimate import Estimator
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.read import machine
from tilenet.planning.plan import Layout, Question
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.profile import Profile, ProfiledLayer
from tilenet.planning.time.roofline import roofline

__all__ = ["Point", "layers_of", "predicted"]

SEEN_PX, SEEN_BASES = 384, (16, 32)
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
BLOCK = 16  # of float32 with AVX-512, into which oneDNN's convolutions sort channels


@dataclass(frozen=True)
class Point:
    """A run to predict.

    Attributes:
        tile_px: Side of what a rank owns of a tile.
        ranks: Of the job; all hold one image.
        halo_mode: As in run files.
        base: Channels of the network's first level.
        norm: Its norm.
        tiles: Tiles along rows of each rank, one after another.
    """

    tile_px: int
    ranks: int
    halo_mode: str = "overlap"
    base: int = 16
    norm: NormKind = "none"
    tiles: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of the image along rows and columns."""
        rows, columns = GRIDS[self.ranks]
        return rows * self.tiles, columns

    @property
    def image(self) -> tuple[int, int]:
        """Rows and columns, pixels."""
        return self.grid[0] * self.tile_px, self.grid[1] * self.tile_px


def options_of(base: int, norm: NormKind) -> UNetOptions:
    """The networks of the runs."""
    return UNetOptions(poolings=4, convolutions=2, base=base, bands=4, classes=3, norm=norm)


def layers_of(base: int, norm: NormKind) -> tuple[Layer, ...]:
    """Their layers."""
    return unet_layers(options_of(base, norm))


def predicted(point: Point, facts: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step, and of its parts, as the plan has them."""
    # Ranks that share a core wait for one another, which processor seconds do not show
    turns = 1.0 if facts["clock"] == "cpu" else max(1.0, point.ranks / facts["cores"])
    links = facts["links"]
    local = replace(
        machine("local"),
        devices_per_node=point.ranks,
        memory_efficiency=1.0,
        latency_s=0.0,
        message_s=links["message_s"] * turns,
        # of sums, which is the lesser one: halos are small
        host_bandwidth=links["sum_bandwidth"] / turns,
        file_bandwidth=links["file_bandwidth"],
    )
    options = options_of(point.base, point.norm)
    exchange = point.halo_mode == "exchange"
    asked = Question(
        options, 0, point.image, local, optimizer="sgd", grid=None if exchange else point.grid,
        halo_mode="exchange" if exchange else "overlap", partitions=1,
    )  # fmt: skip
    estimator = Estimator(replace(asked, profile=_profile(point, facts, turns, local)))
    layout = Layout(point.grid, 1, 1, "never")
    balance = (len(estimator.layers),)
    step_s, pipeline_s, sum_s = estimator.step_s(layout, balance)
    return {
        "step_s": step_s,
        "pipeline_s": pipeline_s,
        "sum_s": sum_s,
        "exchange_s": estimator.exchange_s(layout, balance),
        "read_s": estimator.read_s(layout),
    }


def _profile(point: Point, facts: dict[str, Any], turns: float, local: Machine) -> Profile:
    """The measured layers as those of the point's network, on the tile that was seen."""
    wanted = layers_of(point.base, point.norm)
    new = roofline(_blocked(wanted), SEEN_PX, SEEN_PX, "float32", local)
    paces = [_paces(base, point.ranks, facts, local) for base in SEEN_BASES]
    share = _between(point.base)
    pace = [
        tuple((1 - share) * low + share * high for low, high in zip(*both, strict=True))
        for both in zip(*paces, strict=True)
    ]
    # Norms were not seen: they move memory as activations do.
    kinds = [layer.kind for layer in layers_of(SEEN_BASES[0], "none")]
    moving = pace[kinds.index("activation")]
    by_place = iter(pace)
    slower = turns * facts["step_by_layers"]
    profiled = []
    for layer, time in zip(wanted, new, strict=True):
        forward, backward = moving if layer.kind == "norm" else next(by_place)
        forward_s, backward_s = time.forward_s * forward, time.backward_s * backward
        profiled.append(ProfiledLayer(layer, forward_s * slower, backward_s * slower))
    return Profile("cpu", "float32", SEEN_PX, SEEN_PX, tuple(profiled))


def _paces(
    base: int, ranks: int, facts: dict[str, Any], local: Machine
) -> list[tuple[float, float]]:
    """Of each layer of a network that was seen: measured seconds over the roofline's."""
    by_ranks = facts["layers"][base]
    measured = [LayerTime(*one) for one in by_ranks[min(ranks, max(by_ranks))]]
    old = roofline(_blocked(layers_of(base, "none")), SEEN_PX, SEEN_PX, "float32", local)
    return [
        (_ratio(m.forward_s, o.forward_s), _ratio(m.backward_s, o.backward_s))
        for m, o in zip(measured, old, strict=True)
    ]


def _between(base: int) -> float:
    """Where a width lies between the two that were seen: 0 at the lesser, 1 at the greater."""
    low, high = SEEN_BASES
    return min(max(math.log(base / low) / math.log(high / low), 0.0), 1.0)


def _blocked(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Convolutions with the channels that are computed: vectors hold BLOCK of them."""
    return tuple(
        replace(
            layer,
            in_channels=max(layer.in_channels, BLOCK) if layer.in_channels > 4 else 4,
            out_channels=max(layer.out_channels, BLOCK),
        )
        if isinstance(layer, Conv) and layer.kernel > 1
        else layer
        for layer in layers
    )


def _ratio(new: float, old: float) -> float:
    return new / old if old else 1.0
