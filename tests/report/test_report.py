"""The page of a run: all parts are there, and say what the run's files say."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from pages import EVIL, Page, Write
from rasterio.io import MemoryFile

from tilenet.__main__ import main
from tilenet.data.rasters.raster import Raster
from tilenet.mapping.mapper import Mapper
from tilenet.report import maps as small_maps
from tilenet.report.page import write_report
from tilenet.report.run_view import RunView

SECTIONS = ["Run", "Learning", "Validation", "Classes", "Places", "Time and memory", "Run file"]
HISTORY = ["step", "loss", "learning_rate", "seconds", "read_seconds", "exchange_seconds",
           "reduce_seconds", "swap_wait_seconds", "peak_bytes"]  # fmt: skip


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def picture(uri: str) -> np.ndarray:
    kind, _, data = uri.partition(",")
    assert kind == "data:image/png;base64"
    with MemoryFile(base64.b64decode(data)) as memory, memory.open() as file:
        return file.read()


@pytest.fixture(scope="module")
def a_page(a_run: Path) -> Page:
    """The page that the run left."""
    return Page((a_run / "report.html").read_text(encoding="utf-8"))


def test_a_run_leaves_a_whole_page(a_run: Path, a_page: Page) -> None:
    text, page = (a_run / "report.html").read_text(encoding="utf-8"), a_page
    assert [section.all("h2")[0].text for section in page.all("section")] == SECTIONS
    assert page.all("h1")[0].text.startswith("run <b>")
    # Nothing is loaded, nothing runs.
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    outside = [v for e in every(page) for n, v in e.attributes.items() if n in ("src", "href")]
    assert outside
    assert all(value.startswith("data:image/png;base64,") for value in outside)
    assert not [n for e in every(page) for n in e.attributes if n.startswith("on")]
    assert not re.search(r"url\(|@import", text)
    assert "<script" not in text
    assert "://" not in text
    assert [e for e in every(page) if "refresh" in e.attributes.get("http-equiv", "")] == []
    assert len(page.section("Places").all("img")) >= 4
    assert len(page.section("Learning").all("img")) == 2
    for image in page.all("img"):
        assert len(image.attributes["alt"]) > 5
    for table in page.all("table"):
        assert table.all("caption")[0].text
        heads = table.all("thead")[0].all("th")
        assert {head.attributes["scope"] for head in heads} == {"col"}
        for row in table.all("tbody")[0].all("tr"):
            assert len(row.inside) == len(heads)
            assert row.inside[0].attributes["scope"] == "row"


def every(page: Page) -> list:
    def walk(element) -> list:
        return [element, *(one for child in element.inside for one in walk(child))]

    return walk(page.root)


def test_it_holds_what_the_run_was(a_run: Path, a_page: Page) -> None:
    page = a_page
    facts = {dt.text: dd.text for dt, dd in zip(page.all("dt"), page.all("dd"), strict=True)}
    assert facts["steps made"].startswith("6 in ")
    assert "torch" in facts["versions"]
    assert "rank 0" in facts["machine"]
    assert facts["ranks"].startswith("1 × 1 × 1")
    kept = page.section("Run file").all("pre")[0].text
    assert kept == (a_run / "run.yaml").read_text().strip()
    assert "tiles: {rows: 2, columns: 3}" in kept
    # Names are text, and no markup.
    assert EVIL in page.section("Places").text
    assert page.all("b") == []


def test_places_show_image_label_map_and_errors(a_run: Path, tmp_path: Path) -> None:
    """With a finished map, whose errors are known."""
    scene = a_run.parent
    with rasterio.open(scene / "labels.tif") as file:
        labels, profile = file.read(1), file.profile
    rng = np.random.default_rng(1)
    wrong = (rng.random(labels.shape) < 0.2) & (labels < 2)
    found = np.where(wrong, 1 - labels, labels)
    found[:10, :30] = 1  # where nothing is labelled
    with rasterio.open(tmp_path / "map.tif", "w", **profile) as file:
        file.write(found, 1)
    out = tmp_path / "page.html"
    assert main(["report", str(a_run), "--map", str(tmp_path / "map.tif"), "-o", str(out)]) == 0
    places = Page(out.read_text()).section("Places")
    counted = int((labels < 2).sum())
    told = f"{wrong.sum():,} of {counted:,} labelled pixels are wrong"
    assert told in places.all("h3")[0].text
    shown = [picture(image.attributes["src"]) for image in places.all("img")]
    assert [one.shape for one in shown] == [(4, *labels.shape)] * 4
    assert (shown[0][3] == 0).sum() == 10 * 20  # nodata
    _, label, mapped, errors = (one[:3] for one in shown)
    for one, values in ((label, labels), (mapped, found)):
        colours = [set(map(tuple, one[:, values == n].T.tolist())) for n in (0, 1, 255)]
        assert [len(colour) for colour in colours] == [1, 1, 1]
        assert len(set.union(*colours)) == 3
    red = set(map(tuple, errors[:, wrong].T.tolist()))
    assert len(red) == 1
    assert not red & set(map(tuple, errors[:, ~wrong].T.tolist()))
    (colour,) = red
    assert colour[0] > 2 * max(colour[1:])


def test_windows_of_tiles_are_those_of_the_whole_map(
    a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, image = tmp_path / "map.tif", str(a_run.parent / "image.tif")
    assert main(["predict", str(a_run), image, str(mapped)]) == 0
    monkeypatch.setattr(small_maps, "MOST_PX", 24)
    with Raster(image) as opened, rasterio.open(mapped) as file:
        whole = np.where(file.dataset_mask() > 0, file.read(1).astype(int), -1)
        computed = small_maps.computed_maps(RunView(a_run), opened, [])
        assert len(computed.windows) > 4
        for w in computed.windows:
            part = whole[w.row : w.row + w.height, w.col : w.col + w.width]
            assert np.array_equal(computed.read(w), part)


def test_places_lie_in_held_out_blocks_where_there_are_some(scene: Path, tmp_path: Path) -> None:
    given = ["--output", str(tmp_path / "run"), "--validation.share=0.3", "--steps=1"]
    held = ["--validation.block_px=30", "--crop_px=16", "--network.norm=none"]
    keys = ["--images", str(scene / "image.tif"), "--labels", str(scene / "labels.tif")]
    small = ["--classes=2", "--network.poolings=1", "--network.convolutions=1", "--network.base=4"]
    assert main(["train", *keys, *small, *given, *held, "--device=cpu"]) == 0
    page = report(tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    blocks = [tuple(one) for one in facts["held_out"]["windows"]]
    assert 0 < len(blocks) < 12
    places = [
        [int(n) for n in re.findall(r"\d+", h3.text)[:4]] for h3 in page.section("Places").all("h3")
    ]
    assert places
    for top, bottom, left, right in places:
        assert (top, left, bottom - top + 1, right - left + 1) in blocks
    assert "held out" in page.section("Places").text


@pytest.mark.parametrize(
    ("missing", "how", "said"),
    [
        ("history.csv", "broken", {"Learning": "no history.csv"}),
        ("run.yaml", "gone", {"Places": "no run.yaml"}),
        ("run.yaml", "broken", {"Places": "no run.yaml"}),
        ("run.json", "broken", {"Run": "folder"}),
        ("timings.json", "broken", {"Time and memory": "no timings.json"}),
        ("last", "gone", {"Places": "no checkpoint"}),
        ("image.tif", "elsewhere", {"Places": "No place is shown"}),
    ],
)
def test_what_is_missing_or_broken_is_said(
    a_run: Path, tmp_path: Path, missing: str, how: str, said: dict[str, str]
) -> None:
    copy = shutil.copytree(a_run, tmp_path / "copy", symlinks=True)
    if how == "elsewhere":
        text = (copy / "run.yaml").read_text()
        (copy / "run.yaml").write_text(text.replace(missing, "gone.tif"))
    else:
        (copy / missing).unlink()
    if how == "broken":
        (copy / missing).write_bytes(b"\x00\xff{[step\n1,2,\n")
    page = report(copy)
    assert [section.all("h2")[0].text for section in page.all("section")] == SECTIONS
    for title, words in said.items():
        assert words in page.section(title).text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["RUN", "-o", "/nowhere/page.html"], 1, "must be written to a place"),
        (["RUN", "--map", "OTHER", "-o", "OUT"], 1, "on the grid of one of the run's images"),
        (["EMPTY"], 1, "a report needs the folder of a run"),
        (["PLANNED"], 1, "a report needs the folder of a run"),
        ([], 2, "required"),
    ],
    ids=str,
)
def test_what_makes_no_page_is_refused(
    a_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    paths = {name: tmp_path / name for name in ("OTHER", "EMPTY", "PLANNED", "OUT")}
    with rasterio.open(a_run.parent / "labels.tif") as file:
        profile = {**file.profile, "height": 30}
    with rasterio.open(paths["OTHER"], "w", **profile) as file:
        file.write(np.ones((30, 120), np.uint8), 1)
    paths["EMPTY"].mkdir()
    paths["PLANNED"].mkdir()
    (paths["PLANNED"] / "run.yaml").write_text("output: run\n")  # of a run yet to be started
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *(str((paths | {"RUN": a_run}).get(a, a)) for a in arguments)]) == code
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_scores_are_those_of_the_best_and_the_last_validation(
    folder: Path, write_table: Write
) -> None:
    rng = np.random.default_rng(2)
    names = ["0", "1", "2"]
    (folder / "run.yaml").write_text(
        "images: a.tif\nlabels: b.tif\nclasses: 3\noutput: x\nsteps: 9\n"
    )
    scored = ["step", "loss", "num_pixels", "accuracy", "mean_iou", "mean_f1", "seconds"]
    scored += [f"{kind}_{name}" for kind in ("iou", "f1") for name in names]
    values = rng.random((3, 12))
    values[:, 3] = 0.3, 0.9, 0.5  # mean_iou
    rows = [[step, *row] for step, row in zip((3, 6, 9), values.tolist(), strict=True)]
    rows[1][8] = ""  # a class that does not occur
    write_table("validation.csv", scored, rows)
    pixels = rng.integers(1, 10**6, (3, 3, 3))
    confusion = [
        [step, label, found, pixels[n, label, found]]
        for n, step in enumerate((3, 6, 9))
        for label in range(3)
        for found in range(3)
    ]
    write_table("confusion.csv", ["step", "label", "predicted", "pixels"], confusion)
    page = report(folder)
    heads = [caption.text.split(":")[0] for caption in page.section("Classes").all("caption")]
    assert heads == ["Best validation, step 6"] * 2 + ["Last validation, step 9"] * 2
    matrices = [t for t in page.all("table") if "confusion" in t.text]
    for table, n in zip(matrices, (1, 2), strict=True):
        for label, row in enumerate(table.all("tbody")[0].all("tr")):
            titles = [cell.attributes["title"] for cell in row.inside[1:4]]
            assert [int(t.split()[0].replace(",", "")) for t in titles] == pixels[n, label].tolist()
            shares = pixels[n, label] / pixels[n, label].sum()
            assert [cell.text for cell in row.inside[1:4]] == [f"{s:.1%}" for s in shares]
    table = page.table("scores per class")
    assert table[2][1] == "–"
    assert table[1][1] == f"{values[1, 6]:.4f}"
    assert table[3][2] == f"{values[1, 11]:.4f}"
    assert table[3][3] == f"{pixels[1, 2].sum():,}"
    assert table[3][4] == f"{pixels[1, :, 2].sum():,}"
    (chart,) = page.section("Validation").all("img")
    assert "The best by mean_iou is 0.9, of step 6." in chart.attributes["alt"]


def learned(
    folder: Path, write_table: Write, training: np.ndarray, validation: np.ndarray
) -> list[str]:
    """What the page's head says of a run with these losses, a validation every ten steps."""
    rest = [0.1, 1.0, 0.1, 0.0, 0.1, 0.0, 2**30]
    write_table("history.csv", HISTORY, [[n + 1, x, *rest] for n, x in enumerate(training)])
    rows = [[10 * n + 10, x, 0.5 + 0.01 * (n == 5)] for n, x in enumerate(validation)]
    write_table("validation.csv", ["step", "loss", "mean_iou"], rows)
    said = report(folder).section("Run").all("p")
    return [p.text for p in said]


def test_a_word_is_said_where_the_network_learns_its_images_by_heart(
    folder: Path, write_table: Write
) -> None:
    rng = np.random.default_rng(8)
    falls = np.linspace(1, 0.2, 200) * rng.uniform(0.9, 1.1, 200)
    held_out = np.concatenate([np.linspace(1, 0.5, 8), np.linspace(0.5, 0.9, 12)])
    held_out *= rng.uniform(0.99, 1.01, 20)
    (said,) = learned(folder, write_table, falls, held_out)
    best = int(held_out.argmin())
    assert f"it was lowest after step {10 * best + 10} ({held_out[best]:.4g})" in said
    assert f"and is {np.median(held_out[-3:]):.4g} at the end" in said
    count = (200 - 10 * best - 10) // 2
    then, now = np.median(falls[: 10 * best + 10][-count:]), np.median(falls[-count:])
    assert f"fell from {then:.4g} to {now:.4g}" in said
    assert "the checkpoint best is that of step 60, by mean_iou" in said


@pytest.mark.parametrize("kind", ["both fall", "both rise", "level", "lowest of late", "short"])
def test_no_word_is_said_of_other_runs(folder: Path, write_table: Write, kind: str) -> None:
    rng = np.random.default_rng(9)
    falls, noise = np.linspace(1, 0.2, 200), rng.uniform(0.95, 1.05, 20)
    rises = np.concatenate([np.linspace(1, 0.5, 8), np.linspace(0.5, 0.9, 12)])
    late = np.concatenate([np.linspace(1, 0.5, 18), [0.8, 0.9]])
    training, held_out = {
        "both fall": (falls, np.linspace(1, 0.5, 20) * noise),
        "both rise": (np.concatenate([falls[:80], falls[:120][::-1]]), rises),
        "level": (falls, 0.5 * noise),
        "lowest of late": (falls, late),
        "short": (falls[:30], rises[-3:]),
    }[kind]
    assert learned(folder, write_table, training, held_out) == []


def test_a_device_without_room_for_a_map_costs_the_places_alone(
    a_run: Path, a_page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert "as the checkpoint step-00000006 maps them" in a_page.section("Places").text
    monkeypatch.setattr(Mapper, "tiles", full)
    page = Page(write_report(a_run, tmp_path / "page.html").read_text())
    assert "No place is shown: CUDA out of memory" in page.section("Places").text
    assert page.section("Learning").all("img")


def test_time_and_memory_are_those_of_the_files(folder: Path, write_table: Write) -> None:
    rng = np.random.default_rng(4)
    parts = rng.random((50, 4))
    seconds = parts.sum(axis=1) + rng.random(50)
    rows = [[n + 1, rng.random(), 0.1, seconds[n], *parts[n], 2**30 + n] for n in range(50)]
    write_table("history.csv", HISTORY, rows)
    page = report(folder)
    names = ["", "compute", "read", "exchange", "reduce", "swap wait", "all", "peak memory"]
    head, alone, shares = page.table("Time and memory")
    sums = [seconds.sum() - parts.sum(), *parts.sum(axis=0), seconds.sum()]
    assert head == names
    assert alone[0] == "rank 0, all steps"
    assert [float(text) for text in alone[1:-1]] == pytest.approx(sums, abs=0.006)
    assert alone[-1] == "1.00 GiB"
    assert sum(float(text.rstrip("%")) for text in shares[1:-2]) == pytest.approx(100, abs=0.3)
    assert "no timings.json" in page.section("Time and memory").text
    ranks = rng.random((3, 6)) * 100
    columns = [f"{name.replace(' ', '_')}_seconds" for name in names[1:6]] + ["seconds"]

    def timed(values: np.ndarray) -> dict[str, float]:
        return {**dict(zip(columns, values.tolist(), strict=True)), "peak_bytes": 3 << 20}

    ends = {"least": ranks.min(0), "mean": ranks.mean(0), "most": ranks.max(0)}
    timings = {"ranks": [timed(one) for one in ranks], "first_step": 1, "last_step": 50}
    timings |= {name: timed(values) for name, values in ends.items()}
    (folder / "timings.json").write_text(json.dumps(timings))
    (folder / "run.json").write_text(
        json.dumps({"planned": {"device_bytes": 5 << 30, "host_bytes": 7 << 20}})
    )
    planned, _, _, *rows = report(folder).table("Time and memory")[1:]
    assert planned[-1] == "5.00 GiB on the fullest device, 7.00 MiB of the node's memory"
    for row, values in zip(rows, [*ranks, *ends.values()], strict=True):
        assert [float(text) for text in row[1:-1]] == pytest.approx(values, abs=0.006)
        assert row[-1] == "3.00 MiB"
    assert [row[0] for row in rows[2:4]] == ["rank 2, steps 1 to 50", "least of 3 ranks"]


def test_a_huge_run_makes_a_small_page(folder: Path, write_table: Write) -> None:
    rng = np.random.default_rng(5)
    count = 30_000
    loss = np.exp(-np.arange(count) / 10_000) + rng.normal(0, 0.05, count)
    loss[24_321] = -3.0  # a spike that a curve may not lose
    loss[700] = np.nan
    rows = [[n + 1, loss[n], 1e-3, 1.0, 0.1, 0.2, 0.1, 0.0, 2**30] for n in range(count)]
    write_table("history.csv", HISTORY, rows)
    path = write_report(folder)
    assert path.stat().st_size < 300_000
    loss, _ = Page(path.read_text()).section("Learning").all("img")
    assert "lowest -3, step 24,322" in loss.attributes["alt"]


def test_what_no_run_writes_costs_its_part_alone(folder: Path, write_table: Write) -> None:
    write_table("history.csv", ["step", "loss", "seconds"], [[1, 0.5, 1.0], [2, 0.25, 1.0]])
    (folder / "run.json").write_text(json.dumps({"machine": 3}))
    page = Page(write_report(folder).read_text())
    assert "holds what no run writes (TypeError" in page.section("Run").text
    assert page.section("Learning").all("img")
    (folder / "run.json").write_text(json.dumps({"versions": {"a": "\ud800"}}))
    assert r"a \ud800" in write_report(folder).read_text()


def test_addresses_are_not_looked_for_where_the_run_was_started(a_run: Path) -> None:
    view = RunView(a_run)
    assert view.path_of("https://host/a.tif") == "https://host/a.tif"
    assert view.path_of("none.tif") != "none.tif"


def test_a_map_is_shown_with_its_own_image(scene: Path, tmp_path: Path) -> None:
    """Images of one size, without a grid, and of two zones with the same coordinates."""
    rng = np.random.default_rng(2)
    names, flat = ("a", "b", "c", "d"), {"driver": "GTiff", "count": 1, "height": 40, "width": 50}
    zones = dict(zip(names, (None, None, "EPSG:32630", "EPSG:32631"), strict=True))
    images = []
    for name, crs in zones.items():
        place = {"crs": crs, "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)} if crs else {}
        for kind in ("image", "label"):
            path = tmp_path / f"{kind}_{name}.tif"
            with rasterio.open(path, "w", dtype="uint8", **flat, **place) as file:
                file.write(rng.integers(0, 2, (1, 40, 50)).astype(np.uint8))
        images.append(str(tmp_path / f"image_{name}.tif"))
    labels = [path.replace("image_", "label_") for path in images]
    keys = ["--images", str(images), "--labels", str(labels), "--classes=2", "--steps=1"]
    small = ["--network.poolings=1", "--network.convolutions=1", "--network.base=4"]
    run = tmp_path / "run"
    assert main(["train", *keys, *small, "--output", str(run), "--device=cpu"]) == 0
    for image, label in zip(images, labels, strict=True):
        out, page = str(tmp_path / "map.tif"), tmp_path / "page.html"
        assert main(["predict", str(run), image, out, "--overwrite", "--device=cpu"]) == 0
        with rasterio.open(out) as mapped, rasterio.open(label) as truth:
            wrong = int((mapped.read(1) != truth.read(1)).sum())
        assert main(["report", str(run), "--map", out, "-o", str(page)]) == 0
        places = Page(page.read_text()).section("Places")
        assert f"{wrong:,} of 2,000 labelled pixels are wrong" in places.all("h3")[0].text


def test_a_page_replaces_pages_alone(a_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "labels.tif"
    other.write_bytes(b"II*")
    assert main(["report", str(a_run), "-o", str(other)]) == 1
    assert other.read_bytes() == b"II*"


def test_a_page_is_no_folder(a_run: Path, tmp_path: Path) -> None:
    assert main(["report", str(a_run), "-o", str(tmp_path)]) == 1
