"""Normalisation layers that torch's own do not cover."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchgpipe import is_recomputing

__all__ = ["BatchNorm"]


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that counts each tile once, (B, C, H, W) in and out.

    torch's updates its running statistics in every forward pass, and checkpointing makes two.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_recomputing():
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)
