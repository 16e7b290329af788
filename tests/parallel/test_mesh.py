"""Ranks agree before they raise."""

import pytest
import torch
from mpi4py import MPI

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.mesh import NodePlace, agreed, choose_devices, node_place, world


def raise_agreed(comm: MPI.Intracomm, guilty: list[int]) -> None:
    with agreed(comm):
        if comm.rank in guilty:
            raise TilenetError(f"rank {comm.rank} says so")


def test_all_ranks_raise_what_one_raised(comm: MPI.Intracomm) -> None:
    for guilty in range(comm.size):
        with pytest.raises(AgreedError, match=f"^rank {guilty} says so$"):
            raise_agreed(comm, [guilty])


def test_the_lowest_of_several_speaks(comm: MPI.Intracomm) -> None:
    guilty = list(range(comm.size // 2, comm.size))
    with pytest.raises(AgreedError, match=f"^rank {guilty[0]} "):
        raise_agreed(comm, guilty)


def test_nobody_raises_where_nobody_did(comm: MPI.Intracomm) -> None:
    seen = []
    with agreed(comm):
        seen.append(comm.rank)
    assert seen == [comm.rank]


def test_places_count_the_ranks_of_a_node(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    places = comm.allgather(node_place(comm))
    assert places == [NodePlace(rank, comm.size, False) for rank in range(comm.size)]


def test_a_launcher_that_shows_each_rank_its_own_devices_is_noticed(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", str(comm.rank))
    assert node_place(comm).own_devices == (comm.size > 1)


def test_a_launcher_that_mpi_does_not_know_is_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    if comm.size > 1:
        assert world() == MPI.COMM_WORLD
        return
    with pytest.raises(TilenetError, match="SLURM_STEP_NUM_TASKS: 4, MPI: 1 rank"):
        world()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretends that torch sees two; holds those that were made current."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    return used


def cuda(*numbers: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", number) for number in numbers)


def test_each_partition_of_each_rank_has_a_device(two_gpus: list[torch.device]) -> None:
    assert choose_devices("auto", NodePlace(1, 2)) == cuda(1)
    assert choose_devices("auto", NodePlace(0, 1), 2) == cuda(0, 1)
    assert choose_devices("cuda", NodePlace(2, 3, own_devices=True)) == cuda(0)
    assert choose_devices("cuda", NodePlace(2, 3, own_devices=True), 2) == cuda(0, 1)
    assert two_gpus == list(cuda(1, 0, 0, 0))
    assert choose_devices("cpu", NodePlace(1, 2), 3) == (torch.device("cpu"),) * 3
    with pytest.raises(TilenetError, match=r"ranks on this node: 3, partitions: 1, devices .* 2"):
        choose_devices("auto", NodePlace(0, 3))
    with pytest.raises(TilenetError, match=r"ranks on this node: 2, partitions: 2, devices .* 2"):
        choose_devices("auto", NodePlace(0, 2), 2)


def test_devices_may_be_named(two_gpus: list[torch.device]) -> None:
    assert choose_devices(["cuda:1", "cuda:1", "cuda:0"], NodePlace(0, 1)) == cuda(1, 1, 0)
    assert choose_devices(["cuda"], NodePlace(0, 1)) == cuda(0)
    assert two_gpus == list(cuda(1, 0))
    for names in (["cuda:2"], ["tpu:0"], ["no device"], ["mps"]):
        with pytest.raises(TilenetError, match="a device is cpu or cuda:<number>"):
            choose_devices(names, NodePlace(0, 1))
    with pytest.raises(TilenetError, match=r"belong to one rank .ranks on this node: 2"):
        choose_devices(["cuda:0"], NodePlace(0, 2))
    assert choose_devices(["cuda:0"], NodePlace(1, 2, own_devices=True)) == cuda(0)
    with pytest.raises(TilenetError, match="of one type"):
        choose_devices(["cpu", "cuda:0"], NodePlace(0, 1))
