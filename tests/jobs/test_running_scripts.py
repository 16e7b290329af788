"""Scripts at work: a pretended tilenet under the real mpiexec, and the stand-ins
for jsrun and flux. PBS's job runs on two pretended nodes of its list.

The pretended program waits until it is asked to stop, or ends as its test wants.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launch.placement import place
from launch.planned_job import PlannedJob
from launch.scripts import Job, script
from launch.steps import RANK
from tilenet.planning.machines.read import machine

ROOT = Path(__file__).resolve().parents[2]
# Each command runs lines of Python from a file of its name, once per start and rank.
PRETENDED = f"""#!{sys.executable}
import os, signal, sys, time
if sys.argv[1] == "batch":  # the real one
    sys.path.insert(0, {str(ROOT)!r})
    from launch.batch import main
    sys.exit(main(sys.argv[2:]))
"""
PRETENDED += """
rank = os.environ.get("PMIX_RANK") or os.environ["PMI_RANK"]
def note(*words):
    with open(os.environ["LOG"], "a") as file:
        print(*words, file=file)
def catch(code=75):
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))
def started():
    open(os.environ["TILENET_STARTED"], "a").close()
note(sys.argv[1], rank, os.getcwd())
lines = open(os.path.join(os.environ["PLANS"], sys.argv[1])).read()
if "started()" not in lines:
    started()
exec(lines)
"""
WAIT = "time.sleep(60)\n"
NOTED = "catch()\nnote('listens')\n"
ADDS = """
os.makedirs('out/.map.tif.pieces.part', exist_ok=True)
for name in ('made_of.json', '0_0_9_9.raw'):
    open(f'out/.map.tif.pieces.part/{name}', 'w').close()
"""
STARTS_OVER = ADDS + "os.remove('out/.map.tif.pieces.part/made_of.json')\n" + NOTED
COMPRESSES = "open('out/.map.tif.pieces.part/compressed.json', 'w').close()\n" + NOTED
ADDS += NOTED
ENDLESS = NOTED + WAIT
LIMIT_S = 120  # matters only on failure
Start = Callable[..., subprocess.Popen[str]]


def tool(folder: Path, name: str, text: str) -> Path:
    """A program on the script's PATH."""
    path = folder / "tools" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the script of a machine for 2 ranks, with what train and predict shall do."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tool(tmp_path, "tilenet", PRETENDED)
    tools = tool(tmp_path, "module", "#!/bin/bash\n").parent
    for name in ("run.yaml", "plan.json", "scene.tif", "job.sh"):
        (tmp_path / name).write_text(name)
    here = Path(__file__).resolve().parent.parent / "launch"
    env = os.environ | {
        "PATH": f"{tools}:{here}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "PLANS": str(tools),
        "JSRUN_NODES": "1",
        "PBS_O_WORKDIR": str(tmp_path),
        "USER": "me",
    }
    (tmp_path / "hosts").write_text("n1\nn2\n")
    hosts = {"PBS_NODEFILE": str(tmp_path / "hosts"), "HYDRA_LAUNCHER": "fork"}
    running = []

    def begin(
        train: str,
        predict: str = "",
        name: str = "workstation",
        job: Job | None = None,
        variables: dict[str, str] | None = None,
        stop_after: str = "",
    ) -> subprocess.Popen[str]:
        (tools / "train").write_text(train)
        (tools / "predict").write_text(predict)
        (tmp_path / "log").write_text("")
        facts = machine(name)
        placed = place(PlannedJob(2, 1, 1, "elsewhere", 1), facts, 1 + (name == "pbs"))
        text = re.sub("--stop-after=[0-9]+", stop_after, script(placed, job or Job()))
        text = re.sub(" *--program=.*\n", "", text)  # it would be the real one
        storage = facts.launch.node_storage
        if storage:  # this machine has none
            text = text.replace(f"--storage={storage} ", f"--storage={tmp_path}/storage ")
        (tmp_path / "job.sh").write_text(text)
        process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=env | (hosts if name == "pbs" else {}) | (variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def log(folder: Path, wanted: int = 0) -> list[str]:
    """What ran, as soon as so many have begun."""
    until = time.monotonic() + LIMIT_S
    while len(lines := (folder / "log").read_text().splitlines()) < wanted:
        assert time.monotonic() < until, lines
        time.sleep(0.02)
    return sorted(lines)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def both(command: str, where: Path) -> list[str]:
    return [f"{command} 0 {where}", f"{command} 1 {where}"]


@pytest.mark.parametrize("name", ["workstation", "summit", "pbs", "tuolumne"])
def test_train_then_predict(start: Start, tmp_path: Path, name: str) -> None:
    code, output = ends(start("", name=name))
    assert (code, output.splitlines()) == (0, ["train: finished", "predict: finished"])
    assert log(tmp_path) == both("predict", tmp_path) + both("train", tmp_path)
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "map.image"]


@pytest.mark.parametrize(("leave_out", "left"), [("RUN", "predict"), ("IMAGE", "train")])
@pytest.mark.parametrize("where", ["environment", "script"])
def test_only_one_of_them(
    start: Start, tmp_path: Path, leave_out: str, left: str, where: str
) -> None:
    if where == "environment":
        job = start("", variables={leave_out: ""})
    else:
        job = start("", job=Job(run="") if leave_out == "RUN" else Job(image=""))
    assert ends(job) == (0, f"{left}: finished\n")
    assert log(tmp_path) == both(left, tmp_path)


UNSTARTED = "time.sleep(0.1)\nos._exit(rank == '0')\nstarted()\n"
ONCE = f"""if open(os.environ["LOG"]).read().count("train 0") > 1:
    started()
    os._exit(0)
{UNSTARTED}"""


# What the ranks do, how many lines they note until the signal comes, and how the job ends.
STOPS = {
    "they listen": (ENDLESS, 4, signal.SIGUSR1, 75),
    "they do not listen yet": ("time.sleep(2)\n" + ENDLESS, 2, signal.SIGUSR1, 75),
    "MPI does not start": ("time.sleep(3)\n" + UNSTARTED, 2, signal.SIGUSR1, 75),
    "the job is cancelled": (ENDLESS, 4, signal.SIGTERM, 143),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, "they listen") for name in ("summit", "pbs", "tuolumne")),
        *(("workstation", case) for case in STOPS),
    ],
)
def test_a_signal_reaches_the_ranks_and_tells_whether_the_job_comes_again(
    start: Start, tmp_path: Path, name: str, case: str
) -> None:
    """While they import Python's modules the first signals find nobody."""
    train, noted, number, wanted = STOPS[case]
    job = start(train, name=name)
    log(tmp_path, noted)
    os.kill(job.pid, number)
    code, output = ends(job)
    assert (code, output.splitlines()[-1]) == (wanted, "train: stopped")
    ran = log(tmp_path)
    assert [line for line in ran if line != "listens"] == both("train", tmp_path), "it ran once"
    assert ("listens" in ran) == ("note" in train)


def test_a_job_stops_by_itself_where_nobody_warns(start: Start, tmp_path: Path) -> None:
    code, output = ends(start(ENDLESS, name="pbs", stop_after="--stop-after=4"))
    assert (code, output.splitlines()[-1]) == (75, "train: stopped")
    assert [line for line in log(tmp_path) if line != "listens"] == both("train", tmp_path)


@pytest.mark.parametrize("name", ["PMI_RANK", "FLUX_TASK_RANK", "SLURM_PROCID"])
def test_only_the_first_rank_says_how_it_ended(tmp_path: Path, name: str) -> None:
    for number, wanted in ("0", "began\n0\n"), ("1", ""):
        status = tmp_path / number
        status.touch()
        env = {"PATH": os.environ["PATH"], name: number}
        rank = [sys.executable, "-IS", RANK, str(status), str(tmp_path), "take", "true"]
        subprocess.run(rank, env=env, check=True)
        assert status.read_text() == wanted


@pytest.mark.parametrize(("train", "code", "starts"), [(ONCE, 0, 2), (UNSTARTED, 1, 3)])
def test_a_step_in_which_mpi_does_not_start_runs_again(
    start: Start, tmp_path: Path, train: str, code: int, starts: int
) -> None:
    ended, output = ends(start(train, job=Job(image="")))
    assert ended == code, output
    assert output.count("MPI did not start: once more") == min(starts - 1, 2)
    assert output.count("train: failed\n") == starts - (not code)
    assert log(tmp_path).count(f"train 0 {tmp_path}") == starts
    assert list((tmp_path / "out").iterdir()) == []


def test_a_signal_before_the_first_step_is_not_lost(start: Start, tmp_path: Path) -> None:
    real = shutil.which("mpiexec")
    slow = f"#!/bin/bash\necho launcher >>'{tmp_path}/log'\nsleep 1\nexec {real} \"$@\"\n"
    tool(tmp_path, "mpiexec", slow)
    job = start(ENDLESS)
    log(tmp_path, 1)
    os.kill(job.pid, signal.SIGUSR1)  # would end mpiexec itself before it listens
    code, output = ends(job)
    assert (code, output.splitlines()[-1]) == (75, "train: stopped")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("early", ["ignore", "take"])
def test_a_ranks_exit_code_survives_signals_at_the_same_moment(
    tmp_path: Path, early: str, alone: bool
) -> None:
    """`alone`: a signal that the launcher sends to its own child, once, must reach the program."""
    stop = "catch()\n" if early == "ignore" else ""
    (tmp_path / "train").write_text(f"{stop}note('listens')\n{WAIT}")
    (tmp_path / "tilenet").write_text(PRETENDED)
    env = os.environ | {"LOG": str(tmp_path / "log"), "PLANS": str(tmp_path), "PMI_RANK": "0"}
    command = [sys.executable, str(tmp_path / "tilenet"), "train"]
    for _ in range(1 if alone else 15):
        (tmp_path / "log").write_text("")
        status = tmp_path / "status"
        status.write_text("")
        rank = subprocess.Popen(
            [sys.executable, "-IS", RANK, str(status), str(tmp_path), early, *command],
            env=env,
            start_new_session=True,
        )
        log(tmp_path, 2)
        for number in range(1 if alone else 20):
            with suppress(ProcessLookupError):
                (os.killpg if number == 10 else os.kill)(rank.pid, signal.SIGUSR1)
        assert rank.wait(LIMIT_S) == 0
        assert status.read_text() == "began\n75\n"


@pytest.mark.parametrize(
    "train",
    [
        "sys.exit(1)",
        "sys.exit(3 if rank == '1' else 75)",
        "if rank == '1': os.kill(os.getpid(), 9)",
        "if rank == '1': os.kill(os.getpid(), 11)",
        "catch(3)\nnote('listens')\n" + WAIT,
    ],
)
def test_a_failure_on_any_rank_ends_the_job(start: Start, tmp_path: Path, train: str) -> None:
    job = start(train)
    if "listens" in train:  # one that was asked to stop and failed is no less a failure
        log(tmp_path, 4)
        os.kill(job.pid, signal.SIGUSR1)
    code, output = ends(job)
    assert (code, output.count("train: failed\n")) == (1, 1), output
    assert not [line for line in log(tmp_path) if "predict" in line]


def test_a_rank_that_stops_first_does_not_end_the_others(start: Start, tmp_path: Path) -> None:
    """To a launcher that kills the job on a bad exit, 75 is one; so it sees 0."""
    real = shutil.which("mpiexec")
    tool(tmp_path, "mpiexec", f'#!/bin/bash\n{real} "$@"\necho "mpiexec: $?"\n')
    code, output = ends(start("time.sleep(0.3 * (rank == '0'))\nsys.exit(75)"))
    assert (code, output.splitlines()) == (75, ["mpiexec: 0", "train: stopped"])


@pytest.mark.parametrize("launcher", ["exit 0", "exit 9", "kill -9 $$"])
def test_a_launcher_that_starts_nothing_is_a_failure(
    start: Start, tmp_path: Path, launcher: str
) -> None:
    tool(tmp_path, "mpiexec", f"#!/bin/bash\n{launcher}\n")
    code, output = ends(start(""))
    assert (code, output.splitlines()[-1]) == (1, "train: killed")


@pytest.mark.parametrize(
    "maps",
    [
        [("", 75, "predict: stopped"), ("", 1, "more time than the job has")],
        [(ADDS, 75, "predict: stopped"), (ADDS, 75, "predict: stopped"), (NOTED, 1, "more time")],
        [(STARTS_OVER, 75, "predict: stopped"), (STARTS_OVER, 1, "more time")],
        [(ADDS, 75, "predict: stopped"), (COMPRESSES, 75, "predict: stopped")],
    ],
    ids=["does not listen", "gets on", "starts over", "compresses"],
)
def test_a_map_that_is_cut_off_comes_again_while_it_gets_on(
    start: Start, tmp_path: Path, maps: list[tuple[str, int, str]]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "map.again").write_text("spoilt")  # counts as none
    for predict, wanted, said in maps:
        job = start("", predict=predict + WAIT)
        log(tmp_path, 6 if predict else 4)
        os.kill(job.pid, signal.SIGUSR1)
        code, output = ends(job)
        assert code == wanted
        assert said in output
        assert ("more time" in output) == (wanted == 1)


@pytest.mark.parametrize(("train", "wanted"), [("", 0), ("sys.exit(75)", 75)])
def test_a_full_disk_of_the_log_changes_nothing(
    start: Start, tmp_path: Path, train: str, wanted: int
) -> None:
    tool(tmp_path, "bash", '#!/bin/sh\nexec /bin/bash "$@" >/dev/full\n')
    code, output = ends(start(train))
    assert (code, output) == (wanted, "")
    assert len(log(tmp_path)) == (2 if wanted else 4), "training, and then the map"


def test_a_signal_to_training_that_finishes_is_not_lost(start: Start, tmp_path: Path) -> None:
    """The map does not begin in what is left of the time."""
    job = start("signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\nnote('listens')\n" + WAIT)
    log(tmp_path, 4)
    os.kill(job.pid, signal.SIGUSR1)
    assert ends(job) == (75, "train: finished\n")
    assert not [line for line in log(tmp_path) if "predict" in line]


@pytest.mark.parametrize("name", ["summit", "pbs"])  # two nodes of one disk, in pbs
def test_the_ranks_run_in_the_environment_that_each_node_unpacks(
    start: Start, tmp_path: Path, name: str
) -> None:
    programs = {
        "tilenet": "#!/bin/bash\necho packed in $0\nexec tools/tilenet $@\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "conda-unpack": "print('conda', file=open(__file__ + '.said', 'a'))\n",
    }
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        for program, text in programs.items():
            archive.add(tool(tmp_path, "new", text), f"bin/{program}")
    job = Job(packed="env.tar")
    for turn in range(2):  # the second time it is there
        code, output = ends(start("", name=name, job=job))
        (folder,) = (tmp_path / "storage" / "me").glob("tilenet-*/")
        assert (code, output.count(f"packed in {folder}/bin/tilenet\n")) == (0, 4)
        assert (folder / "bin" / "conda-unpack.said").read_text() == "conda\n"
        assert (folder / "once").exists() == (turn == 1)
        (folder / "once").touch()
    assert log(tmp_path) == both("predict", tmp_path) + both("train", tmp_path)
    with tarfile.open(tmp_path / "env.tar") as archive:
        cut = archive.getmembers()[-1].offset
    (tmp_path / "env.tar").write_bytes((tmp_path / "env.tar").read_bytes()[:cut])
    code, output = ends(start("", name=name, job=job))
    assert (code, "env.tar: its end must be there\n" in output) == (1, True)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(tmp_path / "tools" / "tilenet", "bin/tilenet")
    code, output = ends(start("", name=name, job=job))
    assert (code, "env.tar: bin/python must be in it, and run here\n" in output) == (1, True)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(tmp_path / "tools" / "tilenet", "bin/python")
    code, output = ends(start("", name=name, job=job))
    assert (code, "env.tar: bin/tilenet must be in it, and run here\n" in output) == (1, True)
    for text, said in (("none", "must be unpacked on the nodes"), ("", "env.tar is none")):
        (tmp_path / "env.tar").unlink()
        if text:
            (tmp_path / "env.tar").write_text(text)
        code, output = ends(start("", name=name, job=job))
        assert code == 1
        assert said in output


def test_files_are_copied_to_the_nodes_first(start: Start, tmp_path: Path) -> None:
    job = Job(stage=("scene.tif", "tools/train"))
    (tmp_path / "scene.tif").rename(tmp_path / "real.tif")
    (tmp_path / "scene.tif").symlink_to("real.tif")
    program = "print(open('scene.tif').read(), os.path.exists('tools/train'))"
    code, output = ends(start(program, name="summit", job=job))
    assert (code, output.count("True")) == (0, 2)
    (storage,) = {Path(line.split()[-1]) for line in log(tmp_path)}
    assert log(tmp_path) == both("predict", storage) + both("train", storage)
    assert storage.parent == tmp_path / "storage" / "me"
    assert not list(storage.parent.iterdir())


def test_a_map_of_another_image_has_a_name_of_its_own(start: Start, tmp_path: Path) -> None:
    program = "rank == '0' and open(sys.argv[4], 'a').write(sys.argv[3] + ';')"
    only = {"RUN": ""}
    jobs = [{}, only | {"IMAGE": "a/x.tif"}, only | {"IMAGE": "b/x.tif"}, {"IMAGE": "a/x.tif"}]
    for variables in (*jobs, *jobs):
        code, output = ends(start("pass", program, variables=variables))
        assert code == 0
        assert ("is of another image" in output) == (variables in jobs[2:])
    (tmp_path / "out" / "map.image").unlink()  # a map of unknown origin is that of another, too
    assert ends(start("pass", program))[0] == 0
    names = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.tif")}
    assert (names.pop("map.tif"), names.pop("map-x.tif")) == ("scene.tif;" * 2, "a/x.tif;" * 2)
    assert sorted(names.values()) == ["a/x.tif;" * 2, "b/x.tif;" * 2, "scene.tif;"]
    assert all(re.fullmatch(r"map(-x)?-[0-9a-f]{6}.tif", name) for name in names)
