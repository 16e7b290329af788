"""Facts of nodes, devices and links, from the packaged file and the user's own."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.files.plain_file import read_plain
from tilenet.planning.launch_facts import LaunchFacts, launch_facts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PRECISIONS", "Machine", "checked_machine", "known_machines", "machine", "user_file"]

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
LARGEST = 1e30  # beyond any machine; products of whole numbers stay within floats
MOST_BYTES = 1 << 20
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
        memory_bandwidth: Of a device's memory, bytes/s.
        link_bandwidth: Between two devices of a node, bytes/s.
        host_bandwidth: Between a device and the node's memory, bytes/s.
        network_bandwidth: Of a node, bytes/s.
        maths_efficiency: Share of `flops` that convolutions are assumed to reach.
        memory_efficiency: Share of the bandwidths that is assumed to be reached.
        launch: How jobs start there.
        latency_s: A message's way between two nodes, whatever it holds.
        message_s: What a message costs its rank besides: copying, posting, waiting.
        kernel_s: What each pass over a map takes at least, to launch it.
        file_bandwidth: Of a node that reads and decodes images, bytes/s.
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
        """Seconds that a device computes for so many operations.

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
        """Seconds that a device reads or writes so many bytes of its own memory."""
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
        read: dict[str, Any] = tomllib.loads(read_plain(path, MOST_BYTES).decode("utf-8"))
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
