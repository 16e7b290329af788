"""The network of a run on the devices of a rank, with its pipeline and swapping."""

from contextlib import AbstractContextManager, nullcontext

from tilenet.geometry.by_place import by_place
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import Network, build_network
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.exchange.network import SpatialNetwork, spatial_network
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.shares import Shares
from tilenet.parallel.sums.transport_choice import exchange_from
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.planning.memory.states import state_bytes
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.setup.swap import SwapRequest, decide_swaps, device_bytes, pipe_swaps
from tilenet.training.swept import AnyPipe, swept_pipe


class RunNetwork:
    """The network of a run on a rank's devices. Collective to construct and to close.

    Args:
        plan: Layout of the run.
        devices: Devices of this rank, one per partition.
        request: Swapping that the run asks for, and the loads that must fit.
        seed: Seed of the first weights.
        halos_from: Memory from which halos of feature maps are sent: `auto`, `host` or `device`.
        control: Ranks of the run; requests to stop are checked while weights are drawn.
        filled: The plain network with its weights; None: it is built here and weights are drawn.

    Attributes:
        sharers: Number of ranks that share out the optimizer's states.
        network: The network; its layers exchange halos between ranks if the plan needs it.
        pipe: The pipeline of the network over the devices.
        image_comm: Ranks of the same image, row by row of the grid.

    Raises:
        AgreedError: A step does not fit the memory, or swapped tensors have no writable folder.
        StopAgreed: A rank was asked to stop.
    """

    def __init__(
        self,
        plan: RunPlan,
        devices: RunDevices,
        request: SwapRequest,
        seed: int,
        halos_from: str,
        control: RankControl,
        filled: Network | None = None,
    ) -> None:
        record, comm = plan.record, control.comm
        self.plan, self.devices, self._optimizer = plan, devices, request.optimizer
        self.sharers = request.sharers
        if plan.needs_all_tiles:
            devices.check_threads(comm)
        swaps = decide_swaps(request, plan, devices, comm)
        with together(comm, control.stop) as turns:
            dtype, layer_done = parameter_dtype(record.precision), turns.part_done
            self.network: Network = filled or build_network(
                record.layers, seed, dtype, layer_done=layer_done
            )
            if filled is None and plan.adopted is not None:
                plan.adopted.fill(self.network)
        self.image_comm = comm.Create_group(comm.group.Incl(plan.mesh.same_image(comm.rank)))
        if plan.swept:
            self._swaps = None
            device_mpi = plan.rule.exchanged and _device_mpi(halos_from, devices, comm)
            channel = HaloChannel(self.image_comm, device_mpi=device_mpi)
            limit = device_bytes(request.keys, devices, comm)
            self.pipe: AnyPipe = swept_pipe(plan, self.network, devices.partitions, channel, limit)
            return
        if plan.needs_all_tiles or any(by_place(layer) for layer in record.layers):
            self.network = spatial_network(
                self.network,
                record.layers,
                plan.balance,
                plan.halo_mode,
                self.image_comm,
                comm,
                device_mpi=_device_mpi(halos_from, devices, comm),
            )
        with agreed(comm):
            self._swaps = (
                None if swaps is None else pipe_swaps(swaps, request.keys, devices.partitions)
            )
        self.pipe = Pipe(
            self.network,
            plan.balance,
            devices.partitions,
            plan.checkpointing,
            record.precision,
            inline=len(devices.partitions) == 1,
            stores=None if self._swaps is None else self._swaps.stores,
        )

    @property
    def swap_statistics(self) -> SwapStatistics | None:
        """Statistics of the pipeline's swapping; None: it swaps nothing."""
        return None if self._swaps is None else self._swaps.statistics

    @property
    def later_bytes(self) -> int:
        """Bytes that gradients and optimizer states will take on the first device."""
        device = self.devices.partitions[0]
        here = sum(
            parameter.nbytes for parameter in self.network.trained if parameter.device == device
        )
        return here + state_bytes(self._optimizer, here, self.sharers)

    def shares(self, comm: Intracomm, piece_bytes: int) -> Shares | None:
        """Return the ranks' shares of the update, in pieces of gradients; None: no shares."""
        return None if self.sharers == 1 else Shares(self.network.trained, comm, piece_bytes)

    def gradient_sum(self, comm: Intracomm, pieces: int | Shares, transport: str) -> GradientSum:
        """The sum of this network's gradients over ranks. Collective."""
        return GradientSum(self.network.trained, comm, pieces, transport)

    @property
    def shared_bytes(self) -> int | None:
        """Most bytes of the optimizer's states that a rank keeps; None: they are not shared."""
        return None if self.sharers == 1 else self._state_bytes(self.sharers)

    def bytes_beyond(self, sharers: int) -> int:
        """Bytes of a rank's optimizer states beyond those with `sharers` ranks to share them."""
        return max(self._state_bytes(self.sharers) - self._state_bytes(sharers), 0)

    def _state_bytes(self, sharers: int) -> int:
        weights = sum(parameter.nbytes for parameter in self.network.trained)
        return state_bytes(self._optimizer, weights, sharers)

    def swapping(self) -> AbstractContextManager[None]:
        """Return a context in which the pipeline's layers swap as planned."""
        if self._swaps is None:
            return nullcontext()
        assert isinstance(self.pipe, Pipe)
        return self._swaps.swapping(self.pipe)

    def close(self) -> None:
        """Free host memory and communicators. Collective."""
        if self._swaps is not None:
            self._swaps.close()
        if isinstance(self.network, SpatialNetwork):
            self.network.close()
        self.image_comm.Free()


def _device_mpi(halos_from: str, devices: RunDevices, comm: Intracomm) -> bool:
    return exchange_from(halos_from, devices.partitions, comm) == "device"
