"""The running statistics of batch norms (`norm_scope: tile`), the same on all ranks.

By itself torch blends each tile into the running statistics of batch norm as it passes, so the last
tile weighs most and each rank ends with its own. Here a step's tiles weigh alike and all ranks end
with the same, whatever rank computed which tile.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from tilenet.model.modules import BatchNorm
from tilenet.mpi import Intracomm

MOMENTUM = 0.1


class RunningStatistics:
    """The running statistics of a network's batch norms; does nothing where there are none."""

    def __init__(self, network: nn.Module, comm: Intracomm) -> None:
        self._comm = comm
        self._norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Keep the statistics of the step before, and collect those of a new step."""
        self._before = [buffer.clone() for buffer in self._buffers()]
        for norm in self._norms:
            norm.reset_running_stats()
            norm.tiles = 0  # a plain average over the tiles from now on

    def finish(self) -> None:
        """Blend the step's tiles, of all ranks, into the running statistics. Collective."""
        if not self._norms:
            return
        tiles = self._norms[0].tiles or 0
        buffers = self._buffers()
        sums = torch.cat([buffer.double().cpu() for buffer in buffers]) * tiles
        total = np.append(sums.numpy(), float(tiles))
        self._comm.Allreduce(np.copy(total), total)
        blend = MOMENTUM if total[-1] else 0.0
        means = torch.from_numpy(total[:-1] / max(total[-1], 1.0))
        sizes = [buffer.numel() for buffer in buffers]
        for buffer, before, mean in zip(
            buffers, self._before, torch.split(means, sizes), strict=True
        ):
            buffer.copy_((1 - blend) * before + blend * mean.to(buffer))

    def _buffers(self) -> list[Tensor]:
        """Mean and variance of each norm; all are built with running statistics."""
        parts = (part for norm in self._norms for part in (norm.running_mean, norm.running_var))
        return [cast(Tensor, part) for part in parts]
