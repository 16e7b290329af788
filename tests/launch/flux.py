"""A strict stand-in for `flux run`: options and rules of flux-run(1) and flux-shell-options(7).

Of the options, those that our lines hold; others are refused. mpiexec starts the ranks.
"""

import os
import re
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from typing import NoReturn

__all__ = ["FluxError", "parse", "tasks_per_node"]

SHELL = r"cpu-affinity=(on|off|per-task)|exit-on-error|exit-timeout=(none|[0-9.]+[smhd])"


class FluxError(Exception):
    """What flux run would refuse."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FluxError(message)


def parse(arguments: list[str]) -> Namespace:
    """Read a command line without its first word.

    Raises:
        FluxError: An option or a value is not documented, or they contradict one another.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int, default=0)
    parser.add_argument("-n", "--ntasks", type=int, default=1)
    parser.add_argument("-c", "--cores-per-task", type=int, default=1)
    parser.add_argument("-g", "--gpus-per-task", type=int, default=0)
    parser.add_argument("-x", "--exclusive", action="store_true")
    parser.add_argument("-o", "--setopt", action="append", default=[])
    parser.add_argument("program", nargs=REMAINDER)
    if arguments[:1] != ["run"]:
        raise FluxError(f"not a command here: {arguments[:1]}")
    found = parser.parse_args(arguments[1:])
    if found.exclusive and not found.nodes:
        raise FluxError("--exclusive needs --nodes")
    if found.nodes > found.ntasks:
        raise FluxError(f"{found.nodes} nodes are more than {found.ntasks} tasks")
    if wrong := [one for one in found.setopt if not re.fullmatch(SHELL, one)]:
        raise FluxError(f"not options of the shell: {wrong}")
    return found


def tasks_per_node(options: Namespace) -> list[int]:
    """Tasks are spread evenly over the nodes."""
    least, more = divmod(options.ntasks, options.nodes)
    return [least + (node < more) for node in range(options.nodes)]


if __name__ == "__main__":
    try:
        options = parse(sys.argv[1:])
    except FluxError as error:
        sys.exit(f"flux (stand-in): {error}")
    # MPICH then takes the ranks for those of so many nodes
    os.environ.update(MPIR_CVAR_NUM_CLIQUES=str(options.nodes), MPIR_CVAR_CLIQUES_BY_BLOCK="1")
    os.execvp("mpiexec", ["mpiexec", "-n", str(options.ntasks), *options.program])
