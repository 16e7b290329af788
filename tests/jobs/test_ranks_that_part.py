"""A rank that leaves a loop of a script, or fails there, ends the job in a sentence."""

import textwrap
from pathlib import Path

import pytest
from launched import mpiexec, write_scene

PROGRAM = """
    import time, torch, tilenet
    from torch import nn

    job = tilenet.Job()
    local = job.split(nn.Conv2d(2, 3, 3, padding=1))
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    for step in job.steps("{folder}/image.tif", "{folder}/labels.tif", steps=3, hang_seconds=9):
        for tile in step:
            step.add(local(tile.image)[tile.own].sum(), 1)
        if job.rank == 1 and job.step == 1:
            {does}
        step.apply(optimizer)
"""


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("break", "tilenet: all ranks do the same in the same order (rank 0: step 2, rank 1: "
         "the end of the program); let no rank leave a loop by itself"),
        ("1 / 0", "ZeroDivisionError"),
        ("step.add(torch.zeros(1).sum(), 1)", "tilenet: each tile of a step counts once"),
        ("time.sleep(60)", "[rank 0 of 2] tilenet: step 2 must end within 9 s"),
    ],
)  # fmt: skip
def test_a_rank_that_parts_ends_the_job(tmp_path: Path, does: str, words: str) -> None:
    write_scene(tmp_path, (60, 80))
    ended = mpiexec(2, "-c", textwrap.dedent(PROGRAM).format(folder=tmp_path, does=does))
    assert ended.returncode != 0
    assert words in ended.stderr
    assert ("Traceback" in ended.stderr) == (does == "1 / 0")
