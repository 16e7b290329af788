"""Machines by their names: the packaged table with the user's over it, checked."""

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.planning.machines.detected import detected
from tilenet.planning.machines.fill import filled
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.user_file import user_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PACKAGED = Path(__file__).with_name("machines.toml")


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


def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(PACKAGED.read_text(encoding="utf-8"))
    tables["local"] = {**detected(), **tables["local"]}
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
    remedy = f"correct it in {user_file()}"
    try:
        facts = filled(Machine, name, table, name=name)
    except ValueError as error:
        raise TilenetError(f"{error}; {remedy}") from error
    launch = facts.launch
    if sorted(launch.device_order) not in ([], list(range(facts.devices_per_node))):
        raise TilenetError(
            f"{name}.launch.device_order must name each of the devices 0 to "
            f"{facts.devices_per_node - 1} once (got {[*launch.device_order]}); {remedy}"
        )
    if launch.device_order and facts.most_partitions < facts.devices_per_node:
        raise TilenetError(
            f"{name}.launch.device_order orders devices of NVIDIA and AMD (device: {facts.device}, "
            f"whose masks do not order); leave it out; {remedy}"
        )
    scheduler = {"pals": "pbs", "jsrun": "lsf"}.get(launch.launcher, launch.scheduler)
    if launch.scheduler not in (scheduler, "none"):  # none: in a job that the user asked for
        raise TilenetError(
            f"{launch.launcher} starts ranks in jobs of {scheduler.upper()} alone ({name}.launch."
            f"launcher: {launch.launcher}, launch.scheduler: {launch.scheduler}); {remedy}"
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
