"""Train modules whose saved activations do not fit: they wait in host memory or in a file.

    with swapping(model, limit_bytes=8 << 30) as statistics:
        for images, labels in batches:
            loss = criterion(model(images), labels)
            loss.backward()
            ...
    print(statistics)

Nothing is lost: gradients are the same bits. What a module computes outside of its `forward`, and
what the caller computes with its output, is not swapped.

Large Model Support under the names of IBM's, for all modules of this process.

A script written for IBM's PyTorch says `torch.cuda.set_enabled_lms(True)`; here it says
`lms.set_enabled_lms(True)`. docs/swapping.md says what differs.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from tilenet.errors import TilenetError
from tilenet.parallel.swap.actions import Action, acting
from tilenet.parallel.swap.host_pool import open_slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapper import SwapInForward, Swapper

__all__ = [
    "get_enabled_lms",
    "get_limit_lms",
    "get_size_lms",
    "max_memory_active",
    "memory_active",
    "memory_reclaimed",
    "reset_max_memory_active",
    "reset_memory_reclaimed",
    "set_enabled_lms",
    "set_limit_lms",
    "set_size_lms",
    "swapping",
]


@contextmanager
def swapping(
    model: nn.Module | Iterable[nn.Module],
    *,
    limit_bytes: int | None = 0,
    min_bytes: int = 1 << 20,
    lookahead: int = 2,
    swap_dir: str | None = None,
    host_limit_bytes: int | None = None,
    actions: Mapping[nn.Module, Action] | None = None,
) -> Iterator[SwapStatistics]:
    """Swap what the modules' operations save for backward.

    Backward may run inside of the context or behind it.

    Args:
        model: A module, or several: of a `Pipe` its `partitions`.
        limit_bytes: Of saved storages on their devices, together; beyond it they go out, those
            first that backward needs last. 0: all; None: none.
        min_bytes: Smaller storages stay, and do not count.
        lookahead: Storages that are fetched ahead in backward, as far as the limit allows.
        swap_dir: Folder of the file that they go to. None: pinned host memory where torch sees a
            GPU, else the folder for temporary files.
        host_limit_bytes: Bytes of that memory or file; None: none.
        actions: What to do about each of some modules of the model, see
            `tilenet.parallel.swap.actions`; nothing is done about the others. None: the modules
            given are swapped.

    Yields:
        What happened so far.

    Raises:
        TilenetError: The folder is not writable, or an action is for no module of the model; in
            forward: there is no room, or a module that is computed again writes over its input.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if actions is None:
        actions = dict.fromkeys(models, "swap")
    parts = {part for one in models for part in one.modules()}
    strange = [part for part in actions if part not in parts]
    if strange:
        raise TilenetError(
            f"actions are for modules of the model (found: {len(strange)} of another, the first a "
            f"{type(strange[0]).__name__}); take them from model.modules()"
        )
    slabs = open_slabs(swap_dir, host_limit_bytes, pinned=torch.cuda.is_available())
    swapper = Swapper(limit_bytes, min_bytes, lookahead, slabs)
    with ExitStack() as stack:
        stack.callback(swapper.close)
        stack.enter_context(acting(list(actions), list(actions.values()), swapper))
        yield swapper.statistics


LOOKAHEAD = 2


@dataclass
class _Enabled:
    """What enabling made, to be undone."""

    swapper: Swapper
    hooks: SwapInForward
    handles: tuple[RemovableHandle, ...]


@dataclass
class _Process:
    """Of this process; IBM's defaults."""

    limit_bytes: int = 0
    min_bytes: int = 1 << 20
    enabled: _Enabled | None = None
    statistics: SwapStatistics | None = None


_process = _Process()


def set_enabled_lms(enable: bool) -> None:
    """Let what modules save for backward be swapped, or no more."""
    if enable == get_enabled_lms():
        return
    if _process.enabled is not None:
        made, _process.enabled = _process.enabled, None
        for handle in made.handles:
            handle.remove()
        made.hooks.leave()
        made.swapper.close()
        return
    slabs = open_slabs(None, None, pinned=torch.cuda.is_available())
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
    """Set how many bytes of saved tensors stay on their devices; 0: none."""
    _process.limit_bytes = limit
    if _process.enabled is not None:
        _process.enabled.swapper.limit_bytes = limit


def get_limit_lms() -> int:
    """How many bytes of saved tensors stay on their devices."""
    return _process.limit_bytes


def set_size_lms(size: int) -> None:
    """Set the size, in bytes, below which storages stay."""
    _process.min_bytes = size
    if _process.enabled is not None:
        _process.enabled.swapper.min_bytes = size


def get_size_lms() -> int:
    """Below how many bytes storages stay."""
    return _process.min_bytes


def memory_active() -> int:
    """Bytes of saved storages on their devices now."""
    return _statistics().active_bytes


def max_memory_active() -> int:
    """Most of these bytes since the start or `reset_max_memory_active`."""
    return _statistics().peak_active_bytes


def reset_max_memory_active() -> None:
    """Start over at what is active now."""
    _statistics().peak_active_bytes = memory_active()


def memory_reclaimed() -> int:
    """Bytes copied out since the start or `reset_memory_reclaimed`."""
    return _statistics().out_bytes


def reset_memory_reclaimed() -> None:
    """Start over at 0."""
    _statistics().out_bytes = 0


def _statistics() -> SwapStatistics:
    return _process.statistics or SwapStatistics()
