"""The exponential moving average of a network's weights, on the devices where these are.

Running statistics are not averaged: they are running averages already.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.model.network import Network

__all__ = ["WeightAverage"]

TRAINED = "trained"  # of each averaged weight, that which is trained, in state.safetensors


class WeightAverage:
    """w̄ ← d·w̄ + (1 − d)·w after each update, in the weights' dtype; it begins at the weights.

    Args:
        network: Its trained weights are averaged, alike on all ranks: they are whole there.
        decay: d.
    """

    def __init__(self, network: Network, decay: float) -> None:
        self.decay = decay
        self._names = [n for n, one in network.named_parameters() if one.requires_grad]
        self._weights = network.trained
        self._other = [one.detach().clone() for one in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the weights."""
        for mean, weight in zip(self._other, self._weights, strict=True):
            mean.lerp_(weight, 1 - self.decay)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """The network has the averages, and this the weights that are trained."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for other, weight in zip(self._other, self._weights, strict=True):
            trained = weight.clone()
            weight.copy_(other)
            other.copy_(trained)

    def begin(self) -> None:
        """At the network's weights."""
        for mean, weight in zip(self._other, self._weights, strict=True):
            mean.copy_(weight.detach())

    def trained(self) -> dict[str, Tensor]:
        """While averages are in the network: the weights, as a checkpoint names them."""
        return {
            f"{name}.{TRAINED}": one for name, one in zip(self._names, self._other, strict=True)
        }

    def resume(self, state: dict[str, Tensor], source: str) -> None:
        """Of a network with the averages of a checkpoint: take these, and fill in the weights.

        Weights that were fixed until now begin at those of the checkpoint; those that are fixed
        from now on stay at their averages.

        Args:
            state: `trained`, which is taken out, and other tensors, which stay in it.
            source: Where they come from.

        Raises:
            TilenetError: One does not fit.
        """
        self.begin()
        trained = {key: state.pop(key) for key in list(state) if key.endswith(f".{TRAINED}")}
        for name, weight in zip(self._names, self._weights, strict=True):
            found = trained.get(f"{name}.{TRAINED}", weight)
            if found.shape != weight.shape or not found.isfinite().all():
                raise TilenetError(
                    f"a run with optimizer.ema goes on with the weights that it trained, in finite "
                    f"numbers ({source}: {name} is of another shape, or not finite); use another "
                    "checkpoint"
                )
            weight.data.copy_(found)
