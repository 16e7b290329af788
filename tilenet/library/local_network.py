"""A network over this rank's windows, as a module that a user-written loop calls."""

import hashlib
from collections import Counter
from typing import Literal

import torch
from torch import Tensor, nn

from tilenet.adoption.adopt import Adopted
from tilenet.errors import TilenetError
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import Network, network_to_fill
from tilenet.model.origin import Origin
from tilenet.mpi import Intracomm
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.tf32 import tf32_if_asked
from tilenet.parallel.sums.gradients import GradientSum

OwnHaloMode = Literal["auto", "overlap", "exchange", "sweep"]


class LocalNetwork(nn.Module):
    """The network that `Job.split` returns; pass its parameters to an optimizer.

    Called with a tile's image, (1, bands, H, W), it returns the tile's map (1, classes, H′, W′), of
    which `[tile.own]` is exact. Halos of other tiles are exchanged in forward, and their gradients
    in backward; both are collective where ranks exchange halos.

    Args:
        adopted: The network, the same on all ranks.
        halo_mode: Source of a tile's halo; `auto`: chosen from the images' sizes.
    """

    def __init__(self, adopted: Adopted, halo_mode: OwnHaloMode) -> None:
        super().__init__()
        self.adopted, self.halo_mode = adopted, halo_mode
        self.network = adopted.network(parameter_dtype(adopted.precision))
        self._pipe: Pipe | None = None
        self._origin: Origin | None = None
        self._sum: GradientSum | None = None

    def forward(self, image: Tensor) -> Tensor:
        """Map the image (1, bands, H, W) of the current tile to (1, classes, H′, W′).

        Raises:
            TilenetError: The loop is not at a tile of a step.
        """
        if self._pipe is None or self._origin is None:
            raise TilenetError(
                "a network over ranks computes only tiles of a step (it was called outside of a "
                "step); call it in `for tile in step`, or use job.predict for maps"
            )
        with tf32_if_asked(self.adopted.precision):
            output: Tensor = self._pipe([image], [self._origin])[0]
        return output

    def __getstate__(self) -> dict[str, object]:
        """What copies have, as for averages of the weights: not the loop that it is in."""
        return self.__dict__ | {"_pipe": None, "_origin": None, "_sum": None}

    def copy_for_maps(self) -> Network:
        """A copy on the CPU: mapping fixes norms and moves layers, which training must not see."""
        network = network_to_fill(self.adopted.layers, parameter_dtype(self.adopted.precision))
        network.load_state_dict(self.network.state_dict())
        return network

    def module_state(self) -> dict[str, Tensor]:
        """The weights under the module's own names, for its `load_state_dict`."""
        return self.adopted.module_state(self.network.state_dict())

    def check_weights(self, comm: Intracomm) -> None:
        """Refuse weights that differ between ranks, were cast, or are shared and were thawed.

        Collective.

        Raises:
            AgreedError: On all ranks; names the weight.
        """
        modes = {"the network": "in training" if self.training else "in evaluation"}
        values = {
            name: digest + ", trained" * trained
            for name, (digest, trained) in self._states().items()
        }
        with agreed(comm):
            self._check_as_split()
        _refuse_others(modes | values, "begin a loop with", comm)

    def check_values(self, comm: Intracomm) -> None:
        """Refuse weights that went apart since the loop began. Collective.

        Raises:
            AgreedError: On all ranks; names the first weight that differs.
        """
        digests = {name: digest for name, (digest, _) in self._states().items()}
        _refuse_others(digests, "keep", comm)

    def _states(self) -> dict[str, tuple[str, bool]]:
        """Digest of the values, and whether they are trained, by names of the module."""
        trained = {name for name, weight in self.network.named_parameters() if weight.requires_grad}
        states = {}
        for name, tensor in self.network.state_dict().items():
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest = hashlib.blake2b(memoryview(raw.numpy()), digest_size=4).hexdigest()
            states[self.adopted.names[name]] = digest, name in trained
        return states

    def _check_as_split(self) -> None:
        """Refuse another dtype, and weights thawed since then that several layers share."""
        shared = {name for names in self.adopted.shared.values() for name in names}
        uses = Counter(self.adopted.names.values())
        for name, weight in self.network.named_parameters():
            of_module = self.adopted.names[name]
            if weight.dtype != parameter_dtype(self.adopted.precision):
                raise TilenetError(
                    f"a network keeps the precision that it was split in ({of_module}: "
                    f"{weight.dtype}, split: {self.adopted.precision}); call net.double() or "
                    "net.float() before split"
                )
            if weight.requires_grad and name not in shared and uses[of_module] > 1:
                raise TilenetError(
                    "a weight that several layers share is one weight only if it was trained when "
                    f"the network was split ({of_module}: fixed then, trained now); thaw it before"
                )

    def gradients(self, comm: Intracomm) -> GradientSum:
        """The sum of its gradients over all ranks, built on the first call, which is collective."""
        if self._sum is None:
            self._sum = GradientSum(self.network.trained, comm)
        return self._sum

    def use_pipe(self, pipe: Pipe | None) -> None:
        """Set the pipe that computes tiles; None: `forward` is refused."""
        self._pipe, self._origin = pipe, None

    def set_tile(self, origin: Origin | None) -> None:
        """Set the tile that `forward` computes next; None: `forward` is refused."""
        self._origin = origin


def _refuse_others(own: dict[str, str], verb: str, comm: Intracomm) -> None:
    """Refuse states of weights that are not rank 0's. Collective.

    Raises:
        AgreedError: On all ranks; names the first that differs.
    """
    first = comm.bcast(own, root=0)
    with agreed(comm):
        for name, state in own.items():
            if state != first[name]:
                raise TilenetError(
                    f"all ranks {verb} the same weights (rank {comm.rank}: {name} is {state}, rank "
                    f"0: {first[name]}); load, change and fix weights on all ranks, or before split"
                )
