"""Exchange and sweep, next to a plan whose tiles overlap: what they take and what a step costs."""

from dataclasses import dataclass, replace
from math import prod

from tilenet.geometry.halo import context_of
from tilenet.planning.advise import ALL_OPEN, first_plan
from tilenet.planning.compatibility import obstacle, sweep_obstacle
from tilenet.planning.estimate import Estimator
from tilenet.planning.memory.states import state_bytes
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
        device_bytes: Peak of a device.
        step_s: Seconds, without the halos' way between ranks.
    """

    columns_px: int
    strip_rows: int
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
    """A step by sweeps, a rank per device; None: the network cannot be swept, or it does not fit.

    A sweep computes each strip twice forward and once backward. The image, the weights and the
    optimizer's states are on the device.
    """
    question, layers = plan.question, plan.question.layers
    context, averages = context_of(layers), averaged_sweeps(layers)
    if question.halo != "exact" or context.valid or plan.layout.grid == (1, 1):
        return None
    if sweep_obstacle(layers):
        return None
    estimator, unit = Estimator(replace(question, halo_mode="exchange")), context.alignment_px
    mesh = estimator.mesh(1)
    ranks, images = mesh.rows * mesh.columns, -(-question.batch_size // mesh.replicas)
    height, units = -(-question.image[0] // unit) * unit, -(-question.image[1] // unit)
    if ranks > units:
        return None
    width, item_bytes = -(-units // ranks) * unit, ITEM_BYTES[question.precision]
    parameters = int(estimator.parameter_bytes.sum())
    weights = parameters + state_bytes(question.optimizer, parameters, estimator.sharers(1))
    fixed = weights + prod((height, width, question.options.bands)) * item_bytes
    sweeps = plan_sweeps(layers, height, width, item_bytes, question.limit_bytes - fixed)
    if averages and sweeps.kept != plan_sweeps(layers, height, width, item_bytes, ALL_CELLS).kept:
        return None  # layers are computed more often
    cells = ALL_CELLS if averages else 0
    device_bytes = fixed + trained_bytes(layers, height, width, sweeps.edges[1], item_bytes, cells)
    if device_bytes > question.limit_bytes:
        return None
    times = estimator.times((1, height, width))
    seconds = images * sum(2 * time.forward_s + time.backward_s for time in times)
    return SweptStep(width, sweeps.edges[1], device_bytes, seconds + estimator.least_rest_s(1))
