"""One cluster for all tests here; where there can be none they skip, and the run's end says why.

TILENET_SLURM: `skip`, or `required`, with which a missing Slurm fails. TILENET_FAILURE_TABLE: a
JSON file for the measured failure table.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, NoSlurmError

reasons: list[str] = []  # why the tests skipped, or ran with less than they should
table: list[dict[str, object]] = []  # rows of the failure table


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Virtual nodes n1 to n3."""
    asked = os.environ.get("TILENET_SLURM", "auto")
    if asked == "skip":
        reasons.append("TILENET_SLURM=skip")
        pytest.skip("TILENET_SLURM=skip")
    # Short: a socket's path may have 107 characters
    folder = Path(tempfile.mkdtemp(prefix="tilenet-slurm-"))
    try:
        made = Cluster(folder)
    except NoSlurmError as error:
        shutil.rmtree(folder)
        reasons.append(str(error))
        if asked == "required":
            pytest.fail(f"TILENET_SLURM=required: {error}")
        pytest.skip(str(error).splitlines()[-1])
    if made.plain:
        reasons.append("no namespaces: ran on nodes that share one name, address and memory")
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def failure_table() -> list[dict[str, object]]:
    """Where tests put rows."""
    return table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if table:
        terminalreporter.section("a rank fails: seconds until the job has ended, exit code")
        for row in table:
            terminalreporter.write_line(
                "{fault:14} {launcher:8} {seconds:6.1f} s  exit {exit}".format(**row)
            )
        if path := os.environ.get("TILENET_FAILURE_TABLE"):
            Path(path).write_text(json.dumps(table, indent=1) + "\n")
    if reasons:
        skipped = terminalreporter.stats.get("skipped", [])
        what = f"{len(skipped)} SKIPPED" if skipped else "WITHOUT NAMESPACES"
        terminalreporter.section(f"tests on a real Slurm: {what}", red=True, bold=True)
        for reason in reasons:
            terminalreporter.write_line(reason)
