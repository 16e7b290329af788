"""Groups of keys of the run file; see docs/run-file.md for each key."""

import re
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from tilenet.errors import TilenetError
from tilenet.geometry.symmetries import Symmetry, symmetries
from tilenet.geometry.tiles import Cut
from tilenet.geometry.unet import (
    PRESETS,
    NormKind,
    NormScope,
    Padding,
    UNetOptions,
    Upsampling,
)
from tilenet.planning.memory.states import AVERAGED, Shard
from tilenet.training.learning_rate import LearningRate, ScheduleName

MOST_PROFILED = 100
OF_MODULES = ("module", "options", "weights", "mean", "std", "batch_norm")


@dataclass(frozen=True)
class NetworkKeys:
    """The network; keys left out come from the preset, or from `UNetOptions`."""

    preset: Literal["small", "medium-1", "medium-2", "large"] | None = None
    """`small`, `medium-1`, `medium-2`, `large`: the paper's networks; other `network` keys override
    it"""
    poolings: int | None = None
    """poolings P; tiles are multiples of 2^P. Default: 4."""
    convolutions: int | None = None
    """convolutions per level. Default: 2."""
    base: int | None = None
    """channels of the first level, even. Default: 64."""
    kernel: int | None = None
    """width of the convolutions, odd. Default: 3."""
    padding: Padding | None = None
    """`same`, or `valid` (the 2015 U-Net). Default: `same`."""
    upsampling: Upsampling | None = None
    """`nearest`, `bilinear`, `transposed`. Default: `nearest`."""
    norm: NormKind | None = None
    """`none`, `batch`, `group`, `instance`. Default: `none`."""
    norm_scope: NormScope | None = None
    """pixels that normalisation takes statistics of: `image`: those of each whole image
    (`instance`, `group`) or of all images of a step (`batch`), exact whatever the tiles, see
    [below](#what-composes-with-what); `tile` is approximate: the result depends on the tiles.
    Default: `image`."""
    groups: int | None = None
    """groups of a group norm. Default: 8."""
    dropout: float | None = None
    """probability that a channel is dropped; masks are keyed by (seed, step, image, layer), the
    same on any number of ranks. Default: 0."""
    bias: bool | None = None
    """whether convolutions add a constant. Default: where no norm follows."""
    module: str | None = None
    """instead of all these: a [user module](networks.md), as in
    `segmentation_models_pytorch:Unet`: a function or a class of a package, or of a file in the
    working directory, that makes a `torch.nn.Module`"""
    options: dict[str, Any] | None = None
    """arguments that `module` is called with"""
    weights: str | None = None
    """weights of the module or of a part of it, such as its encoder: a `.safetensors` file, or one
    of `torch.save` or Lightning that runs no code; names
    [may begin otherwise](networks.md#in-a-run)"""
    mean: list[float] | None = None
    """mean per band that the module's weights were trained with, in units of pixels; `std` goes
    with it. Default: that of the training images, as for all networks."""
    std: list[float] | None = None
    """standard deviation per band, see `mean`"""
    batch_norm: Literal["frozen", "step"] | None = None
    """batch norm of the module: `frozen` keeps its running statistics, `step` takes those of all
    images of a step. Default: `frozen`."""

    @property
    def start(self) -> UNetOptions:
        """Options of the preset, or the defaults, which the other keys override."""
        return PRESETS[self.preset] if self.preset else UNetOptions()

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and std per band; None: those of the training images."""
        if self.mean is None or self.std is None:
            return None
        return tuple(self.mean), tuple(self.std)

    def check(self) -> None:
        """Refuse keys of a U-Net with a module, keys of a module without one.

        Raises:
            TilenetError: The keys contradict each other; the error names the values.
        """
        numbers = [*(self.mean or ()), *(self.std or ())]
        valid = len(self.mean or ()) == len(self.std or ()) and all(map(isfinite, numbers))
        if not valid or min(self.std or [1.0]) <= 0:
            raise TilenetError(
                f"pixels less a mean are divided by a std above 0, one of each per band "
                f"(network.mean: {self.mean}, network.std: {self.std}); give both, or none"
            )
        for name, value in vars(self).items():
            if value is not None and (name in OF_MODULES) != (self.module is not None):
                raise TilenetError(
                    f"a network is a user module, with {', '.join(OF_MODULES[1:])}, or a U-Net "
                    f"of tilenet's own (network.module: {self.module}, network.{name}: {value}); "
                    "leave one of them out, and give what the module is called with as "
                    "network.options"
                )


@dataclass(frozen=True)
class MeshKeys:
    """Ranks as replicas × rows × columns; axes left out follow from the number of ranks."""

    replicas: int | None = None
    """groups of ranks that each hold one image of the step. Default: from the ranks."""
    rows: int | None = None
    """ranks along an image's rows and columns; replicas × rows × columns is the number of ranks.
    Default: from the ranks."""
    columns: int | None = None
    """ranks along an image's rows and columns; replicas × rows × columns is the number of ranks.
    Default: from the ranks."""


@dataclass(frozen=True)
class TileKeys:
    """Tiles per image: a grid, or a largest own size; left out: one tile per rank of a replica."""

    rows: int | None = None
    """tiles per image; `columns` goes with it. Default: one tile per rank of a replica."""
    columns: int | None = None
    """tiles per image; `rows` goes with it. Default: one tile per rank of a replica."""
    size_px: int | None = None
    """instead: largest own size of a tile"""

    @property
    def cut(self) -> Cut | None:
        """The tiles that are asked for; None: left out."""
        if self.rows is not None and self.columns is not None:
            return Cut(grid=(self.rows, self.columns))
        return None if self.size_px is None else Cut(size_px=self.size_px)

    def check(self) -> None:
        """Refuse half a grid, or a grid and a size.

        Raises:
            TilenetError: The keys contradict each other; the error names the values.
        """
        grid = [count for count in (self.rows, self.columns) if count is not None]
        if len(grid) == 1 or (grid and self.size_px is not None):
            raise TilenetError(
                f"tiles are given as a grid of rows and columns, or as a size (rows: {self.rows}, "
                f"columns: {self.columns}, size_px: {self.size_px}); set both or the size"
            )


@dataclass(frozen=True)
class GradientKeys:
    """Settings of the sum of gradients over ranks."""

    transport: Literal["auto", "host", "device", "nccl"] = "auto"
    """transport of gradients between ranks: `host` (MPI on host memory), `device` (MPI on device
    memory, if it is CUDA-aware), `nccl` (NCCL or RCCL)"""
    piece_mb: float = 4.0
    """MiB of a piece of gradients that is sent at once"""

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces that are summed at a time."""
        return int(self.piece_mb * 2**20)


@dataclass(frozen=True)
class OptimizerKeys:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw` or `sgd`"""
    lr: float = 1e-3
    """learning rate"""
    momentum: float = 0.0
    """momentum of `sgd`"""
    weight_decay: float = 0.0
    """weight decay, of `adamw` decoupled from the gradient"""
    nesterov: bool = False
    """momentum of `sgd` as Nesterov's"""
    clip_norm: float | None = None
    """largest norm of the gradient: a longer one is scaled down to it. The norm of the whole
    gradient of the step's loss, over all parameters"""
    ema: float | None = None
    """decay of an exponential moving average of the weights, as 0.999: after each update the
    average is ema times itself and 1 − ema times the weights. Validation, checkpoints and maps have
    the average ([below](#averaged-weights)). Default: none."""
    shard: Shard = "auto"
    """whether ranks share out the optimizer's states of the weights, and the update: `always`,
    `never`, or `auto`, where it is more than 64 MiB in all; a run may go on with another value
    ([below](#the-optimizers-states-over-ranks))"""

    @property
    def kind(self) -> str:
        """Name of the optimizer by its states of each parameter, see `partition_bytes`."""
        kind = "sgd-momentum" if self.name == "sgd" and self.momentum else self.name
        return kind if self.ema is None else kind + AVERAGED

    def check(self) -> None:
        """Refuse an average of no weights.

        Raises:
            TilenetError: The error names the value.
        """
        if self.ema is not None and not 0 < self.ema < 1:
            raise TilenetError(
                f"an average of weights decays by a number between 0 and 1 (optimizer.ema: "
                f"{self.ema}); 0.999 is usual, or leave it out"
            )


@dataclass(frozen=True)
class ScheduleKeys:
    """The schedule of the learning rate over steps."""

    name: ScheduleName = "constant"
    """schedule of the learning rate over steps: `constant`, `poly`, `cosine`, `step`
    ([below](#learning-rates))"""
    power: float = 0.9
    """exponent of `poly`"""
    warmup_steps: int = 0
    """steps of the rise to `optimizer.lr`, before the schedule begins"""
    milestones: list[int] | None = None
    """numbers of steps made, rising; after each, `step` multiplies the rate by `factor`"""
    factor: float = 0.1
    """factor of `step`"""
    min_lr: float = 0.0
    """rate that `poly` and `cosine` fall to, and that `step` does not fall below"""

    def check(self, lr: float, steps: int | None) -> None:
        """Refuse values that make no schedule.

        Raises:
            TilenetError: The error names the first of them.
        """
        if steps is not None and 0 < steps <= self.warmup_steps:
            raise TilenetError(
                f"the warm-up must end before the run (schedule.warmup_steps: {self.warmup_steps}, "
                f"steps: {steps}); choose fewer"
            )
        if self.min_lr > lr:
            raise TilenetError(
                f"schedule.min_lr lies between 0 and the rate that it falls from (schedule.min_lr: "
                f"{self.min_lr}, optimizer.lr: {lr}); choose a smaller one"
            )
        milestones = self.milestones or []
        rising = sorted({step for step in milestones if step > 0}) == milestones
        if (self.name == "step" and not milestones) or not rising:
            raise TilenetError(
                f"a schedule by name: step has milestones: steps from 1 on, each later than the "
                f"one before (schedule.name: {self.name}, schedule.milestones: {self.milestones}); "
                "correct them, or the name"
            )

    def rates(self, lr: float, num_steps: int) -> LearningRate:
        """The rates of a run of a number of steps."""
        values = {**vars(self), "milestones": tuple(self.milestones or ())}
        return LearningRate(lr, num_steps, **values)


@dataclass(frozen=True)
class AugmentKeys:
    """Changes of images and crops before the network sees them."""

    flips: bool = False
    """flip images or crops at random, up to down and left to right (4 symmetries)"""
    rotations: bool = False
    """turn them by 0, 90, 180 or 270°; with flips, all 8 symmetries of the square
    ([below](#augmentation))"""
    brightness: float = 0.0
    """add to each band of an image or crop a number in ± this, in standard deviations of the
    band"""
    contrast: float = 0.0
    """multiply each band's distance from its mean by a number in 1 ± this, at most 1"""
    noise: float = 0.0
    """standard deviation of normal noise added to each pixel, in standard deviations of the band;
    drawing it takes a CPU core about 20 ns per pixel and band"""

    @property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """Turns to draw one from for each image or crop of a step."""
        return symmetries(flips=self.flips, rotations=self.rotations)


@dataclass(frozen=True)
class CheckpointKeys:
    """The checkpoints that stay, besides the last and the best one."""

    keep: int = 2
    """newest checkpoints that stay, at least 1; `last` and `best` always do"""


@dataclass(frozen=True)
class ProfileKeys:
    """The steps that a trace is recorded of: `40-60`, or one; left out: none."""

    steps: int | str | None = None
    """steps that rank 0 records a trace of: `40-60`, or one; at most 100 together, since the trace
    is kept in memory until then ([below](#what-a-run-leaves))"""

    @property
    def numbers(self) -> range:
        """Their numbers, from 1.

        Raises:
            TilenetError: They are no range.
        """
        if self.steps is None:
            return range(0)
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(self.steps))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last < first + MOST_PROFILED:
            raise TilenetError(
                f"profile.steps are a first and a last step from 1 on, at most {MOST_PROFILED} "
                f"together since a trace is kept in memory (profile.steps: {self.steps}); write "
                "40-60, or one number"
            )
        return range(first, last + 1)

    def check(self, steps: int | None) -> None:
        """Refuse steps that a run of that many does not reach; None: not known yet.

        Raises:
            TilenetError: They begin after the run.
        """
        if self.numbers and steps is not None and self.numbers[0] > steps:
            raise TilenetError(
                f"profile.steps must begin within the run (profile.steps: {self.steps}, steps: "
                f"{steps}); choose earlier ones, or leave profile out"
            )


@dataclass(frozen=True)
class SwappingKeys:
    """Place and limits of swapped tensors; left out: by the machine."""

    device_gib: float | None = None
    """memory of a device that `swap: auto` and the sweeps of a step may use; on CPUs the ranks of a
    node share its memory. Default: the device's memory, less a tenth; on CPUs less
    another tenth, for decoded blocks of images."""
    host_gib: float | None = None
    """memory or file that a rank may swap to. Default: no limit."""
    folder: str | None = None
    """swap to a file there, on node-local NVMe for instance. Default: pinned memory with GPUs, else
    the folder for temporary files."""
    min_mib: float = 1.0
    """smaller tensors stay"""

    @property
    def min_bytes(self) -> int:
        """Smaller tensors stay."""
        return int(self.min_mib * 2**20)
