"""Gradients summed in pieces are the sum over ranks, whatever the order of completion."""

import time

import pytest
import torch
from mpi4py import MPI
from torch import nn

from tilenet.parallel.gradients import GradientSum


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (11,), (5, 2, 3), (1,), (40, 13)]
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]


def inputs(rank: int, step: int, tile: int) -> list[torch.Tensor]:
    return [p.detach() for p in parameters(1000 * rank + 10 * step + tile)]


@pytest.mark.parametrize("piece_bytes", [8, 100, 1 << 20])
@pytest.mark.parametrize("order", [1, -1], ids=["backward order", "other order"])
def test_sum_over_ranks_and_tiles(comm: MPI.Intracomm, piece_bytes: int, order: int) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, piece_bytes)
    for step in range(3):
        summing.zero()
        tiles = (comm.rank + step) % 3  # ranks have 0, 1 or 2 tiles
        for tile in range(tiles):
            if tile == tiles - 1:
                summing.arm()
            pairs = list(zip(held, inputs(comm.rank, step, tile), strict=True))[::order]
            sum(((p * x).sum() for p, x in pairs), torch.zeros(())).backward()
        summing.finish()
        for index, parameter in enumerate(held):
            wanted = torch.zeros_like(parameter)
            for rank in range(comm.size):
                for tile in range((rank + step) % 3):
                    wanted = wanted + inputs(rank, step, tile)[index]
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-14, atol=1e-14)
    summing.close()


def test_the_sum_is_its_own_adjoint(comm: MPI.Intracomm) -> None:
    """⟨Sx, y⟩ = ⟨x, S*y⟩ for the sum over ranks S, which is its own adjoint."""
    x, y = parameters(comm.rank + 1), parameters(comm.rank + 100)

    def summed(values: list[nn.Parameter]) -> list[torch.Tensor]:
        held = parameters(0)
        summing = GradientSum(held, comm, 64)
        for parameter, value in zip(held, values, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(value.detach())
        summing.finish()
        summing.close()
        return [p.grad for p in held if p.grad is not None]

    def inner(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return sum(float((p.detach() * q.detach()).sum()) for p, q in zip(a, b, strict=True))

    left = comm.allreduce(inner(summed(x), list(y)))
    right = comm.allreduce(inner(list(x), summed(y)))
    assert left == pytest.approx(right, rel=1e-12)


def test_pieces_are_summed_while_backward_is_still_running(comm: MPI.Intracomm) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, 8)
    first = held[-1]  # completed first: the network's last layer
    summing.arm()
    (first * 2.0).sum().backward()
    if comm.size > 1:
        # The helper sums without being waited for; every rank reaches this line by itself.
        wanted = torch.full_like(first, 2.0 * comm.size)
        for _ in range(2000):
            if torch.equal(first.grad, wanted):  # type: ignore[arg-type]
                break
            time.sleep(0.005)
        assert torch.equal(first.grad, wanted)  # type: ignore[arg-type]
    summing.finish()
    summing.close()


def test_a_failure_of_the_helper_reaches_the_rank(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("one rank has no helper")
    summing = GradientSum(parameters(0), comm, 64)
    summing._pieces = [("not", "numbers")] * len(summing._pieces)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        summing.finish()
    summing.close()
