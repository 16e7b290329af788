"""The run file: one YAML file describes a training run; dotted options override it.

Each key is documented in docs/run-file.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, TypeVar

from tilenet.choices import READ_AHEAD, Checkpointing, Device, HaloMode, Pipelining, Precision
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Part
from tilenet.storage.class_names import check_class_names
from tilenet.training.config.keys import (
    AugmentKeys,
    CheckpointKeys,
    GradientKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ProfileKeys,
    ScheduleKeys,
    SwappingKeys,
    TileKeys,
)
from tilenet.training.config.task import check_task
from tilenet.training.config.unread import check_unread
from tilenet.training.config.validation_keys import ValidationKeys, check_pairs, listed
from tilenet.training.config.windows import check_windows

Halo = Literal["exact", "epsilon"] | int

T = TypeVar("T")


@dataclass(frozen=True)
class RunFile:
    """A training run; see docs/run-file.md for each key."""

    images: str | tuple[str, ...]
    """a raster, or a list of them: anything GDAL reads. Files that plus signs join are one image,
    [stacked](#bands-and-nodata) on the grid of the first: `R.tif+G.tif+B.tif`, `rgb.tif+dem.tif`.
    Or a pattern, or a CSV or vector file that lists images and labels ([below](#many-images))"""
    classes: int | list[str]
    """number of classes, or a list of their names, each once; labels are 0 to classes − 1. In a
    regression the name of the predicted number: `[height]`"""
    output: str
    """folder of the run: `history.csv`, `validation.csv`, `checkpoints/`, `last`, `best`"""
    labels: str | tuple[str, ...] | None = None
    """a label file per image, in the same order (a file may stand several times), or a pattern: a
    raster of one band of whole numbers, or polygons, see [below](#labels). Default: required, but
    for a list of both."""
    task: Literal["classification", "regression"] = "classification"
    """`regression`: the network predicts a number per pixel, and labels are [rasters of
    numbers](#regression)"""
    unit: str | None = None
    """unit of a regression's numbers, such as `m`; maps carry it"""
    plan: str | None = None
    """`plan.json` of `tilenet plan -o`: its mesh, tiles, halo, partitions, balance, micro-batches,
    checkpointing, batch size and precision, where neither this file nor the command line says
    otherwise"""
    bands: list[int | str] | None = None
    """bands to read: numbers from 1, [names](#bands-and-nodata), or both: `[4, 3, 2]`, `[nir, red,
    green]`. Default: all but alpha."""
    vectors: VectorKeys = field(default_factory=VectorKeys)
    validation: ValidationKeys = field(default_factory=ValidationKeys)
    ignore_index: int = 255
    """label of pixels that do not count; nodata in label rasters becomes it"""
    nodata: float | Literal["none", "collar"] | None = None
    """a value without data; `none`: every pixel is valid; `collar`: [black pixels that reach the
    edge](#bands-and-nodata) are not. By default the file's mask, alpha or nodata tag. NaN and
    infinite pixels never count. Default: from the file."""
    resolution: float | None = None
    """pixel size to read at, a whole multiple of the file's own (within 5 %); images are averaged
    (means are rounded to float32 where it holds all values of the file's type, with `precision:
    float64` too), labels take the most frequent class. Default: the file's."""
    bbox: list[float] | str | None = None
    """[the part](#a-part-of-the-images) of the images that is looked at: XMIN,YMIN,XMAX,YMAX in
    their CRS"""
    window: list[int] | str | None = None
    """instead of `bbox`: ROW,COL,HEIGHT,WIDTH of one image"""
    network: NetworkKeys = field(default_factory=NetworkKeys)
    mesh: MeshKeys = field(default_factory=MeshKeys)
    tiles: TileKeys = field(default_factory=TileKeys)
    halo: Halo = "exact"
    """`exact`; `epsilon`, the paper's tiling, approximate; or pixels"""
    halo_mode: HaloMode = "overlap"
    """source of the context around tiles: `overlap`: they read it and compute it too; `exchange`:
    each layer takes it from the neighbouring ranks, and nothing is computed twice, one window of an
    image per rank; `sweep`: strip by strip, which takes less memory, with columns of an image per
    rank, or with tiles that overlap ([halo.md](halo.md#sweep)); `windows`: for an opaque module,
    which no list of layers can express, approximate: crops are all that it sees
    ([windows.md](windows.md))"""
    exchange_from: Literal["auto", "host", "device"] = "auto"
    """with GPUs, whether `exchange` hands `device` memory to MPI or stages it through the `host`;
    `auto`: device where MPI says that it takes it"""
    partitions: int | None = None
    """devices per rank: the network's layers are cut into as many parts, which work as a pipeline.
    Default: 1."""
    balance: list[int] | None = None
    """layers per partition, which must add up; it changes speed and memory, never the result.
    Default: computed."""
    micro_batches: int = 1
    """most tiles of a rank in the pipeline at once (images or crops, where they are one tile each).
    Where a rank has fewer tiles of the largest image, they are cut into sub-tiles, at the price of
    more overlap"""
    pipeline: Pipelining = "gpipe"
    """order of micro-batches in the partitions: `gpipe`: a mini-batch of them forward, then back;
    `1f1b`: each back as soon as its own loss is known, so that nothing drains between mini-batches,
    and memory is that of as many micro-batches as partitions
    ([large-networks.md](large-networks.md#one-forward-one-backward))"""
    read_ahead: int = READ_AHEAD
    """micro-batches that a thread of each rank reads before they are needed, those of the next
    steps too; 0: each is read when it is computed ([below](#reading)). Default: 2."""
    checkpointing: Checkpointing = "never"
    """micro-batches that keep only their input and are computed again in backward: `always` all,
    `except_last` all but the last"""
    swap: Literal["off", "auto", "all"] | bool = "off"
    """tensors that wait for backward on the host instead of on the device: `off` none; `all` all
    large enough; `auto` as many as must, so that a step fits `swapping.device_gib`: those of the
    first layers of each partition, by the fastest simulated step. Results are the same bits
    ([swapping.md](swapping.md#in-training-runs))"""
    swapping: SwappingKeys = field(default_factory=SwappingKeys)
    steps: int | None = None
    """length of the run; an epoch sees each image once, or takes ⌈n / (`crop_px`² · `batch_size`)⌉
    steps of crops, n the pixels that lie in at least one place of a crop: an image smaller than a
    crop counts as a whole crop, and cells of 2^P px at edges as whole cells. Default: one is
    required."""
    epochs: int | None = None
    """length of the run; an epoch sees each image once, or takes ⌈n / (`crop_px`² · `batch_size`)⌉
    steps of crops, n the pixels that lie in at least one place of a crop: an image smaller than a
    crop counts as a whole crop, and cells of 2^P px at edges as whole cells. Default: one is
    required."""
    crop_px: int | None = None
    """train on crops of this side, a multiple of 2^P, drawn where labelled pixels are, from
    multiples of 2^P (of more in [images of 185 000² px and
    more](when-it-does-not-fit.md#before-the-first-step)); without it a step covers whole images"""
    oversample: float = 0.0
    """share of the crops, 0 to 1, that are drawn by class: first one of the classes that occur,
    each as likely, then a place among those that hold it; the others are drawn from all places. For
    rare classes; needs `crop_px`"""
    batch_size: int = 1
    """images or crops per step. A GPU computes as many crops in one batch as keep it busy and fit
    its memory, which changes results by rounding alone"""
    optimizer: OptimizerKeys = field(default_factory=OptimizerKeys)
    schedule: ScheduleKeys = field(default_factory=ScheduleKeys)
    augment: AugmentKeys = field(default_factory=AugmentKeys)
    loss: Literal["ce", "focal", "dice", "ce+dice", "l1", "l2", "huber"] | None = None
    """`ce`, cross-entropy: Σ w·ℓ over own, labelled pixels with data, divided once by Σ w; `dice`:
    1 − the mean over classes of (2·Σ p·t + 1) / (Σ p + Σ t + 1) of each whole image, averaged over
    the step's images (needs all tiles of a step in the pipeline at once; class weights do not
    count); `ce+dice`: their sum; `focal`: Σ w·(1 − p)^γ·ℓ / Σ w, p the probability of the pixel's
    label (Lin et al., 2017). Of a regression `l1`, `l2` or `huber`: the mean over own, labelled
    pixels with data of a, of a², or of a²/2 up to `huber_delta` and of δ·(a − δ/2) beyond, a the
    error's absolute value. Default: `ce`; of a regression `l2`."""
    focal_gamma: float = 2.0
    """γ of `focal`; 0 is cross-entropy"""
    huber_delta: float = 1.0
    """δ of `huber`, in units of the labels"""
    class_weights: list[float] | Literal["auto"] | None = None
    """weight w of a pixel by its label: a list, or `auto`: N / (K·n), with N labelled pixels of all
    images, K classes that occur and n pixels of the class, so that all classes weigh the same and
    the mean over pixels is 1 (King and Zeng, 2001; scikit-learn's `balanced`). A class that does
    not occur gets 0. They are printed as the run begins (with other weights the pixels of each
    class are), and follow from the labels again where it goes on. Default: 1 each."""
    seed: int = 0
    """first weights, dropout masks, crops and augmentation depend on it, and on nothing else"""
    precision: Precision = "float32"
    """`float32`, `float64`, or `bfloat16`, `float16` (autocast; weights stay float32). `float16`
    scales the loss; a step with overflowing gradients is thrown away on all ranks, and printed.
    `tf32` is float32 but for the factors of convolutions and products, which GPUs of compute
    capability 8 and later round to 10 bits of mantissa; elsewhere, as a line then says, it is
    `float32`"""
    device: Device | list[str] = "auto"
    """`cpu`, `cuda` (ROCm too), `xpu` (Intel, with float64; never run on one, and without several
    partitions, `nccl` and `device` memory), `auto`: a GPU where torch sees one; or a list with one
    device per partition; a device may be named several times (with GPUs for one rank per node)"""
    gradients: GradientKeys = field(default_factory=GradientKeys)
    init: str | None = None
    """first weights: a `.safetensors` file or a run's folder"""
    checkpoint_every: int = 100
    """steps between checkpoints; the last step always leaves one"""
    checkpoints: CheckpointKeys = field(default_factory=CheckpointKeys)
    hang_seconds: float = 1800.0
    """when a step takes longer, every rank prints its stacks and the job ends
    ([failures.md](failures.md)); four times as long for the first step, checkpoints and work that
    is done once; 0: never"""
    prove: bool = True
    """where the network is a module: before the first step a small random image goes through this
    run's ranks, tiles, partitions and devices, forward and backward, and is compared with the
    module on the whole image ([exactness.md](exactness.md)); about 2 s, or 2 % of the run"""
    profile: ProfileKeys = field(default_factory=ProfileKeys)
    tensorboard: bool = False
    """write scalars for TensorBoard too, into `tensorboard/` of the output; it needs `pip install
    tilenet[tensorboard]` ([below](#validation))"""

    def __post_init__(self) -> None:
        if self.swap is False:  # YAML reads an unquoted off as false
            object.__setattr__(self, "swap", "off")
        _check(self)

    @property
    def image_paths(self) -> tuple[str, ...]:
        """The images, in order; patterns or a list until read.py read them."""
        return listed(self.images)

    @property
    def label_paths(self) -> tuple[str, ...]:
        """The label rasters or vectors, one per image."""
        return listed(self.labels)

    @property
    def band_names(self) -> tuple[str | None, ...] | None:
        """The names that bands are asked for by, None for those by number; None: no names."""
        names = tuple(band if isinstance(band, str) else None for band in self.bands or ())
        return names if any(names) else None

    @property
    def part(self) -> Part | None:
        """The part of the images that there is for the run; None: all.

        Raises:
            TilenetError: Both keys name one, or their value is no list of numbers.
        """
        if self.bbox is None and self.window is None:
            return None
        if self.bbox is not None and self.window is not None:
            raise TilenetError(
                "a part of the images is named once, by bbox or by window (bbox: "
                f"{self.bbox}, window: {self.window}); leave one of them out"
            )
        if self.bbox is not None:
            return Part(bbox=_numbers("bbox", self.bbox, float, "XMIN,YMIN,XMAX,YMAX"))
        assert self.window is not None
        return Part(window=_numbers("window", self.window, int, "ROW,COL,HEIGHT,WIDTH"))

    @property
    def num_partitions(self) -> int:
        """Devices per rank."""
        return self.partitions or (len(self.balance) if self.balance else 1)

    @property
    def window_px(self) -> int | None:
        """Side of the windows of an opaque module; None: the module becomes layers."""
        return self.crop_px if self.halo_mode == "windows" else None

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the terms that the loss adds up."""
        default = "l2" if self.task == "regression" else "ce"
        return tuple((self.loss or default).split("+"))

    @property
    def score(self) -> str:
        """Name of the score that chooses the best validation."""
        default = "rmse" if self.task == "regression" else "mean_iou"
        return self.validation.score or default

    @property
    def terms(self) -> dict[str, Any]:
        """Values that must not change when the run goes on from a checkpoint."""
        return {
            "optimizer": self.optimizer.name,
            "ema": self.optimizer.ema,
            "precision": self.precision,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "crop_px": self.crop_px,
            "held_out": self.validation.held_out,
            "part": None if self.part is None else str(self.part),
            "nodata": None if self.nodata is None else str(self.nodata),  # nan is unlike itself
            "resolution": self.resolution,
            "ignore_index": self.ignore_index,
            **{f"vectors.{key}": str(value) for key, value in asdict(self.vectors).items()},
            "network.mean": self.network.mean,
            "network.std": self.network.std,
            **(self._loss_keys if self.score == "loss" else {}),
        }

    @property
    def _loss_keys(self) -> dict[str, Any]:
        """Values without which the losses of two validations cannot be compared."""
        weights = (
            [1.0] * len(self.class_names) if self.class_weights is None else self.class_weights
        )
        keys = {"loss": "+".join(self.loss_terms), "class_weights": weights}
        keys |= {name: getattr(self, name) for name in ("focal_gamma", "huber_delta")}
        return {f"validation.score by {name}": value for name, value in keys.items()}

    @property
    def reading(self) -> dict[str, Any]:
        """Values that statistics of the same files depend on."""
        return {
            "resolution": self.resolution,
            "nodata": self.nodata,
            "vectors": repr(asdict(self.vectors)),  # may hold keys of several types
            "ignore_index": self.ignore_index,
            "num_classes": len(self.class_names),
            **({"task": self.task} if self.task == "regression" else {}),
            "part": None if self.part is None else str(self.part),
        }

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where none are given."""
        if isinstance(self.classes, int):
            return tuple(str(index) for index in range(self.classes))
        return tuple(self.classes)


def _numbers(
    name: str, value: Sequence[float] | str, kind: Callable[[str], T], order: str
) -> tuple[T, ...]:
    """The numbers of a key: a list, or as `tilenet predict` takes them."""
    parts = value.split(",") if isinstance(value, str) else [str(number) for number in value]
    try:
        numbers = tuple(kind(part) for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) != 4:
        raise TilenetError(f"{name} is four numbers, {order} ({name}: {value}); give all four")
    return numbers


def _check(run: RunFile) -> None:
    """Refuse keys that make no run.

    Raises:
        TilenetError: Keys are wrong or contradict each other; the error names the first.
    """
    _check_values(run)
    for group in fields(run):
        if is_dataclass(group.default_factory):
            _check_values(getattr(run, group.name), f"{group.name}.")
    _check_numbers(run)
    if run.swap is True:
        raise TilenetError("swap is off, auto or all (swap: true); auto swaps no more than it must")
    check_pairs(run.image_paths, run.label_paths)
    _ = run.part  # refuses wrong values
    _check_length(run)
    _check_pipeline(run)
    check_unread(run)
    check_task(run)
    _check_classes(run)
    if run.task == "classification":
        run.vectors.check(len(run.class_names), run.ignore_index)
    _check_loss(run)
    run.optimizer.check()
    run.schedule.check(run.optimizer.lr, run.steps)
    check_pairs(run.validation.image_paths, run.validation.label_paths, "validation.")
    run.tiles.check()
    run.network.check()
    check_windows(run)


def _check_length(run: RunFile) -> None:
    if (run.steps is None) == (run.epochs is None):
        raise TilenetError(
            f"a run's length is steps or epochs, one of them (steps: {run.steps}, epochs: "
            f"{run.epochs}); set one"
        )
    run.profile.check(run.steps)


def _check_pipeline(run: RunFile) -> None:
    if isinstance(run.device, list) and len(run.device) != run.num_partitions:
        raise TilenetError(
            f"a list of devices names one per partition (device: {run.device}, partitions: "
            f"{run.num_partitions}); one device may be named several times"
        )


def _check_classes(run: RunFile) -> None:
    if run.task == "classification" and len(run.class_names) < 2:
        raise TilenetError(
            f"a map needs at least two classes (classes: {run.classes}); name the background too"
        )
    check_class_names(run.class_names, "classes")
    if 0 <= run.ignore_index < len(run.class_names):
        raise TilenetError(
            f"ignore_index may not be a class (ignore_index: {run.ignore_index}, classes: 0 to "
            f"{len(run.class_names) - 1}); 255 is usual"
        )


def _check_loss(run: RunFile) -> None:
    weights = run.class_weights
    if isinstance(weights, list) and (
        len(weights) != len(run.class_names)
        or not all(weight >= 0 and isfinite(weight) for weight in weights)
        or max(weights) == 0
    ):
        raise TilenetError(
            f"class_weights must be one weight of at least 0 per class, not all 0 (weights: "
            f"{weights}, classes: {len(run.class_names)}); write as many as there are classes"
        )
    least = {"float64": 0.0, "float16": 1e-5}.get(run.precision, 1e-37)
    if isinstance(weights, list) and max(weights) < least:
        raise TilenetError(
            f"only the ratios of class_weights count, and {run.precision} rounds small ones to 0 "
            f"(weights: {weights}, the largest should be at least {least:g}); multiply all by one "
            "number"
        )


def _check_values(keys: Any, group: str = "") -> None:
    """Refuse `seed: null` and its like, which the parser lets pass where a default is a value."""
    for part in fields(keys):
        if getattr(keys, part.name) is None and part.default is not None:
            raise TilenetError(
                f"a key that stands in a run file has a value ({group}{part.name}: null); give it "
                "one, or leave it out"
            )


def _check_numbers(run: RunFile) -> None:
    """Refuse numbers out of their range."""
    for words, (fits, names) in RANGES.items():
        for name in names.split():
            value = attrgetter(name)(run)
            if value is not None and not (isfinite(value) and fits(value)):
                raise TilenetError(
                    f"{name} is a finite number {words} ({name}: {value}); write such a number"
                )


# Not types of jsonargparse: runs that Python makes are checked too, and inf is no learning rate.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "from 0 on": (
        lambda value: value >= 0,
        "steps epochs hang_seconds read_ahead focal_gamma optimizer.lr optimizer.momentum "
        "optimizer.weight_decay schedule.warmup_steps schedule.min_lr augment.brightness "
        "augment.noise swapping.min_mib",
    ),
    "from 0 to below 2⁶³": (lambda value: 0 <= value < 2**63, "seed"),
    "from 1 on": (
        lambda value: value >= 1,
        "checkpoint_every crop_px partitions checkpoints.keep validation.block_px validation.every "
        "validation.batch_size micro_batches batch_size",
    ),
    "above 0": (
        lambda value: value > 0,
        "optimizer.clip_norm schedule.power schedule.factor huber_delta gradients.piece_mb "
        "swapping.device_gib swapping.host_gib",
    ),
    "from 0 to 1": (lambda value: 0 <= value <= 1, "oversample augment.contrast"),
    "from 0 to below 1": (lambda value: 0 <= value < 1, "validation.share"),
}
