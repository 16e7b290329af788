"""Seconds of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch; backward makes gradients of weights and input."""

    forward_s: float
    backward_s: float
