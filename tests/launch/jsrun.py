"""A strict stand-in for jsrun, which is proprietary: the documented layouts, on Summit's nodes.

What it takes from where: the options from the table in hpc/Spindle's launcher and OLCF's Summit
User Guide; the layouts from the guide and the jsrun quick start. Options that our lines do not
hold, and what is not documented, are refused instead of guessed. mpiexec starts the ranks.

    jsrun.py [options] program …          JSRUN_NODES: nodes of the allocation (1)
"""

import os
import shlex
import sys
from dataclasses import dataclass
from itertools import chain

__all__ = ["JsrunError", "Options", "Rank", "layout", "parse"]

SOCKETS, CORES, THREADS, GPUS = 2, 21, 4, 3  # of a node; cores and GPUs per socket
SOCKET_THREADS = 88  # where the second socket's numbers begin: 84 to 87 are the system's

OPTIONS = ("-n", "-r", "-a", "-c", "-g", "-b", "-d", "-E", "-X")


class JsrunError(Exception):
    """What jsrun would refuse, what is not documented, or what is not built here."""


@dataclass(frozen=True)
class Options:
    """What was asked for; the defaults are those of OLCF."""

    sets: int | None = None
    per_host: int | None = None
    tasks: int = 1
    cpus: int = 1
    gpus: int = 0
    bind: str | None = None
    environment: tuple[str, ...] = ()
    exit_on_error: bool = False
    program: tuple[str, ...] = ()


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
        name, value = word[:2], word[2:]
        if word.startswith("--smpiargs="):
            name, value = "--smpiargs", word.partition("=")[2]
        elif name not in OPTIONS:
            raise JsrunError(f"{word}: no such option")
        elif not value:
            if not rest:
                raise JsrunError(f"{word}: needs a value")
            value = rest.pop(0)
        if name in found and name != "-E":
            raise JsrunError(f"{word}: given twice")
        found.setdefault(name, []).append(value)
    return _options(found, tuple(rest))


def _options(found: dict[str, list[str]], program: tuple[str, ...]) -> Options:
    one = {name: values[0] for name, values in found.items()}
    if one.get("-d", "packed") != "packed":
        raise JsrunError(f"-d {one['-d']}: only packed is built here")
    if one.get("-X", "0") not in ("0", "1"):
        raise JsrunError(f"-X {one['-X']}: 0 or 1")
    if one.get("--smpiargs", "off") not in ("-gpu", "off", "-disable_gpu_hooks"):
        raise JsrunError(f"--smpiargs={one['--smpiargs']}: not documented")
    for text in found.get("-E", []):
        if not text.partition("=")[0].isidentifier():
            raise JsrunError(f"-E {text}: VAR=value or VAR")
    return Options(
        sets=_number(one, "-n"),
        per_host=_number(one, "-r"),
        tasks=_number(one, "-a") or 1,
        cpus=_number(one, "-c") or 1,
        gpus=_number(one, "-g", least=0) or 0,
        bind=_bind(one.get("-b")),
        environment=tuple(found.get("-E", [])),
        exit_on_error=one.get("-X") == "1",
        program=program,
    )


def _number(one: dict[str, str], name: str, least: int = 1) -> int | None:
    if name not in one:
        return None
    text = one[name]
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise JsrunError(f"{name} {text}: a whole number from {least} on")
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
    tasks = options.tasks
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
    asked = options.per_host or fits
    if not fits or asked > fits:
        raise JsrunError(
            f"{asked or 1} resource sets of {options.cpus} cores and {options.gpus} GPUs do not "
            f"fit on a node ({SOCKETS * CORES} cores, {SOCKETS * GPUS} GPUs)"
        )
    return asked


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


def _csv(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)


# --- running


def main(arguments: list[str]) -> None:
    """Become mpiexec."""
    if arguments[:1] == ["--as-rank"]:
        _become_rank(arguments[1], arguments[2:])
    nodes = int(os.environ.get("JSRUN_NODES", "1"))
    options = parse(arguments)
    ranks = layout(options, nodes)
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
    os.execvp(program[0], program)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except JsrunError as error:
        print(f"jsrun (stand-in): {error}", file=sys.stderr)
        sys.exit(1)
