"""Whether a helper of each rank has a core: counted per node, and alike on all ranks."""

import os

import pytest
import torch
from mpi4py import MPI

from tilenet.parallel.sums.meanwhile import room_for_helpers, sums_pay_meanwhile


@pytest.mark.parametrize(
    ("cores", "threads", "room"),
    [
        ([range(2)] * 2, [1, 1], False),  # unbound: they share both
        ([range(4)] * 2, [1, 1], True),
        ([range(3)] * 2, [1, 1], False),
        ([range(8)] * 2, [4, 4], False),
        ([range(10)] * 2, [4, 4], True),
        ([{0, 1}, {2, 3}], [1, 1], True),  # bound
        ([{0}, {1}], [1, 1], False),
        ([{0, 1}, {2, 3}], [1, 3], False),
        ([range(5)], [4], True),
    ],
)
def test_cores_are_counted_once(
    cores: list[set[int] | range], threads: list[int], room: bool
) -> None:
    assert room_for_helpers(cores, threads) == room


@pytest.mark.ranks(1, 2, 4)
def test_ranks_agree(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2 * comm.rank, 2 * comm.rank + 1})
    assert sums_pay_meanwhile(comm, on_devices=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {comm.rank})
    assert not sums_pay_meanwhile(comm, on_devices=False)
    last = comm.rank == comm.size - 1
    assert sums_pay_meanwhile(comm, on_devices=last)  # one rank's devices are enough
    if last:  # whose MPI takes one thread at a time
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    assert not sums_pay_meanwhile(comm, on_devices=True)
