"""The question to the planner, and its answer: everything decided before the job."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from tilenet.choices import Checkpointing, Pipelining
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.geometry.legal_layers import check_layers
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.machines.fill import filled
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.values import Count
from tilenet.planning.memory.states import OPTIMIZER_STATES
from tilenet.planning.swap.plan import SwapPlan
from tilenet.planning.time.profile import Profile
from tilenet.storage.atomic import write_aside
from tilenet.storage.layer_json import layer_from_json, layer_to_json
from tilenet.storage.strict_json import parsed_json

VERSION = 1
PlannedMode = Literal["overlap", "exchange", "sweep"]
MODES: tuple[PlannedMode, ...] = get_args(PlannedMode)
Optimizer = Annotated[str, f"one of {', '.join(OPTIMIZER_STATES)}", OPTIMIZER_STATES.__contains__]
Size = Annotated[tuple[int, int], "rows and columns", lambda size: len(size) == 2 and min(size) > 0]
T = TypeVar("T")


@dataclass(frozen=True)
class OwnNetwork:
    """A user module as a list of layers.

    Attributes:
        name: Name of the module, for messages.
        layers: Layers in the order in which they run.
        together: First and last of the layers that share a weight, by the weight's name.
    """

    name: str
    layers: tuple[Layer, ...]
    together: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def bands(self) -> int:
        """Channels of the image."""
        return self.layers[0].in_channels

    def to_json(self) -> dict[str, Any]:
        """Return the network as a plain dictionary, as a plan holds it."""
        layers = [layer_to_json(layer) for layer in self.layers]
        return {"name": self.name, "layers": layers, "together": dict(self.together)}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "OwnNetwork":
        """Read the dictionary that `to_json` returned.

        Raises:
            TilenetError: The layers are no network.
            KeyError, TypeError, ValueError: The entry is something else.
        """
        layers = tuple(map(layer_from_json, entry["layers"]))
        if not layers:
            raise ValueError("a network has layers")
        check_layers(layers, layers[0].in_channels, layers[-1].out_channels)
        together = {str(name): (int(a), int(b)) for name, (a, b) in entry["together"].items()}
        if any(not 0 <= a <= b < len(layers) for a, b in together.values()):
            raise ValueError("together names layers that there are not")
        return cls(str(entry["name"]), layers, together)


@dataclass(frozen=True)
class Question:
    """An image, a network and a machine to plan for; values that are None are chosen.

    Attributes:
        options: The network: a U-Net's, or a user module's layers.
        epsilon_px: The paper's halo for it; 0 for a user module.
        image: Height and width of the largest image, pixels.
        num_images: Images of an epoch.
        batch_size: Images of a step.
        precision: Precision, as in run files.
        optimizer: `adamw`, `sgd`, or `sgd-momentum`.
        halo: `exact`, `epsilon` or pixels.
        halo_mode: `overlap`, `exchange` or `sweep`; `auto`: the fastest that fits, which is in
            the question of a plan.
        grid: Tiles along rows and columns.
        tile_px: Largest own size of a tile.
        partitions: Devices per rank.
        balance: Layers per partition, which says how many partitions there are.
        micro_batches: Micro-batches of a rank in the pipeline at once, each a tile or a stack.
        checkpointing: Micro-batches that are computed again in backward.
        pipeline: Order of micro-batches in the partitions, `gpipe` or `1f1b`.
        swap: `off`; `auto`: as much as must, where that is fastest; `all`: all large tensors.
        reserve: Share of a device's memory that is left for workspace and fragmentation.
        profile: Measured times of the layers; None: the roofline's.
    """

    options: UNetOptions | OwnNetwork
    epsilon_px: int
    image: Size
    machine: Machine
    nodes: int = 1
    num_images: int = 1
    batch_size: int = 1
    precision: str = "float32"
    optimizer: Optimizer = "adamw"
    halo: int | str = "exact"
    halo_mode: PlannedMode | Literal["auto"] = "overlap"
    grid: tuple[int, int] | None = None
    tile_px: int | None = None
    partitions: int | None = None
    balance: tuple[int, ...] | None = None
    micro_batches: int | None = None
    checkpointing: Checkpointing | None = None
    pipeline: Pipelining = "gpipe"
    swap: Literal["off", "auto", "all"] = "off"
    reserve: float = 0.1
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.partitions is None and self.balance is not None:
            object.__setattr__(self, "partitions", len(self.balance))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's."""
        options = self.options
        return options.layers if isinstance(options, OwnNetwork) else unet_layers(options)

    @property
    def together(self) -> Mapping[str, tuple[int, int]]:
        """First and last of the layers that stay in one partition, by their weight's name."""
        return self.options.together if isinstance(self.options, OwnNetwork) else {}

    @property
    def limit_bytes(self) -> int:
        """Bytes of a device that may be planned with."""
        return int(self.machine.memory_bytes * (1 - self.reserve))


@dataclass(frozen=True)
class Layout:
    """One way to lay out a run.

    Attributes:
        grid: Tiles along rows and columns of an image.
        partitions: Devices per rank.
        micro_batches: Micro-batches of a rank in the pipeline at once, each a tile or a stack.
        checkpointing: Micro-batches that are computed again in backward.
        swap: Whether tensors go to the host.
        strip_rows: Rows of a strip of a sweep; None: tiles are computed whole.
        pipeline: Order of micro-batches in the partitions, `gpipe` or `1f1b`.
    """

    grid: tuple[int, int]
    partitions: int
    micro_batches: int
    checkpointing: Checkpointing
    swap: bool = False
    strip_rows: int | None = None
    pipeline: Pipelining = "gpipe"

    @property
    def flows(self) -> bool:
        """Whether micro-batches go back while others go forward."""
        return self.pipeline == "1f1b"

    def __str__(self) -> str:
        rows, cols = self.grid
        parts = f"{self.partitions} partition{'s' * (self.partitions > 1)}"
        if self.strip_rows is not None:
            return f"{rows} × {cols} tiles in strips of {self.strip_rows} rows, {parts}"
        return (
            f"{rows} × {cols} tiles, {parts}, {'1f1b, ' * self.flows}{self.micro_batches} "
            f"micro-batch{'es' * (self.micro_batches > 1)}, checkpointing {self.checkpointing}"
            + ", swapping"
            * self.swap
        )


@dataclass(frozen=True)
class PartitionPlan:
    """A partition: the layers on one device.

    Attributes:
        layers: Number of layers.
        parameters: Trained values.
        num_bytes: Predicted peak.
        seconds: Seconds of one micro-batch, forward and backward.
        share: Share of the time of all partitions.
    """

    layers: int
    parameters: int
    num_bytes: int
    seconds: float
    share: float


def round_seconds(seconds: float) -> float:
    """Seconds to nine digits: equal ones stay equal however they were added up.

    Sums of doubles differ in the 13th digit, predictions from runs in the second.
    """
    return float(f"{seconds:.9g}")


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        mesh: Replicas, rows and columns of ranks.
        ranks_per_node: Ranks that share a node.
        halo_px: Pixels read around own windows.
        tile_own_px: Largest own size of a tile, rows and columns.
        tile_read_px: Rows and columns that a tile reads.
        work_ratio: Pixels read by all tiles, per pixel of the image.
        tiles_per_rank: Most tiles of a rank in a step.
        stacked: Tiles of a micro-batch: more than 1 where a layer needs them at once.
        balance: Layers per partition.
        device_bytes: Predicted peak of the fullest device.
        host_bytes: Predicted bytes of a node's memory.
        bubble: Idle share of the pipeline.
        pipeline_s: Predicted seconds of a step in the pipeline.
        sum_s: Predicted seconds of summing gradients, if nothing of it hides behind backward.
        exchange_s: Predicted seconds of a step that layers wait for other ranks; part of
            `pipeline_s`, where partitions wait at the same time.
        read_s: Predicted seconds of reading a step's tiles, while the step before it computes.
        step_s: Predicted seconds of a step.
        epoch_s: Predicted seconds of an epoch.
        swaps: Layers and bytes that a rank swaps; None: nothing.
        swap_overhead: Predicted seconds of a step that this adds, per second without it, were
            memory endless.
        sharers: Ranks that share out the optimizer's states.
        notes: Sentences for people.
    """

    question: Question
    layout: Layout
    mesh: tuple[int, int, int]
    ranks_per_node: int
    halo_px: int
    tile_own_px: tuple[int, int]
    tile_read_px: tuple[int, int]
    work_ratio: float
    tiles_per_rank: int
    stacked: int
    balance: tuple[int, ...]
    parts: tuple[PartitionPlan, ...]
    device_bytes: int
    host_bytes: int
    bubble: float
    pipeline_s: float
    sum_s: float
    exchange_s: float
    read_s: float
    step_s: float
    epoch_s: float
    swaps: SwapPlan | None = None
    swap_overhead: float = 0.0
    sharers: int = 1
    notes: tuple[str, ...] = ()

    @property
    def halo_mode(self) -> PlannedMode:
        """Halo mode of the tiles."""
        assert self.question.halo_mode != "auto"
        return self.question.halo_mode

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key of plans: fast ones first, then those of few partitions, then of few bytes."""
        return round_seconds(self.step_s), self.layout.partitions, self.device_bytes

    @property
    def num_ranks(self) -> int:
        """MPI ranks of the job."""
        return self.mesh[0] * self.mesh[1] * self.mesh[2]

    def run_keys(self) -> dict[str, Any]:
        """Return the plan's keys of a run file."""
        replicas, rows, columns = self.mesh
        tiles = {"rows": self.layout.grid[0], "columns": self.layout.grid[1]}
        # Or the run would plan with all of the device that it finds.
        swapping = {"swapping": {"device_gib": self.question.limit_bytes / 2**30}}
        # A sweep takes the columns of a rank as they are; of tiles each would have a halo.
        swept = self.layout.strip_rows is not None
        return {
            "mesh": {"replicas": replicas, "rows": rows, "columns": columns},
            **({} if swept else {"tiles": tiles}),
            "halo": self.question.halo,
            "halo_mode": self.question.halo_mode,
            "partitions": self.layout.partitions,
            "balance": list(self.balance),
            "micro_batches": self.layout.micro_batches,
            "checkpointing": self.layout.checkpointing,
            "pipeline": self.layout.pipeline,
            "swap": self.question.swap if self.layout.swap else "off",
            **(swapping if self.layout.swap else {}),
            "batch_size": self.question.batch_size,
            "precision": self.question.precision,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the contents of `plan.json`."""
        answer = asdict(replace(self, question=replace(self.question, profile=None)))
        entry = answer.pop("question")
        if isinstance(self.question.options, OwnNetwork):
            entry["options"] = self.question.options.to_json()
        return {"tilenet_plan": VERSION, "run": self.run_keys(), "asked": entry, "answer": answer}


def write_plan(plan: Plan, path: Path) -> None:
    """Write `plan.json`.

    Raises:
        TilenetError: It cannot be written.
    """
    write_aside(json.dumps(plan.to_json(), indent=1), path, "a plan")


AXES = {"replicas", "rows", "columns"}
Mesh = Annotated[dict[str, Count], "replicas, rows, columns", lambda mesh: set(mesh) == AXES]
Tiles = Annotated[dict[str, Count], "rows, columns", lambda grid: set(grid) == AXES - {"replicas"}]


@dataclass(frozen=True)
class PlannedRun:
    """The part of `plan.json` that runs, jobs and later plans take.

    Attributes:
        keys: Keys of the run file; some of those below are among them.
        mesh: Ranks by axis.
        balance: Layers per partition.
        tiles: Tiles of an image by axis; a sweep has none.
        ranks_per_node: Most ranks that share a node, on the machine that was planned for.
        device_bytes: Predicted peak of the fullest device.
        host_bytes: Predicted bytes of a node's memory.
        sharers: Ranks that share out the optimizer's states.
    """

    keys: dict[str, Any]
    question: Question
    mesh: Mesh
    balance: Annotated[tuple[Count, ...], "numbers of layers", bool]
    micro_batches: Count
    checkpointing: Checkpointing
    ranks_per_node: Count
    device_bytes: Count
    host_bytes: Count
    sharers: Count = 1
    tiles: Tiles = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.keys.get("partitions"), self.keys.get("balance")
        if parts != (len(self.balance), [*self.balance]):
            raise ValueError("run has no balance with one number of layers per partition")
        if not self.tiles and self.question.halo_mode != "sweep":
            raise ValueError("run has no tiles")


def read_plan(path: Path) -> PlannedRun:
    """Read a file that `tilenet plan -o` wrote.

    Raises:
        TilenetError: It is no plan, or not one that this version understands.
    """
    try:
        entry = parsed_json(path.read_text("utf-8"))
    except OSError as error:
        raise TilenetError(
            f"the plan must be a readable file ({path}: {error.strerror}); write one with tilenet "
            "plan -o"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"no JSON: {error}") from error
    version = entry.get("tilenet_plan") if isinstance(entry, dict) else None
    if version is True or version != VERSION:
        raise _wrong(path, f"the key tilenet_plan is missing or not {VERSION}")
    keys, table, answer = (entry.get(part) for part in ("run", "asked", "answer"))
    if not all(isinstance(part, dict) for part in (keys, table, answer)):
        raise _wrong(path, "run, asked and answer must be objects")
    try:
        network = table["options"]
        own = "layers" in network
        options = OwnNetwork.from_json(network) if own else UNetOptions(**network)
    except (AttributeError, KeyError, TypeError, ValueError, TilenetError) as error:
        raise _wrong(path, f"asked has no network: {error}") from error
    try:
        question = _known(Question, "asked", table, options=options)
        both = {**answer, **keys}
        return _known(PlannedRun, "run or answer", both, keys=keys, question=question)
    except ValueError as error:
        raise _wrong(path, str(error)) from error


def _known(kind: type[T], where: str, table: dict[str, Any], **known: Any) -> T:
    """A dataclass filled with those of a table's values that it has a place for."""
    names = [part.name for part in fields(kind) if part.name not in known]  # type: ignore[arg-type]
    return filled(kind, where, {name: table[name] for name in names if name in table}, **known)


def planned_bytes(path: Path) -> dict[str, int]:
    """Read a plan's prediction: bytes of the fullest device and of a rank's share of its node.

    Raises:
        TilenetError: See `read_plan`.
    """
    plan = read_plan(path)
    host_bytes = plan.host_bytes // plan.ranks_per_node
    return {"device_bytes": plan.device_bytes, "host_bytes": host_bytes}


def _wrong(path: Path, what: str) -> TilenetError:
    return TilenetError(f"{path} must be a plan ({what}); write one with tilenet plan -o")
