"""`tilenet predict` whose ranks are killed: the map goes on with what was done, to the last bit."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import rasterio
from launched import mpiexec, write_scene

from tilenet.__main__ import main
from tilenet.mapping.writing.writer import MapWriter

# A rank ends itself after so many rounds.
PROGRAM = """
import os, signal, sys
import tilenet.mapping.writing.resume as resume
from tilenet.__main__ import main

rank, rounds, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
done, seen = resume.MapResume.tiles_done, []
def tiles_done(self, *, last):
    done(self, last=last)
    seen.append(last)
    if self.comm.rank == rank and len(seen) == rounds:
        os.kill(os.getpid(), getattr(signal, how))

resume.MapResume.tiles_done = tiles_done
sys.exit(main(sys.argv[4:]))
"""

# A rank ends itself once so many rounds of tiles are compressed and kept; small tiles, one a round.
FINISH = """
import os, signal, sys
from tilenet.__main__ import main
from tilenet.mapping.writing import cog, tiff_header, writer

rounds, log = int(sys.argv[1]), sys.argv[2]
cog.BLOCK_PX = tiff_header.BLOCK_PX = writer.BLOCK_PX = 128
cog.BATCH_TILES, cog.KEEP_SECONDS = 1, 0.0
keep, compressed, seen = cog._CogWriter._record_sizes, cog._compress, []

def kept(self, *args, **more):
    keep(self, *args, **more)
    seen.append(args)
    if len(seen) == rounds and self.comm.rank == self.comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(values, job):
    with open(log, "a") as file:
        print("tile", file=file)
    return compressed(values, job)

cog._CogWriter._record_sizes, cog._compress = kept, counted
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A trained network and what to map with it, in 20 tiles."""
    write_scene(tmp_path, (157, 211))
    run = ["--classes", "3", "--steps", "2", "--network.poolings", "1", "--network.base", "4"]
    files = {"images": "image.tif", "labels": "labels.tif", "output": "run"}
    run += [word for key, name in files.items() for word in (f"--{key}", str(tmp_path / name))]
    assert main(["train", "--device", "cpu", *run]) == 0
    return ["predict", str(tmp_path / "run"), str(tmp_path / "image.tif"), "--tile", "44"]


def test_a_map_goes_on_after_kills_and_a_stop(
    tmp_path: Path, job: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 is killed; then the other; then one is asked to stop."""
    program, out = tmp_path / "program.py", tmp_path / "map.tif"
    program.write_text(PROGRAM)
    more = ["--output", "probabilities", "--device", "cpu"]
    mapping = [*job[:3], str(out), *job[3:], *more, "--resume"]
    done: dict[str, int] = {}
    for rank, rounds, how, code in [
        (0, 1, "SIGKILL", None),
        (1, 1, "SIGKILL", None),
        (1, 2, "SIGTERM", 75),
    ]:
        ended = mpiexec(2, str(program), str(rank), str(rounds), how, *mapping)
        if code is None:
            assert ended.returncode not in (0, 75)
        else:
            assert ended.returncode == 75, ended.stderr
            assert ended.stderr.count("run again to go on") == 1
        assert not out.exists()
        tiles = {
            piece.name: piece.stat().st_mtime_ns
            for piece in tmp_path.glob(".map.tif.pieces.part/*.raw")
        }
        assert tiles.items() > done.items()  # none is written twice
        done = tiles
    assert len(done) < 20
    capfd.readouterr()
    assert main([*mapping, "--json"]) == 0  # on one rank
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["grid"] == [4, 5]
    whole = tmp_path / "whole.tif"
    assert main([*job[:3], str(whole), *job[3:], *more]) == 0
    with rasterio.open(out) as file, rasterio.open(whole) as other:
        np.testing.assert_array_equal(file.read(), other.read())
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_a_finish_goes_on_after_kills(tmp_path: Path, job: list[str]) -> None:
    """Of five tiles two ranks compress an overview, then two others; one rank the last two."""
    program, out, whole = (tmp_path / name for name in ("program.py", "map.tif", "whole.tif"))
    program.write_text(FINISH)

    def tiles_of(path: Path, ranks: int, rounds: int) -> tuple[int, int]:
        """Compressed by a job that is killed after so many rounds; its exit code."""
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        mapping = [*job[:3], str(path), *job[3:], "--output", "probabilities", "--device", "cpu"]
        ended = mpiexec(ranks, str(program), str(rounds), str(log), *mapping, "--resume")
        return len(log.read_text().splitlines()), ended.returncode

    assert tiles_of(whole, 2, 0) == (5, 0)
    for in_round in (1, 2):
        tiles, code = tiles_of(out, 2, 1)
        assert in_round <= tiles <= in_round + 2  # the other rank may have begun the next round
        assert code != 0
        assert not out.exists()
    assert tiles_of(out, 1, 0) == (2, 0)
    assert out.read_bytes() == whole.read_bytes()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_who_asks_for_a_stop_while_the_map_is_finished_gets_it(
    tmp_path: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that was to make room would be run again for a map that is there."""
    asked: list[int] = []
    finish = MapWriter.finish

    def asked_meanwhile(writer: MapWriter) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        finish(writer)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(MapWriter, "finish", asked_meanwhile)
    numbers = signal.SIGTERM, signal.SIGUSR1
    before = [signal.signal(number, lambda number, _: asked.append(number)) for number in numbers]
    try:
        assert main([*job[:3], str(tmp_path / "map.tif"), *job[3:], "--resume"]) == 0
        assert asked == []
        for number in numbers:  # which are this process's own again
            os.kill(os.getpid(), number)
        assert asked == list(numbers)
    finally:
        for number, one in zip(numbers, before, strict=True):
            signal.signal(number, one)
    assert (tmp_path / "map.tif").exists()
