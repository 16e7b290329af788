"""Copies from the host to a device that do not wait.

A copy from pageable memory waits until the device has done all that it was given before: 24 times
in a step of the preset `small`, most of them for masks of dropout.
"""

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """The same values on a device; sent from pinned memory where that is a GPU."""
    if device.type in ("cpu", "meta") or values.device.type != "cpu":
        return values.to(device)
    # torch keeps the pinned memory until the copy is done.
    return pinned(values).to(device, non_blocking=True)


def pinned(values: Tensor) -> Tensor:
    """The same values in memory from which copies run by themselves."""
    return values if values.is_pinned() else values.pin_memory()
