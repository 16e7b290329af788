"""Seconds of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch.

    Attributes:
        forward_s: Forward.
        backward_s: Backward: gradients of the weights and of the input.
    """

    forward_s: float
    backward_s: float
