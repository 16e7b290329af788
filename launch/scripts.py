"""Job scripts, as text, for a machine and a placement: values to change, and `tilenet batch`."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.planning.machines.launch_facts import LaunchFacts

from .commands import HOSTS, command, environment, once_per_node, quoted
from .elastic import check_range, without_nodes
from .layout import in_one_line
from .placement import Placement

WARNING_S = 600  # a step and a checkpoint of the largest models take minutes
WIDTH = 110
NAME = re.compile(r"[\w.-]+")
TIME = re.compile(r"(\d{1,3}):([0-5]\d)")
MAIL = re.compile(r"\w[\w.+-]*(@[\w.-]+)?")
WHAT = {
    "slurm": "account, partition, time",
    "lsf": "project (-P), queue (-q), time (-W)",
    "pbs": "project, queue, time (and --stop-after below with it)",
    "flux": "bank, queue, time",
}
# In place of --chain. LSF takes no job that waits for one that it cannot find, as the first would
# (bsub -w); PBS knows jobs by number (qsub(1B), depend). Slurm and Flux have singleton (sbatch(1),
# flux-batch(1)). Flux writes no mail (flux-core, issue 4436).
AFTER = {
    "lsf": "give jobs after the first to bsub -w 'ended(\"{name}\")'",
    "pbs": "give jobs after the first to qsub -W depend=afterany:JOB",
    "none": "run one script after the other",
}
SUBMIT = {"lsf": "bsub", "slurm": "sbatch", "pbs": "qsub", "flux": "flux batch", "none": "bash"}


@dataclass(frozen=True)
class Job:
    """The work of a job script and its options, as the user names them.

    Paths are relative to the folder in which the job is submitted.

    Attributes:
        run: The run file; empty: do not train.
        plan: The file of `tilenet plan -o`.
        image: The raster to map; empty: make no map.
        output: The run's folder.
        venv: A virtual environment to activate; empty: no environment.
        name: The job's name in the queue.
        time: Limit of its time, as hours:minutes.
        account: Project that pays; empty: the machine's default.
        queue: The queue; empty: the machine's.
        stage: Relative paths of the files that are copied to the nodes first.
        packed: The file of `tilenet pack`, which each node unpacks; empty: ranks read `venv`.
        file: Path of the script.
        mail: Address to which the batch system writes when the job ends or fails; empty: none.
        chain: Whether it starts after the user's other jobs of its name.
        most_nodes: Nodes to start with if as many are free; it goes on with fewer, down to the
            placement's; None: the placement's, always.
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
    packed: str = ""
    file: str = "job.sh"
    mail: str = ""
    chain: bool = False
    most_nodes: int | None = None


def script(placed: Placement, job: Job) -> str:
    """The script for the machine's batch system.

    Raises:
        TilenetError: Something cannot be written into a script.
    """
    facts = placed.machine.launch
    minutes = _check(placed, job)
    layout = in_one_line(placed, job.most_nodes)
    submit = shlex.join(submit_command(placed, job.file))
    heads = {"lsf": _lsf, "slurm": _slurm, "pbs": _pbs, "flux": _flux, "none": lambda *_: []}
    lines = [
        # -l: as the sites' documents have it, for `module`
        "#!/bin/bash" + " -l" * (facts.scheduler in ("pbs", "flux")),
        f"# {_aim(job)} on {placed.machine.name}: {layout}.",
        f"# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: {submit}",
        *heads[facts.scheduler](placed, job, minutes),
        _changes(facts.scheduler),
        *([f"# {facts.note}"] if facts.note else []),
        "set -e",
        *(['cd "$PBS_O_WORKDIR"'] if facts.scheduler == "pbs" else []),
        *([f"module load {shlex.join(facts.modules)}"] if facts.modules else []),
        f"VENV=${{VENV-{shlex.quote(job.venv)}}} # with tilenet; empty: tilenet is there without",
        "# shellcheck source=/dev/null",
        '[ -z "$VENV" ] || source "$VENV/bin/activate"',
        *_wrapped("export", [f"{k}={shlex.quote(v)}" for k, v in environment(placed).items()]),
        "",
        *_names(placed, job),
        "",
        *_batch(placed, job, minutes),
    ]
    return "\n".join(lines) + "\n"


def submit_command(placed: Placement, path: str) -> list[str]:
    """The batch system's command that takes the script; bash on a machine without one."""
    return [*SUBMIT[placed.machine.launch.scheduler].split(), path]


def _aim(job: Job) -> str:
    if not job.run:
        return "Map"
    return "Train, then map," if job.image else "Train"


def _changes(scheduler: str) -> str:
    if scheduler == "none":
        return "# To stop it with a checkpoint: kill -USR1 its process. Exit code 75: run it again"
    command = SUBMIT[scheduler]
    return f"# CHANGE, here or as options of {command}, which win: {WHAT[scheduler]}"


def _names(placed: Placement, job: Job) -> list[str]:
    """Return the lines of shell variables that name the run, its plan and its files."""
    storage = placed.machine.launch.node_storage or "/tmp"
    packed = f"PACKED=${{PACKED-{shlex.quote(job.packed)}}} # of tilenet pack, for {storage}"
    return [
        "# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image",
        f"RUN=${{RUN-{shlex.quote(job.run)}}} # the run file; empty: only map",
        f"IMAGE=${{IMAGE-{shlex.quote(job.image)}}} # the raster to map; empty: only train",
        f"PLAN=${{PLAN-{shlex.quote(job.plan)}}} OUTPUT=${{OUTPUT-{shlex.quote(job.output)}}} "
        "# the run's folder",
        "PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024",
        f"STAGE=({shlex.join(job.stage)}) # for each node's {storage}: relative paths of all the "
        "run file names, IMAGE",
        *([f"{packed}; empty: ranks read VENV"] if job.packed else []),
    ]


def _batch(placed: Placement, job: Job, minutes: int) -> list[str]:
    """Return the script's last command; its last words start the ranks, and can be changed."""
    facts = placed.machine.launch
    start, once = command(placed), once_per_node(placed)
    words = ["tilenet", "batch", f"--scheduler={facts.scheduler}"]
    if facts.scheduler == "pbs":
        words.append(f"--stop-after={minutes * 60 - _warning_s(minutes)}")
    if job.most_nodes:
        start, once = without_nodes(start), without_nodes(once)
        words.append(f"--nodes {placed.nodes} {placed.ranks_per_node}")
    names = ("run", "plan", "image", "output", "predict")
    words += [f'--{name}="${name.upper()}"' for name in names]
    words += ['--packed="$PACKED"'] if job.packed else []
    words += ['--stage "${STAGE[@]}"', f"--storage={shlex.quote(facts.node_storage or '/tmp')}"]
    words.append(f"--once-per-node={_as_word(once)}")
    if facts.program != ("tilenet",):
        words.append(f"--program={_as_word(facts.program)}")
    ranks = ["--", *map(quoted, start)]
    return [*_wrapped("exec", words, more=True), *_wrapped("   ", ranks)]


def _as_word(words: Sequence[str]) -> str:
    """Quote a command line as one word of another, in which a shell expands HOSTS alone."""
    text = " ".join(
        word if word == HOSTS else re.sub(r'["$`\\]', r"\\\g<0>", shlex.quote(word))
        for word in words
    )
    return f'"{text}"'


def _warning_s(minutes: int) -> int:
    """Seconds before its end at which a job of `minutes` shall stop."""
    return min(WARNING_S, minutes * 30)


def _wrapped(first: str, words: Iterable[str], more: bool = False) -> list[str]:
    """A command over as few lines as hold its words; `more`: it goes on below."""
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    lines[-1] += " \\" * more
    return lines


def _account_and_queue(account: str, queue: str, job: Job, facts: LaunchFacts) -> list[str]:
    """Options for those of the two that are named; `account` and `queue`: how the options begin."""
    named = (account, job.account), (queue, job.queue or facts.queue)
    return [f"{option}{shlex.quote(value)}" for option, value in named if value]


def _lsf(placed: Placement, job: Job, minutes: int) -> list[str]:
    """Return the #BSUB lines: account and queue, nodes, log, how it stops and is queued again."""
    facts = placed.machine.launch
    user = [f"-W {minutes // 60}:{minutes % 60:02d}"]
    user += _account_and_queue("-P ", "-q ", job, facts)
    log = [f"-J {job.name}", f"-o {job.name}.%J.out", f"-e {job.name}.%J.err"]
    log += [f"-N -u {job.mail}"] if job.mail else []
    stop = ["-wa USR1", f"-wt {min(WARNING_S // 60, max(minutes // 2, 1))}", "-Q 75"]
    lines = (user, [f"-nnodes {placed.nodes}"], *([option] for option in facts.header), log, stop)
    return [f"#BSUB {' '.join(options)}" for options in lines]


def _slurm(placed: Placement, job: Job, minutes: int) -> list[str]:
    """Return the #SBATCH lines: account and queue, nodes, log and queueing again, mail."""
    machine, facts = placed.machine, placed.machine.launch
    user = [f"--time={minutes}"]
    user += _account_and_queue("--account=", f"{facts.queue_option}=", job, facts)
    user += [f"--constraint={shlex.quote(facts.constraint)}"] if facts.constraint else []
    nodes = [f"--nodes={placed.nodes}"]
    if job.most_nodes:
        # With tasks per node Slurm counts those of the fewest nodes, and gives no more nodes
        nodes = [f"--nodes={placed.nodes}-{job.most_nodes}", "--no-kill"]
    elif not placed.straddles:
        nodes += [f"--ntasks-per-node={placed.ranks_per_node}"]
    nodes += [f"--cpus-per-task={placed.cores_per_rank * facts.threads_per_core}"]
    nodes += [f"{facts.gpu_option}{machine.devices_per_node}"] * (machine.device != "cpu")
    nodes += ["--exclusive", *([facts.memory_option] if facts.memory_option else [])]
    log = [f"--job-name={job.name}", f"--output={job.name}.%j.out", "--open-mode=append"]
    log += ["--requeue", f"--signal=B:USR1@{_warning_s(minutes)}"]
    more = [f"--mail-user={job.mail}", "--mail-type=END,FAIL"] if job.mail else []
    more += ["--dependency=singleton"] * job.chain
    lines = (user, nodes, *([option] for option in facts.header), log, more)
    return [f"#SBATCH {' '.join(options)}" for options in lines if options]


def _pbs(placed: Placement, job: Job, minutes: int) -> list[str]:
    """Return the #PBS lines: account and queue, nodes; the job reruns where PBS ended it."""
    machine, facts = placed.machine, placed.machine.launch
    user = [f"-N {job.name} -k doe -r y -l walltime={minutes // 60}:{minutes % 60:02d}:00"]
    user += _account_and_queue("-A ", "-q ", job, facts)
    user += [f"-m ae -M {job.mail}"] if job.mail else []
    chunk = f"ncpus={machine.cores * facts.threads_per_core}:mpiprocs={placed.ranks_per_node}"
    chunk += f":ngpus={machine.devices_per_node}" * (machine.device != "cpu")
    nodes = [f"-l select={placed.nodes}:{facts.constraint or chunk}", "-l place=scatter:excl"]
    return [f"#PBS {' '.join(options)}" for options in (user, [*nodes, *facts.header])]


def _flux(placed: Placement, job: Job, minutes: int) -> list[str]:
    """Return the `# flux:` lines: account and queue, log, and how it is told to stop."""
    facts = placed.machine.launch
    user = [f"--time-limit={minutes}m", f"--nodes={placed.nodes}", "--exclusive"]
    user += _account_and_queue("--bank=", "--queue=", job, facts)
    log = [f"--job-name={job.name}", f"--output={job.name}.{{{{id}}}}.out"]
    log += [f"--signal=USR1@{_warning_s(minutes)}s"]
    log += ["--dependency=singleton"] * job.chain
    lines = (user, *([option] for option in facts.header), log)
    return [f"# flux: {' '.join(options)}" for options in lines]


def _check(placed: Placement, job: Job) -> int:
    """Return the job's minutes, after checking that all names can be written."""
    names = (job.run, job.plan, job.image, job.output, job.venv, job.packed)
    for text in (*names, job.account, job.queue, job.file):
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
    scheduler = placed.machine.launch.scheduler
    if job.mail and not MAIL.fullmatch(job.mail):
        raise TilenetError(
            f"mail goes to one address or user (got {job.mail!r}); give, say, --mail me@site.org"
        )
    if job.mail and scheduler in ("flux", "none"):
        raise TilenetError(
            f"only Slurm, LSF and PBS write mail when a job ends ({placed.machine.name}: "
            f"{scheduler}); leave --mail out"
        )
    if job.chain and scheduler in AFTER:
        raise TilenetError(
            f"only Slurm and Flux start a job after others of its name ({placed.machine.name}: "
            f"{scheduler}); leave --chain out, and {AFTER[scheduler].format(name=job.name)}"
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
