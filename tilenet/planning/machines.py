"""Facts of nodes, devices and links, from the packaged file and the user's own.

What starting a job on a machine takes: batch system, launcher, cores, modules, environment.
"""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from tilenet.errors import TilenetError

__all__ = [
    "PRECISIONS",
    "LaunchFacts",
    "Machine",
    "checked_machine",
    "known_machines",
    "launch_facts",
    "machine",
    "user_file",
]

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
        modules: Modules to be loaded before Python.
        environment: Environment to be exported.
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


FACT_KEYS = tuple(part.name for part in fields(LaunchFacts))


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
        if key not in FACT_KEYS:
            near = get_close_matches(key, FACT_KEYS, n=1, cutoff=0)[0]
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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
LARGEST = 1e30  # beyond any machine; products of whole numbers stay within floats
PACKAGED = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True)
class Machine:
    """A node, its devices and its links; bandwidths are of one direction.

    Attributes:
        name: Its table's name in the file.
        devices_per_node: Devices, each of which can hold a partition.
        device: What a device is called.
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
        launch: How jobs start there.
        latency_s: A message's way between two nodes, whatever it holds.
        message_s: What a message costs its rank besides: copying, posting, waiting.
        kernel_s: What each pass over a map takes at least, to launch it.
        file_bandwidth: File bandwidth of a node that reads and decodes images, bytes/s.
    """

    name: str
    devices_per_node: int
    device: str
    memory_bytes: int
    host_bytes: int
    cores: int
    flops: dict[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    maths_efficiency: float
    memory_efficiency: float
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    latency_s: float = 2e-6
    message_s: float = 1e-5
    kernel_s: float = 0.0
    file_bandwidth: float = 1e9

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


INTEGERS = ("devices_per_node", "memory_bytes", "host_bytes", "cores")
SHARES = ("maths_efficiency", "memory_efficiency")
KEYS = tuple(part.name for part in fields(Machine) if part.name != "name")
OPTIONAL = ("launch", "latency_s", "message_s", "kernel_s", "file_bandwidth")
MAY_BE_ZERO = ("latency_s", "message_s", "kernel_s")


def machine(name: str) -> Machine:
    """The facts of a machine, the user's own first.

    Raises:
        TilenetError: There is none of that name, or a file says something impossible.
    """
    tables = _tables()
    if name not in tables:
        near = get_close_matches(name, tables, n=1, cutoff=0)
        raise TilenetError(
            f"there is no machine named {name!r} (known: {', '.join(tables)}; nearest: {near[0]}); "
            f"describe your own in {user_file()}"
        )
    return checked_machine(name, tables[name])


def known_machines() -> tuple[str, ...]:
    """Names of the machines of both files.

    Raises:
        TilenetError: The user's file cannot be read.
    """
    return tuple(_tables())


def user_file() -> Path:
    """Where the user's own machines stand, whether there are any or not."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # the XDG specification has relative paths ignored
    folder = Path(home) if os.path.isabs(home) else Path.home() / ".config"
    return folder / "tilenet" / "machines.toml"


def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(PACKAGED.read_text(encoding="utf-8"))
    tables["local"] = {**_detected(), **tables["local"]}
    for name, own in _user_tables(user_file()).items():
        table = tables.setdefault(name, {})
        for key, value in own.items():
            old = table.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            table[key] = {**old, **value} if both else value  # type: ignore[dict-item]
    return tables


def _user_tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        read: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TilenetError(
            f"{path} must be a readable TOML file ({error}); mend or remove it"
        ) from error
    for name, table in read.items():
        if not isinstance(table, dict):
            raise TilenetError(
                f"every machine in {path} must be a table ({name} = {table!r}); write [{name}] "
                "and its keys below"
            )
    return read


def checked_machine(name: str, table: dict[str, Any]) -> Machine:
    """The machine that a table describes.

    Raises:
        TilenetError: A key is missing, unknown, or its value impossible.
    """
    for key in table:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1, cutoff=0)
            raise TilenetError(
                f"machine {name} has no key {key!r} in {user_file()}; nearest: {near[0]}"
            )
    missing = [key for key in KEYS if key not in (*table, *OPTIONAL)]
    if missing:
        raise TilenetError(
            f"machine {name} must have all keys (missing: {', '.join(missing)}); add them in "
            f"{user_file()}"
        )
    _check_flops(name, table["flops"])
    if not isinstance(table["device"], str):
        raise TilenetError(
            f"{name}.device must be a text (got {table['device']!r}); put it in quotes in "
            f"{user_file()}"
        )
    for key in KEYS:
        if key not in ("device", "flops", "launch") and key in table:
            _check_number(name, key, table[key])
    remedy = f"correct it in {user_file()}"
    launch = launch_facts(table.get("launch", {}), name, table["devices_per_node"], remedy)
    return Machine(name=name, **{**table, "launch": launch})


def _check_flops(name: str, flops: Any) -> None:
    if not isinstance(flops, dict) or not flops:
        raise TilenetError(
            f"{name}.flops must give operations per second by precision (got {flops!r}); write, "
            f"say, flops = {{ float32 = 1e12 }} in {user_file()}"
        )
    for precision, value in flops.items():
        if precision not in PRECISIONS:
            raise TilenetError(
                f"{name}.flops has no precision {precision!r} (known: {', '.join(PRECISIONS)}); "
                f"correct it in {user_file()}"
            )
        _check_number(name, f"flops.{precision}", value)


def _check_number(name: str, key: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = number and 0 < value < LARGEST
    rule = "a positive number"
    if key in MAY_BE_ZERO:
        good, rule = number and 0 <= value < LARGEST, "a number of seconds, at least 0"
    if key in INTEGERS:
        good, rule = good and isinstance(value, int), "a positive whole number"
    if key in SHARES:
        good, rule = good and value <= 1, "a share above 0 and at most 1"
    if not good:
        raise TilenetError(
            f"{name}.{key} must be {rule} (got {value!r}); correct it in {user_file()}"
        )


def _detected() -> dict[str, Any]:
    """Cores, memory and peaks of the machine that runs this.

    The peak takes 3 GHz and two units for fused multiply-adds of 256 bits, what most processors
    since 2013 have at least; half precision is no faster there than float32.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container or batch job
    with suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(limit.read_text()))
    single = cores * 3e9 * 2 * 2 * 8
    return {
        "memory_bytes": memory,
        "host_bytes": memory,
        "cores": cores,
        "flops": {
            "float64": single / 2,
            "float32": single,
            "bfloat16": single,
            "float16": single,
        },
    }
