"""The edge of the graph at which the gradient of a tensor's current value enters."""

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["edge_of"]


def edge_of(x: Tensor) -> GradientEdge:
    """The edge of a tensor over which layers may write later."""
    if isinstance(x.grad_fn, BackwardCFunction):
        # Torch 2.8 cannot begin at the node of a function that is written in Python.
        with torch.enable_grad():
            x = x.view_as(x)
    return get_gradient_edge(x)
