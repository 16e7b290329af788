"""Large Model Support with the function names of IBM's, for all modules of this process.

A script written for IBM's PyTorch says `torch.cuda.set_enabled_lms(True)`; here it says
`lms.set_enabled_lms(True)`. docs/swapping.md says what differs.
"""

from dataclasses import dataclass

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from tilenet.parallel.swap.host_pool import open_slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper

LOOKAHEAD = 2


@dataclass
class _Enabled:
    """Objects that enabling creates and disabling removes."""

    swapper: Swapper
    hooks: SwapInForward
    handles: tuple[RemovableHandle, ...]


@dataclass
class _Process:
    """Settings and state of this process; the defaults are IBM's."""

    limit_bytes: int = 0
    min_bytes: int = 1 << 20
    enabled: _Enabled | None = None
    statistics: SwapStatistics | None = None


_process = _Process()


def set_enabled_lms(enable: bool) -> None:
    """Enable or disable swapping of the tensors that modules save for backward."""
    if enable == get_enabled_lms():
        return
    if _process.enabled is not None:
        enabled, _process.enabled = _process.enabled, None
        for handle in enabled.handles:
            handle.remove()
        enabled.hooks.leave()
        enabled.swapper.close()
        return
    slabs = open_slabs(None, None, pinned=torch.accelerator.is_available())
    swapper = Swapper(_process.limit_bytes, _process.min_bytes, LOOKAHEAD, slabs)
    hooks = SwapInForward(swapper)
    before = register_module_forward_pre_hook(hooks.before)
    after = register_module_forward_hook(hooks.after, always_call=True)
    _process.enabled = _Enabled(swapper, hooks, (before, after))
    _process.statistics = swapper.statistics


def get_enabled_lms() -> bool:
    """Whether tensors are swapped."""
    return _process.enabled is not None


def set_limit_lms(limit: int) -> None:
    """Set the number of bytes of saved tensors that stay on their devices; 0: all are swapped."""
    _process.limit_bytes = limit
    if _process.enabled is not None:
        _process.enabled.swapper.limit_bytes = limit


def get_limit_lms() -> int:
    """Number of bytes of saved tensors that stay on their devices."""
    return _process.limit_bytes


def set_size_lms(size: int) -> None:
    """Set the size in bytes below which a storage is not swapped."""
    _process.min_bytes = size
    if _process.enabled is not None:
        _process.enabled.swapper.min_bytes = size


def get_size_lms() -> int:
    """Size in bytes below which a storage is not swapped."""
    return _process.min_bytes


def memory_active() -> int:
    """Bytes of saved storages that are on their devices now."""
    return _statistics().active_bytes


def max_memory_active() -> int:
    """Largest `memory_active` since the start or `reset_max_memory_active`."""
    return _statistics().peak_active_bytes


def reset_max_memory_active() -> None:
    """Restart the maximum at the bytes that are active now."""
    _statistics().peak_active_bytes = memory_active()


def memory_reclaimed() -> int:
    """Bytes that were copied to the host since the start or `reset_memory_reclaimed`."""
    return _statistics().out_bytes


def reset_memory_reclaimed() -> None:
    """Restart the count at 0."""
    _statistics().out_bytes = 0


def _statistics() -> SwapStatistics:
    return _process.statistics or SwapStatistics()
