"""A map's proof: a small image in the way of the map, next to the network on the whole image.

Method, ranks, tiles, passes, partitions and devices are the map's own. The network is compared with
its plain list of layers: no module is imported for a map.
"""

import copy
from dataclasses import replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Window
from tilenet.mapping.job import MapJob
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.model.network import Network
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.proof import (
    Difference,
    largest,
    no_trace,
    proof_precision,
    say_or_refuse,
    say_why_not,
    scale_of,
    with_zeros,
)
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import together
from tilenet.planning.maps.passes import plan_passes
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.small_image import (
    ImageQuestion,
    choose_small_image,
    proof_grid,
    untested_halo,
)


def prove_map(job: MapJob, comm: Intracomm) -> None:
    """Compare, and say how far the map's tiles are from the whole image. Collective.

    Args:
        job: The map; its network is on the CPU.

    Raises:
        AgreedError: Tiles do not give the network's numbers.
    """
    try:  # all ranks decide the same
        plan = _plan_small(job, comm.size)
    except TilenetError as error:
        reason = str(error)
    else:
        with no_trace(job.placement.devices):
            reason = _prove(job, plan, comm)
    say_why_not(reason, comm)


def _plan_small(job: MapJob, num_ranks: int) -> MapPlan:
    """The map's plan for the small image.

    Raises:
        TilenetError: There is no image that takes little time.
    """
    plan, layers = job.plan, job.mapper.record.layers
    tiling = plan.tiling
    if not tiling.rule.exact:
        raise TilenetError(
            f"the halo that was asked for ({tiling.rule.halo_px} px) is not the exact one"
        )
    rule, columns = tiling.rule, min(num_ranks, tiling.grid[1], 3)
    ranks = -(-num_ranks // columns), columns
    grid = tiling.grid if rule.exchanged else proof_grid(tiling.grid, ranks)
    if plan.method == "sweep" and num_ranks == tiling.grid[1] == 1:
        rule = replace(rule, halo_px=0)  # rows above a strip are kept, and nothing is read twice
    size_question = ImageQuestion(
        layers,
        rule,
        grid,
        tiling,
        tiles=-(-prod(grid) // num_ranks) * (len(plan.passes) + 1),
        run_pixels=prod(tiling.extended) / num_ranks,
    )
    small = choose_small_image(size_question)
    swept = read_ratio(small, num_ranks) if plan.method == "sweep" else None
    if not plan.passes:
        return MapPlan(plan.method, small, ratio=swept)
    question = MapQuestion(
        layers,
        small.extended,
        rule,
        halo_asked=False,
        tile_px=None,
        num_ranks=num_ranks,
        item_bytes=0,
        budget_bytes=0,
        most_px=0,
    )
    return plan_passes(question, small, "", swept)


def _prove(job: MapJob, plan: MapPlan, comm: Intracomm) -> str:
    """Compute, compare and say it; returns why it cannot be done."""
    from mpi4py import MPI

    layers, size = job.mapper.record.layers, plan.tiling.extended
    generator = torch.Generator().manual_seed(0)
    shape = 1, layers[0].in_channels, *size
    plain = torch.randn(shape, generator=generator, dtype=torch.float64)
    image = with_zeros(plain)
    precision = proof_precision(job.placement.devices, comm)
    dtype = torch.float64 if precision == "float64" else torch.float32
    reference, rounding = {}, 0.0
    reason: str = ""
    with together(comm):  # ranks that wait leave the cores to rank 0
        if comm.rank == 0:
            reference["logits"] = _compute_whole(job.network, image)
            if not reference["logits"].isfinite().all():
                reference["logits"] = _compute_whole(job.network, image := plain)
            if not reference["logits"].isfinite().all():
                reason = "the network gives values without end"
            elif precision == "float32":
                device = job.placement.devices[0]
                apart = _compute_whole(job.network, image, dtype, device) - reference["logits"]
                rounding = float(apart.abs().max()) / scale_of(reference.values())
    reason, rounding, is_plain = comm.bcast((reason, rounding, image is plain))
    if reason:
        return reason
    image = plain if is_plain else image
    logits = share_tensors(reference, comm)["logits"]
    small_job = replace(
        job,
        plan=plan,
        mapper=_RandomMapper(job.mapper, plan.tiling, image.to(dtype)),
        network=copy.deepcopy(job.network).to(dtype),
        placement=replace(job.placement, precision=precision),
        what=None,
        turns=(),
    )
    sink = _ComparingSink(comm.rank, logits)
    small_job.map(small_job.fix_statistics(comm), comm, sink)
    apart = comm.allreduce(sink.apart / scale_of([logits]), op=MPI.MAX)
    difference = Difference("logits", apart, rounding if precision == "float32" else None)
    note = untested_halo(plan.tiling)
    say_or_refuse([difference], _describe_method(job, comm.size), note, "--no-prove", comm)
    return ""


def _describe_method(job: MapJob, num_ranks: int) -> str:
    """Ranks, method and partitions, for people."""
    rows, cols = job.plan.tiling.grid
    number, parts, passes = num_ranks, len(job.placement.balance), len(job.plan.passes) + 1
    ranks = f"{rows} × {cols}" if job.plan.method == "exchange" else f"{number}"
    kind = "sweeps" if job.plan.method == "sweep" else "passes"
    method = f"{passes} {kind}" if passes > 1 else job.plan.method
    return f"{ranks} rank{'s' * (num_ranks > 1)}, {method}" + f", {parts} partitions" * (parts > 1)


def _compute_whole(
    network: Network,
    image: Tensor,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Logits of the whole image, in float64 on the CPU."""
    plain = copy.deepcopy(network).to(device=device, dtype=dtype).eval()
    with torch.inference_mode():
        logits: Tensor = plain(image.to(device=device, dtype=dtype, copy=True))
    return logits.double().cpu().clone()


class _RandomMapper(Mapper):
    """Reads a random image in which all pixels have data."""

    def __init__(self, like: Mapper, tiling: Tiling, pixels: Tensor) -> None:
        super().__init__("logits", like.record, like.image, tiling, pixels.dtype)
        self.pixels = pixels

    def input(self, window: Window) -> tuple[Tensor, NDArray[np.bool_]]:
        pixels = part_of(self.pixels, window, 0, 0).clone()
        return pixels, np.ones(pixels.shape[2:], bool)


class _ComparingSink:
    """Keeps how far this rank's pieces are from the whole image's logits, (1, C, H, W)."""

    def __init__(self, rank: int, logits: Tensor) -> None:
        self.rank, self.logits = rank, logits
        self.apart = 0.0

    def wants(self, rank: int, window: Window) -> bool:
        return rank == self.rank

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        assert computed is not None
        whole = part_of(self.logits, window, 0, 0)[0]
        self.apart = max(self.apart, largest(computed.logits, whole))
