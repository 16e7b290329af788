"""Whether a loss is a sum, as far as its graph says it: a mean could not be added over tiles."""

from typing import Any

from torch import Tensor

from tilenet.errors import TilenetError

__all__ = ["check_summed"]

MOST_NODES = 500  # of the loss itself, which is small
MEAN = 1  # as torch's losses number their reductions


def check_summed(loss: Tensor) -> None:
    """Refuse a loss of a tile that is no number, that nothing is learned from, or that is a mean.

    Raises:
        TilenetError: With what it is.
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
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == MEAN:
            raise TilenetError(
                f"a tile's loss is a sum over its pixels, which the step divides once by the sum "
                f"of their weights (found: a mean, {name}); take reduction='sum' or sum(), and "
                "give the number of pixels as the weight"
            )
        if "Convolution" not in name:  # there the network begins
            waiting.extend(following for following, _ in node.next_functions)
