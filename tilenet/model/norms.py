"""Normalisation layers that torch's own do not cover."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchgpipe import is_recomputing

__all__ = ["BatchNorm"]


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that counts each tile once, (B, C, H, W) in and out.

    torch's updates its running statistics in every forward pass, and checkpointing makes two.

    Attributes:
        tiles: Tiles seen, where the running statistics are to be their plain average; None: torch's
            own blending. Counted here, since torch would ask the device for its count each time.
    """

    tiles: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_recomputing():
            # Copies, not None: a checkpoint wants as many tensors saved as for the first time.
            mean, var = (
                b if b is None else b.clone() for b in (self.running_mean, self.running_var)
            )
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.0, self.eps)
        if self.training and self.tiles is not None:
            self.tiles += 1
            self.momentum = 1 / self.tiles
        return super().forward(x)
