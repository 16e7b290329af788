"""What starting a job on a machine takes: batch system, launcher, cores, modules, environment."""

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from tilenet.errors import TilenetError

__all__ = ["LaunchFacts", "launch_facts"]

Scheduler = Literal["lsf", "slurm", "none"]
Launcher = Literal["jsrun", "srun", "mpiexec"]
QueueOption = Literal["--partition", "--qos"]
CHOICES = {
    "scheduler": get_args(Scheduler),
    "launcher": get_args(Launcher),
    "queue_option": get_args(QueueOption),
}
TEXT = re.compile(r"[^\x00-\x1f\x7f]*")  # a line break would begin a line of its own in a script
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class LaunchFacts:
    """How jobs start on a machine.

    Attributes:
        scheduler: The batch system that takes scripts.
        launcher: What starts the ranks.
        mpi: The plug-in that srun needs for mpi4py's MPI: pmi2, pmix, cray_shasta.
        sockets: Processors of a node, between which its cores and devices are shared evenly.
        threads_per_core: Hardware threads that the launcher counts per core.
        queue: Queue, partition or quality of service; empty: the machine's own choice.
        queue_option: What Slurm's option for it is called there.
        constraint: What Slurm shall choose nodes by.
        header: More options for the head of the script, one per line.
        step: More options for the launcher.
        modules: To be loaded before Python.
        environment: To be exported.
        node_storage: Folder on fast storage of the node itself; a folder per user goes below it.
        device_order: Devices in the order of the cores that are close to them; empty: as counted.
        program: tilenet, as it is called there.
        install: How to install it there, for the script's comments, one line each.
        own_device: Whether the launcher gives a rank of one device only that one to see.
    """

    scheduler: Scheduler = "none"
    launcher: Launcher = "mpiexec"
    mpi: str = ""
    sockets: int = 1
    threads_per_core: int = 1
    queue: str = ""
    queue_option: QueueOption = "--partition"
    constraint: str = ""
    header: tuple[str, ...] = ()
    step: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    node_storage: str = ""
    device_order: tuple[int, ...] = ()
    program: tuple[str, ...] = ("tilenet",)
    install: tuple[str, ...] = ()
    own_device: bool = False


KEYS = tuple(part.name for part in fields(LaunchFacts))


def launch_facts(table: Any, machine: str, devices: int, remedy: str) -> LaunchFacts:
    """The table `launch` of a machine.

    Args:
        table: As read from the file.
        machine: The machine's name, for messages.
        devices: Its devices per node.
        remedy: What to do about an impossible value.

    Raises:
        TilenetError: A key is unknown, or a value impossible.
    """
    if not isinstance(table, dict):
        raise TilenetError(f"{machine}.launch must be a table (got {table!r}); {remedy}")
    for key in table:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1, cutoff=0)[0]
            raise TilenetError(f"{machine}.launch has no key {key!r} (nearest: {near}); {remedy}")
    for key, value in table.items():
        rule = _broken_rule(key, value, devices)
        if rule:
            raise TilenetError(f"{machine}.launch.{key} must be {rule} (got {value!r}); {remedy}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    facts = LaunchFacts(**values)
    if facts.launcher == "srun" and not facts.mpi:
        raise TilenetError(
            f"{machine}.launch.mpi must name srun's plug-in (pmi2 for mpich, pmix for Open MPI, "
            f"cray_shasta for Cray): without it each rank may be alone; {remedy}"
        )
    return facts


def _broken_rule(key: str, value: Any, devices: int) -> str:
    """What a value must be and is not; empty: it is good."""
    if key in CHOICES:
        return "" if value in CHOICES[key] else f"one of {', '.join(CHOICES[key])}"
    if key in ("sockets", "threads_per_core"):
        return "" if type(value) is int and value > 0 else "a positive whole number"
    if key == "own_device":
        return "" if isinstance(value, bool) else "true or false"
    if key in ("header", "step", "modules", "program", "install"):
        good = isinstance(value, list) and all(_is_line(line) for line in value)
        good = good and (key != "program" or bool(value))
        return "" if good else "a list of texts without line breaks"
    if key == "device_order":
        good = isinstance(value, list) and all(type(number) is int for number in value)
        good = good and sorted(value) in ([], list(range(devices)))
        return "" if good else f"each of the devices 0 to {devices - 1} once"
    if key == "environment":
        good = isinstance(value, dict) and all(
            NAME.fullmatch(name) and _is_line(text) for name, text in value.items()
        )
        return "" if good else "names of variables and their values, as texts"
    if key == "node_storage":
        return "" if value == "" or (_is_line(value) and value[0] == "/") else "an absolute path"
    return "" if _is_line(value) else "a text without line breaks"


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and TEXT.fullmatch(value) is not None
