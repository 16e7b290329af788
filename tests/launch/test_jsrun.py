"""The stand-in for jsrun against the documented layouts, and what it refuses."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from jsrun import JsrunError, Rank, layout, omp_threads, parse

Row = tuple[int, tuple[int, ...], tuple[int, ...]]  # node, hardware threads, GPUs
GPUS6 = tuple((gpu,) for gpu in range(6))
HALVES = [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
LONE = (0, 4, 8, 88, 92, 96)  # first cores of three resource sets on each socket
SEVENS = (0, 28, 56, 88, 116, 144)  # the same, of 7 cores each


def rows(line: str, nodes: int) -> list[Rank]:
    return layout(parse(shlex.split(line)[1:]), nodes)


def shown(ranks: Sequence[Rank]) -> list[Row]:
    return [(rank.node, rank.threads, rank.gpus) for rank in ranks]


# OLCF, Summit User Guide and jsrun quick start: line, nodes, where each rank goes.
DOCUMENTED: list[tuple[str, int, list[Row]]] = [
    (
        "jsrun -n12 -r6 -a1 -g1 -c1 ./a.out",
        2,
        [(k // 6, (LONE[k % 6],), GPUS6[k % 6]) for k in range(12)],
    ),
    (
        "jsrun -n12 -a2 -g1 -c2 -dpacked ./a.out",
        2,
        [
            (node, (thread,), (gpu,))
            for node in range(2)
            for gpu in range(6)
            for thread in [gpu // 3 * 88 + gpu % 3 * 8, gpu // 3 * 88 + gpu % 3 * 8 + 4]
        ],
    ),
    (
        "jsrun -n4 -a6 -c6 -g3 -d packed ./a.out",  # the guide's -l GPU-CPU moves nothing
        2,
        [
            (node, (socket * 88 + 4 * task,), (3 * socket, 3 * socket + 1, 3 * socket + 2))
            for node in range(2)
            for socket in range(2)
            for task in range(6)
        ],
    ),
    (
        "jsrun -n12 -a1 -c4 -g1 -b packed:4 -d packed ./a.out",
        2,
        [
            (node, tuple(range(first, first + 16, 4)), (gpu,))
            for node in range(2)
            for gpu, first in enumerate((0, 16, 32, 88, 104, 120))
        ],
    ),
    ("jsrun -n6 -c7 -g1 -a1 ./a.out", 1, [(0, (SEVENS[k],), GPUS6[k]) for k in range(6)]),
    (
        "jsrun -n6 -c7 -g1 -a1 -bpacked:2 ./a.out",
        1,
        [(0, (SEVENS[k], SEVENS[k] + 4), GPUS6[k]) for k in range(6)],
    ),
    (
        "jsrun -n2 -c21 -g3 -a3 -bpacked:1 ./a.out",
        1,
        [(0, (LONE[k],), HALVES[k]) for k in range(6)],
    ),
    (
        "jsrun -n1 -a2 -c8 -g1 -bpacked:4 -dpacked -EOMP_NUM_THREADS=16 ./a.out",
        1,
        [(0, (0, 4, 8, 12), (0,)), (0, (16, 20, 24, 28), (0,))],
    ),
    ("jsrun -n1 -a2 -c8 -g1 -brs -dpacked ./a.out", 1, [(0, tuple(range(0, 32, 4)), (0,))] * 2),
    ("jsrun -n4 -c1 -a1 ./a.out", 2, [(0, (4 * k,), ()) for k in range(4)]),
    ("jsrun -n4 -c1 -a1 -r2 ./a.out", 2, [(k // 2, (k % 2 * 4,), ()) for k in range(4)]),
    (
        "jsrun -r1 -g6 -a6 -c42 -bpacked:7 ./a.out",
        2,
        [
            (node, tuple(range(first, first + 28, 4)), (0, 1, 2, 3, 4, 5))
            for node in range(2)
            for first in SEVENS
        ],
    ),
]


@pytest.mark.parametrize(("line", "nodes", "wanted"), DOCUMENTED, ids=[d[0] for d in DOCUMENTED])
def test_a_documented_line_gives_the_documented_layout(
    line: str, nodes: int, wanted: list[Row]
) -> None:
    assert shown(rows(line, nodes)) == wanted


def test_the_largest_documented_job_leaves_two_nodes_free() -> None:
    ranks = rows("jsrun -n 4092 -r 2 -a 12 -g 3 ./a.out", 2048)
    assert (len(ranks), ranks[-1].resource_set, ranks[-1].node) == (49104, 4091, 2045)


def test_openmp_threads_are_given_or_as_many_as_hardware_threads() -> None:
    given = parse(shlex.split("-n1 -a2 -c8 -g1 -bpacked:4 -EOMP_NUM_THREADS=16 ./a.out"))
    counted = parse(shlex.split("-n1 -a2 -c8 -g1 -brs ./a.out"))
    assert omp_threads(given, layout(given, 1)[0]) == 16
    assert omp_threads(counted, layout(counted, 1)[0]) == 32


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-n1 -q 3", "unrecognized|program"),
        ("-n", "expected one argument"),
        ("-n 0", "a whole number from 1 on"),
        ("-n six", "a whole number"),
        ("-n5 -r2", "must divide"),
        ("-n1 -r1 -g7", "do not fit on a node"),
        ("-n1 -r1 -c43", "do not fit on a node"),
        ("-n13 -g1", "do not fit"),
        ("-n3 -r3 -g2 -c14", "fits on neither socket"),
        ("-n1 -a6 -c42 -b packed:8", "need 48 cores"),
        ("-n1 -b packed", "packed:N"),
        ("-n1 -b sockets", "packed:N"),
        ("-n1 -d roundrobin", "invalid choice"),
        ("-n1 -X yes", "invalid choice"),
        ("-n1 --smpiargs=gpu", "invalid choice"),
        ("-n1 -E 3=x", "VAR=value"),
    ],
)
def test_what_is_not_documented_is_refused(line: str, said: str) -> None:
    with pytest.raises(JsrunError, match=said):
        layout(parse(shlex.split(line)), 2)


def test_it_runs_a_program_on_its_ranks() -> None:
    """MPI sees as many nodes as were pretended, and ranks what jsrun would tell them."""
    code = (
        "from mpi4py import MPI; import os; c = MPI.COMM_WORLD; n = c.Split_type("
        "MPI.COMM_TYPE_SHARED); e = os.environ; print(*c.gather((c.rank, n.rank, n.size, "
        "int(e['JSM_NAMESPACE_LOCAL_RANK']), e['CUDA_VISIBLE_DEVICES'], e['OMP_NUM_THREADS'])) "
        "or [], sep='\\n', end='' if c.rank else '\\n', flush=True)"
    )
    line = "-n 2 -r1 -a2 -g6 -c42 -b packed:7 -X 1 -E OMP_NUM_THREADS=3"
    here = Path(__file__).parent
    env = os.environ | {"JSRUN_NODES": "2", "PATH": f"{here}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["jsrun", *shlex.split(line), sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    wanted = [f"({k}, {k % 2}, 2, {k % 2}, '0,1,2,3,4,5', '3')" for k in range(4)]
    assert [text for text in run.stdout.splitlines() if text] == wanted
