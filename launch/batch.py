"""`tilenet batch`, the last command of a job script: train, map, stop when asked, and come again.

It runs on the job's first node, and loads neither torch nor MPI; `scripts.py` writes its call.
"""

import os
import pwd
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.storage.atomic import write_aside

from .lives import Lives
from .queues import Queue, Slurm
from .steps import Outcome, Steps, say
from .stop_signals import StopSignals

# A job's number in its script, which it keeps when it comes again; FLUX_JOB_ID is the ranks' alone
NUMBERS = {
    "slurm": "SLURM_JOB_ID",
    "lsf": "LSB_JOBID",
    "pbs": "PBS_JOBID",
    "flux": "FLUX_ENCLOSING_ID",
}
CLEAN_S = 60  # seconds in which nodes delete what was staged; a dead one holds no job up
AGAIN = -1  # in place of an exit code: the job comes again
# On the nodes; what killed jobs left goes after 7 days, where no rank of a longer job works in it
COPY = """
rm -rf "$1" && mkdir -p "$1" || exit 1
find "${1%/*}" -maxdepth 1 -name "tilenet-staged-*" -mtime +6 -print0 | while read -rd "" old; do
    readlink /proc/[0-9]*/cwd | grep -qF "${old##*/}" || rm -rf "$old"
done
cp -rpL --parents "${@:2}" "$1" && touch "$1" # a copy of . gives it the time of .
"""
# Once per node and archive, also when two jobs of a user share a node or a job comes again
UNPACK = """
mkdir -p "${2%/*}" && exec 9>"$2.lock" && flock 9 && if [ ! -e "$2/.whole" ]; then
    rm -rf "$2" && mkdir "$2" && tar -xf "$1" -C "$2" || exit 1
    # tar takes one that was cut off after a file for whole
    [[ $1 != *.tar ]] || [ -z "$(tail -c 1024 "$1" | tr -d "\\0")" ] ||
        { echo "$1: its end must be there" >&2; exit 1; }
    for name in "${@:3}"; do
        [ -x "$2/bin/$name" ] || { echo "$1: bin/$name must be in it, and run here" >&2; exit 1; }
    done
    # of conda pack
    [ ! -x "$2/bin/conda-unpack" ] || "$2/bin/python" "$2/bin/conda-unpack" || exit 1
    touch "$2/.whole"
fi
"""


def main(arguments: list[str]) -> int:
    """Run the job. Returns 0: done, 1: failed, 75: stopped, may come again, 143: cancelled."""
    stop = StopSignals()
    stop.listen()
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    signal.alarm(options.stop_after)
    try:
        if not arguments[at + 1 :]:
            raise TilenetError("what starts the ranks must follow --; add, say, -- mpiexec -n 2")
        if not (options.run or options.image):
            raise TilenetError(
                "a job must train, or make a map (run: none, image: none); give RUN or IMAGE"
            )
        queue = Slurm() if options.scheduler == "slurm" else Queue()
        return _Job(options, arguments[at + 1 :], stop, queue).run()
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        sentence = TilenetError(
            "a job starts its launcher, and reads and writes in its output folder "
            f"({where}); mend that, or name another"
        )
    except TilenetError as error:
        sentence = error
    print(f"tilenet: {sentence}", file=sys.stderr)
    return 1


def ending(
    ended: Outcome, stop: StopSignals, preempted: Callable[[], bool], last: bool = False
) -> int | None:
    """The exit code with which the job ends after a step; None: it goes on to the next.

    `last`: there is no next step, so that one that finishes is the end, whichever signals came.
    """
    if ended.result == "failed":
        return 1
    if ended.result == "finished" and (last or not stop):
        return 0 if last else None
    # Ranks stopped, or the job was asked to while they still finished: who ends the job?
    if stop.cancel:
        return 143
    if ended.result == "killed" and not stop.requeue and not preempted():
        return 1
    return AGAIN


class _Job:
    def __init__(
        self, options: Namespace, launch: list[str], stop: StopSignals, queue: Queue
    ) -> None:
        self.options, self.stop, self.queue = options, stop, queue
        self.output = Path(options.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.output = self.output.resolve()
        self.plan, self.program = os.path.realpath(options.plan), shlex.split(options.program)
        self.steps = Steps(launch, self.output, os.getcwd(), stop)
        self.once_per_node = shlex.split(options.once_per_node)
        self.step, self.lives = self.steps.attempts, None
        if options.nodes:
            lives = Lives(self.steps, self.plan, self.program, self.once_per_node, options.nodes)
            self.plan, self.step, self.lives = lives.plan, lives.run, lives

    def run(self) -> int:
        """The job's exit code."""
        if self.options.packed:
            self._unpack()
        if not self.options.stage:
            return self._run_steps()
        self.steps.folder = folder = self._name_folder()
        try:
            self._copy()
            return self._run_steps()
        finally:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._run_on_nodes("rm", "-rf", folder, timeout=CLEAN_S)

    def _run_steps(self) -> int:
        code = self._train() if self.options.run else None
        if code is None and self.options.image:
            code = self._map()
        return self.queue.come_again(self.stop) if code == AGAIN else code or 0

    def _run_on_nodes(self, *line: str, timeout: float | None = None) -> int:
        """Run a command on each node of the job, of those that are left where some died."""
        launch = self.lives.once_per_node if self.lives else self.once_per_node
        return subprocess.run([*launch, *line], check=False, timeout=timeout).returncode

    def _storage(self) -> str:
        """The user's folder on each node's own disk."""
        user = os.environ.get("USER") or pwd.getpwuid(os.getuid()).pw_name
        return f"{self.options.storage}/{user}"

    def _unpack(self) -> None:
        """Have each node unpack the environment; ranks find it on their PATH."""
        archive = os.path.realpath(self.options.packed)
        if not os.path.isfile(archive):
            raise TilenetError(
                f"what nodes unpack must be a file ({self.options.packed} is none); write it with "
                "tilenet pack, or start the job with PACKED= in its environment"
            )
        folder = f"{self._storage()}/tilenet-{os.stat(archive).st_mtime_ns:x}"
        programs = ["python", *(["tilenet"] if self.program[0] == "tilenet" else [])]
        unpack = ["bash", "-c", UNPACK, "unpack", archive, folder, *programs]
        if self._run_on_nodes(*unpack):
            raise TilenetError(
                f"the environment must be unpacked on the nodes ({archive} in {folder}); what "
                "stands above must be mended, or the job started with PACKED= in its environment"
            )
        os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"

    def _name_folder(self) -> str:
        # A folder of its own: patterns of images would find those of another job, which may have
        # the same output.
        number = os.environ.get(NUMBERS.get(self.options.scheduler, ""), os.getpid())
        job = sha256(os.fsencode(f"{self.output} {number}")).hexdigest()[:12]
        return f"{self._storage()}/tilenet-staged-{job}"

    def _copy(self) -> None:
        if self._run_on_nodes("bash", "-c", COPY, "copy", self.steps.folder, *self.options.stage):
            raise TilenetError(
                f"files must reach the nodes' storage ({self.steps.folder}); what cp says above "
                "must be mended"
            )

    def _train(self) -> int | None:
        files = ["-c", os.path.realpath(self.options.run), "--plan", self.plan]
        train = [*self.program, "train", *files, "--output", str(self.output), "--resume"]
        return ending(self.step("train", "ignore", train), self.stop, self.queue.preempted)

    def _name_map(self) -> str:
        """Name the image's map; one has its own where another image's has the usual name."""
        image = os.fsencode(os.path.realpath(self.options.image))
        name = "map" if self.options.run else f"map-{Path(self.options.image).stem}"
        note = self.output / f"{name}.image"
        if not (self.output / f"{name}.tif").exists():
            with suppress(FileExistsError), note.open("xb") as file:
                file.write(image)
        if note.exists() and note.read_bytes() == image:
            return name
        own = f"{name}-{sha256(image).hexdigest()[:6]}"
        say(f"the map is {own}.tif: {name}.tif is of another image")
        return own

    def _map(self) -> int | None:
        name = self._name_map()
        files = [str(self.output), self.options.image, str(self.output / f"{name}.tif")]
        more = ["--plan", self.plan, "--overwrite", "--resume", *self.options.predict.split()]
        ended = self.step("predict", "take", [*self.program, "predict", *files, *more])
        again = self.output / f"{name}.again"
        if ended.result in ("stopped", "killed") and self.stop.requeue:
            aside = self.output / f".{name}.tif.pieces.part"
            patterns = "*.raw", "sums-*.json", "compressed.json"
            pieces = [piece for pattern in patterns for piece in aside.glob(pattern)]
            if not (aside / "made_of.json").exists():  # a map that starts over
                pieces = []
            newest = max((piece.stat().st_mtime_ns for piece in pieces), default=0)
            if newest == _read_time(again):  # none since the last life that was cut off
                again.unlink()
                say("the map needs more time than the job has")
                return 1
            write_aside(str(newest), again, "how far a map is")
        elif ended.result == "finished":
            again.unlink(missing_ok=True)
        return ending(ended, self.stop, self.queue.preempted, last=True)


def _read_time(path: Path) -> int | None:
    """The time that the last life wrote; None where it wrote none that can be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="tilenet batch",
        usage="tilenet batch [options] -- LAUNCHER…",
        description="What the scripts of tilenet job end in: train, then map, on the ranks that "
        "LAUNCHER… starts; stop when the batch system asks, and come again.",
    )
    batch = ["slurm", "lsf", "pbs", "flux", "none"]
    parser.add_argument("--scheduler", choices=batch, default="none")
    parser.add_argument(
        "--stop-after",
        type=int,
        default=0,
        metavar="SECONDS",
        help="stop by itself, where the batch system does not warn that time is up; 0: never",
    )
    parser.add_argument("--run", default="", help="the run file; empty: only map")
    parser.add_argument("--plan", required=True, help="file of tilenet plan -o")
    parser.add_argument("--image", default="", help="the raster to map; empty: only train")
    parser.add_argument("--output", required=True, help="the run's folder")
    parser.add_argument("--predict", default="", help="more options of tilenet predict")
    parser.add_argument("--program", default="tilenet", help="tilenet, as ranks start it")
    parser.add_argument("--packed", default="", help="unpacked on each node: of tilenet pack")
    parser.add_argument("--stage", nargs="*", default=[], help="copied to each node's storage")
    parser.add_argument("--storage", default="/tmp", help="folder of a node's own storage")
    parser.add_argument(
        "--once-per-node", default="", help="a launcher of one process on each node, which copies"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        nargs=2,
        metavar=("LEAST", "RANKS"),
        help="go on with the nodes that are left: the fewest nodes, and the ranks on each",
    )
    return parser
