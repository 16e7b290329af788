"""Every weight is updated by one rank, and all ranks know by which."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from test_gradients import parameters

from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.shares import Part, Shares, owned_parts, values_of_piece
from tilenet.planning.memory.states import sharers
from tilenet.training.config.keys import OptimizerKeys
from tilenet.training.optimizer import make_optimizer

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(sizes=SIZES, ranks=st.integers(1, 7), piece_bytes=st.integers(1, 400))
def test_each_value_has_one_owner_and_shares_are_even(
    sizes: list[int], ranks: int, piece_bytes: int
) -> None:
    piece = values_of_piece(piece_bytes, 4, ranks)
    assert piece % ranks == 0
    owners = [[-1] * size for size in sizes]
    counts = []
    for rank in range(ranks):
        parts = list(owned_parts(sizes, piece, ranks, rank))
        for part in parts:
            assert part.start < part.stop
            for at in range(part.start, part.stop):
                assert owners[part.parameter][at] == -1
                owners[part.parameter][at] = rank
        counts.append(sum(part.stop - part.start for part in parts))
    assert all(owner >= 0 for one in owners for owner in one)
    assert max(counts) == -(-sum(sizes) // ranks)  # what plans count


def test_who_updates_what() -> None:
    """Pieces of 4 values over parameters of 3 and 7, between two ranks."""
    found = [list(owned_parts([3, 7], 4, 2, rank)) for rank in range(2)]
    assert found[0] == [Part(0, 0, 2), Part(1, 1, 3), Part(1, 5, 6)]
    assert found[1] == [Part(0, 2, 3), Part(1, 0, 1), Part(1, 3, 5), Part(1, 6, 7)]


def test_states_are_shared_out_where_they_are_large() -> None:
    mib = 1 << 20
    assert sharers("auto", "adamw", 32 * mib, 4) == 1
    assert sharers("auto", "adamw", 32 * mib + 4, 4) == 4
    assert sharers("auto", "sgd-momentum", 64 * mib, 4) == 1
    assert sharers("auto", "sgd", 1 << 40, 4) == 1
    assert sharers("always", "sgd", 4, 4) == 4
    assert sharers("never", "adamw", 1 << 40, 4) == 1


KEYS = [
    OptimizerKeys("adamw", 0.1, weight_decay=0.1),
    OptimizerKeys("sgd", 0.1, momentum=0.9, nesterov=True),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("piece_bytes", [8, 100, 1 << 20])
@pytest.mark.parametrize("meanwhile", [True, False])
@pytest.mark.parametrize("most", [0.5, 1e3])
@pytest.mark.parametrize("keys", KEYS, ids=["adamw", "momentum"])
def test_a_clipped_update_is_that_of_one_rank(
    comm: MPI.Intracomm, piece_bytes: int, meanwhile: bool, most: float, keys: OptimizerKeys
) -> None:
    held, wanted = parameters(0), parameters(0)
    shares = Shares(held, comm, piece_bytes)
    summing = GradientSum(held, comm, shares, meanwhile=meanwhile)
    one, mine = make_optimizer(keys, wanted), make_optimizer(keys, shares.own)
    for step in range(3):
        summing.zero()
        summing.arm()
        pairs = zip(held, parameters(100 * step + comm.rank + 1), strict=True)
        torch.stack([(p * x.detach()).sum() for p, x in pairs]).sum().backward()
        summing.finish()
        summing.divide(3.0)
        norm = summing.clip(most)
        mine.step()
        summing.share_weights()
        ranks = [parameters(100 * step + rank + 1) for rank in range(comm.size)]
        for index, parameter in enumerate(wanted):
            parameter.grad = torch.stack([x[index].detach() for x in ranks]).sum(0) / 3.0
        length = float(torch.cat([p.grad.view(-1) for p in wanted if p.grad is not None]).norm())
        assert norm == pytest.approx(length, rel=1e-12)
        for parameter in wanted:
            assert parameter.grad is not None
            parameter.grad *= min(1.0, most / length)
        assert comm.allgather(norm) == [norm] * comm.size
        one.step()
        for parameter, other in zip(held, wanted, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)
    summing.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_on_one_rank_is_known_to_all(comm: MPI.Intracomm, value: float) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, Shares(held, comm, 100))
    summing.zero()
    summing.finish()
    assert summing.finite
    if comm.rank == comm.size - 1:
        held[0].grad.view(-1)[-1] = value  # type: ignore[union-attr]
    summing.finish()
    assert not summing.finite
    summing.close()
