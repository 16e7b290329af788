"""IBM's names, over all modules of the process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_swapping import check_same, trained
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from tilenet import lms


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    lms.reset_memory_reclaimed()  # of other tests in this process
    lms.reset_max_memory_active()
    yield
    lms.set_enabled_lms(False)
    lms.set_limit_lms(0)
    lms.set_size_lms(1 << 20)


def test_the_names_of_ibms() -> None:
    assert not lms.get_enabled_lms()
    assert (lms.get_limit_lms(), lms.get_size_lms()) == (0, 1 << 20)
    lms.set_size_lms(1000)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
    x = torch.randn(1, 3, 30, 30)
    wanted = trained(module, x)
    assert lms.memory_reclaimed() == lms.max_memory_active() == 0
    lms.set_enabled_lms(True)
    lms.set_enabled_lms(True)
    assert lms.get_enabled_lms()
    check_same(trained(module, x), wanted)
    all_bytes = lms.memory_reclaimed()
    assert all_bytes >= 4 * (8 * 28 * 28 + 8 * 26 * 26)
    assert lms.memory_active() == 0
    assert 0 < lms.max_memory_active() < all_bytes
    lms.reset_memory_reclaimed()
    lms.reset_max_memory_active()
    assert lms.memory_reclaimed() == lms.max_memory_active() == 0
    lms.set_limit_lms(all_bytes // 2)
    check_same(trained(module, x), wanted)
    assert 0 < lms.memory_reclaimed() < all_bytes
    assert 0 < lms.max_memory_active() <= all_bytes // 2
    lms.reset_memory_reclaimed()
    lms.set_size_lms(1 << 20)
    check_same(trained(module, x), wanted)
    assert lms.memory_reclaimed() == 0
    lms.set_size_lms(1000)
    lms.set_enabled_lms(False)
    assert not lms.get_enabled_lms()
    check_same(trained(module, x), wanted)
    assert lms.memory_reclaimed() == 0


def test_checkpoints_within_go_on_recomputing() -> None:
    lms.set_size_lms(0)
    calls = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
            self.inner.register_forward_pre_hook(lambda *_: calls.append(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).tanh()

    module, x = Block(), torch.randn(8, 24)
    wanted = trained(module, x)
    lms.set_enabled_lms(True)
    check_same(trained(module, x), wanted)
    assert len(calls) == 4
    assert lms.memory_reclaimed() == 2 * 8 * 24 * 4  # the checkpoint's input, and the result


def test_an_error_in_a_hook_before_ours_leaves_none_behind() -> None:
    lms.set_size_lms(0)

    def fails(*_: object) -> None:
        raise ValueError("first")

    lms.set_enabled_lms(True)
    handle = register_module_forward_pre_hook(fails)
    nn.modules.module._global_forward_pre_hooks.move_to_end(handle.id, last=False)
    with pytest.raises(ValueError, match="first"):
        nn.Identity()(torch.ones(1))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    handle.remove()

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handle = register_module_forward_pre_hook(fails)
            nn.modules.module._global_forward_pre_hooks.move_to_end(handle.id, last=False)
            with pytest.raises(ValueError, match="first"):
                nn.Identity()(x)
            handle.remove()
            return x.exp()

    y = Outer()(torch.ones(1000, requires_grad=True))
    assert lms.memory_reclaimed() == 4000
    del y
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_the_folder_is_that_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU it is pinned memory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lms.set_enabled_lms(True)
    assert str(tmp_path) in Path("/proc/self/maps").read_text() or any(
        str(tmp_path) in str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )
