"""Plans with `halo_mode: sweep`: ranks hold columns of an image and go over them strip by strip.

A rank has a device, or strips flow through partitions on several. Each strip is computed twice
forward and once backward. The image is on the first device, its labels are on the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilenet.errors import TilenetError
from tilenet.geometry.sweep import sweep
from tilenet.model.dtypes import parameter_dtype
from tilenet.planning.balance import (
    Balance,
    block_seconds,
    blocks_of,
    least_time,
    most_partitions,
    without_cuts,
)
from tilenet.planning.compatibility import sweep_obstacle
from tilenet.planning.estimate import Estimator
from tilenet.planning.memory.states import state_bytes
from tilenet.planning.memory.sweeps.swept_partitions import partition_peaks
from tilenet.planning.memory.sweeps.trained_sweeps import (
    ALL_CELLS,
    averaged_sweeps,
    plan_sweeps,
    trained_bytes,
)
from tilenet.planning.plan import Layout, PartitionPlan, Plan, Question
from tilenet.planning.search import check_question, partition_counts
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.messages import halo_times
from tilenet.planning.time.roofline import ITEM_BYTES

LABEL_BYTES = 2  # of a pixel, as labels come to a device


def swept_plans(question: Question) -> list[Plan]:
    """The plans by sweeps, the fastest first, whether they fit their devices or not.

    Raises:
        TilenetError: The network cannot be swept, the question sets options that sweeps lack, there
            are too few columns, or maps that sweeps hand on do not fit.
    """
    _check(question)
    estimator = Estimator(question)
    parts = [(number, _part(estimator, number)) for number in _partitions(question)]
    if all(part is None for _, part in parts):
        mesh, unit = estimator.mesh(parts[-1][0]), estimator.rule.alignment_px
        raise TilenetError(
            f"a sweep gives each rank of an image columns of it (halo_mode: sweep, image: "
            f"{question.image[0]} × {question.image[1]} px, columns in multiples of {unit} px, "
            f"ranks of an image: {mesh.columns}); take fewer nodes or devices_per_node, a larger "
            "batch_size, or halo_mode overlap"
        )
    plans = [
        plan
        for partitions, part in parts
        if part is not None
        for plan in _plans(estimator, partitions, part)
    ]
    if not plans:
        raise TilenetError(
            "a sweep for averages of the whole image keeps maps for the sweeps after it, and they "
            f"must fit a device (halo_mode: sweep, memory to plan with: "
            f"{question.limit_bytes / 2**30:.1f} GiB); take larger devices, more nodes, or another "
            "halo_mode"
        )
    return sorted(plans, key=lambda plan: plan.order)


def fitting_sweeps(question: Question) -> list[Plan]:
    """The fastest plan by sweeps that fits, and the fastest with each other number of partitions.

    Raises:
        TilenetError: See `swept_plans`.
    """
    by_partitions: dict[int, Plan] = {}
    for plan in swept_plans(question):
        if plan.device_bytes <= question.limit_bytes:
            by_partitions.setdefault(plan.layout.partitions, plan)
    return list(by_partitions.values())


def _check(question: Question) -> None:
    check_question(question)
    free = {
        "halo": (question.halo, "exact"),
        "grid": (question.grid, None),
        "tile_px": (question.tile_px, None),
        "micro_batches": (question.micro_batches, None),
        "checkpointing": (question.checkpointing, None),
        "pipeline": (question.pipeline, "gpipe"),
        # Nothing must be swapped.
        "swap": ("off" if question.swap == "auto" else question.swap, "off"),
    }
    for name, (value, only) in free.items():
        if value != only:
            raise TilenetError(
                "a sweep goes over all columns of a rank, and computes each strip again by itself "
                f"(halo_mode: sweep, {name}: {value}); leave {name} out, or take another halo_mode"
            )
    if reason := sweep_obstacle(question.layers, question.partitions or 1):
        raise TilenetError(reason)


def _partitions(question: Question) -> list[int]:
    """Numbers of partitions among which the fastest is chosen."""
    layers = question.layers
    most = 1 if averaged_sweeps(layers) else most_partitions(len(layers), question.together)
    return partition_counts(question, most)


@dataclass(frozen=True)
class _Part:
    """The part of an image on the rank with most of it.

    Attributes:
        grid: Ranks along its rows and columns.
    """

    grid: tuple[int, int]
    height: int
    width: int
    image_bytes: int
    label_bytes: int


def _part(estimator: Estimator, partitions: int) -> _Part | None:
    """The part of the largest image; None: there are more ranks than columns for them."""
    question, mesh = estimator.question, estimator.mesh(partitions)
    if mesh.columns > -(-question.image[1] // estimator.rule.alignment_px):
        return None
    height, width = estimator.read_px((1, mesh.columns))
    # Autocast leaves the image in float32.
    item_bytes = parameter_dtype(question.precision).itemsize
    image_bytes = height * width * question.options.bands * item_bytes
    return _Part((1, mesh.columns), height, width, image_bytes, height * width * LABEL_BYTES)


def _plans(estimator: Estimator, partitions: int, part: _Part) -> Iterator[Plan]:
    """Plans with a number of partitions and the fastest balances."""
    question, layers = estimator.question, estimator.layers
    size, item_bytes = (part.height, part.width), ITEM_BYTES[question.precision]
    times = [LayerTime(2 * time.forward_s, time.backward_s) for time in estimator.times((1, *size))]
    seconds = block_seconds(times, estimator.transfers((1, *size)))
    seconds = without_cuts(seconds, question.together)
    averages = averaged_sweeps(layers)
    balances = [question.balance] if question.balance else least_time(seconds, partitions)
    # All balances have the same strips: with averages, which keep maps, there is one balance.
    fixed = _fixed_bytes(estimator, balances[0], part)
    sweeps = plan_sweeps(layers, *size, item_bytes, question.limit_bytes - fixed[0])
    if averages and sweeps.kept_maps != plan_sweeps(layers, *size, item_bytes, ALL_CELLS).kept_maps:
        return  # layers are computed more often
    strip_rows = sweeps.edges[1]
    for balance in balances:
        fixed = _fixed_bytes(estimator, balance, part)
        if partitions > 1:
            peaks = partition_peaks(layers, *size, strip_rows, item_bytes, balance)
        else:
            most_cells = ALL_CELLS * bool(averages)
            peaks = (trained_bytes(layers, *size, strip_rows, item_bytes, most_cells),)
        sizes = [int(states + peak) for states, peak in zip(fixed, peaks, strict=True)]
        yield _plan(estimator, part, balance, sweeps.edges, sizes)


def _fixed_bytes(estimator: Estimator, balance: Balance, part: _Part) -> list[int]:
    """Bytes of each partition's weights, gradients and optimizer states, of image and labels."""
    optimizer, sharers = estimator.question.optimizer, estimator.sharers(len(balance))
    weights = [
        int(estimator.parameter_bytes[first:stop].sum()) for first, stop in blocks_of(balance)
    ]
    states = [2 * num_bytes + state_bytes(optimizer, num_bytes, sharers) for num_bytes in weights]
    states[0] += part.image_bytes
    states[-1] += part.label_bytes
    return states


def _seconds_of(times: Sequence[LayerTime], blocks: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of each block's layers, which run twice forward and once backward."""
    return [
        sum(2 * time.forward_s + time.backward_s for time in times[first:stop])
        for first, stop in blocks
    ]


def _moving(estimator: Estimator, part: _Part, blocks: Sequence[tuple[int, int]]) -> list[float]:
    """Return the seconds that rows and gradients of a part take to come from neighbours.

    Rows come each time that they are computed, which is twice, and gradients once.
    """
    moves = [0.0, *estimator.transfers((1, part.height, part.width))[1:-1], 0.0]
    return [2 * moves[first] + moves[stop] for first, stop in blocks]


def _plan(
    estimator: Estimator,
    part: _Part,
    balance: Balance,
    edges: Sequence[int],
    sizes: list[int],
) -> Plan:
    """All that the plan says.

    Args:
        edges: Rows between strips.
        sizes: Peaks of the partitions, bytes.
    """
    question, layers, partitions = estimator.question, estimator.layers, len(balance)
    mesh, tiling = estimator.mesh(partitions), estimator.tiling(part.grid)
    layout = Layout(part.grid, partitions, 1, "never", strip_rows=edges[1])
    num_strips = sum(1 for _ in sweep(layers, edges))
    link, item_bytes = estimator.link(partitions), ITEM_BYTES[question.precision]
    waits = halo_times(layers, tiling, item_bytes, link, num_strips)
    blocks = blocks_of(balance)
    computing = _seconds_of(estimator.times((1, part.height, part.width)), blocks)
    waiting = _seconds_of(waits, blocks)
    images = estimator.images(partitions)
    moving = _moving(estimator, part, blocks)
    # The pipeline fills and drains.
    turns = (num_strips + partitions - 1) / num_strips
    pipeline_s = images * turns * max(map(sum, zip(computing, waiting, moving, strict=True)))
    sum_s = estimator.sum_s(partitions)
    read_s = estimator.read_s(layout)
    step_s = max(pipeline_s + sum_s + estimator.update_s(balance), read_s)
    parameters = [sum(layer.num_parameters for layer in layers[a:b]) for a, b in blocks]
    rows = zip(balance, parameters, sizes, computing, strict=True)
    return Plan(
        question=question,
        layout=layout,
        mesh=(mesh.replicas, mesh.rows, mesh.columns),
        ranks_per_node=estimator.ranks_per_node(partitions),
        halo_px=0,
        tile_own_px=(part.height, part.width),
        tile_read_px=(part.height, part.width),
        work_ratio=tiling.work_ratio,
        tiles_per_rank=images,
        stacked=1,
        balance=balance,
        parts=tuple(PartitionPlan(*row, row[-1] / sum(computing)) for row in rows),
        device_bytes=max(sizes),
        host_bytes=estimator.host_bytes(layout, 0),
        bubble=1 - 1 / turns,
        pipeline_s=pipeline_s,
        sum_s=sum_s,
        exchange_s=images * sum(waiting),
        read_s=read_s,
        step_s=step_s,
        epoch_s=step_s * -(-question.num_images // question.batch_size),
        sharers=estimator.sharers(partitions),
    )
