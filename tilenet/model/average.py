"""The exponential moving average of a network's weights, on the devices of the weights.

Running statistics are not averaged: they are running averages already.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.model.network import Network

TRAINED = "trained"  # NAME.trained in state.safetensors: the weight that is trained


class WeightAverage:
    """w̄ ← d·w̄ + (1 − d)·w after each update, in the weights' dtype; it begins at the weights.

    Args:
        network: Its trained weights are averaged, alike on all ranks: they are whole there.
        decay: d.
    """

    def __init__(self, network: Network, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, weight in network.named_parameters() if weight.requires_grad]
        self._weights = network.trained
        self._averages = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after they were updated."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.lerp_(weight, 1 - self.decay)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """Put the averages into the network, and keep the trained weights here meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(self._averages, self._weights, strict=True):
            trained = weight.clone()
            weight.copy_(average)
            average.copy_(trained)

    def begin(self) -> None:
        """Begin the average at the network's weights."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.copy_(weight.detach())

    def trained(self) -> dict[str, Tensor]:
        """The trained weights, as a checkpoint names them, while averages are in the network."""
        return {
            f"{name}.{TRAINED}": weight
            for name, weight in zip(self._names, self._averages, strict=True)
        }

    def resume(self, state: dict[str, Tensor], source: str) -> None:
        """Take the averages from a network that has them, and fill in the trained weights.

        Weights that were fixed until now begin at those of the checkpoint; weights that are fixed
        from now on stay at their averages.

        Args:
            state: Tensors of `trained`, which are taken out, and others, which stay in it.
            source: Name of the checkpoint, for the error.

        Raises:
            TilenetError: A trained weight has another shape, or is not finite.
        """
        self.begin()
        trained = {key: state.pop(key) for key in list(state) if key.endswith(f".{TRAINED}")}
        for name, weight in zip(self._names, self._weights, strict=True):
            value = trained.get(f"{name}.{TRAINED}", weight)
            if value.shape != weight.shape or not value.isfinite().all():
                raise TilenetError(
                    f"a run with optimizer.ema goes on with the weights that it trained, in finite "
                    f"numbers ({source}: {name} is of another shape, or not finite); use another "
                    "checkpoint"
                )
            weight.data.copy_(value)
