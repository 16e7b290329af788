"""Groups of keys of the run file; see docs/run-file.md for each key."""

import re
from dataclasses import dataclass
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.files.vector_keys import VectorKeys
from tilenet.geometry.networks import NormKind, NormScope, Padding, Upsampling

__all__ = [
    "GradientKeys",
    "MeshKeys",
    "NetworkKeys",
    "OptimizerKeys",
    "ProfileKeys",
    "SwappingKeys",
    "TileKeys",
    "VectorKeys",
]

MOST_PROFILED = 100


@dataclass(frozen=True)
class NetworkKeys:
    """The network; keys left out come from the preset, or from `UNetOptions`."""

    preset: Literal["small", "medium-1", "medium-2", "large"] | None = None
    poolings: int | None = None
    convolutions: int | None = None
    base: int | None = None
    kernel: int | None = None
    padding: Padding | None = None
    upsampling: Upsampling | None = None
    norm: NormKind | None = None
    norm_scope: NormScope | None = None
    groups: int | None = None
    dropout: float | None = None
    bias: bool | None = None


@dataclass(frozen=True)
class MeshKeys:
    """Ranks as replicas × rows × columns; what is left out follows from the number of ranks."""

    replicas: int | None = None
    rows: int | None = None
    columns: int | None = None


@dataclass(frozen=True)
class TileKeys:
    """Tiles per image: a grid, or a largest own size; left out: one tile per rank of a replica."""

    rows: int | None = None
    columns: int | None = None
    size_px: int | None = None


@dataclass(frozen=True)
class GradientKeys:
    """How gradients are summed over ranks."""

    transport: Literal["auto", "host", "device", "nccl", "gloo"] = "auto"
    piece_mb: float = 4.0


@dataclass(frozen=True)
class OptimizerKeys:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class ProfileKeys:
    """The steps that a trace is recorded of: `40-60`, or one; left out: none."""

    steps: int | str | None = None

    @property
    def numbers(self) -> range:
        """Their numbers, from 1.

        Raises:
            TilenetError: They are no range.
        """
        if self.steps is None:
            return range(0)
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(self.steps))
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last < first + MOST_PROFILED:
            raise TilenetError(
                f"profile.steps are a first and a last step from 1 on, at most {MOST_PROFILED} "
                f"together since a trace is kept in memory (profile.steps: {self.steps}); write "
                "40-60, or one number"
            )
        return range(first, last + 1)


@dataclass(frozen=True)
class SwappingKeys:
    """Where swapped tensors go, and how much may stay; left out: what the machine says."""

    device_gib: float | None = None
    host_gib: float | None = None
    folder: str | None = None
    min_mib: float = 1.0

    @property
    def min_bytes(self) -> int:
        """Smaller tensors stay."""
        return int(self.min_mib * 2**20)
