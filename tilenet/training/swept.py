"""The network of a run with `halo_mode: sweep`."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.model.network import Network
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.memory.sweeps.trained_sweeps import plan_sweeps
from tilenet.planning.time.roofline import ITEM_BYTES
from tilenet.training.setup.run_plan import RunPlan

AnyPipe = Pipe | SweptPipe


def swept_pipe(
    plan: RunPlan,
    network: Network,
    devices: Sequence[torch.device],
    channel: HaloChannel,
    device_bytes: int,
) -> SweptPipe:
    """The pipe that computes a rank's tiles strip by strip.

    Args:
        devices: Devices of this rank, one per partition.
        channel: Channel to the ranks that hold columns of the same image.
        device_bytes: Bytes that a step may take on the device.
    """
    layers, precision = plan.record.layers, plan.record.precision
    item_bytes = ITEM_BYTES[precision]  # as the planner counts them

    def sweeps(height: int, width: int) -> Sweeps:
        fitting = plan_sweeps(layers, height, width, item_bytes, device_bytes)
        if plan.strip_rows is None:
            return fitting
        return replace(fitting, edges=strip_edges(height, plan.strip_rows))

    return SweptPipe(network, layers, devices, precision, sweeps, channel, balance=plan.balance)
