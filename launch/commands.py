"""Turn a placement into the command line of jsrun, srun, flux or mpiexec: a list of arguments."""

import shlex
from collections.abc import Sequence

from .placement import Placement

HOSTS = "$PBS_NODEFILE"  # file of the job's nodes, one a line; the only word that a shell expands


def command(placed: Placement, program: Sequence[str] = ()) -> list[str]:
    """The command line that starts a program on all ranks.

    Every rank sees all devices of its node and chooses its own by its number on the node: devices
    of one node can then copy to one another, which separate cgroups forbid. The exceptions are
    machines with `own_device`, and partly filled nodes under jsrun.
    """
    launcher = placed.machine.launch.launcher
    lines = {"jsrun": _jsrun, "srun": _srun, "flux": _flux, "pals": _pals, "hydra": _hydra}
    line = lines.get(launcher, _mpiexec)(placed)
    return [*line, *placed.machine.launch.step, *program]


def once_per_node(placed: Placement) -> list[str]:
    """The command line that starts a program once on each node, without devices: to copy files."""
    nodes, facts = str(placed.nodes), placed.machine.launch
    launcher = facts.launcher
    if launcher == "jsrun":
        # --smpiargs=off: the program does not use MPI
        options = ["-n", nodes, "-r", "1", "-a", "1", "-c", "1", "-X", "1", "--smpiargs=off"]
    elif launcher == "srun":
        options = ["-N", nodes, "-n", nodes, "--ntasks-per-node=1", "-c", "1", "--mpi=none"]
        options.append("--kill-on-bad-exit=1")
    elif launcher == "flux":
        options = ["run", "-N", nodes, "-n", nodes, "--setopt=exit-on-error"]
    elif launcher == "pals":
        return ["mpiexec", "-n", nodes, "--ppn", "1", "--hostfile", HOSTS]
    elif launcher == "hydra":
        return ["mpiexec", "-n", nodes, "-ppn", "1", *_hosts(placed), *facts.step]
    else:
        options = ["-n", "1"]
    return [launcher, *options]


def quoted(word: str) -> str:
    """A word of a command line, quoted for a shell."""
    return f'"{word}"' if word == HOSTS else shlex.quote(word)


def environment(placed: Placement) -> dict[str, str]:
    """Return the environment variables that ranks need, besides those that modules set."""
    facts = placed.machine.launch
    variables = {"OMP_NUM_THREADS": str(placed.cores_per_rank), **facts.environment}
    if facts.device_order and not _own_device(placed):
        # renumbers the devices so that each local rank's device is close to its cores
        order = ",".join(str(number) for number in facts.device_order)
        maker = "CUDA" if placed.machine.device.startswith("NVIDIA") else "HIP"
        variables[f"{maker}_VISIBLE_DEVICES"] = order
    return variables


def _own_device(placed: Placement) -> bool:
    return placed.machine.launch.own_device and placed.partitions == 1


def _jsrun(placed: Placement) -> list[str]:
    machine, cores = placed.machine, placed.cores_per_rank
    ends = ["-X", "1", "-E", f"OMP_NUM_THREADS={cores}"]
    if placed.shares_nodes_in_resource_sets:
        # no -r: with it jsrun must fill all nodes alike
        sets = ["-n", str(placed.ranks), "-a", "1", "-g", str(placed.partitions), "-c", str(cores)]
        return ["jsrun", *sets, "-b", "rs", "-d", "packed", *ends]
    node = ["-g", str(machine.devices_per_node), "-c", str(machine.cores)]
    whole = placed.ranks_per_node == 1 and cores == machine.cores
    bind = "rs" if whole else f"packed:{cores}"
    sets = ["-n", str(placed.nodes), "-r", "1", "-a", str(placed.ranks_per_node), *node]
    return ["jsrun", *sets, "-b", bind, "-d", "packed", *ends]


def _srun(placed: Placement) -> list[str]:
    facts = placed.machine.launch
    options = ["-N", str(placed.nodes), "-n", str(placed.ranks)]
    if placed.straddles:
        # else ranks are spread evenly; a number per node must hold for all of them
        options.append("--distribution=block,Pack")
    else:
        options.append(f"--ntasks-per-node={placed.ranks_per_node}")
    # srun does not inherit sbatch's --cpus-per-task since Slurm 22.05
    options += ["-c", str(placed.cores_per_rank * facts.threads_per_core)]
    if placed.machine.device != "cpu":
        if _own_device(placed):
            options += ["--gpus-per-task=1", "--gpu-bind=closest"]
        else:
            options.append(f"{facts.gpu_option}{placed.machine.devices_per_node}")
            # without it tasks see all of --gres; a Slurm that knows --gres alone may refuse it
            options += ["--gpu-bind=none"] * facts.gpu_option.startswith("--gpus")
    # A rank that ends without a word ends the others a minute later; together they end in less.
    return ["srun", *options, f"--mpi={facts.mpi}", "--kill-on-bad-exit=1", "--wait=60"]


def _flux(placed: Placement) -> list[str]:
    options = ["-N", str(placed.nodes), "-n", str(placed.ranks), "-c", str(placed.cores_per_rank)]
    if placed.machine.device != "cpu":
        options += ["-g", str(placed.partitions)]
    # All tasks of a node see its devices (gpu-affinity=on, the default), each has its own cores.
    shell = ("cpu-affinity=per-task", "exit-on-error", "exit-timeout=60s")
    return ["flux", "run", *options, "--exclusive", *(f"--setopt={option}" for option in shell)]


def _pals(placed: Placement) -> list[str]:
    depth = placed.cores_per_rank * placed.machine.launch.threads_per_core
    bind = ["--depth", str(depth), "--cpu-bind", "depth", "--hostfile", HOSTS]
    return ["mpiexec", "-n", str(placed.ranks), "--ppn", str(placed.ranks_per_node), *bind]


def _hydra(placed: Placement) -> list[str]:
    ranks = ["-n", str(placed.ranks), "-ppn", str(placed.ranks_per_node)]
    return ["mpiexec", *ranks, *_hosts(placed)]


def _hosts(placed: Placement) -> list[str]:
    """Hydra's option for the hosts, which PBS lists; elsewhere the machine's `step` names them."""
    return ["-f", HOSTS] if placed.machine.launch.scheduler == "pbs" else []


def _mpiexec(placed: Placement) -> list[str]:
    return ["mpiexec", "-n", str(placed.ranks)]
