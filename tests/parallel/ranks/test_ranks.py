"""Ranks agree before they raise."""

import os
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.ranks import devices
from tilenet.parallel.ranks.comm import STEP_SIZES, agreed, check_torchrun, world
from tilenet.parallel.ranks.devices import NodePlace, choose_devices, find_node_place
from tilenet.parallel.ranks.node import cores_of_rank

pytestmark = pytest.mark.ranks(1, 2)


def raise_agreed(comm: MPI.Intracomm, guilty: list[int]) -> None:
    with agreed(comm):
        if comm.rank in guilty:
            raise TilenetError(f"rank {comm.rank} says so")


@pytest.mark.ranks(1, 2, 4)
def test_all_ranks_raise_what_one_raised(comm: MPI.Intracomm) -> None:
    for guilty in range(comm.size):
        with pytest.raises(AgreedError, match=f"^rank {guilty} says so$"):
            raise_agreed(comm, [guilty])


@pytest.mark.ranks(4)
def test_the_lowest_of_several_speaks(comm: MPI.Intracomm) -> None:
    guilty = list(range(comm.size // 2, comm.size))
    with pytest.raises(AgreedError, match=f"^rank {guilty[0]} "):
        raise_agreed(comm, guilty)


def test_nobody_raises_where_nobody_did(comm: MPI.Intracomm) -> None:
    seen = []
    with agreed(comm):
        seen.append(comm.rank)
    assert seen == [comm.rank]


def test_places_count_the_ranks_of_a_node_and_gather_what_each_sees(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: (f"GPU-{comm.rank}", "GPU-9"))
    places = comm.allgather(find_node_place(comm, "auto"))
    shown = tuple((f"GPU-{rank}", "GPU-9") for rank in range(comm.size))
    own = comm.allgather(len(os.sched_getaffinity(0)))
    assert [place.rank for place in places] == list(range(comm.size))
    assert {(place.size, place.visible) for place in places} == {(comm.size, shown)}
    assert all(1 <= place.cores <= most for place, most in zip(places, own, strict=True))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("bound_to", "cores"),
    [
        ([{0, 1, 2, 3}] * 2, [2, 2]),  # bound to nothing
        ([{0, 1, 2, 3}] * 3, [1, 1, 1]),
        ([{0, 1, 2}, {3, 4, 5}], [3, 3]),  # each to its own
        ([{0}, {0}, {0}], [1, 1, 1]),
        ([{0}, {1, 2, 3, 4, 5}], [1, 3]),
        ([{0, 1, 2, 3}], [4]),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    bound_to: list[set[int]], cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for own in bound_to:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own: own)
        node = SimpleNamespace(size=len(bound_to), allgather=lambda own: bound_to)
        place = NodePlace(0, 1, cores_of_rank(node))  # type: ignore[arg-type]
        choose_devices("cpu", place)
    assert threads == cores


def test_ranks_that_compute_on_the_cpu_do_not_look_for_gpus(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: pytest.fail("this starts CUDA"))
    assert find_node_place(comm, "cpu").visible == ((),) * comm.size


def test_two_ranks_on_one_gpu_are_refused_on_both(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: ("GPU-a",))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    place = find_node_place(comm, "cuda")
    if comm.size == 1:
        assert choose_devices("cuda", place) == cuda(0)
        return
    with pytest.raises(TilenetError, match="a device of its own"):
        choose_devices("cuda", place)


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize(
    ("shown", "own"),
    [
        ([["a"], ["b"]], True),
        ([["a", "b"], ["c"]], True),
        ([["a", "b"], ["b", "c"]], False),
        ([["a"], ["a"]], False),
        ([["a"], []], False),
        ([[], []], False),
        ([["a"]], False),
        ([], False),
    ],
)
def test_own_devices_are_those_that_no_other_rank_sees(shown: list[list[str]], own: bool) -> None:
    place = NodePlace(0, max(1, len(shown)), 1, tuple(tuple(names) for names in shown))
    assert place.has_own_gpus == own


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_STEP_NUM_TASKS",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "JSM_NAMESPACE_SIZE",
        "FLUX_JOB_SIZE",
    ],
)
def test_a_launcher_that_mpi_does_not_know_is_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in STEP_SIZES:
        monkeypatch.delenv(other, raising=False)
    for harmless in ("", "1"):
        monkeypatch.setenv(name, harmless)
        assert MPI.Comm.Compare(world(), MPI.COMM_WORLD) == MPI.CONGRUENT
    monkeypatch.setenv(name, "4")
    if comm.size > 1:
        assert MPI.Comm.Compare(world(), MPI.COMM_WORLD) == MPI.CONGRUENT
        return
    with pytest.raises(TilenetError, match=f"{name}: 4, MPI: 1 rank"):
        world()


def test_ranks_of_torchrun_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # people set it for their own programs too
    check_torchrun(comm)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if comm.size > 1:  # mpiexec starts ranks that torchrun's environment reaches
        check_torchrun(comm)
        return
    with pytest.raises(TilenetError, match=r"torchrun does not start .WORLD_SIZE: 4, MPI: 1 rank"):
        check_torchrun(comm)


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


@pytest.mark.ranks  # no rank is needed
def test_each_partition_of_each_rank_has_a_device(two_gpus: list[torch.device]) -> None:
    assert choose_devices("auto", NodePlace(1, 2, 1)) == cuda(1)
    assert choose_devices("auto", NodePlace(0, 1, 1), 2) == cuda(0, 1)
    own = tuple((f"{rank}a", f"{rank}b") for rank in range(3))
    assert choose_devices("cuda", NodePlace(2, 3, 1, own)) == cuda(0)
    assert choose_devices("cuda", NodePlace(2, 3, 1, own), 2) == cuda(0, 1)
    assert two_gpus == list(cuda(1, 0, 0, 0))
    assert choose_devices("cpu", NodePlace(1, 2, 1), 3) == (torch.device("cpu"),) * 3
    with pytest.raises(TilenetError, match=r"ranks on this node: 3, partitions: 1, devices .* 2"):
        choose_devices("auto", NodePlace(0, 3, 1))
    with pytest.raises(TilenetError, match=r"ranks on this node: 2, partitions: 2, devices .* 2"):
        choose_devices("auto", NodePlace(0, 2, 1), 2)


@pytest.mark.ranks  # no rank is needed
def test_devices_may_be_named(two_gpus: list[torch.device]) -> None:
    assert choose_devices(["cuda:1", "cuda:1", "cuda:0"], NodePlace(0, 1, 1)) == cuda(1, 1, 0)
    assert choose_devices(["cuda"], NodePlace(0, 1, 1)) == cuda(0)
    assert two_gpus == list(cuda(1, 0))
    for names in (["cuda:2"], ["tpu:0"], ["no device"], ["mps"]):
        with pytest.raises(TilenetError, match="a device is cpu, cuda:<number> or xpu:<number>"):
            choose_devices(names, NodePlace(0, 1, 1))
    with pytest.raises(TilenetError, match=r"belong to one rank .ranks on this node: 2"):
        choose_devices(["cuda:0"], NodePlace(0, 2, 1))
    assert choose_devices(["cuda:0"], NodePlace(1, 2, 1, (("a", "b"), ("c", "d")))) == cuda(0)
    with pytest.raises(TilenetError, match=r"belong to one rank .ranks on this node: 2"):
        choose_devices(["cuda:0"], NodePlace(1, 2, 1, (("a", "b"), ("a", "b"))))
    with pytest.raises(TilenetError, match="of one type"):
        choose_devices(["cpu", "cuda:0"], NodePlace(0, 1, 1))


@pytest.fixture
def two_tiles(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretends that torch sees two of Intel's GPUs; holds those that were made current."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "set_device", used.append)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace())
    return used


def xpu(*numbers: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("xpu", number) for number in numbers)


@pytest.mark.ranks  # no rank is needed
def test_ranks_share_intels_gpus_out_by_the_same_rule(two_tiles: list[torch.device]) -> None:
    assert choose_devices("auto", NodePlace(1, 2, 1)) == xpu(1)
    assert choose_devices("xpu", NodePlace(1, 2, 1, (("a", "b"), ("a", "b")))) == xpu(1)
    assert choose_devices("xpu", NodePlace(1, 2, 1, (("a",), ("b",)))) == xpu(0)
    assert choose_devices(["xpu:1"], NodePlace(0, 1, 1)) == xpu(1)
    assert two_tiles == list(xpu(1, 1, 0, 1))
    with pytest.raises(TilenetError, match=r"ranks on this node: 3, partitions: 1, devices .* 2"):
        choose_devices("auto", NodePlace(0, 3, 1))
    with pytest.raises(TilenetError, match=r"of one type .*'cpu', 'xpu:0'"):
        choose_devices(["cpu", "xpu:0"], NodePlace(0, 1, 1))
    with pytest.raises(TilenetError, match=r"device: xpu:2, .* 0 cuda, 2 xpu"):
        choose_devices(["xpu:2"], NodePlace(0, 1, 1))
    with pytest.raises(TilenetError, match=r"belong to one rank .*set device: xpu,"):
        choose_devices(["xpu:0"], NodePlace(0, 2, 1))


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize("device", ["auto", "xpu", ["xpu:0", "xpu:1"], ["xpu:0", "xpu:0"]])
def test_a_rank_has_one_partition_on_intels_gpus(
    two_tiles: list[torch.device], device: str | list[str]
) -> None:
    with pytest.raises(TilenetError, match=r"of CUDA or ROCm .*partitions: 2\); use partitions: 1"):
        choose_devices(device, NodePlace(0, 1, 1), 2)
    assert two_tiles == []


@pytest.mark.ranks  # no rank is needed
def test_gpus_without_float64_are_refused_and_not_taken(
    two_tiles: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda _: SimpleNamespace(has_fp64=False)
    )
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda _: "Intel Arc A770")
    assert choose_devices("auto", NodePlace(2, 4, 1)) == (torch.device("cpu"),)
    for device in ("xpu", ["xpu:1"]):
        with pytest.raises(TilenetError, match=r"compute in float64.*Arc A770\); set device: cpu"):
            choose_devices(device, NodePlace(0, 1, 1))
    assert two_tiles == []


@pytest.mark.ranks  # no rank is needed
def test_other_gpus_than_torch_sees_are_refused(two_tiles: list[torch.device]) -> None:
    with pytest.raises(TilenetError, match=r"device: cuda, torch sees: xpu\); set device: xpu$"):
        choose_devices("cuda", NodePlace(0, 1, 1, (("a", "b"),)))
