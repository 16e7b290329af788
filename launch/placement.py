"""The placement of a plan's ranks on nodes, cores and devices, as integers."""

from dataclasses import dataclass
from math import ceil

from tilenet.errors import TilenetError
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.user_file import user_file

from .planned_job import PlannedJob

GIB = 2**30


@dataclass(frozen=True)
class Binding:
    """Cores and devices of one rank of a node.

    Attributes:
        local_rank: Number of the rank on its node.
        cores: Numbers of its cores among the node's usable ones, from 0.
        devices: Numbers of its devices on the node, one per partition.
    """

    local_rank: int
    cores: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Ranks on nodes, in blocks: all nodes but the last hold `ranks_per_node`.

    Attributes:
        ranks: MPI ranks of the job.
        ranks_per_node: Ranks on every node but the last, which may hold fewer.
        partitions: Devices per rank.
        cores_per_rank: Cores of each rank; also its threads (OMP_NUM_THREADS).
    """

    machine: Machine
    nodes: int
    ranks: int
    ranks_per_node: int
    partitions: int
    cores_per_rank: int

    @property
    def devices_per_node(self) -> int:
        """Devices that a full node gives to its ranks; the job holds all there are."""
        return self.ranks_per_node * self.partitions

    @property
    def last_node_ranks(self) -> int:
        """Ranks on the last node."""
        return self.ranks - (self.nodes - 1) * self.ranks_per_node

    @property
    def straddles(self) -> bool:
        """Whether the last node holds fewer ranks than the others."""
        return self.last_node_ranks != self.ranks_per_node

    @property
    def shares_nodes_in_resource_sets(self) -> bool:
        """Whether jsrun gets a resource set per rank instead of one per node.

        Only so can it fill the last node partly; each rank then sees its own devices alone.
        """
        return self.straddles and self.machine.launch.launcher == "jsrun"

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Cores and devices of a full node's ranks."""
        return tuple(
            Binding(
                rank,
                tuple(range(rank * self.cores_per_rank, (rank + 1) * self.cores_per_rank)),
                tuple(range(rank * self.partitions, (rank + 1) * self.partitions)),
            )
            for rank in range(self.ranks_per_node)
        )


def place(job: PlannedJob, machine: Machine, nodes: int | None = None) -> Placement:
    """Place a plan's ranks: as many per node as fit, or over `nodes`.

    A device's share of the cores goes with it, so that ranks keep close to their devices also
    where they leave some of a node's free.

    Raises:
        TilenetError: The ranks do not fit on the machine, or its launcher cannot place them so.
    """
    most = _most_per_node(job, machine)
    if nodes is None:
        per_node = min(most, job.num_ranks)
    else:
        per_node = ceil(job.num_ranks / max(nodes, 1))
    needed = ceil(job.num_ranks / per_node)
    if per_node > most or nodes not in (None, needed):
        least = ceil(job.num_ranks / most)
        near = needed if per_node <= most else least
        raise TilenetError(
            f"the plan's ranks must fill the nodes (ranks: {job.num_ranks}, at most {most} per "
            f"node, nodes: {nodes}); give --nodes {near}, or plan for {nodes} nodes"
        )
    placed = Placement(
        machine=machine,
        nodes=needed,
        ranks=job.num_ranks,
        ranks_per_node=per_node,
        partitions=job.partitions,
        cores_per_rank=machine.cores // machine.devices_per_node * job.partitions,
    )
    _check_launcher(placed, most)
    return placed


def _most_per_node(job: PlannedJob, machine: Machine) -> int:
    machine.check_partitions(job.partitions)
    if machine.cores < machine.devices_per_node:
        raise TilenetError(
            f"every device must have a core to drive it (cores of {machine.name}: "
            f"{machine.cores}, devices per node: {machine.devices_per_node}); give the machine "
            "fewer devices_per_node"
        )
    if job.device_bytes > machine.memory_bytes:
        raise TilenetError(
            f"a device must hold what the plan predicts ({job.device_bytes / GIB:.2f} GiB, "
            f"{machine.device}: {machine.memory_bytes / GIB:.2f} GiB); plan with --machine "
            f"{machine.name}"
        )
    most = machine.devices_per_node // job.partitions
    # the planner may have been told of fewer devices, and says itself what memory lacks; elsewhere
    # its limit says nothing
    if job.machine == machine.name:
        planned = min(job.ranks_per_node, job.num_ranks)
        if planned > most:
            raise TilenetError(
                f"a node holds the ranks that were planned for one (planned: {planned}, devices of "
                f"each: {job.partitions}, per node of {machine.name}: {machine.devices_per_node}); "
                f"plan with --devices-per-node {machine.devices_per_node}, or set {machine.name}."
                f"devices_per_node in {user_file()}"
            )
        return min(most, job.ranks_per_node)
    if job.host_bytes > machine.rank_bytes:
        raise TilenetError(
            f"a node must hold what the plan predicts for a rank ({job.host_bytes / GIB:.1f} GiB, "
            f"of {machine.name}: {machine.rank_bytes / GIB:.1f} GiB); plan with --machine "
            f"{machine.name}"
        )
    return min(most, machine.rank_bytes // max(job.host_bytes, 1))


def _check_launcher(placed: Placement, most: int) -> None:
    facts = placed.machine.launch
    if facts.launcher == "mpiexec" and placed.nodes > 1:
        raise TilenetError(
            f"mpiexec starts the ranks of one node here (nodes: {placed.nodes}, ranks: "
            f"{placed.ranks}); plan for one node of {placed.machine.name}, or name a machine with "
            "a batch system"
        )
    if not placed.straddles or _fills_in_blocks(placed):
        return
    even = max(d for d in range(1, most + 1) if placed.ranks % d == 0)
    full = "fills the last node partly only where the others are full"
    rule = {"jsrun": f"{full} and ranks keep to their sockets", "flux": "fills all nodes alike"}
    raise TilenetError(
        f"{facts.launcher} {rule.get(facts.launcher, full)} (ranks: "
        f"{placed.ranks}, {placed.ranks_per_node} per node, partitions: {placed.partitions}); give "
        f"--nodes {placed.ranks // even}, with {even} on each"
    )


def _fills_in_blocks(placed: Placement) -> bool:
    """Whether the launcher packs just `ranks_per_node` ranks on a node, because no more fit."""
    machine = placed.machine
    if machine.launch.launcher in ("pals", "hydra"):
        return True  # -ppn on each host of the list, until there are no more
    if machine.launch.launcher == "flux":
        return False  # it spreads them
    if machine.launch.launcher == "srun":
        return placed.cores_per_rank * (placed.ranks_per_node + 1) > machine.cores
    # where jsrun puts a resource set that no socket has room for is not documented
    per_socket, rest = divmod(machine.devices_per_node, machine.launch.sockets)
    full = placed.devices_per_node == machine.devices_per_node
    return full and not rest and per_socket % placed.partitions == 0
