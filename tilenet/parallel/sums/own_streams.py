"""Streams of the helper thread that sums gradients.

On a device's default stream its copies and sums would wait for all of backward that the main thread
has queued there meanwhile, and nothing would overlap.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnStreams:
    """One stream per device, next to the one that backward fills."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextmanager
    def of(self, device: torch.device) -> Iterator[None]:
        """Queue the block's work on the device's own stream, and wait for it at the end.

        Waits on the host, because what follows runs in another thread and on another stream.
        """
        accelerator = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        stream = self._streams[device]
        with accelerator.stream(stream):  # makes the device this thread's, too
            yield
        stream.synchronize()
