"""Which GPUs each rank of a node takes, for what each launcher shows it."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.parallel.ranks.devices import VISIBLE_DEVICES, list_gpus, share_gpus

ALL = "abcdefgh"


@pytest.mark.parametrize(
    ("shown", "partitions", "wanted"),
    [
        # srun --gpus-per-node=8 --gpu-bind=none, jsrun -r1 -g6: all ranks see all
        ([ALL] * 8, 1, [(n,) for n in range(8)]),
        ([ALL] * 4, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ([ALL], 8, [tuple(range(8))]),
        ([ALL] * 2, 1, [(0,), (1,)]),
        # srun --gpus-per-task, jsrun -r6 -g1: each sees its own, which are numbered from 0 again
        (["a", "b", "c"], 1, [(0,)] * 3),
        (["ab", "cd"], 2, [(0, 1)] * 2),
        (["ab", "cd", "e"], 1, [(0,)] * 3),
        # jsrun -n2 -c21 -g3 -a3: a resource set per socket
        (["abc"] * 3 + ["def"] * 3, 1, [(0,), (1,), (2,)] * 2),
        (["abcd", "efgh", "abcd", "efgh"], 2, [(0, 1), (0, 1), (2, 3), (2, 3)]),
        # Frontier: the same GPUs, nearest first
        (["efcd", "cdef"], 2, [(0, 1), (0, 1)]),
        (["ab", "ba"], 1, [(0,), (0,)]),
        (["abcd", "bcda"], 2, [(0, 1), (1, 2)]),
        # overlapping, but nobody takes what another does
        (["ab", "bc"], 1, [(0,), (0,)]),
    ],
    ids=str,
)
def test_each_rank_has_its_own(
    shown: list[str], partitions: int, wanted: list[tuple[int, ...]]
) -> None:
    chosen = share_gpus([tuple(names) for names in shown], partitions)
    assert list(chosen) == wanted
    names = [shown[rank][number] for rank, numbers in enumerate(chosen) for number in numbers]
    assert len(names) == len(set(names)) == partitions * len(shown)


@pytest.mark.parametrize(
    ("shown", "partitions", "said"),
    [
        (["a", "a"], 1, r"ranks on this node: 2, partitions: 1, devices that torch sees: 1\)"),
        (["ab"] * 3, 1, "ranks on this node: 3, partitions: 1, devices that torch sees: 2"),
        (["abc"] * 2, 2, "ranks on this node: 2, partitions: 2, devices that torch sees: 3"),
        (["ab", "cd", "cd"], 2, "on this node: 3, ranks that see the same: 2, partitions: 2"),
        (["a", ""], 1, "devices that torch sees: 0"),
        (["abc", "bd"], 2, r"two ranks may not use one device \(ranks 0 and 1 of this node, GPU b"),
        (["ab", "cb", "b"], 1, ""),
        (["ba", "bc"], 1, "ranks 0 and 1 of this node, GPU b"),
    ],
    ids=str,
)
def test_what_would_be_shared_is_refused(shown: list[str], partitions: int, said: str) -> None:
    seen = [tuple(names) for names in shown]
    if not said:
        assert share_gpus(seen, partitions)
        return
    with pytest.raises(TilenetError, match=said):
        share_gpus(seen, partitions)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What torch says of the GPUs; a test fills it."""
    found: list[SimpleNamespace] = []
    for name in chain(*VISIBLE_DEVICES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found[number])
    return found


def test_a_gpu_is_named_by_its_uuid(gpus: list[SimpleNamespace]) -> None:
    assert list_gpus() == ()
    gpus.extend([SimpleNamespace(uuid="a1-2"), SimpleNamespace(uuid="b1-2")])
    assert list_gpus() == ("a1-2", "b1-2")


def test_without_a_uuid_by_its_bus_and_else_by_the_launcher(
    gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = {"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0}
    gpus.extend([SimpleNamespace(uuid="0000-00", **bus), SimpleNamespace(), SimpleNamespace()])
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    assert list_gpus() == ("00:c1:00", "5", "2")


def test_slices_of_a_gpu_are_told_apart(
    gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.append(SimpleNamespace(uuid="a1-2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77")
    assert list_gpus() == ("MIG-77",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus.append(SimpleNamespace(uuid="a1-2"))
    assert len(set(list_gpus())) == 2


@pytest.fixture
def tiles(gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What torch says of Intel's GPUs, where there is none of CUDA; a test fills it."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(torch.xpu, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.xpu, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda number: found[number])
    return found


def test_tiles_of_intels_gpus_are_named_by_their_uuids(tiles: list[SimpleNamespace]) -> None:
    names = [f"d20ebf0c-4ca0-6be7-0000-00000000000{tile}" for tile in (1, 2)]
    tiles.extend(SimpleNamespace(uuid=name) for name in names)
    assert list_gpus() == tuple(names)


@pytest.mark.parametrize(
    ("variable", "mask", "named"),
    [
        ("ZE_AFFINITY_MASK", "10,2", ("2", "10")),  # Level Zero does not reorder
        ("ZE_AFFINITY_MASK", "1.0,0.1", ("0.1", "1.0")),
        ("ONEAPI_DEVICE_SELECTOR", "level_zero:3", ("level_zero:3", "1")),
        ("CUDA_VISIBLE_DEVICES", "6,7", ("0", "1")),
    ],
)
def test_without_uuids_intels_gpus_are_named_by_the_mask(
    tiles: list[SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    mask: str,
    named: tuple[str, ...],
) -> None:
    """As drivers of which torch learns none."""
    tiles.extend([SimpleNamespace(), SimpleNamespace()])
    monkeypatch.setenv(variable, mask)
    assert list_gpus() == named


def test_torch_is_asked_for_cuda_first(
    gpus: list[SimpleNamespace], tiles: list[SimpleNamespace]
) -> None:
    tiles.append(SimpleNamespace(uuid="b1-2"))
    gpus.append(SimpleNamespace(uuid="a1-2"))
    assert list_gpus() == ("a1-2",)
