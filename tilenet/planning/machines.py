"""Machines: nodes, devices, links and how jobs start, from the packaged file and the user's."""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tilenet.errors import TilenetError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PRECISIONS", "LaunchFacts", "Machine", "checked_machine", "known_machines", "machine"]
__all__ += ["user_file"]

PRECISIONS = ("float32", "tf32", "float64", "bfloat16", "float16")
LARGEST = 1e30  # beyond any machine; products of whole numbers stay within floats
PACKAGED = Path(__file__).with_name("machines.toml")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

T = TypeVar("T")

# Each with what it must be, in words, and a test of that.
Count = Annotated[int, "a positive whole number", lambda n: 0 < n < LARGEST]
Rate = Annotated[float, "a positive number", lambda x: 0 < x < LARGEST]
Share = Annotated[float, "a share above 0 and at most 1", lambda x: 0 < x <= 1]
Seconds = Annotated[float, "a number of seconds, at least 0", lambda x: 0 <= x < LARGEST]
# A line break would begin a line of its own in a script.
Line = Annotated[str, "a text without line breaks", str.isprintable]
Lines = Annotated[tuple[Line, ...], "a list of texts without line breaks", lambda _: True]
Command = Annotated[Lines, "a list of at least one text without line breaks", bool]
Folder = Annotated[Line, "an absolute path", lambda path: path[:1] in ("", "/")]
GpuOption = Annotated[
    Line,
    "--gpus-per-node= or --gres=gpu:, and after it a type and a colon where the site has types",
    re.compile(r"(--gpus-per-node=|--gres=gpu:)([\w.-]+:)?").fullmatch,
]
Numbers = Annotated[tuple[int, ...], "a list of whole numbers", lambda _: True]
Variables = Annotated[
    dict[str, Line],
    "names of variables and their values, as texts",
    lambda table: all(map(NAME.fullmatch, table)),
]
Peaks = Annotated[
    dict[str, Rate],
    f"operations per second, positive, by precision (of {', '.join(PRECISIONS)})",
    lambda table: table and set(table) <= set(PRECISIONS),
]


@dataclass(frozen=True)
class LaunchFacts:
    """How jobs start on a machine.

    Attributes:
        scheduler: The batch system that takes scripts.
        launcher: What starts the ranks; `mpiexec` those of one node, `hydra` (MPICH's mpiexec) and
            `pals` (HPE's) those of several.
        mpi: The plug-in that srun needs for mpi4py's MPI: pmi2, pmix, cray_shasta.
        sockets: Processors of a node, between which its cores and devices are shared evenly.
        threads_per_core: Hardware threads that the launcher counts per core.
        queue: Queue, partition or quality of service; empty: the machine's own choice.
        queue_option: Name of Slurm's option for the queue.
        constraint: Expression by which Slurm and PBS choose nodes.
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
        program: tilenet, as it is called there.
        note: What a user must read in the script before the first job.
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


@dataclass(frozen=True)
class Machine:
    """A node, its devices and its links; bandwidths are of one direction.

    Attributes:
        name: Name of the table in the file.
        devices_per_node: Devices, each of which can hold a partition.
        device: Name of a device.
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


def machine(name: str) -> Machine:
    """The facts of a machine, the user's own first.

    Raises:
        TilenetError: No machine has that name, or a file says something impossible.
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
    facts = _filled(Machine, name, table, name=name)
    launch, remedy = facts.launch, f"correct it in {user_file()}"
    if sorted(launch.device_order) not in ([], list(range(facts.devices_per_node))):
        raise TilenetError(
            f"{name}.launch.device_order must name each of the devices 0 to "
            f"{facts.devices_per_node - 1} once (got {[*launch.device_order]}); {remedy}"
        )
    if launch.launcher == "srun" and not launch.mpi:
        raise TilenetError(
            f"{name}.launch.mpi must name srun's plug-in (pmi2 for mpich, pmix for Open MPI, "
            f"cray_shasta for Cray; got ''): without it each rank may be alone; {remedy}"
        )
    if launch.own_device and launch.gpu_option.startswith("--gres"):
        raise TilenetError(
            f"a rank gets a device of its own by --gpus-per-task, which goes with --gpus-per-node= "
            f"({name}.launch.own_device: true, gpu_option: {launch.gpu_option}); {remedy}"
        )
    if launch.launcher == "hydra" and launch.scheduler != "pbs" and "-f" not in launch.step:
        raise TilenetError(
            f"{name}.launch.step must name a file of hosts, ['-f', FILE], where no PBS does (got "
            f"{[*launch.step]}): without it all ranks share one node; {remedy}"
        )
    return facts


def _filled(kind: type[T], where: str, table: Any, **known: str) -> T:
    """A dataclass of a table's values, and of those given; `where` it stands, for messages."""
    remedy = f"correct it in {user_file()}"
    if not isinstance(table, dict):
        raise TilenetError(f"{where} must be a table (got {table!r}); {remedy}")
    kinds, values = get_type_hints(kind, include_extras=True), dict[str, Any](known)
    keys = [part.name for part in fields(kind) if part.name not in known]  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in keys:
            near = get_close_matches(key, keys, n=1, cutoff=0)[0]
            raise TilenetError(f"{where} has no key {key!r} (nearest: {near}); {remedy}")
        if is_dataclass(kinds[key]):
            values[key] = _filled(kinds[key], f"{where}.{key}", value)
        elif _fits(value, kinds[key]):
            values[key] = tuple(value) if isinstance(value, list) else value
        else:
            rule = _rule(kinds[key])
            raise TilenetError(f"{where}.{key} must be {rule} (got {value!r}); {remedy}")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).partition(": ")[2]
        raise TilenetError(f"{where} must have all keys (missing: {missing}); {remedy}") from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML or JSON file is of a type as it stands in a dataclass here."""
    origin, (part, *more) = get_origin(kind), get_args(kind) or (None,)
    if origin is Annotated:
        return _fits(value, part) and all(test(value) for test in more[1::2])
    if origin is Literal:
        return value in (part, *more)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, part) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, more[0]) for item in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def _rule(kind: Any) -> str:
    """What a value of a type must be, in words."""
    parts = get_args(kind) or ("true or false", bool)
    return f"one of {', '.join(parts)}" if get_origin(kind) is Literal else parts[-2]


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
