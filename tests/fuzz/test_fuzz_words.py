"""Commands with odd words, and pages of runs whose files and names are spoilt."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import yaml
from hostile import bounded, few, noisy, said, spoilt, written
from hypothesis import given
from hypothesis import strategies as st

from tilenet.__main__ import main
from tilenet.report.page import page
from tilenet.report.run_view import RunView

sys.path.append(str(Path(__file__).parents[1] / "report"))
from pages import Page

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = {
    "images": ["a.tif"],
    "labels": ["b.tif"],
    "classes": ["sea", "land"],
    "output": "out",
    "steps": 2,
}
HISTORY = (
    b"step,loss,weight_sum,seconds,read_seconds,peak_bytes\n1,0.5,9,1,0.1,9\n2,0.2,9,1,0.1,9\n"
)
TABLES = {
    "history.csv": HISTORY,
    "validation.csv": b"step,loss,mean_iou,mean_f1,iou_0,iou_1\n1,0.5,0.5,0.6,0.4,0.6\n2,0.4,,,,\n",
    "confusion.csv": b"step,label,predicted,pixels\n2,0,0,5\n2,0,1,3\n2,1,0,2\n2,1,1,9\n",
}
FACTS = {
    "began": "2026-11-22T05:13:53+00:00",
    "versions": {"tilenet": "0.1.0", "torch": "2.13.0"},
    "machine": ["node vm: rank 0"],
    "working_directory": "/tmp",
    "mesh": [1, 1, 2],
    "devices": ["cpu", "cpu"],
    "layers": 17,
    "parameters": 277,
    "balance": [17],
    "micro_batches": 1,
    "planned": {"bytes": [5, 6], "seconds": 0.5},
    "tiles": {
        "size": [96, 90],
        "rows": [[0, 96, 0, 96]],
        "columns": [[0, 50, 0, 48], [40, 50, 48, 42]],
    }
    | {"halo_px": 8, "exchanged": False, "exact": True, "work_ratio": 1.0},
    "held_out": {"block_px": 32, "blocks": [[0, 1], [1, 2]]},
}
SECONDS = {"seconds": 0.1, "read_seconds": 0.01, "reduce_seconds": 0.0, "peak_bytes": 4096}
TIMINGS = {"first_step": 1, "last_step": 2, "ranks": [SECONDS, SECONDS]}
TIMINGS |= dict.fromkeys(("least", "mean", "most"), SECONDS)
names = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["<script>alert(1)</script>", "\x1b[31m", '"><img src=x>', "a\nb", "\u202e", "&amp;", "</svg>"]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pages are made of."""
    return tmp_path_factory.mktemp("run")


def fresh(run: Path) -> None:
    for name, data in TABLES.items():
        written(run, name, data)
    written(run, "run.yaml", yaml.safe_dump(RUN))
    written(run, "run.json", FACTS)
    written(run, "timings.json", TIMINGS)


def check_page(run: Path) -> None:
    def use() -> None:
        text = page(RunView(run), maps=False)
        text.encode()
        assert "\x1b" not in text
        found = Page(text)
        for name in ("script", "iframe", "link"):
            assert not found.all(name)
        assert not [
            one for one in found.all("img") if not one.attributes["src"].startswith("data:")
        ]

    said(use)


@pytest.mark.parametrize(("name", "good"), [("run.json", FACTS), ("timings.json", TIMINGS)])
@few
@given(data=st.data())
def test_pages_of_spoilt_facts(run: Path, name: str, good: Any, data: st.DataObject) -> None:
    fresh(run)
    written(run, name, data.draw(spoilt(good)))
    check_page(run)


@pytest.mark.parametrize("name", [*TABLES, "run.yaml", "run.json"])
@few
@given(data=st.data())
def test_pages_of_noise(run: Path, name: str, data: st.DataObject) -> None:
    fresh(run)
    written(run, name, data.draw(noisy((run / name).read_bytes())))
    check_page(run)


@few
@given(classes=st.lists(names, min_size=2, max_size=2), image=names)
def test_pages_of_odd_names(run: Path, classes: list[str], image: str) -> None:
    fresh(run)
    text = json.dumps(RUN | {"classes": classes, "images": [image]})
    written(run, "run.yaml", text)
    written(run, "run.json", FACTS | {"machine": [image], "working_directory": image})
    check_page(run)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("words")
    size = {"driver": "GTiff", "count": 1, "height": 32, "width": 32, "dtype": "uint8"}
    with rasterio.open(made / "a.tif", "w", **size) as file:
        file.write(np.random.default_rng(2).integers(0, 2, (1, 32, 32)).astype("uint8"))
    return made


WORDS = [
    *("a.tif", "b.png", "", "-", "--", "-1", "0", "1e999", "nan", "99999999999999999999", "\ud800"),
    *(
        "\0",
        "\x1b[31m",
        "x" * 5000,
        ".",
        "..",
        "/dev/zero",
        "/proc/self/mem",
        "²",
        "1,2",
        "[1",
        "{a:",
    ),
    *("--image", "--json", "--labels", "--ignore-index", "--bands", "--resolution", "--nodata"),
    *(
        "--classes",
        "--poolings",
        "--tile",
        "--window",
        "--bbox",
        "--out",
        "--map",
        "--config",
        "-c",
    ),
    *(
        "--network.poolings",
        "--network.base",
        "--halo",
        "--ranks",
        "--memory",
        "--machine",
        "a.tif",
    ),
]


@pytest.mark.parametrize("command", ["halo", "plan", "info", "preview", "evaluate", "report"])
@few
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=6))
def test_commands_with_odd_words(
    image: Path, command: str, words: list[str], monkeypatch_module: pytest.MonkeyPatch
) -> None:
    """One sentence and 1 or 2, or a result and 0."""
    monkeypatch_module.chdir(image)
    out, err = io.StringIO(), io.StringIO()
    with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([command, *words])
        except SystemExit as end:  # --help
            code = end.code
    assert code in (0, 1, 2), code
    assert "Traceback" not in err.getvalue()
    lines = [line for line in err.getvalue().splitlines() if line.startswith("tilenet")]
    if command != "info":
        assert len(lines) == (code != 0), err.getvalue()
    elif "--json" not in words:  # there it stands in the JSON
        assert (code != 0) <= len(lines) <= max(1, len(words))  # one for each image
    assert all(line.isprintable() for line in lines)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
