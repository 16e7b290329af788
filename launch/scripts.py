"""Job scripts: templates in shell, filled in for a machine and a placement."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tilenet.errors import TilenetError

from .commands import command, environment, once_per_node
from .elastic import check_range, without_nodes
from .layout import in_one_line
from .placement import Placement

__all__ = ["Job", "script", "submit_command"]

TEMPLATES = Path(__file__).with_name("templates")
WARNING_S = 600  # a step and a checkpoint of the largest models take minutes
NAME = re.compile(r"[\w.-]+")
TIME = re.compile(r"(\d{1,3}):([0-5]\d)")


@dataclass(frozen=True)
class Job:
    """What a script runs, as the user names it; paths are relative to where it is submitted.

    Attributes:
        run: The run file; empty: do not train.
        plan: Of `tilenet plan -o`.
        image: The raster to map; empty: make no map.
        output: The run's folder.
        venv: A virtual environment to activate; empty: none.
        name: The job's name in the queue.
        time: hours:minutes.
        account: Project that pays; empty: the machine's default.
        queue: Instead of the machine's.
        stage: Relative paths of what is copied to the nodes first.
        file: What the script will be called.
        most_nodes: With how many nodes it shall start if there are so many, and go on with fewer,
            down to the placement's; None: the placement's, always.
    """

    run: str = "run.yaml"
    plan: str = "plan.json"
    image: str = "scene.tif"
    output: str = "out"
    venv: str = ""
    name: str = "tilenet"
    time: str = "2:00"
    account: str = ""
    queue: str = ""
    stage: tuple[str, ...] = ()
    file: str = "job.sh"
    most_nodes: int | None = None


class _Shell(Template):
    """Leaves $ to the shell."""

    delimiter = "%%"


def script(placed: Placement, job: Job) -> str:
    """The script for the machine's batch system.

    Raises:
        TilenetError: Something cannot be written into a script.
    """
    facts = placed.machine.launch
    minutes = _check(placed, job)
    kind = {"lsf": "lsf", "slurm": "slurm", "none": "plain"}[facts.scheduler]
    starts = command(placed), once_per_node(placed)
    if job.most_nodes:
        starts = without_nodes(starts[0]), without_nodes(starts[1])
    layout = in_one_line(placed, job.most_nodes)
    values = {
        "title": f"{_aim(job)} on {placed.machine.name}: {layout}.",
        "script": shlex.quote(job.file),
        "name": job.name,
        "minutes": str(minutes),
        "minutes_lsf": f"{minutes // 60}:{minutes % 60:02d}",
        "header": _header(placed, job),
        "warning_s": str(min(WARNING_S, minutes * 30)),
        "warning_min": str(min(WARNING_S // 60, max(minutes // 2, 1))),
        "run": shlex.quote(job.run),
        "plan": shlex.quote(job.plan),
        "image": shlex.quote(job.image),
        "output": shlex.quote(job.output),
        "venv": shlex.quote(job.venv),
        "stage": shlex.join(job.stage),
        "storage": shlex.quote(facts.node_storage or "/tmp"),
        "machine": placed.machine.name,
        "install": "".join(f"# {line}\n" for line in facts.install),
        "modules": _modules(facts.modules),
        "environment": "".join(
            f"export {name}={shlex.quote(text)}\n" for name, text in environment(placed).items()
        ),
        "layout": layout,
        "program": shlex.join(facts.program),
        "launch": _lines(starts[0]),
        "once_per_node": _lines(starts[1]),
        "several": "lives" if job.most_nodes else "attempts",
        "least": str(placed.nodes),
        "most": str(job.most_nodes),
        "per_node": str(placed.ranks_per_node),
    }
    values["steps"] = _filled(f"{values['several']}.sh", values)
    return "".join(_filled(name, values) for name in (f"{kind}.sh", "body.sh"))


def _filled(template: str, values: dict[str, str]) -> str:
    return _Shell((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)


def submit_command(placed: Placement, path: str) -> list[str]:
    """The batch system's command that takes the script; bash where there is none."""
    name = {"lsf": "bsub", "slurm": "sbatch", "none": "bash"}[placed.machine.launch.scheduler]
    return [name, path]


def _aim(job: Job) -> str:
    if not job.run:
        return "Map"
    return "Train, then map," if job.image else "Train"


def _modules(names: Sequence[str]) -> str:
    if not names:
        return ""
    loads = "".join(f"module load {shlex.quote(name)}\n" for name in names)
    return f"set +u # what module runs has unset variables\n{loads}set -u\n"


def _header(placed: Placement, job: Job) -> str:
    """Options for the batch system, one per line, behind its mark in the template."""
    machine, facts = placed.machine, placed.machine.launch
    queue, account = shlex.quote(job.queue or facts.queue), shlex.quote(job.account)
    if facts.scheduler == "lsf":
        mark, options = "#BSUB", [f"-nnodes {placed.nodes}"]
        options += [f"-P {account}"] if job.account else []
        options += [f"-q {queue}"] if job.queue or facts.queue else []
    else:
        cores = placed.cores_per_rank * facts.threads_per_core
        mark, options = "#SBATCH", [f"--nodes={placed.nodes}"]
        if job.most_nodes:
            # With tasks per node Slurm counts those of the fewest nodes, and gives no more nodes
            options = [f"--nodes={placed.nodes}-{job.most_nodes}", "--no-kill"]
        elif not placed.straddles:
            options += [f"--ntasks-per-node={placed.ranks_per_node}"]
        options += [f"--cpus-per-task={cores}"]
        options += [f"--gpus-per-node={machine.devices_per_node}"] * (machine.device != "cpu")
        options += [f"--account={account}"] if job.account else []
        options += [f"{facts.queue_option}={queue}"] if job.queue or facts.queue else []
        options += [f"--constraint={shlex.quote(facts.constraint)}"] if facts.constraint else []
    return f"\n{mark} ".join([*options, *facts.header])


def _lines(arguments: Sequence[str]) -> str:
    """An array's elements for bash: an option and its value share a line."""
    lines: list[list[str]] = []
    for argument in arguments:
        value = bool(lines) and len(lines[-1]) == 1 and re.fullmatch(r"-\w", lines[-1][0])
        if value and not argument.startswith("-"):
            lines[-1].append(argument)
        else:
            lines.append([argument])
    return "\n".join(f"    {' '.join(map(_quoted, line))}" for line in lines)


def _quoted(text: str) -> str:
    # a comma between elements is a mistake that shellcheck looks for
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


def _check(placed: Placement, job: Job) -> int:
    """The job's minutes, if all can be written."""
    names = (job.run, job.plan, job.image, job.output, job.venv, job.account, job.queue, job.file)
    for text in names:
        if re.search(r"[\x00-\x1f\x7f]", text):
            raise TilenetError(
                f"what stands in a script must be one line each ({text!r}); rename it"
            )
    if not job.run and not job.image:
        raise TilenetError(
            "a job must train, or make a map (run: none, image: none); give --run or --image"
        )
    if not NAME.fullmatch(job.name):
        raise TilenetError(
            f"a job's name must be letters, digits, dots and dashes (got {job.name!r}); choose "
            "another --name"
        )
    if job.most_nodes is not None:
        check_range(placed, job.most_nodes)
    time = TIME.fullmatch(job.time)
    minutes = int(time[1]) * 60 + int(time[2]) if time else 0
    if minutes < 1:
        raise TilenetError(
            f"a job's time must be hours:minutes (got {job.time!r}); give, say, --time 2:00"
        )
    for path in job.stage:
        if path.startswith(("/", "-")) or ".." in Path(path).parts:
            raise TilenetError(
                f"what is copied to the nodes must be named by relative paths (got {path!r}); "
                "submit from a folder above it"
            )
    if job.stage and not placed.machine.launch.node_storage:
        raise TilenetError(
            f"copies need storage on the nodes ({placed.machine.name} names none); leave --stage "
            "out, or set launch.node_storage of the machine"
        )
    return minutes
