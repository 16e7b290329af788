"""What commands load: nothing that draws where nothing is drawn, and never torch's compiler."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from whole_image import random_scene

SCRIPT = """
import sys
import torch  # which loads some of them itself, depending on its version
names = {"jinja2", "jsonargparse", "matplotlib", "sympy", "torch._dynamo", "torch.export"}
names -= set(sys.modules)
from tilenet.__main__ import main
code = main(sys.argv[1:])
print(code, sorted(names & set(sys.modules)))
"""


def loaded(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_no_command_loads_what_its_work_does_not_need(tmp_path: Path) -> None:
    scene = random_scene(tmp_path, (64, 80), 3, write=True)
    run, made = str(tmp_path / "run"), str(tmp_path / "map.tif")
    keys = {
        "images": str(scene.image),
        "labels": str(scene.labels),
        "classes": 3,
        "output": run,
        "network": {"poolings": 1, "base": 4},
        "device": "cpu",
        "steps": 2,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    # The report of a run is drawn, and its run file is read.
    trained = loaded("train", "-c", str(tmp_path / "run.yaml"))
    assert trained == "0 ['jinja2', 'jsonargparse', 'matplotlib']"
    assert loaded("predict", run, str(scene.image), made) == "0 []"
    assert loaded("evaluate", made, str(scene.labels)).splitlines()[-1] == "0 []"


@pytest.mark.parametrize("name", ["job", "info"])
def test_what_needs_no_network_loads_no_torch(name: str, tmp_path: Path) -> None:
    """It takes longer to load than all else that these commands do, on a busy login node."""
    scene = random_scene(tmp_path, (64, 80), 3, write=True)
    read = [str(scene.image), "--labels", str(scene.labels)]
    arguments = ["jobs/slurm/plan.json"] if name == "job" else read
    script = f"""
import sys
from tilenet.__main__ import main
print(main([{name!r}, *{arguments!r}]), "torch" in sys.modules)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.splitlines()[-1] == "0 False"
