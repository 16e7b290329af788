"""A machine's nodes, their devices and links."""

from dataclasses import dataclass, field

from tilenet.errors import TilenetError
from tilenet.parallel.health.node_memory import BLOCKS_SHARE
from tilenet.planning.machines.launch_facts import LaunchFacts
from tilenet.planning.machines.user_file import user_file
from tilenet.planning.machines.values import Count, Line, Peaks, Rate, Seconds, Share


@dataclass(frozen=True)
class Machine:
    """A node, its devices and its links; bandwidths are of one direction.

    Attributes:
        name: Name of the table in the file.
        devices_per_node: Devices of the node; each can hold a partition.
        device: Name of a device, which begins with its maker: of Intel's a rank takes one.
        memory_bytes: Memory of one device.
        host_bytes: Memory of the node.
        cores: Processor cores of the node that jobs may use.
        flops: Peak operations per second of a device, by precision.
        memory_bandwidth: Bandwidth of a device's memory, bytes/s.
        link_bandwidth: Between two devices of a node, bytes/s.
        host_bandwidth: Between a device and the node's memory, bytes/s.
        network_bandwidth: Network bandwidth of a node, bytes/s.
        maths_efficiency: Share of `flops` that convolutions are assumed to reach.
        memory_efficiency: Share of the bandwidths that is assumed to be reached.
        launch: Batch system and launcher.
        latency_s: A message's way between two nodes, whatever it holds.
        message_s: Seconds that a message costs its rank besides: copying, posting, waiting.
        kernel_s: Seconds that each pass over a map takes at least, to launch it.
        file_bandwidth: File bandwidth of a node that reads and decodes images, bytes/s.
    """

    name: str
    devices_per_node: Count
    device: Line
    memory_bytes: Count
    host_bytes: Count
    cores: Count
    flops: Peaks
    memory_bandwidth: Rate
    link_bandwidth: Rate
    host_bandwidth: Rate
    network_bandwidth: Rate
    maths_efficiency: Share
    memory_efficiency: Share
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    latency_s: Seconds = 2e-6
    message_s: Seconds = 1e-5
    kernel_s: Seconds = 0.0
    file_bandwidth: Rate = 1e9

    @property
    def most_partitions(self) -> int:
        """Devices that a rank may take: of Intel's GPUs one alone."""
        return 1 if self.device.startswith("Intel") else self.devices_per_node

    def check_partitions(self, partitions: int) -> None:
        """Refuse more partitions than a rank can have devices.

        Raises:
            TilenetError: There are too many.
        """
        if partitions > self.devices_per_node:
            raise TilenetError(
                f"a rank's partitions stand on devices of one node (partitions: {partitions}, "
                f"devices per node of {self.name}: {self.devices_per_node}); plan with at most "
                f"{self.devices_per_node}"
            )
        if partitions > self.most_partitions:
            raise TilenetError(
                f"several partitions need streams of CUDA or ROCm (partitions: {partitions}, "
                f"devices of {self.name}: {self.device}); plan with 1"
            )

    @property
    def rank_bytes(self) -> int:
        """Memory of the node that its ranks may plan with: decoded blocks of images take some."""
        return int(self.host_bytes * (1 - BLOCKS_SHARE))

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds to move bytes from a device to another one of the node."""
        return num_bytes / (self.link_bandwidth * self.memory_efficiency)

    def maths_s(self, operations: float, precision: str) -> float:
        """Seconds that a device computes for a number of operations.

        Raises:
            TilenetError: No peak is known for the precision.
        """
        if precision not in self.flops:
            raise TilenetError(
                f"machine {self.name} has no peak for precision {precision} (known: "
                f"{', '.join(self.flops)}); choose one of these or set {self.name}.flops."
                f"{precision} in {user_file()}"
            )
        return operations / (self.flops[precision] * self.maths_efficiency)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds that a device takes to read or write a number of bytes of its own memory."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)
