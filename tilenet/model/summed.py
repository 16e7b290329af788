"""Whether a loss is a sum, as far as its graph says it: a mean could not be added over tiles."""

from typing import Any

from torch import Tensor

from tilenet.errors import TilenetError

MOST_NODES = 500  # of the loss itself, which is small
MEAN = 1  # as torch's losses number their reductions


def check_summed(loss: Tensor) -> None:
    """Refuse a tile's loss that is not one number, has no gradient, or is a mean.

    Raises:
        TilenetError: Names the shape or the operator.
    """
    if loss.numel() != 1:
        raise TilenetError(
            f"a tile's loss is one number, the sum over its pixels (shape: {tuple(loss.shape)}); "
            "call sum() of it"
        )
    if loss.grad_fn is None:
        raise TilenetError(
            "a tile's loss is computed from the network's output (it requires no gradient); call "
            "the network that job.split gave, without no_grad"
        )
    waiting: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    while waiting and len(visited) < MOST_NODES:
        node = waiting.pop(0)
        if node is None or node in visited:
            continue
        visited.add(node)
        name = node.name()
        if name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == MEAN:
            raise TilenetError(
                f"a tile's loss is a sum over its pixels, which the step divides once by the sum "
                f"of their weights (found: a mean, {name}); take reduction='sum' or sum(), and "
                "give the number of pixels as the weight"
            )
        if "Convolution" not in name:  # there the network begins
            waiting.extend(following for following, _ in node.next_functions)
