"""`tilenet job plan.json --machine NAME`: print, write or submit the job's commands."""

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from tilenet.cli.options.arguments import Arguments
from tilenet.errors import TilenetError, UsageError, printable
from tilenet.planning.machines.read import known_machines, machine
from tilenet.storage.atomic import write_aside

from .commands import command, environment, quoted
from .elastic import job_of_least, node_range
from .layout import explain, in_one_line
from .paths import check_paths
from .placement import Placement, place
from .planned_job import read_job
from .scripts import Job, script, submit_command


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 error, 2 usage."""
    try:
        return _run(_parser().parse_args(arguments))
    except UsageError as error:
        print(f"tilenet job: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1


def _run(options: Namespace) -> int:
    planned = read_job(Path(options.plan))
    facts = machine(options.machine or planned.machine)
    nodes, most = options.nodes or (None, None)
    if nodes is not None and most is not None:
        planned = job_of_least(Path(options.plan), facts, nodes)
    placed = place(planned, facts, nodes)
    job = _job(options, placed, most)
    text = script(placed, job)
    if most is not None:
        _check_script(options)
        print(f"{in_one_line(placed, most)}; with the fewest:")
    print(explain(placed))
    if not (options.script or options.submit):
        print("\n" + "\n".join(map(printable, _lines(placed, job))))
        return 0
    _check_place(job)
    warnings = check_paths(job, submits=options.submit)
    write_aside(text.removesuffix("\n"), Path(job.file), "a script", executable=True)
    print(f"written: {printable(job.file)}", flush=True)
    for warning in warnings:
        print(f"tilenet job: {warning}", file=sys.stderr)
    submission = submit_command(placed, job.file)
    if options.submit:
        return _submit(submission)
    print(f"submit it with: {printable(shlex.join(submission))}")
    return 0


def _check_place(job: Job) -> None:
    """Refuse a script in the place of a file that it names, or that is no script."""
    files = [job.plan, job.run, job.image, job.packed, *job.stage]
    if os.path.exists(job.file) and any(
        file and os.path.exists(file) and os.path.samefile(file, job.file) for file in files
    ):
        raise TilenetError(
            f"a script replaces none of the files that it names ({job.file}); give it another name"
        )
    if os.path.exists(job.file) and not _is_script(job.file):
        raise TilenetError(
            f"a script replaces only a file that begins with #! ({job.file}); give it another name"
        )


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return os.path.isfile(path) and file.read(2) in (b"#!", b"")
    except OSError:
        return False


def _check_script(options: Namespace) -> None:
    """Refuse a range of nodes for which no script is written."""
    if not (options.script or options.submit):
        raise TilenetError(
            "a range of nodes takes a script, which plans again for those that are left; add "
            "--script FILE or --submit"
        )


def _job(options: Namespace, placed: Placement, most_nodes: int | None) -> Job:
    ending = "lsf" if placed.machine.launch.scheduler == "lsf" else "sh"
    file = options.script or f"{options.name}-{placed.machine.name}.{ending}"
    names = {part.name for part in fields(Job)} - {"stage", "file", "most_nodes"}
    same = {name: getattr(options, name) for name in names}
    return Job(**same, stage=tuple(options.stage), file=file, most_nodes=most_nodes)


def _lines(placed: Placement, job: Job) -> list[str]:
    """Lines to type inside an allocation: environment, training and mapping."""
    lines = [f"module load {shlex.quote(name)}" for name in placed.machine.launch.modules]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in environment(placed).items()]
    steps = []
    if job.run:
        steps.append(["train", "-c", job.run, "--plan", job.plan, "--output", job.output])
    if job.image:
        steps.append(
            ["predict", job.output, job.image, f"{job.output}/map.tif", "--plan", job.plan]
        )
    for step in steps:
        words = command(placed, [*placed.machine.launch.program, *step, "--resume"])
        lines.append(" ".join(map(quoted, words)))
    return lines


def _submit(arguments: list[str]) -> int:
    try:
        return subprocess.run(arguments, check=False).returncode
    except OSError as error:
        raise TilenetError(
            f"the batch system's command must be on the PATH ({arguments[0]}: {error.strerror}); "
            "submit on a login node of the machine"
        ) from error


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet job",
        description="From a plan and a machine to command lines, a job script, or a job.",
    )
    parser.add_argument("plan", help="file of tilenet plan -o")
    parser.add_argument("--machine", metavar="|".join(known_machines()), help="default: the plan's")
    parser.add_argument(
        "--nodes",
        type=node_range,
        metavar="N|N-M",
        help="default: as few as hold the ranks; N-M: up to M, going on with N or more if some die",
    )
    parser.add_argument(
        "--run", default="run.yaml", help="the run file (%(default)s); '': only map"
    )
    parser.add_argument(
        "--image", default="scene.tif", help="raster to map (%(default)s); '': only train"
    )
    parser.add_argument("--output", default="out", help="the run's folder (%(default)s)")
    parser.add_argument("--script", metavar="FILE", help="write the job script")
    parser.add_argument("--submit", action="store_true", help="write it and submit it")
    script = parser.add_argument_group("script")
    script.add_argument("--name", default="tilenet", help="the job's name (%(default)s)")
    script.add_argument("--time", default="2:00", metavar="H:MM", help="(%(default)s)")
    script.add_argument("--account", default="", help="project that pays")
    script.add_argument("--venv", default="", help="virtual environment to activate")
    script.add_argument(
        "--packed", default="", metavar="ENV.tar", help="file of tilenet pack; each node unpacks it"
    )
    script.add_argument("--queue", default="", help="default: the machine's")
    script.add_argument("--mail", default="", metavar="USER@SITE", help="when it ends or fails")
    script.add_argument(
        "--chain", action="store_true", help="start after your other jobs of this name"
    )
    script.add_argument(
        "--stage", nargs="+", default=[], metavar="PATH", help="copy to the nodes' storage first"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader has seen enough: tilenet job … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
