"""Consecutive layers of a network on one device, as an engine's threads compute them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilenet.model.dtypes import AUTOCAST
from tilenet.model.modules import out_of_place


class Partition(nn.Sequential):
    """Consecutive layers on one device, (B, C, H, W) in and out.

    Args:
        layers: The network's own modules.
        device: They are moved there.
        precision: Precision of the arithmetic: `bfloat16` and `float16` compute under autocast.
        failed: Errors that the pipe's partitions raised.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        precision: str,
        failed: list[Exception],
    ) -> None:
        # Its input is the neighbour's output, which recomputation needs as it was.
        layers = [out_of_place(layers[0]), *layers[1:]]
        super().__init__(*layers)
        self.to(device)
        self.device = device
        self.dtype = AUTOCAST.get(precision)
        self.failed = failed

    def forward(self, x: Tensor) -> Tensor:
        if self.failed:
            # A worker goes on with its device's next partition, which would wait for the messages
            # of ranks that wait for the partition that failed, and the error would not be raised.
            raise self.failed[0]
        try:
            # Here and not around the pipeline: autocast belongs to a thread. No cache: it would
            # hold copies of all weights until the end, also of those that are swapped.
            with torch.autocast(
                self.device.type, self.dtype, enabled=self.dtype is not None, cache_enabled=False
            ):
                y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        except Exception as error:
            self.failed.append(error)
            raise
        return y
