"""The limit, the counts, and what is refused."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_swapping import check_empty, trained
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.saved import SavedStorage, Watch
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper
from tilenet.parallel.swap.swapping import swapping
from tilenet.planning.memory.live import LiveBytes

MAP = 8 * 64 * 64 * 4  # bytes of one map of `convolutions`


def swapper_of(folder: Path, limit: int | None, lookahead: int = 0, min_bytes: int = 0) -> Swapper:
    return Swapper(limit, min_bytes, lookahead, FileSlabs(str(folder), slab_bytes=1 << 20))


@contextmanager
def hooks(swapper: Swapper) -> Iterator[Swapper]:
    with saved_tensors_hooks(swapper.pack, swapper.unpack):
        yield swapper


def convolutions(count: int = 12) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    layers = ((nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(count))
    return nn.Sequential(*(layer for pair in layers for layer in pair)), torch.randn(1, 8, 64, 64)


def peak_of(limit: int | None, swapped: bool = True) -> tuple[int, int]:
    """Most bytes of tensors that were alive, and those of the swapper."""
    module, x = convolutions()
    trained(module, x)
    with swapping(module if swapped else [], limit_bytes=limit, min_bytes=0) as statistics:
        with LiveBytes() as live:
            trained(module, x)
        return live.peak, statistics.peak_active_bytes


def test_tensor_bytes_keep_to_the_limit() -> None:
    without, _ = peak_of(None, swapped=False)
    working, _ = peak_of(0)
    assert working < 0.6 * without
    assert peak_of(None)[0] <= without + 1000
    for maps in (1, 2, 4, 8):
        alive, active = peak_of(maps * MAP)
        assert active <= maps * MAP
        assert alive <= working + maps * MAP


def test_a_storage_goes_once_however_often_it_is_saved(tmp_path: Path) -> None:
    x = torch.randn(100, requires_grad=True)
    with hooks(swapper_of(tmp_path, 0)) as swapper:
        y = x.exp()  # saves y
        z = (y * y[::2].repeat(2)) * y.view(10, 10).t().reshape(100) * y.sin()
    assert swapper.statistics.out_count < 8
    sizes = swapper.statistics.out_bytes / swapper.statistics.out_count
    assert sizes == 400
    z.sum().backward()
    del y, z
    check_empty(swapper.statistics)


def test_counts(tmp_path: Path) -> None:
    """Three results of 4000 bytes, of which one may stay."""
    x = torch.linspace(0, 1, 1000, requires_grad=True)
    with hooks(swapper_of(tmp_path, 4000)) as swapper:
        z = x.exp().exp().exp()
    counted = swapper.statistics
    assert (counted.active_bytes, counted.peak_active_bytes) == (4000, 4000)
    assert (counted.out_count, counted.out_bytes) == (2, 8000)
    assert (counted.in_count, counted.in_bytes) == (0, 0)
    assert counted.host_bytes == counted.peak_host_bytes == 2 * 4096
    assert counted.wait_seconds > 0
    z.sum().backward()
    assert (counted.in_count, counted.in_bytes) == (2, 8000)
    assert (counted.active_bytes, counted.host_bytes) == (0, 0)
    assert swapper.copies._slabs.used_bytes == 0
    counted.reset()
    assert set(vars(counted).values()) == {0}
    with hooks(swapper):
        z = x.exp().exp()
    counted.reset()
    assert (counted.active_bytes, counted.peak_active_bytes) == (4000, 4000)
    assert (counted.host_bytes, counted.peak_host_bytes, counted.out_count) == (4096, 4096, 0)


@pytest.mark.parametrize(("lookahead", "wanted"), [(0, [1, 2, 3, 4]), (2, [3, 4, 5, 5])])
def test_the_next_are_fetched_ahead_in_reverse_order(
    tmp_path: Path, lookahead: int, wanted: list[int]
) -> None:
    swapper = swapper_of(tmp_path, 0, lookahead)
    fetched: list[int] = []
    fetch = swapper._fetch
    swapper._fetch = lambda storage: fetched.append(storage.next_need) or fetch(storage)
    saved = [swapper.pack(torch.full((1000,), float(i))) for i in range(5)]
    swapper.limit_bytes = 100_000
    counts = []
    for number in (4, 3, 2, 1):
        assert (swapper.unpack(saved[number]) == number).all()
        counts.append(swapper.statistics.in_count)
    assert counts == wanted
    assert sorted(set(fetched), reverse=True) == list(dict.fromkeys(fetched))


def test_fetching_ahead_keeps_to_the_limit(tmp_path: Path) -> None:
    swapper = swapper_of(tmp_path, 0, 10)
    saved = [swapper.pack(torch.full((1000,), float(i))) for i in range(8)]
    swapper.limit_bytes = 12_000
    swapper.unpack(saved[7])
    assert swapper.statistics.active_bytes == 12_000
    # What comes back for the second time was still there: nothing is written again.
    swapper.limit_bytes = 4_000
    swapper.unpack(saved[0])
    assert swapper.statistics.active_bytes == 4_000
    assert swapper.statistics.out_count == 8


def test_results_that_stay_are_freed_with_their_graph(tmp_path: Path) -> None:
    x = torch.randn(1000, requires_grad=True)
    with hooks(swapper_of(tmp_path, 0, min_bytes=5000)):
        y = x.exp()
    storage = weakref.ref(y.untyped_storage())
    gc.disable()
    try:
        del y
        assert storage() is None
    finally:
        gc.enable()


def test_a_graph_may_be_collected_while_the_lock_is_held(tmp_path: Path) -> None:
    swapper = swapper_of(tmp_path, 0)
    saved = [swapper.pack(torch.ones(1000)) for _ in range(5)]
    take = swapper.copies._take
    swapper.copies._take = lambda size: saved.clear() or take(size)
    thread = threading.Thread(target=swapper.pack, args=(torch.ones(1000),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    check_empty(swapper.statistics)


def test_after_closing_everything_stays(tmp_path: Path) -> None:
    swapper = swapper_of(tmp_path, 0)
    saved = [swapper.pack(torch.full((1000,), float(number))) for number in range(3)]
    swapper.close()
    swapper.pack(torch.ones(1000))
    assert swapper.statistics.out_count == 3
    assert [float(swapper.unpack(one)[0]) for one in saved] == [0, 1, 2]
    saved.clear()
    assert swapper.copies._slabs._file.closed
    check_empty(swapper.statistics)


def test_small_storages_and_parameters_stay(tmp_path: Path) -> None:
    module = nn.Linear(100, 100)
    with hooks(swapper_of(tmp_path, 0, min_bytes=5000)) as swapper:
        module(torch.randn(10, 100)).exp()  # 4000 bytes each; the weight has 40 000
        module(torch.randn(1000, 100)[10:20]).exp()  # out of a data set, which the caller holds
        assert swapper.statistics.out_count == 0
        y = module(torch.randn(20, 100, requires_grad=True)).exp()
        assert swapper.statistics.out_bytes == 2 * 8000
        del y


CHANGES: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "the result": lambda module, x, y: y.detach().mul_(2),
    "a view of the result": lambda module, x, y: y.detach()[0].zero_(),
    "the input": lambda module, x, y: x.detach().add_(1),
    "a parameter": lambda module, x, y: module.weight.detach().add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("limit", [0, None, "without"])
@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_writing_over_what_backward_needs_raises_as_without_hooks(
    change: str, limit: Any, min_bytes: int
) -> None:
    module, x = nn.Linear(24, 24), torch.randn(8, 24, requires_grad=True)
    watched = [] if limit == "without" else nn.Sequential(module, nn.Sigmoid())
    whole = watched or nn.Sequential(module, nn.Sigmoid())
    with swapping(
        watched, limit_bytes=None if limit == "without" else limit, min_bytes=min_bytes
    ) as statistics:
        y = whole(x)
        CHANGES[change](module, x, y)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace.* expected version \d inst"
        ):
            y.sum().backward()
    del y
    check_empty(statistics)


def test_writing_over_what_is_not_needed_is_allowed(tmp_path: Path) -> None:
    x = torch.randn(1000, requires_grad=True)
    with hooks(swapper_of(tmp_path, 0)):
        y = (x * 3).add_(1).mul_(2)
        z = y.sin()
    z.add_(1).sum().backward()
    assert torch.equal(x.grad, (((x.detach() * 3) + 1) * 2).cos() * 2 * 3)


def test_a_swapper_that_told_storages_apart_by_address_would_be_wrong(tmp_path: Path) -> None:
    class ByAddress(Swapper):
        seen: dict[tuple[int, int], SavedStorage]

        def _storage_of(self, tensor: Tensor, watch: Watch) -> SavedStorage:
            key = tensor.data_ptr(), tensor._version
            if key not in self.seen or not self.seen[key].numbers:
                self.seen[key] = super()._storage_of(tensor, watch)
            return self.seen[key]

    for kind in (Swapper, ByAddress):
        swapper = kind(0, 0, 0, FileSlabs(str(tmp_path)))
        swapper.seen = {}
        saved, addresses = [], set()
        for number in range(50):
            tensor = torch.full((1000,), float(number))
            addresses.add(tensor.data_ptr())
            saved.append(swapper.pack(tensor))
            del tensor
        assert len(addresses) < 50, "or nothing is tested"
        right = [bool((swapper.unpack(one) == n).all()) for n, one in enumerate(saved)]
        assert all(right) == (kind is Swapper)


def test_a_graph_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    module, x = convolutions(3)
    with hooks(swapper_of(tmp_path, 2 * MAP)) as swapper:
        y = module(x)
        assert swapper.statistics.active_bytes == 2 * MAP
        assert swapper.statistics.host_bytes > 0
        del y
        check_empty(swapper.statistics)
        # In a cycle, which only the collector finds, when it likes.
        holder: list[Any] = [module(x)]
        holder.append(holder)
        del holder
        assert swapper.statistics.host_bytes > 0
        gc.collect()
        check_empty(swapper.statistics)


def test_storages_are_freed_as_soon_as_they_were_used(tmp_path: Path) -> None:
    module, x = convolutions(4)
    with hooks(swapper_of(tmp_path, None)) as swapper:
        y = module(x)
    active: list[int] = []
    for layer in module:
        if isinstance(layer, nn.Conv2d):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _: active.append(swapper.statistics.active_bytes)
            )
    y.sum().backward()
    assert active == sorted(active, reverse=True)
    assert active[0] <= 5 * MAP
    assert active[-1] <= MAP
    check_empty(swapper.statistics)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_no_hooks_behind(kind: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.exp().exp()
            raise kind

    x = torch.randn(1000, requires_grad=True)
    module = nn.Sequential(nn.Sigmoid(), Fails())
    with swapping([module, *module], min_bytes=0) as statistics:
        with pytest.raises(kind):
            module(x)
        # An interrupt is past what modules call always: left with the context.
        left = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert left == (kind is RuntimeError)
    gc.collect()
    assert statistics.out_count == 3
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    check_empty(statistics)


def test_a_module_that_was_not_entered_ends_the_swapping_of_no_other(tmp_path: Path) -> None:
    """torch calls what is called always after another's pre-hook failed, too."""
    swap, outer, inner = SwapInForward(swapper_of(tmp_path, 0)), nn.Identity(), nn.Identity()
    swap.after(inner, (), None)
    swap.before(outer, ())
    swap.after(inner, (), None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    swap.after(outer, (), None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_without_room_it_is_said_and_the_next_step_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_room: object
) -> None:
    module, x = convolutions(3)
    wanted = trained(module, x)
    with swapping(module, min_bytes=0, swap_dir=str(tmp_path)) as statistics:
        monkeypatch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(
            TilenetError, match=r"must fit the disk .* choose a larger one \(swap_dir"
        ):
            trained(module, x)
        monkeypatch.undo()
        gc.collect()
        check_empty(statistics)
        found = trained(module, x)
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)
    with (
        pytest.raises(TilenetError, match="share"),
        swapping(module, min_bytes=0, swap_dir=str(tmp_path), host_limit_bytes=3 * MAP),
    ):
        trained(module, x)
    with (
        pytest.raises(TilenetError, match=r"choose another \(swap_dir"),
        swapping(module, swap_dir=str(tmp_path / "missing")),
    ):
        pass


def test_the_file_goes_with_the_context_or_the_last_graph(tmp_path: Path) -> None:
    def file_is_open() -> bool:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return any(str(tmp_path) in os.readlink(link) for link in links if os.path.islink(link))

    module, x = convolutions(3)
    with swapping(module, min_bytes=0, swap_dir=str(tmp_path)):
        y = module(x)
        assert file_is_open()
    assert file_is_open()
    del y
    assert not file_is_open()
    with swapping(module, min_bytes=0, swap_dir=str(tmp_path)):
        assert file_is_open()
    assert not file_is_open()


def test_nothing_holds_the_storages_that_went_out(tmp_path: Path) -> None:
    swapper = swapper_of(tmp_path, 0)
    tensor = torch.randn(1000)
    storage = weakref.ref(tensor.untyped_storage())
    saved = swapper.pack(tensor)
    assert storage() is not None
    assert swapper.unpack(saved).data_ptr() == tensor.data_ptr()  # still there: nothing is copied
    assert swapper.statistics.in_count == 0
    swapper.pack(torch.randn(10))  # which makes room
    del tensor
    assert storage() is None


@pytest.mark.gpu
@pytest.mark.parametrize("maps", [0, 3])
def test_on_a_gpu(maps: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, torch sees none")
    torch.use_deterministic_algorithms(True, warn_only=True)
    module, x = convolutions()
    module, x = module.cuda(), x.cuda()
    weights = torch.linspace(-1, 2, x.numel(), device="cuda").view_as(x)
    results = []
    for swapped in (False, True):
        for _ in range(3):
            module.zero_grad()
            with swapping(
                module if swapped else [], limit_bytes=maps * MAP, min_bytes=0
            ) as statistics:
                (weights * module(x).square()).sum().backward()
        results.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert statistics.out_count > (9 if maps else 10)  # fewer where some may stay
    check_empty(statistics)
