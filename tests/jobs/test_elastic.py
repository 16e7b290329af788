"""Scripts for a range of nodes, at work: a pretended Slurm whose nodes die as the test wants."""

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.elastic import node_range, without_nodes
from launch.lives import WATCH
from tilenet.__main__ import main as tilenet

ROOT = Path(__file__).resolve().parents[2]
# Slurm's commands know the nodes that are there (file nodes) and that answer (file alive).
TOOLS = {
    "squeue": """case $* in
*-s*) cat "$HERE/steps" ;;
*) rm "$HERE/busy" 2>/dev/null && exit 1; [ ! -e "$HERE/deaf" ] || exit 1; cat "$HERE/nodes" ;;
esac""",
    "scontrol": """case "$1 $2" in
"show hostnames") tr , "\\n" <<<"$3" ;;
"show job") echo " JobState=RUNNING " ;;
*) echo "$@" >>"$HERE/log"; kill "$PPID" ;;
esac""",
    # -w NAME… of a probe or a watch; else it is a step, or copies files or deletes them
    "srun": """words="$*"
names=${words##*-w }
names=${names%% *}
case $words in *--overlap*)
    grep -qx "$names" "$HERE/alive" || exit 1
    [[ $words != *"-J watch"* ]] || echo "watch on $names" >>"$HERE/log"
    exit ;;
esac
words=${words%% bash *}
echo "srun ${words%% /*}" >>"$HERE/log"
while [[ "$1" != *python* && "$1" != bash && "$1" != rm ]]; do shift; done
SLURM_PROCID=0 "$@" """,
    "tilenet": f"""if [ "$1" = batch ]; then exec {sys.executable} -c '
import sys, time
sys.path.insert(0, "{ROOT}")
from launch import batch, lives
lives.time = type("", (), dict(sleep=lambda seconds: None))
sys.exit(batch.main(sys.argv[2:]))
' "$@"
fi"""
    """
echo "tilenet $1 ${*: -4}" >>"$HERE/log"
if [ "$1" != plan ]; then
    [ -n "$(grep UNSTARTED "$HERE/ranks")" ] || touch "$TILENET_STARTED"
    source "$HERE/ranks"
    exit
fi
grep -q '"tilenet_plan": 1' "$3" || { echo "tilenet: $3 must be a plan" >&2; exit 1; }
echo "for $5" >"$7" """,
}
LIMIT_S = 120
ALL = "3 -n 6 -w n1,n2,n3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan for 3 nodes and its script for 2 to 3, and a Slurm of 3 nodes that answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    asked = ["--poolings", "1", "--base", "4", "--image", "150x110", "--grid", "4x4"]
    where = ["--machine", "slurm", "--nodes", "3", "--partitions", "2"]
    assert tilenet(["plan", *asked, *where, "--json", "-o", "plan.json"]) == 0
    assert main(["plan.json", "--nodes", "2-3", "--image", "", "--script", "job.sh"]) == 0
    (tmp_path / "run.yaml").touch()
    (tmp_path / "tools").mkdir()
    for name, text in TOOLS.items():
        (tmp_path / "tools" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n1,n2,n3\n")
    (tmp_path / "alive").write_text("n1\nn2\nn3\n")
    (tmp_path / "log").touch()
    (tmp_path / "steps").write_text("7.batch batch\n7.extern extern\n7.3 watch\n")
    return tmp_path


def run(folder: Path, ranks: str) -> tuple[int, str, list[str]]:
    """What the job returns and says when its ranks do that; and what it ran."""
    (folder / "ranks").write_text(ranks)
    env = os.environ | {
        "PATH": f"{folder}/tools:{os.environ['PATH']}",
        "HERE": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1,n2,n3",
        "SLURMD_NODENAME": "n1",
    }
    done = subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.returncode, done.stdout + done.stderr, (folder / "log").read_text().splitlines()


def starts(log: list[str]) -> list[str]:
    """Nodes, ranks and names of each step."""
    return [line.partition(" -N ")[2] for line in log if line.startswith("srun")]


def test_a_range_is_two_numbers() -> None:
    assert node_range("4") == (4, None)
    assert node_range("4-4") == (4, None)
    assert node_range("3-12") == (3, 12)
    for wrong in ("", "0", "0-3", "4-3", "a", "-3", "3-", "1-2-3", "1.5"):
        with pytest.raises(ArgumentTypeError, match="expected a number of nodes"):
            node_range(wrong)


def test_nodes_and_ranks_leave_the_line() -> None:
    line = ["srun", "-N", "2", "-n", "4", "--ntasks-per-node=2", "-c", "32", "--mpi=pmi2"]
    assert without_nodes(line) == ["srun", "--ntasks-per-node=2", "-c", "32", "--mpi=pmi2"]


@pytest.mark.parametrize(
    "also",
    [
        "",
        pytest.param("busy", marks=pytest.mark.nightly, id="a controller that answers later"),
        pytest.param("deaf", marks=pytest.mark.nightly, id="a controller that answers no more"),
    ],
)
def test_it_goes_on_with_the_nodes_that_are_left(folder: Path, also: str) -> None:
    """The plan that train gets is for those; the user's own stays as it is.

    What was staged is deleted on them: a step on a dead node would wait.
    """
    text = (folder / "job.sh").read_text()
    staged = text.replace("STAGE=()", "STAGE=(run.yaml)").replace("=/tmp", f"={folder}/disk")
    (folder / "job.sh").write_text(staged)
    before = (folder / "plan.json").read_bytes()
    dies = f"""if [ -e "$HERE/died" ]; then exit 0; fi
touch "$HERE/died" "$HERE/{also}"
printf 'n1\\nn3\\n' >"$HERE/alive"
exit 137
"""
    code, said, log = run(folder, dies)
    copies, deletes = "3 -n 3 -w n1,n2,n3", "2 -n 2 -w n1,n3 rm -rf"
    assert (code, starts(log)) == (0, [copies, ALL, "2 -n 4 -w n1,n3", deletes]), said
    assert not list(folder.glob("disk/*/*"))
    plans = [line for line in log if line.startswith("tilenet plan")]
    assert [line.split()[-3] for line in plans] == ["3", "2"]
    assert [line for line in log if "train" in line] == [
        f"tilenet train {folder}/out/plan.now.json --output {folder}/out --resume"
    ] * 2
    assert (folder / "plan.json").read_bytes() == before
    assert (folder / "out" / "plan.now.json").read_text() == "for 2\n"
    assert said.splitlines()[-1] == "train: finished"


HELD = """printf 'n1\\nn3\\n' >"$HERE/alive"
echo "7.4 bash" >>"$HERE/steps"
exit 137
"""
LAST = 'echo n1 >"$HERE/alive"\nexit 137\n'
# A file that is spoilt, what the ranks do, the exit code (None: it queues again), steps, words.
ENDS: dict[str, tuple[str, str, int | None, list[str], str]] = {
    "undisturbed": ("", "", 0, [ALL], "train: finished"),
    "Slurm does not let a step go": (
        "",
        HELD,
        None,
        [ALL],
        "does not release the step that lost",
    ),
    "no answer at first": ("deaf", "", 0, [ALL], "train: finished"),
    "no answer any more": (
        "",
        'touch "$HERE/deaf"; >"$HERE/alive"\nexit 137\n',
        None,
        [ALL],
        "none of",
    ),
    "too few nodes": ("", LAST, None, [ALL], "1 of the job's nodes answer (n1), at least 2 must"),
    "a failure on living nodes": ("", "exit 3\n", 1, [ALL], "train: failed"),
    "MPI never starts": (
        "",
        "exit 134 # UNSTARTED\n",
        1,
        [ALL] * 3,
        "MPI did not start: once more",
    ),
    "no node, nothing starts": ("alive", "", 1, [], "srun does not work here"),
    "no plan": ("plan.json", "", 1, [], "must be a plan"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", ENDS)
def test_it_ends_or_queues_again(folder: Path, case: str) -> None:
    broken, ranks, wanted, steps, said = ENDS[case]
    if broken:
        (folder / broken).write_text("{}" if broken == "plan.json" else "")
    code, output, log = run(folder, ranks)
    assert starts(log) == steps, output
    assert said in output
    assert output.count("once more") == max(len(steps) - 1, 0)
    if wanted is None:
        assert code != 0
        assert log[-1] == "requeue 7"
    else:
        assert code == wanted, output
        assert not [line for line in log if "requeue" in line]
    assert ("watch on n3" in log) or steps == []


def test_the_watch_queues_a_job_again_that_has_lost_its_first_node(tmp_path: Path) -> None:
    answers = "n1,n2", "", "n2,n3"  # in between the controller says nothing
    tools = {
        "squeue": f"""set -- {" ".join(f"'{answer}'" for answer in answers)}
echo >>"$0.asked"
shift $(($(wc -l <"$0.asked") - 1))
echo "$1" """,
        "scontrol": """[ "$1" != show ] || exec tr , "\\n" <<<"$3"
echo "$@" """,
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-IS", WATCH, "7", "n1", "0.01"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "requeue 7\n", "")
    assert (tmp_path / "squeue.asked").read_text() == "\n" * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2-3"], "add --script FILE"),
        (["--nodes", "2-3", "--machine", "frontier", "--script", "x.sh"], "be of the machine of"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan.json", *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_only_slurm_takes_a_range(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--poolings", "1", "--base", "4", "--image", "150x110", "--machine", "summit"]
    fixed = ["--grid", "2x2", "--partitions", "1", "--nodes", "2"]
    assert tilenet(["plan", *asked, *fixed, "--json", "-o", "summit.json"]) == 0
    capsys.readouterr()
    assert main(["summit.json", "--nodes", "1-2", "--script", "x.lsf"]) == 1
    assert "only Slurm gives a job a range of nodes" in capsys.readouterr().err
