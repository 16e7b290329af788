"""Groups of keys of the run file; see docs/run-file.md for each key."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import nn

from tilenet.data.image_patterns import is_list_file
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Cut
from tilenet.geometry.unet import NormKind, NormScope, Padding, Upsampling
from tilenet.geometry.windows import Symmetry, symmetries
from tilenet.model.inputs import Radiometry
from tilenet.parallel.swap.host_pool import Slabs, open_slabs
from tilenet.planning.learning_rate import LearningRate, ScheduleName

__all__ = [
    "AugmentKeys",
    "CheckpointKeys",
    "GradientKeys",
    "MeshKeys",
    "NetworkKeys",
    "OptimizerKeys",
    "ProfileKeys",
    "ScheduleKeys",
    "SwappingKeys",
    "TileKeys",
    "ValidationKeys",
    "VectorKeys",
    "check_pairs",
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

    @property
    def cut(self) -> Cut | None:
        """The tiles that are asked for; None: left out."""
        if self.rows is not None and self.columns is not None:
            return Cut(grid=(self.rows, self.columns))
        return None if self.size_px is None else Cut(size_px=self.size_px)

    def check(self) -> None:
        """Refuse half a grid, or a grid and a size.

        Raises:
            TilenetError: With the values.
        """
        if self.size_px is not None and (self.rows or self.columns):
            raise TilenetError(
                f"tiles are given as a grid or as a size, not both (rows: {self.rows}, columns: "
                f"{self.columns}, size_px: {self.size_px}); leave one out"
            )
        if (self.rows is None) != (self.columns is None):
            raise TilenetError(
                f"a grid of tiles has rows and columns (rows: {self.rows}, columns: "
                f"{self.columns}); set both"
            )


@dataclass(frozen=True)
class GradientKeys:
    """How gradients are summed over ranks."""

    transport: Literal["auto", "host", "device", "nccl", "gloo"] = "auto"
    piece_mb: float = 4.0

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces that are summed at a time."""
        return int(self.piece_mb * 2**20)

    def check(self) -> None:
        """Refuse pieces that are none.

        Raises:
            TilenetError: With the size.
        """
        if not (2**-10 <= self.piece_mb <= 2**10):
            raise TilenetError(
                f"gradients.piece_mb must lie between 1/1024 and 1024 (gradients.piece_mb: "
                f"{self.piece_mb}); 4 is usual"
            )


@dataclass(frozen=True)
class OptimizerKeys:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None

    @property
    def kind(self) -> str:
        """The optimizer by what it keeps of each parameter, see `partition_bytes`."""
        return "sgd-momentum" if self.name == "sgd" and self.momentum else self.name

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of some parameters."""
        # Not foreach: it makes temporary tensors as large as all parameters together.
        if self.name == "sgd":
            return torch.optim.SGD(
                parameters,
                self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                nesterov=self.nesterov,
                foreach=False,
            )
        return torch.optim.AdamW(parameters, self.lr, weight_decay=self.weight_decay, foreach=False)

    def check(self) -> None:
        """Refuse values that make no optimizer.

        Raises:
            TilenetError: With the first of them.
        """
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise TilenetError(
                    f"optimizer.{name} must be a number of at least 0 (optimizer.{name}: {value})"
                )
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise TilenetError(
                f"nesterov is a kind of momentum of sgd (optimizer.name: {self.name}, "
                f"optimizer.momentum: {self.momentum}); set name: sgd and momentum: 0.9, or leave "
                "it out"
            )
        clip = self.clip_norm
        if clip is not None and not (clip > 0 and isfinite(clip)):
            raise TilenetError(
                f"optimizer.clip_norm must be a number above 0 (optimizer.clip_norm: {clip}); "
                "leave it out not to clip"
            )


@dataclass(frozen=True)
class ScheduleKeys:
    """How the learning rate changes with the step."""

    name: ScheduleName = "constant"
    power: float = 0.9
    warmup_steps: int = 0
    milestones: list[int] | None = None
    factor: float = 0.1
    min_lr: float = 0.0

    def check(self, lr: float, steps: int | None) -> None:
        """Refuse values that make no schedule.

        Raises:
            TilenetError: With the first of them.
        """
        for name in ("power", "factor"):
            value = getattr(self, name)
            if not (value > 0 and isfinite(value)):
                raise TilenetError(
                    f"schedule.{name} must be a number above 0 (schedule.{name}: {value})"
                )
        if self.warmup_steps < 0 or (steps is not None and 0 < steps <= self.warmup_steps):
            raise TilenetError(
                f"the warm-up must end before the run (schedule.warmup_steps: {self.warmup_steps}, "
                f"steps: {steps}); choose fewer"
            )
        if not 0 <= self.min_lr <= lr:
            raise TilenetError(
                f"schedule.min_lr lies between 0 and the rate that it falls from (schedule.min_lr: "
                f"{self.min_lr}, optimizer.lr: {lr}); choose a smaller one"
            )
        milestones = self.milestones
        if (milestones is None) == (self.name == "step"):
            raise TilenetError(
                f"milestones belong to a schedule of steps, and to no other (schedule.name: "
                f"{self.name}, schedule.milestones: {milestones}); "
                + ("set some" if self.name == "step" else "leave them out, or set name: step")
            )
        if milestones is not None and (
            not milestones or milestones[0] < 1 or sorted(set(milestones)) != milestones
        ):
            raise TilenetError(
                f"milestones are steps from 1 on, each later than the one before "
                f"(schedule.milestones: {milestones})"
            )

    def rates(self, lr: float, num_steps: int) -> LearningRate:
        """The rates of a run of so many steps."""
        return LearningRate(
            lr,
            num_steps,
            self.name,
            self.power,
            self.warmup_steps,
            tuple(self.milestones or ()),
            self.factor,
            self.min_lr,
        )


@dataclass(frozen=True)
class AugmentKeys:
    """How images and crops are altered before the network sees them."""

    flips: bool = False
    rotations: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0

    @property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """Of these, one is drawn for each image or crop of a step."""
        return symmetries(flips=self.flips, rotations=self.rotations)

    @property
    def radiometry(self) -> Radiometry:
        """How pixel values are altered."""
        return Radiometry(self.brightness, self.contrast, self.noise)

    def check(self) -> None:
        """Refuse amounts that are none.

        Raises:
            TilenetError: With the first of them.
        """
        for name in ("brightness", "contrast", "noise"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)) or (name == "contrast" and value > 1):
                most = "between 0 and 1" if name == "contrast" else "of at least 0"
                raise TilenetError(
                    f"augment.{name} must be a number {most} (augment.{name}: {value}); 0.2 is "
                    "usual"
                )


@dataclass(frozen=True)
class CheckpointKeys:
    """Which checkpoints stay, besides the last and the best one."""

    keep: int = 2

    def check(self) -> None:
        """Refuse to keep none.

        Raises:
            TilenetError: With the number.
        """
        if self.keep < 1:
            raise TilenetError(
                f"checkpoints.keep is the number of newest checkpoints that stay, at least 1 "
                f"(checkpoints.keep: {self.keep}); 2 is usual"
            )


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
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(self.steps))
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

    def slabs(self, device: torch.device) -> Slabs:
        """Where swapped tensors of a device go.

        Raises:
            TilenetError: The folder is not writable.
        """
        limit = None if self.host_gib is None else int(self.host_gib * 2**30)
        return open_slabs(self.folder, limit, pinned=device.type == "cuda")

    def check(self) -> None:
        """Refuse sizes that are none.

        Raises:
            TilenetError: With the first of them.
        """
        if not 0 <= self.min_mib < 2**20:
            raise TilenetError(
                f"swapping.min_mib is a number of MiB from 0 on (swapping.min_mib: "
                f"{self.min_mib}); 1 is usual"
            )
        for name in ("device_gib", "host_gib"):
            gib = getattr(self, name)
            if gib is not None and not 0 < gib < 2**20:
                raise TilenetError(
                    f"swapping.{name} is a number of GiB above 0 (swapping.{name}: {gib}); leave "
                    "it out for all that there is"
                )


@dataclass(frozen=True)
class ValidationKeys:
    """What is held out from training, and when the network is scored on it."""

    images: str | list[str] | None = None
    labels: str | list[str] | None = None
    share: float = 0.0
    block_px: int = 512
    every: int | None = None
    batch_size: int = 1
    score: Literal["mean_iou", "mean_f1", "accuracy", "loss"] = "mean_iou"

    @property
    def image_paths(self) -> tuple[str, ...]:
        """Images that training does not see, in order."""
        return _listed(self.images)

    @property
    def label_paths(self) -> tuple[str, ...]:
        """Their labels, one per image."""
        return _listed(self.labels)

    @property
    def held_out(self) -> str | None:
        """Which share of which blocks is held out, in words; None: none is."""
        return f"{self.share} of blocks of {self.block_px} px" if self.share else None

    @property
    def wanted(self) -> bool:
        """Whether anything is held out."""
        return bool(self.image_paths) or self.share > 0

    def check(self) -> None:
        """Refuse values that hold nothing out.

        Raises:
            TilenetError: With the first of them.
        """
        check_pairs(self.image_paths, self.label_paths, "validation.")
        if not 0 <= self.share < 1:
            raise TilenetError(
                f"validation.share is the share of the training images' blocks that is held out, "
                f"from 0 to below 1 (validation.share: {self.share}); 0.2 is usual"
            )
        for name in ("block_px", "every", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TilenetError(
                    f"validation.{name} must be at least 1 (validation.{name}: {value})"
                )


def check_pairs(images: tuple[str, ...], labels: tuple[str, ...], group: str = "") -> None:
    """Refuse images without labels, unless they are one list of both.

    Args:
        group: Of the keys, with its dot.

    Raises:
        TilenetError: With their numbers.
    """
    lists = [path for path in images if is_list_file(path, with_labels=bool(labels))]
    if lists and (len(images) > 1 or labels):
        raise TilenetError(
            f"a list of images stands alone, since it names their labels too ({group}images: "
            f"{', '.join(images[:3])}, {group}labels: {', '.join(labels[:3]) or 'none'}); leave "
            f"{group}labels out, or join lists"
        )
    if not lists and (len(images) != len(labels) or not (images or group)):
        raise TilenetError(
            f"each image needs one label file ({group}images: {len(images)}, {group}labels: "
            f"{len(labels)}); list them in the same order"
        )
    wrong = [path for path in images + labels if "\0" in path or not path]
    if wrong:
        raise TilenetError(
            f"a path is not empty and holds no NUL bytes ({group}images or {group}labels: "
            f"{wrong[0]!r}); write it again"
        )


def _listed(paths: str | list[str] | None) -> tuple[str, ...]:
    if paths is None:
        return ()
    return (paths,) if isinstance(paths, str) else tuple(paths)
