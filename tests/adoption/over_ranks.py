"""Compare a module's list over the ranks of a job with the module on the whole image.

mpiexec -n 3 python -m mpi4py tests/adoption/over_ranks.py --from 0 --count 50, with tests/adoption
and tests/exactness on PYTHONPATH. A rank that raises ends the job; `survey.py --ranks` goes on.
"""

import argparse
import json
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from grammar import BANDS, generate
from mpi4py import MPI
from referee import (
    Run,
    apart,
    by_module,
    loss_of,
    mode_of,
    run_module,
    size_for,
    without_drops,
)
from shared_out import Case, Result, grids, shared_out, summed
from sweeps import CPU, whole
from torch import Tensor, nn

import tilenet
from tilenet.adoption.adopt import Adopted, BatchNormMode
from tilenet.choices import HaloMode
from tilenet.errors import TilenetError
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.balance import likely_balance
from tilenet.planning.compatibility import whole_image
from tilenet.planning.memory.sweeps.trained_sweeps import maps_to_keep

__all__ = ["adopt_once", "compare_over_ranks"]

LEAST_PX, MOST_PX = 24, 600


@dataclass(frozen=True)
class AdoptedCase(Case):
    """A case whose weights are the module's, without dropout."""

    adopted: Adopted | None = None

    @property
    def balance(self) -> list[int]:
        assert self.adopted is not None
        together = self.adopted.together
        return [*likely_balance(self.layers, self.size, self.partitions, together)]

    def network(self) -> Network:
        assert self.adopted is not None
        return without_drops(self.adopted.network(torch.float64).train())


def adopt_once(comm: MPI.Intracomm, module: nn.Module, batch_norm: BatchNormMode) -> Adopted | None:
    """What rank 0 adopts; None: it is refused, or fails, which is told of in one process."""
    adopted = None
    if comm.rank == 0:
        try:
            adopted = tilenet.adopt(module, BANDS, batch_norm)
        except Exception:
            adopted = None
    found: Adopted | None = comm.bcast(adopted)
    return found


def case_of(
    adopted: Adopted, mode: HaloMode, grid: tuple[int, int], stride: int, partitions: int
) -> AdoptedCase | None:
    """The smallest image that the grid may share out; None: it is too large for a test."""
    unit, layers = lcm(adopted.context.alignment_px, stride), adopted.layers
    halo = adopted.context.halo_px if mode == "overlap" else 0
    units = [side // unit for side in size_for(adopted, grid, stride)]
    if mode == "exchange":
        units = [max(2 * n + 1, -(-LEAST_PX // unit)) for n in grid]
    while mode == "overlap" or max(units) * unit <= MOST_PX:
        size = units[0] * unit, units[1] * unit
        case = AdoptedCase(
            layers, size, grid, adopted.context.alignment_px, halo, mode, images=2,
            partitions=min(partitions, len(layers)), adopted=adopted,
        )  # fmt: skip
        if mode == "overlap":
            return case
        try:
            check_shares(layers, case.tiling.rows, "rows")
            check_shares(layers, case.tiling.cols, "columns")
        except TilenetError:
            units = [u + n for u, n in zip(units, grid, strict=True)]
            continue
        return case
    return None


def run_of(adopted: Adopted, result: Result) -> Run:
    return Run(
        torch.cat(result.outputs),
        torch.cat(result.images),
        by_module(adopted, iter(result.parameters.items())),
        by_module(adopted, iter(result.running.items())),
    )


def swept(case: AdoptedCase, comm: MPI.Intracomm, strip_rows: int, like: Run) -> Run:
    """Over the ranks of `comm`, each of which sweeps its columns; images get no gradient."""
    network, tiling, adopted = case.network(), case.tiling, case.adopted
    assert adopted is not None

    def sweeps(rows: int, cols: int) -> Sweeps:
        return Sweeps(strip_edges(rows, strip_rows), maps_to_keep(case.layers, rows, cols))

    pipe = SweptPipe(network, case.layers, [CPU], "float64", sweeps, HaloChannel(comm))
    read, found = tiling.tiles[comm.rank].read, list[Tensor]()
    for number, image in enumerate(case.inputs()):
        mine = image[:, :, :, read.col : read.col + read.width].clone()
        laid = pipe(mine, Origin((10 + number,), tiling, (comm.rank,)), whole(case.size))
        loss_of(laid).backward()
        found.append(summed(laid.detach().contiguous(), comm))
    grads = {
        name: summed(p.grad.contiguous(), comm)
        for name, p in network.named_parameters()
        if p.grad is not None
    }
    buffers = by_module(adopted, iter(network.named_buffers()))
    return Run(torch.cat(found), like.image, by_module(adopted, iter(grads.items())), buffers)


def compare_over_ranks(
    comm: MPI.Intracomm, seed: int, adopted: Adopted, mode: HaloMode
) -> dict[str, float] | None:
    """Largest differences that are beyond their bounds, on any rank; None: no grid takes it, or
    its sums cannot be swept.

    Raises:
        TilenetError: The grid cannot be exchanged over, on all ranks.
    """
    module, choices = generate(seed), grids(comm.size)
    sweeps = mode == "sweep"
    if sweeps and whole_image(adopted.layers) not in (None, "global average"):
        return None
    grid = (1, comm.size) if sweeps else choices[seed % len(choices)]
    mode = "exchange" if sweeps else mode
    case = case_of(adopted, mode, grid, module.stride, 1 + seed // 4 % 2)
    if case is None:
        return None
    wanted = run_module(module, torch.cat(case.inputs()), mode_of(seed))
    if sweeps:
        found = swept(case, comm, case.unit * (1 + seed % 5), wanted)
    else:
        found = run_of(adopted, shared_out(case, comm, stacked=mode_of(seed) == "step"))
    wrong = {what: value for what, (value, bound) in apart(found, wanted).items() if value > bound}
    gathered = comm.allgather(wrong)
    return {
        what: max(w.get(what, 0.0) for w in gathered) for what in sorted(set().union(*gathered))
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)

    def say(seed: int, mode: str, kind: str, more: Any = "") -> None:
        if comm.rank == 0:
            print(json.dumps([seed, mode, kind, more]), flush=True)

    for seed in range(asked.start, asked.start + asked.count):
        adopted = adopt_once(comm, generate(seed), mode_of(seed))
        if adopted is None:
            say(seed, "", "not adopted")
            continue
        for mode in ("overlap", "exchange", "sweep"):
            say(seed, mode, "begins")
            try:
                wrong = compare_over_ranks(comm, seed, adopted, mode)  # type: ignore[arg-type]
            except TilenetError as error:
                say(seed, mode, "refused", str(error))
                continue
            kind = "too large" if wrong is None else "failed" if wrong else "exact"
            say(seed, mode, kind, wrong)


if __name__ == "__main__":
    main()
