"""A strict stand-in for jsrun, which is proprietary: the documented layouts, on Summit's nodes.

What it takes from where: the options from the table in hpc/Spindle's launcher and OLCF's Summit
User Guide; the layouts from the guide and the jsrun quick start. Options that our lines do not
hold, and what is not documented, are refused instead of guessed. mpiexec starts the ranks.

    jsrun.py [options] program …          JSRUN_NODES: nodes of the allocation (1)
"""

import os
import re
import shlex
import sys
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

__all__ = ["JsrunError", "Options", "Rank", "layout", "parse"]

SOCKETS, CORES, THREADS, GPUS = 2, 21, 4, 3  # of a node; cores and GPUs per socket
SOCKET_THREADS = 88  # where the second socket's numbers begin: 84 to 87 are the system's


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
    """Where a rank runs: on which node, counted from 0; which of the node's ranks it is, and which
    resource set of all nodes it is in; the first hardware thread of each core that it is bound to;
    and the node's GPUs, which the rank sees numbered from 0.
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


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JsrunError(message)


def parse(arguments: list[str]) -> Options:
    """Read a command line without its first word.

    Raises:
        JsrunError: An option or a value is not documented.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, meaning in (("-n", "sets"), ("-r", "per_host")):
        parser.add_argument(name, dest=meaning, type=_number)
    for name, meaning in (("-a", "tasks"), ("-c", "cpus")):
        parser.add_argument(name, dest=meaning, type=_number, default=1)
    parser.add_argument("-g", dest="gpus", type=int, choices=range(CORES), default=0)
    parser.add_argument("-b", dest="bind", type=_bind)
    parser.add_argument("-E", dest="environment", type=_variable, action="append", default=[])
    parser.add_argument("-X", dest="exit_on_error", choices="01", default="0")
    parser.add_argument("-d", choices=["packed"])
    parser.add_argument("--smpiargs", choices=["-gpu", "off", "-disable_gpu_hooks"])
    parser.add_argument("program", nargs=REMAINDER)
    found = vars(parser.parse_args(arguments))
    del found["d"], found["smpiargs"]
    lists = {name: tuple(found[name]) for name in ("environment", "program")}
    return Options(**found | lists | {"exit_on_error": found["exit_on_error"] == "1"})


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number from 1 on, not {text}")
    return int(text)


def _bind(text: str) -> str:
    if not re.fullmatch("none|rs|packed:[1-9][0-9]*", text):
        raise ArgumentTypeError(f"none, rs or packed:N (others are not built here), not {text}")
    return text


def _variable(text: str) -> str:
    if not text.partition("=")[0].isidentifier():
        raise ArgumentTypeError(f"VAR=value or VAR, not {text}")
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
