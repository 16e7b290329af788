"""Running statistics weigh the tiles of a step alike, whichever rank computed them."""

import pytest
import torch
from mpi4py import MPI

from tilenet.model.modules import BatchNorm
from tilenet.parallel.sums.running_statistics import MOMENTUM, RunningStatistics

pytestmark = pytest.mark.ranks(1, 2, 3)


def tile(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn((1, 3, 5, 7), generator=generator, dtype=torch.float64) + number


def test_a_step_blends_the_average_over_all_tiles(comm: MPI.Intracomm) -> None:
    norm = BatchNorm(3).double()
    running = RunningStatistics(norm, comm)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(3):
        tiles = [tile(10 * step + number) for number in range(5)]
        running.begin()
        for number in range(comm.rank, len(tiles), comm.size):
            norm(tiles[number])
        running.finish()
        means = torch.stack([t.mean(dim=(0, 2, 3)) for t in tiles]).mean(dim=0)
        variances = torch.stack([t.var(dim=(0, 2, 3)) for t in tiles]).mean(dim=0)
        mean = (1 - MOMENTUM) * mean + MOMENTUM * means
        var = (1 - MOMENTUM) * var + MOMENTUM * variances
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, var, rtol=1e-12, atol=1e-12)


def test_a_step_without_tiles_changes_nothing(comm: MPI.Intracomm) -> None:
    norm = BatchNorm(3).double()
    running = RunningStatistics(norm, comm)
    running.begin()
    if comm.rank == 0:
        norm(tile(1))
    running.finish()
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    running.begin()
    running.finish()
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, before["running_mean"], rtol=0, atol=0)
