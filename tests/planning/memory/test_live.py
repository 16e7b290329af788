"""The tracker of live storages, on tensors whose lives are known."""

import torch
from owned_bytes import OwnedBytes
from torch import Tensor

from tilenet.planning.memory.live import LiveBytes


def test_a_storage_counts_once_while_anything_views_it() -> None:
    with LiveBytes() as live:
        x = torch.randn(7, 11)
        view = x[2:].t()
        assert live.current == 7 * 11 * 4
        del x
        assert live.current == 7 * 11 * 4
        y = view.double()
        assert live.current == 7 * 11 * 4 + 5 * 11 * 8
        del view
        assert live.current == 5 * 11 * 8
        y.add_(1)
        assert live.current == y.nbytes
    assert live.peak == 7 * 11 * 4 + 5 * 11 * 8


def test_what_was_there_before_counts_only_when_charged() -> None:
    before = torch.randn(9, 5)
    other = torch.randn(3)
    with OwnedBytes() as live:
        live.owner = 4
        view = before[1:]
        view.mul_(2)
        assert live.current == 0
        live.charge([before, view, other])
        assert live.current == before.nbytes + other.nbytes
        assert live.current_of[4] == live.current
        assert live.owner_of(view) == 4


def test_an_address_that_is_used_again_is_another_storage() -> None:
    with LiveBytes() as live:
        for _ in range(200):
            x = torch.empty(1000)
            assert live.current == 4000
            del x
    assert live.peak == 4000
    assert live.current == 0


def test_bytes_go_to_their_owners() -> None:
    def same(func: object, given: list[Tensor]) -> int:
        owners = [live.owner_of(x) for x in given]
        return next((owner for owner in owners if owner is not None), live.owner)

    with OwnedBytes(same) as live:
        live.owner = 1
        x = torch.randn(10)
        live.owner = 2
        y = torch.randn(100)
        z = x * 2
        assert live.current_of == {1: 80, 2: 400}
        del x, z
        live.reset_peaks()
        z = y + y
        del y
    assert live.peak_of == {1: 0, 2: 800}
    assert live.peak == 800
    assert z.shape == (100,)
