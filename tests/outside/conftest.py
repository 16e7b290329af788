"""Ranks that stay: each number of them starts once, and runs the commands of all tests here."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVE = str(Path(__file__).with_name("serve.py"))
# Far above the cost of any run here: a rank that waits forever ends the test, not the day.
TIMEOUT_S = 240


class Ranks:
    """So many ranks of tilenet, in a folder of their own."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder, self._asked = folder, 0
        program = ("mpiexec", "-n", str(count), sys.executable, "-m", "mpi4py", SERVE, str(folder))
        # The environment as Python knows it: an MPI that a test began here leaves its own in C's
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                program, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def run(self, arguments: tuple[str, ...]) -> None:
        """Run a command to its end; it must succeed."""
        asked = self._folder / f"{self._asked}.json"
        self._asked += 1
        asked.with_suffix(".part").write_text(json.dumps(arguments))
        os.replace(asked.with_suffix(".part"), asked)
        answer, began = asked.with_suffix(".code"), time.monotonic()
        while not answer.exists():
            said = (self._folder / "said").read_text(errors="replace")
            assert self.process.poll() is None, said
            assert time.monotonic() - began < TIMEOUT_S, said
            time.sleep(0.02)
        assert answer.read_text() == "0", (self._folder / "said").read_text(errors="replace")

    def end(self) -> None:
        """Let the ranks go, or end those that do not."""
        (self._folder / "end").touch()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def tilenet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """`tilenet(ranks, *arguments)` runs a command over so many ranks."""
    started: dict[int, Ranks] = {}

    def run(ranks: int, *arguments: str) -> None:
        if ranks not in started or started[ranks].process.poll() is not None:
            started[ranks] = Ranks(ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
        started[ranks].run(arguments)

    yield run
    for one in started.values():
        one.end()
