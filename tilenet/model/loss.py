"""The loss as a sum over the pixels that a tile owns, to be divided once by the sum of weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, class_weights: Tensor | None = None
) -> tuple[Tensor, float]:
    """Cross-entropy summed over pixels, and the sum of the pixels' weights.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), int64; `ignore_index` does not count.
        class_weights: (K,), the weight of a pixel by its label; None: 1.

    Returns:
        Σ w·ℓ in float64 (differentiable), Σ w.
    """
    # Summed in float64: over 10⁸ pixels float32 sums lose the digits that ranks must agree on.
    losses = F.cross_entropy(
        logits, labels, weight=class_weights, ignore_index=ignore_index, reduction="none"
    )
    counted = labels[labels != ignore_index]
    if class_weights is None:
        weight = float(counted.numel())
    else:
        weight = float(class_weights.double()[counted].sum())
    return losses.sum(dtype=torch.float64), weight
