"""Bytes that operations take inside, where no tensor shows them: measured by running each once.

Convolutions copy their maps into their kernels' layout, or lay out all windows. How much is the
library's affair and changes with device, dtype and size, so it is asked for, not predicted. On
Volta and later the same holds for cuDNN's workspace.
"""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

MEASURED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Scratch:
    """Scratch of an operation on tensors, real or fake, in bytes; each kind is measured once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, int] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        """Most bytes that the operation takes besides what it is given and what it returns."""
        if func not in MEASURED:
            return 0
        key = str((func, tree_map(_shape, args), kwargs))
        if key not in self._known:
            with _disable_current_modes():
                self._known[key] = self._measure(func, args, kwargs)
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        real = tree_map(self._real, args)
        made: list[Any] = []
        with torch.no_grad():
            peak = allocated_peak(lambda: made.append(func(*real, **kwargs)), self._device)
        outputs = {id(x): x for x in tree_leaves(made) if isinstance(x, Tensor)}
        kept = sum(x.untyped_storage().nbytes() for x in outputs.values())
        return max(0, peak - kept)

    def _real(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=self._device
        )
        return made.fill_(0.5)


def _shape(value: Any) -> Any:
    return (value.dtype, value.size(), value.stride()) if isinstance(value, Tensor) else value


def allocated_peak(work: Any, device: torch.device) -> int:
    """Most bytes of torch's allocator that `work` took above what was taken before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = most = 0
    # Not from profiler.events(): those hold only what no operation makes.
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
