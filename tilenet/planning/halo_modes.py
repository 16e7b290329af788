"""Exchange and sweep, next to a plan whose tiles overlap: what they take and what a step costs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

from tilenet.geometry.halo import context_of
from tilenet.geometry.sweep import sweep
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.planning.advise import ALL_OPEN, first_plan
from tilenet.planning.balance import block_seconds, least_time, most_partitions, without_cuts
from tilenet.planning.compatibility import obstacle, sweep_obstacle
from tilenet.planning.estimate import Estimator
from tilenet.planning.memory.states import state_bytes
from tilenet.planning.memory.swept_partitions import partition_peaks
from tilenet.planning.memory.trained_sweeps import (
    ALL_CELLS,
    averaged_sweeps,
    plan_sweeps,
    trained_bytes,
)
from tilenet.planning.plan import Plan
from tilenet.planning.time.roofline import ITEM_BYTES

__all__ = ["SweptStep", "exchanged", "swept"]


@dataclass(frozen=True)
class SweptStep:
    """A step with `halo_mode: sweep` on the devices of a plan.

    Attributes:
        columns_px: Most columns of an image on a rank.
        strip_rows: Rows of a strip.
        balance: Layers per partition.
        device_bytes: Peak of the fullest device.
        step_s: Seconds, without the halos' way between ranks.
    """

    columns_px: int
    strip_rows: int
    balance: tuple[int, ...]
    device_bytes: int
    step_s: float


def exchanged(plan: Plan) -> Plan | None:
    """The fastest plan with `halo_mode: exchange`; None: the halo is not exact, or nothing fits."""
    question = plan.question
    if question.halo_mode != "overlap" or question.halo != "exact" or plan.layout.grid == (1, 1):
        return None
    fastest = first_plan(replace(question, halo_mode="exchange", **ALL_OPEN))
    if fastest is None or obstacle(question.layers, fastest.layout.grid, fastest.mesh, "exchange"):
        return None
    return fastest


def swept(plan: Plan) -> SweptStep | None:
    """The fastest step by sweeps that fits; None: the network cannot be swept, or none fits.

    A rank has a device, or strips flow through partitions on several. A sweep computes each strip
    twice forward and once backward. The image is on the first device.
    """
    question, layers = plan.question, plan.question.layers
    if question.halo != "exact" or context_of(layers).valid or plan.layout.grid == (1, 1):
        return None
    if sweep_obstacle(layers):
        return None
    estimator = Estimator(replace(question, halo_mode="exchange"))
    most = 1 if averaged_sweeps(layers) else question.machine.devices_per_node
    most = min(most, most_partitions(len(layers), question.together))
    steps = (
        step
        for partitions in range(1, most + 1)
        if question.machine.devices_per_node % partitions == 0
        for step in _steps(plan, estimator, partitions)
    )
    return min(steps, key=lambda step: step.step_s, default=None)


def _steps(plan: Plan, estimator: Estimator, partitions: int) -> Iterator[SweptStep]:
    """Steps over so many partitions that fit."""
    question, layers, mesh = plan.question, plan.question.layers, estimator.mesh(partitions)
    unit = context_of(layers).alignment_px
    ranks, images = mesh.rows * mesh.columns, -(-question.batch_size // mesh.replicas)
    height, units = -(-question.image[0] // unit) * unit, -(-question.image[1] // unit)
    if ranks > units:
        return
    width, item_bytes = -(-units // ranks) * unit, ITEM_BYTES[question.precision]
    image_bytes = prod((height, width, question.options.bands)) * item_bytes
    times = [
        LayerTime(2 * time.forward_s, time.backward_s)
        for time in estimator.times((1, height, width))
    ]
    seconds = block_seconds(times)
    for balance in least_time(without_cuts(seconds, question.together), partitions):
        blocks = list(pairwise([0, *accumulate(balance)]))
        fixed = [_kept_bytes(estimator, partitions, *block) for block in blocks]
        fixed[0] += image_bytes
        sweeps = plan_sweeps(layers, height, width, item_bytes, question.limit_bytes - fixed[0])
        strips, averages = sweeps.edges[1], averaged_sweeps(layers)
        size = height, width
        if averages and sweeps.kept != plan_sweeps(layers, *size, item_bytes, ALL_CELLS).kept:
            return  # layers are computed more often
        if partitions > 1:
            peaks = partition_peaks(layers, *size, strips, item_bytes, balance)
        else:
            peaks = (trained_bytes(layers, *size, strips, item_bytes, bool(averages) * ALL_CELLS),)
        device_bytes = max(one + peak for one, peak in zip(fixed, peaks, strict=True))
        if device_bytes <= question.limit_bytes:
            num_strips = sum(1 for _ in sweep(layers, sweeps.edges))
            slowest = max(float(seconds[block]) for block in blocks)
            # The pipeline fills and drains.
            step_s = images * slowest * (num_strips + partitions - 1) / num_strips
            rest_s = estimator.least_rest_s(partitions)
            yield SweptStep(width, strips, balance, device_bytes, step_s + rest_s)


def _kept_bytes(estimator: Estimator, partitions: int, first: int, stop: int) -> int:
    """Bytes of weights, of the buffer of their gradients and of the optimizer's states."""
    parameters = int(estimator.parameter_bytes[first:stop].sum())
    sharers = estimator.sharers(partitions)
    return 2 * parameters + state_bytes(estimator.question.optimizer, parameters, sharers)
