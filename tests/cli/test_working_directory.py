"""A working directory that was deleted."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    """Before any library looks for its files: MKL ends the process there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); from tilenet.__main__ import main; "
    for arguments in (["info", "a.tif"], ["train", "-c", "a.yaml"], ["halo", "--poolings", "1"]):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", f"{program}sys.exit(main({json.dumps(arguments)}))"],
            cwd=gone,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        assert done.stderr == (
            "tilenet: the working directory must exist, and you may enter it (of this one: No such "
            "file or directory); change into another one with cd\n"
        )
