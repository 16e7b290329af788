"""A strict stand-in for jsrun, which is proprietary: the documented layouts, on Summit's nodes.

What it takes from where: the options and their long names from the table in hpc/Spindle's launcher
and OLCF's Summit User Guide; the layouts from the guide and the jsrun quick start. What is not
documented is refused instead of guessed. It starts the ranks with mpiexec.

    jsrun.py [options] [program …]          JSRUN_NODES: nodes of the allocation (1)
"""

import os
import shlex
import sys
from dataclasses import dataclass
from itertools import chain

__all__ = ["JsrunError", "Options", "Rank", "layout", "parse", "table"]

SOCKETS, CORES, THREADS, GPUS = 2, 21, 4, 3  # of a node; cores and GPUs per socket
SOCKET_THREADS = 88  # where the second socket's numbers begin: 84 to 87 are the system's

# long names of the options, and their letters
LONG = {
    "nrs": "n",
    "rs_per_host": "r",
    "rs_per_socket": "K",
    "tasks_per_rs": "a",
    "np": "p",
    "cpu_per_rs": "c",
    "gpu_per_rs": "g",
    "memory_per_rs": "m",
    "bind": "b",
    "launch_distribution": "d",
    "latency_priority": "l",
    "env": "E",
    "smpiargs": "M",
    "exit_on_error": "X",
    "stdio_mode": "e",
    "chdir": "h",
    "immediate": "i",
    "print_placement": "print_placement",
}
FLAGS = ("i", "print_placement")


class JsrunError(Exception):
    """What jsrun would refuse, or what is not documented."""


@dataclass(frozen=True)
class Options:
    """What was asked for; the defaults are those of OLCF."""

    sets: int | None = None
    per_host: int | None = None
    per_socket: int | None = None
    tasks: int | None = None
    total: int | None = None
    cpus: int = 1
    gpus: int = 0
    bind: str | None = None
    distribution: str = "packed"
    latency: tuple[str, ...] = ("gpu-cpu", "cpu-mem", "cpu-cpu")
    environment: tuple[str, ...] = ()
    smpiargs: str = ""
    exit_on_error: bool = False
    print_placement: bool = False
    chdir: str = ""
    program: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rank:
    """Where a rank runs.

    Attributes:
        node: Counted from 0.
        local_rank: Among the node's ranks.
        resource_set: Counted over all nodes.
        threads: First hardware thread of each core that it is bound to.
        gpus: Of the node; the rank sees them numbered from 0.
    """

    node: int
    local_rank: int
    resource_set: int
    threads: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class _Set:
    """A resource set's cores and GPUs on its node, in the order in which tasks get them."""

    cores: tuple[int, ...]
    gpus: tuple[int, ...]


def parse(arguments: list[str]) -> Options:
    """Read a command line without its first word.

    Raises:
        JsrunError: An option or a value is not documented, or some exclude one another.
    """
    found: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, value = _split(word)
        if name in FLAGS:
            if value is not None:
                raise JsrunError(f"{word}: takes no value")
            value = ""
        elif value is None:
            if not rest:
                raise JsrunError(f"{word}: needs a value")
            value = rest.pop(0)
        if name in found and name != "E":
            raise JsrunError(f"{word}: given twice")
        found.setdefault(name, []).append(value)
    return _options(found, tuple(rest))


def _split(word: str) -> tuple[str, str | None]:
    """An option's short name and the value that stands in the same word."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if name not in LONG:
            raise JsrunError(f"{word}: no such option")
        return LONG[name], value if equals else None
    if word[1:2] not in set(LONG.values()):
        raise JsrunError(f"{word}: no such option")
    return word[1], word[2:] or None


def _options(found: dict[str, list[str]], program: tuple[str, ...]) -> Options:
    one = {name: values[0] for name, values in found.items()}
    if "p" in one and "a" in one:
        raise JsrunError("-p and -a exclude one another")
    if "r" in one and "K" in one:
        raise JsrunError("-r and -K exclude one another")
    warnings = []
    latency = one.get("l", "gpu-cpu,cpu-mem,cpu-cpu")
    if latency != latency.lower():
        warnings.append("-l: capitals are broken in some versions")
    latencies = tuple(latency.lower().split(","))
    if not set(latencies) <= {"gpu-cpu", "cpu-mem", "cpu-cpu"}:
        raise JsrunError(f"-l {latency}: no such priority")
    distribution = one.get("d", "packed")
    if distribution != "packed":
        raise JsrunError(f"-d {distribution}: only packed is built here")
    if one.get("X", "0") not in ("0", "1"):
        raise JsrunError(f"-X {one['X']}: 0 or 1")
    if one.get("M", "off") not in ("-gpu", "off", "-disable_gpu_hooks"):
        raise JsrunError(f"-M {one['M']}: not documented")
    for text in found.get("E", []):
        if not text.partition("=")[0].isidentifier():
            raise JsrunError(f"-E {text}: VAR=value or VAR")
    return Options(
        sets=_number(one, "n") if one.get("n") != "ALL_HOSTS" else None,
        per_host=_number(one, "r"),
        per_socket=_number(one, "K"),
        tasks=_number(one, "a"),
        total=_number(one, "p"),
        cpus=_number(one, "c") or 1,
        gpus=_number(one, "g", least=0) or 0,
        bind=_bind(one.get("b")),
        distribution=distribution,
        latency=latencies,
        environment=tuple(found.get("E", [])),
        smpiargs=one.get("M", ""),
        exit_on_error=one.get("X") == "1",
        print_placement="print_placement" in one,
        chdir=one.get("h", ""),
        program=program,
        warnings=tuple(warnings),
    )


def _number(one: dict[str, str], name: str, least: int = 1) -> int | None:
    if name not in one:
        return None
    text = one[name]
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise JsrunError(f"-{name} {text}: a whole number from {least} on")
    return int(text)


def _bind(text: str | None) -> str | None:
    kind, colon, number = (text or "none").partition(":")
    good = kind in ("none", "rs") and not colon
    good |= kind == "packed" and number.isascii() and number.isdigit() and int(number) > 0
    if not good:
        raise JsrunError(f"-b {text}: none, rs or packed:N (others are not built here)")
    return text


# --- layout


def layout(options: Options, nodes: int) -> list[Rank]:
    """Where the ranks run.

    Raises:
        JsrunError: They do not fit, or where they would go is not documented.
    """
    per_node = _sets_per_node(options)
    count = options.sets if options.sets is not None else per_node * nodes
    tasks = options.tasks or 1
    if options.total is not None:
        raise JsrunError("-p: layouts with it are not built here; use -n and -a")
    if options.per_host and count % options.per_host:
        raise JsrunError(f"-r {options.per_host} must divide -n {count}")
    if count > per_node * nodes:
        raise JsrunError(f"{count} resource sets do not fit ({nodes} nodes, {per_node} on each)")
    shape = _fill(options, min(per_node, count))
    ranks = []
    for number in range(count):
        node, place = divmod(number, per_node)
        for task in range(tasks):
            threads = _bound(options, shape[place], task, tasks)
            ranks.append(Rank(node, place * tasks + task, number, threads, shape[place].gpus))
    return ranks


def _sets_per_node(options: Options) -> int:
    fits = SOCKETS * CORES // options.cpus
    if options.gpus:
        fits = min(fits, SOCKETS * GPUS // options.gpus)
    asked = options.per_host or (options.per_socket and options.per_socket * SOCKETS)
    if not fits or (asked and asked > fits):
        raise JsrunError(
            f"{asked or 1} resource sets of {options.cpus} cores and {options.gpus} GPUs do not "
            f"fit on a node ({SOCKETS * CORES} cores, {SOCKETS * GPUS} GPUs)"
        )
    return asked or fits


def _fill(options: Options, count: int) -> list[_Set]:
    """Cores and GPUs of a node's resource sets: each on the first socket that has room."""
    cores = [[s * CORES + i for i in range(CORES)] for s in range(SOCKETS)]
    gpus = [[s * GPUS + i for i in range(GPUS)] for s in range(SOCKETS)]
    filled = []
    for number in range(count):
        room = [
            s
            for s in range(SOCKETS)
            if len(cores[s]) >= options.cpus and len(gpus[s]) >= options.gpus
        ]
        if options.per_socket:
            room = [number // options.per_socket]
        if room:
            here = room[0]
            filled.append(
                _Set(tuple(cores[here][: options.cpus]), tuple(gpus[here][: options.gpus]))
            )
            del cores[here][: options.cpus], gpus[here][: options.gpus]
        elif options.cpus > CORES or options.gpus > GPUS:  # larger than a socket
            free, devices = list(chain(*cores)), list(chain(*gpus))
            filled.append(_Set(tuple(free[: options.cpus]), tuple(devices[: options.gpus])))
            cores, gpus = _without(cores, filled[-1].cores), _without(gpus, filled[-1].gpus)
        else:
            raise JsrunError(
                f"resource set {number} of a node fits on neither socket: where it goes is not "
                "documented"
            )
    return filled


def _without(free: list[list[int]], taken: tuple[int, ...]) -> list[list[int]]:
    return [[number for number in socket if number not in taken] for socket in free]


def _bound(options: Options, shape: _Set, task: int, tasks: int) -> tuple[int, ...]:
    bind = options.bind or "packed:1"
    if bind in ("rs", "none"):
        return tuple(_thread(core) for core in shape.cores)
    width = int(bind.partition(":")[2])
    if options.bind and tasks * width > len(shape.cores):
        raise JsrunError(
            f"-b {bind}: {tasks} tasks need {tasks * width} cores, the resource set has "
            f"{len(shape.cores)}"
        )
    cores = [shape.cores[(task * width + i) % len(shape.cores)] for i in range(width)]
    return tuple(_thread(core) for core in cores)


def _thread(core: int) -> int:
    """The number of a core's first hardware thread."""
    socket, inside = divmod(core, CORES)
    return socket * SOCKET_THREADS + inside * THREADS


def omp_threads(options: Options, rank: Rank) -> int:
    """OMP_NUM_THREADS: what -E says, else as many as the rank has hardware threads."""
    for text in options.environment:
        name, equals, value = text.partition("=")
        if name == "OMP_NUM_THREADS" and equals:
            return int(value)
    return len(rank.threads) * THREADS


def table(options: Options, nodes: int) -> str:
    """The layout as text, a rank per line."""
    lines = [f"warning: {text}" for text in options.warnings]
    for number, rank in enumerate(layout(options, nodes)):
        lines.append(
            f"rank {number}: node {rank.node} local {rank.local_rank} set {rank.resource_set} "
            f"threads {_csv(rank.threads)} gpus {_csv(rank.gpus) or '-'} "
            f"omp {omp_threads(options, rank)}"
        )
    return "\n".join(lines)


def _csv(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)


# --- running


def main(arguments: list[str]) -> None:
    """Print the layout if asked to, then become mpiexec."""
    if arguments[:1] == ["--as-rank"]:
        _become_rank(arguments[1], arguments[2:])
    nodes = int(os.environ.get("JSRUN_NODES", "1"))
    options = parse(arguments)
    ranks = layout(options, nodes)
    if options.print_placement:
        print(table(options, nodes), flush=True)
    if not options.program:
        return
    used = ranks[-1].node + 1
    # MPICH then takes the ranks for those of so many nodes
    os.environ.update(MPIR_CVAR_NUM_CLIQUES=str(used), MPIR_CVAR_CLIQUES_BY_BLOCK="1")
    line = shlex.join(arguments[: len(arguments) - len(options.program)])
    mine = [sys.executable, os.path.abspath(__file__), "--as-rank", line]
    os.execvp("mpiexec", ["mpiexec", "-n", str(len(ranks)), *mine, *options.program])


def _become_rank(line: str, program: list[str]) -> None:
    """Set what jsrun sets for a rank, and become the program."""
    options = parse(shlex.split(line))
    ranks = layout(options, int(os.environ.get("JSRUN_NODES", "1")))
    number = int(os.environ["PMI_RANK"])
    rank = ranks[number]
    local = sum(one.node == rank.node for one in ranks)
    env = os.environ
    for text in options.environment:
        name, equals, value = text.partition("=")
        if equals:
            env[name] = value
    env.setdefault("OMP_NUM_THREADS", str(omp_threads(options, rank)))
    if "JSRUN_THREADS" in env:  # this machine is smaller than Summit's nodes
        env["OMP_NUM_THREADS"] = env["JSRUN_THREADS"]
    for prefix in ("JSM_NAMESPACE_", "OMPI_COMM_WORLD_"):
        env[f"{prefix}RANK"], env[f"{prefix}SIZE"] = str(number), str(len(ranks))
        env[f"{prefix}LOCAL_RANK"] = str(rank.local_rank)
        env[f"{prefix}LOCAL_SIZE"] = str(local)
    env["PMIX_RANK"] = str(number)
    env["CUDA_VISIBLE_DEVICES"] = _csv(rank.gpus)
    if options.chdir:
        os.chdir(options.chdir)
    os.execvp(program[0], program)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except JsrunError as error:
        print(f"jsrun (stand-in): {error}", file=sys.stderr)
        sys.exit(1)
