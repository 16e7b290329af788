"""The batch system and the launcher of a machine."""

from dataclasses import dataclass, field
from typing import Literal

from tilenet.planning.machines.values import (
    Command,
    Count,
    Folder,
    GpuOption,
    Line,
    Lines,
    Numbers,
    Variables,
)


@dataclass(frozen=True)
class LaunchFacts:
    """The batch system, the launcher and their options on a machine.

    Attributes:
        scheduler: The batch system that takes scripts.
        launcher: Starter of the ranks; `mpiexec` those of one node, `hydra` (MPICH's mpiexec) and
            `pals` (HPE's) those of several.
        mpi: The plug-in that srun needs for mpi4py's MPI: pmi2, pmix, cray_shasta.
        sockets: Processors of a node, between which its cores and devices are shared evenly.
        threads_per_core: Hardware threads that the launcher counts per core.
        queue: Queue, partition or quality of service; empty: the machine's own choice.
        queue_option: Name of Slurm's option for the queue.
        constraint: Expression for Slurm and PBS to choose nodes with.
        gpu_option: Slurm's option for a node's GPUs, up to their number; `--gres=gpu:` or, with a
            type, `--gres=gpu:a100:` where a cluster knows generic resources alone.
        memory_option: Slurm's option for a node's memory; the default is all of it. Empty where a
            cluster rejects it.
        header: More options for the head of the script, one per line.
        step: More options for the launcher.
        modules: Modules to be loaded before Python.
        environment: Environment to be exported.
        node_storage: Folder on fast storage of the node itself; a folder per user goes below it.
        device_order: Devices in the order of the cores that are close to them; empty: as counted.
        program: Command that runs tilenet there.
        note: Sentence in the script that a user must read before the first job.
        own_device: Whether the launcher gives a rank of one device only that one to see.
    """

    scheduler: Literal["lsf", "slurm", "pbs", "flux", "none"] = "none"
    launcher: Literal["jsrun", "srun", "flux", "pals", "hydra", "mpiexec"] = "mpiexec"
    mpi: Line = ""
    sockets: Count = 1
    threads_per_core: Count = 1
    queue: Line = ""
    queue_option: Literal["--partition", "--qos"] = "--partition"
    constraint: Line = ""
    gpu_option: GpuOption = "--gpus-per-node="
    memory_option: Line = "--mem=0"
    header: Lines = ()
    step: Lines = ()
    modules: Lines = ()
    environment: Variables = field(default_factory=dict)
    node_storage: Folder = ""
    device_order: Numbers = ()
    program: Command = ("tilenet",)
    note: Line = ""
    own_device: bool = False
