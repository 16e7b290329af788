"""How long does a job live on after one of its ranks has failed, and what does it return?

Rank 2 of 4 fails in nine ways under mpiexec, `srun --kill-on-bad-exit=1` on a real Slurm of virtual
nodes (root, Debian), and the stand-in for jsrun (quick: no srun). Rows are written by the tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from bench.report import ROOT, Found, at_least, at_most

HANG_S = 1  # the patience of the tests' watchdog


def bench(quick: bool) -> Found:
    """Run the tests, and turn their rows into claims."""
    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / "table.json"
        tests = [str(ROOT / "tests" / "jobs" / "slurm" / "test_slurm_failures.py")]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *tests, *(("-k", "not srun") if quick else ())],
            check=True,
            cwd=ROOT,
            stdout=sys.stderr,
            env={**os.environ, "TILENET_SLURM": "required", "TILENET_FAILURE_TABLE": str(table)},
        )
        rows = json.loads(table.read_text())
    for row in rows:
        row["seconds"] = round(row["seconds"], 2)
    said_done = [row for row in rows if row["fault"] == "os._exit(0)"]
    others = [row for row in rows if row not in said_done]
    waited = [row for row in others if row["fault"].startswith("hang")]
    killed = [row for row in said_done if row["launcher"] != "srun"]  # which waits for the watchdog
    ended = [row for row in others if row not in waited] + killed
    claims = [
        at_most("seconds to the job's end, at most", max(r["seconds"] for r in ended), 5),
        at_most(
            "the same after a hang, over patience", max(r["seconds"] for r in waited), 5 + HANG_S
        ),
        at_least("smallest exit code, os._exit(0) aside", min(r["exit"] for r in others), 1),
    ]
    return {"date": date.today().isoformat(), "ranks": 4, "rows": rows}, claims
