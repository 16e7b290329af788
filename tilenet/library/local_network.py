"""A network over this rank's windows, as a module that loops of one's own call."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from tilenet.adoption.adopt import Adopted
from tilenet.errors import TilenetError
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import Network, network_to_fill
from tilenet.model.skips import Origin
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.tf32 import tf32_if_asked
from tilenet.parallel.sums.gradients import GradientSum

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LocalNetwork", "OwnHaloMode"]

OwnHaloMode = Literal["auto", "overlap", "exchange", "sweep"]


class LocalNetwork(nn.Module):
    """What `Job.split` makes of a network; its parameters are there for an optimizer.

    Called with a tile's image, (1, bands, H, W), it gives its map (1, classes, H′, W′), of which
    `[tile.own]` is exact; what it takes from the other tiles of an image comes on the way, and so
    do their gradients. Forward and backward are collective where ranks exchange halos.

    Args:
        adopted: The network, the same on all ranks.
        halo_mode: How tiles get their context; `auto`: the images say so.
    """

    def __init__(self, adopted: Adopted, halo_mode: OwnHaloMode) -> None:
        super().__init__()
        self.adopted, self.halo_mode = adopted, halo_mode
        self.network = adopted.network(parameter_dtype(adopted.precision))
        self._pipe: Pipe | None = None
        self._origin: Origin | None = None
        self._sum: GradientSum | None = None

    def forward(self, image: Tensor) -> Tensor:
        """(1, bands, H, W) of the step's tile under way to (1, classes, H′, W′).

        Raises:
            TilenetError: No tile is under way.
        """
        if self._pipe is None or self._origin is None:
            raise TilenetError(
                "a network over ranks computes tiles of a step (called: outside of one); call it "
                "in `for tile in step`, and use job.predict for maps"
            )
        with tf32_if_asked(self.adopted.precision):
            found: Tensor = self._pipe([image], [self._origin])[0]
        return found

    def copied(self) -> Network:
        """A copy on the CPU for maps, which fix norms and move layers, also those that share."""
        network = network_to_fill(self.adopted.layers, parameter_dtype(self.adopted.precision))
        network.load_state_dict(self.network.state_dict())
        return network

    def module_state(self) -> dict[str, Tensor]:
        """The weights under the module's own names, for its `load_state_dict`."""
        return self.adopted.module_state(self.network.state_dict())

    def gradients(self, comm: "MPI.Intracomm") -> GradientSum:
        """What sums its gradients over all ranks; made once. Collective on the first call."""
        if self._sum is None:
            self._sum = GradientSum(self.network.trained, comm)
        return self._sum

    def over(self, pipe: Pipe | None) -> None:
        """Compute by a pipe from now on; None: by none."""
        self._pipe, self._origin = pipe, None

    def at(self, origin: Origin | None) -> None:
        """Say which tile is under way."""
        self._origin = origin
