"""Scores of a map, against loops over its pixels."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
import rasterio
import shapely
from affine import Affine

import tilenet
from tilenet.cli.evaluate import main
from tilenet.errors import TilenetError
from tilenet.mapping import evaluate
from tilenet.mapping.evaluate import confusion_matrix
from tilenet.mapping.map_facts import read_class_names
from tilenet.scores import SMALL_SPAN, count_pairs, scores

Capture = pytest.CaptureFixture[str]
Write = Callable[..., str]
SIZE = 37, 53
IGNORE = 255
GRID = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def a_pair(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A map and labels; class 3 is in neither, 1 only in the labels, 4 only in the map."""
    rng = np.random.default_rng(seed)
    truth = rng.choice([0, 1, 2, 5, IGNORE], SIZE, p=[0.3, 0.1, 0.3, 0.2, 0.1]).astype("uint8")
    mapped = np.where(rng.random(SIZE) < 0.6, truth, rng.choice([0, 2, 4, 5], SIZE))
    mapped[(mapped == 1) | (mapped == IGNORE)] = 4
    mapped[rng.random(SIZE) < 0.05] = 200  # nodata
    return mapped.astype("uint8"), truth


def by_hand(mapped: np.ndarray, truth: np.ndarray) -> dict[str, object]:
    labelled_pixels = [
        (int(label), int(guess))
        for label, guess in zip(truth.ravel(), mapped.ravel(), strict=True)
        if label != IGNORE
    ]
    pairs = [(label, guess) for label, guess in labelled_pixels if guess != 200]
    iou: list[float | None] = []
    f1: list[float | None] = []
    for c in range(6):
        hits = sum(pair == (c, c) for pair in pairs)
        labelled = sum(label == c for label, _ in pairs)
        found = sum(guess == c for _, guess in pairs)
        union = labelled + found - hits
        iou.append(hits / union if union else None)
        f1.append(2 * hits / (labelled + found) if union else None)
    there = [(i, f) for i, f in zip(iou, f1, strict=True) if i is not None and f is not None]
    return {
        "accuracy": sum(label == guess for label, guess in pairs) / len(pairs),
        "mean_iou": sum(i for i, _ in there) / len(there),
        "mean_f1": sum(f for _, f in there) / len(there),
        "iou": iou,
        "f1": f1,
        "label_pixels": [sum(label == c for label, _ in pairs) for c in range(6)],
        "map_pixels": [sum(guess == c for _, guess in pairs) for c in range(6)],
        "num_pixels": len(pairs),
        "num_unmapped": len(labelled_pixels) - len(pairs),
        "confusion": [[pairs.count((row, col)) for col in range(6)] for row in range(6)],
    }


@pytest.mark.parametrize("block_px", [7, 16, 2048])
def test_scores_are_those_of_a_loop_over_all_pixels(
    write_raster: Write, monkeypatch: pytest.MonkeyPatch, block_px: int
) -> None:
    monkeypatch.setattr(evaluate, "BLOCK_PX", block_px)
    mapped, truth = a_pair()
    paths = write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)
    matrix = confusion_matrix(*paths, IGNORE)
    assert matrix.shape == (6, 7)
    found, wanted = scores(matrix), by_hand(mapped, truth)
    assert found.keys() == wanted.keys()
    assert wanted["iou"][3] is None
    assert wanted["iou"][1] == wanted["iou"][4] == 0
    assert wanted["num_unmapped"] > 20
    for name in ("mean_iou", "mean_f1"):  # numpy adds in another order
        assert found.pop(name) == pytest.approx(wanted.pop(name), rel=1e-14)
    assert found == wanted


def test_another_label_may_be_the_one_that_does_not_count(write_raster: Write) -> None:
    mapped, truth = a_pair()
    path = write_raster("map.tif", mapped, nodata=200)
    other = write_raster("labels.tif", np.where(truth == IGNORE, 77, truth).astype("uint8"))
    first = confusion_matrix(path, write_raster("same.tif", truth), IGNORE)
    assert np.array_equal(confusion_matrix(path, other, 77), first)
    with_nodata = write_raster("nodata.tif", truth, nodata=IGNORE)
    assert np.array_equal(confusion_matrix(path, with_nodata, 9), first)


@pytest.mark.parametrize(
    ("mapped", "labels", "said"),
    [
        ({"dtype": "float32"}, {}, "one band of whole numbers .*1 of float32.*--output classes"),
        ({"bands": 2}, {}, "one band of whole numbers .*2 of uint8"),
        ({}, {"fill": IGNORE}, "at least one pixel must be labelled"),
        ({}, {"dtype": "int16", "fill": -3}, r"counted from 0 \(.*: -3\)"),
        ({}, {"dtype": "int32", "fill": 70000}, r"at most 4096 classes .*: 70000\)"),
        ({}, {"size": (37, 52), "crs": None}, "must have the image's size"),
        ({}, {"size": (74, 106), "crs": None, "transform": None}, "must have the image's size"),
        ({"crs": None, "transform": None}, {"size": (74, 106)}, "must have the image's size"),
        ({}, {"transform": Affine(2, 0, 6e5, 0, -2, 4e6)}, "labels must overlap their image"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused(
    write_raster: Write, mapped: dict[str, object], labels: dict[str, object], said: str
) -> None:
    def write(name: str, change: dict[str, object]) -> str:
        rng = np.random.default_rng(1)
        shape = (change.pop("bands", 1), *change.pop("size", SIZE))
        values = rng.integers(0, 3, shape).astype(change.pop("dtype", "uint8"))
        values[:] = change.pop("fill", values)
        return write_raster(name, values, **change)

    paths = write("map.tif", dict(mapped)), write("labels.tif", dict(labels))
    with pytest.raises(TilenetError, match=said):
        confusion_matrix(*paths, IGNORE)


def test_labels_are_classes_of_a_map_that_names_its_own(write_raster: Write) -> None:
    values = np.random.default_rng(1).integers(0, 3, (1, *SIZE)).astype("uint8")
    truth = np.where(values == 2, 7, values)
    paths = write_raster("map.tif", values), write_raster("labels.tif", truth)
    with pytest.raises(TilenetError, match=r"classes of the map \(.*: 7, .*: 0 to 3\); name that"):
        confusion_matrix(*paths, IGNORE, least=4, all_named=True)
    assert confusion_matrix(*paths, 7, least=4, all_named=True).shape == (4, 5)
    assert confusion_matrix(*paths, IGNORE).shape == (8, 9)  # of maps of other programs


def test_a_map_without_data_where_there_are_labels_is_refused(write_raster: Write) -> None:
    mapped, truth = a_pair()
    mapped[truth != IGNORE] = 200
    paths = write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)
    with pytest.raises(TilenetError, match="at least one labelled pixel must have data in the map"):
        confusion_matrix(*paths, IGNORE)


# --- the command


def test_the_command_prints_json_or_a_table(write_raster: Write, capsys: Capture) -> None:
    mapped, truth = a_pair()
    paths = [write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)]
    assert main([*paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == scores(confusion_matrix(*paths, IGNORE)) | {"classes": []}
    assert main(paths) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == list("012345")
    assert lines[4].split()[1:3] == ["–", "–"]
    assert lines[1].split()[1] == f"{found['iou'][0]:.4f}"
    assert lines[7].split() == ["mean", f"{found['mean_iou']:.4f}", f"{found['mean_f1']:.4f}"]
    assert f"{found['num_unmapped']} labelled pixels are nodata in" in lines[-1]


NAMES = ("ground & <soil>", "road\u202e", "2", "a" * 99, "water")


def names_beside(path: str, names: Sequence[str], band: int = 1) -> None:
    """As GDAL and QGIS write them."""
    categories = "".join(f"<Category>{escape(name)}</Category>" for name in names)
    Path(f"{path}.aux.xml").write_text(
        f'<PAMDataset><PAMRasterBand band="{band}"><Description>x</Description><CategoryNames>'
        f"{categories}</CategoryNames></PAMRasterBand></PAMDataset>"
    )


def tagged(path: str, names: Sequence[str]) -> None:
    with rasterio.open(path, "r+") as file:
        file.update_tags(1, **{f"class_{index}": name for index, name in enumerate(names)})


def test_classes_are_named_as_the_map_names_them(write_raster: Write, capsys: Capture) -> None:
    mapped, truth = a_pair()
    paths = [write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)]
    names_beside(paths[0], NAMES)
    assert main(paths) == 0
    lines = capsys.readouterr().out.splitlines()
    wide = len("3 ") + 41
    assert [line[:wide].rstrip() for line in lines[:8]] == [
        "class",
        "0 ground & <soil>",
        r"1 road\u202e",
        "2",
        f"3 {'a' * 40}…",
        "4 water",
        "5",  # has no name
        "mean",
    ]
    assert len({line.rindex("F1") if "F1" in line else len(line) for line in lines[1:7]}) == 1
    assert main([*paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == list(NAMES)


def test_names_are_those_of_its_band_beside_the_map_or_else_in_it(
    write_raster: Write, tmp_path: Path
) -> None:
    mapped, _ = a_pair()
    path = write_raster("map.tif", mapped, nodata=200)
    assert read_class_names(path) == ()
    tagged(path, ("a", "b"))
    beside = Path(f"{path}.aux.xml")
    assert read_class_names(path) == ("a", "b")
    names_beside(path, NAMES, band=2)
    assert read_class_names(path) == ("a", "b")
    names_beside(path, ("c", ""))
    assert read_class_names(path) == ("c", "")
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {name} "{f"&{before};" * 10}">'
        for before, name in zip("abcdefghi", "bcdefghij", strict=True)
    )
    for text in ("", "no XML", "<PAMDataset/>", bomb + "]><PAMDataset>&j;</PAMDataset>"):
        beside.write_text(text)
        assert read_class_names(path) == ("a", "b")


def test_labels_on_another_grid_are_resampled_and_that_is_said(
    write_raster: Write, capsys: Capture
) -> None:
    mapped, truth = a_pair()
    moved = GRID @ Affine.translation(-3.2, -2.1)
    paths = [
        write_raster("map.tif", mapped, nodata=200),
        write_raster("labels.tif", np.pad(truth, ((2, 5), (3, 1))), transform=moved),
    ]
    assert main([*paths, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == by_hand(mapped, truth) | {"classes": []} | {
        name: pytest.approx(by_hand(mapped, truth)[name], rel=1e-14)
        for name in ("mean_iou", "mean_f1")
    }
    assert "labels.tif lie on another grid" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("factor", [1, 3])
def test_a_map_of_a_part_is_scored_on_what_it_covers(
    write_raster: Write, capsys: Capture, factor: int
) -> None:
    """Labels reach beyond it on all sides, on its grid or on one `factor` times finer."""
    mapped, truth = a_pair()
    fine = np.pad(truth, ((2, 5), (3, 1))).repeat(factor, 0).repeat(factor, 1)
    if factor > 1:
        corner = fine[::factor, ::factor]
        corner[corner != IGNORE] = 1  # one of nine: the others are more
    grid = GRID @ Affine.translation(-3, -2) @ Affine.scale(1 / factor)
    labels = write_raster("labels.tif", fine, transform=grid)
    path = write_raster("map.tif", mapped, nodata=200)
    assert main([path, labels, "--json"]) == 0
    printed = capsys.readouterr()
    wanted = by_hand(mapped, truth)
    close = {name: pytest.approx(wanted[name], rel=1e-14) for name in ("mean_iou", "mean_f1")}
    assert json.loads(printed.out) == wanted | {"classes": []} | close
    rows, cols = SIZE[0] * factor, SIZE[1] * factor
    assert printed.err == (
        f"tilenet: the map covers {rows} × {cols} of the {rows + 7 * factor} × "
        f"{cols + 4 * factor} px of {labels}, and is scored on these\n"
    )


@pytest.mark.parametrize(
    ("moved", "crs"),
    [((0, 0), "EPSG:32630"), ((-3, -2), "EPSG:32630"), ((0.4, 0.3), "EPSG:32630"), ((0, 0), None)],
)
def test_a_window_of_a_map_is_scored(
    write_raster: Write, capsys: Capture, moved: tuple[float, float], crs: str | None
) -> None:
    mapped, truth = a_pair()
    more = ((2, 1), (3, 4)) if moved == (-3, -2) else ((0, 0), (0, 0))
    grid = GRID @ Affine.translation(*moved)
    paths = [
        write_raster("map.tif", mapped, nodata=200, crs=crs),
        write_raster("labels.tif", np.pad(truth, more), transform=grid, crs=crs),
    ]
    assert main([*paths, "--window", "5,7,20,30", "--json"]) == 0
    printed = capsys.readouterr()
    part = np.s_[5:25, 7:37]
    seen = truth[part]
    if moved == (0.4, 0.3):
        assert "lie on another grid" in printed.err
    else:
        assert printed.err == ""
    wanted = by_hand(mapped[part], seen)
    assert json.loads(printed.out)["confusion"] == wanted["confusion"]
    found = tilenet.evaluate(*paths, window=(5, 7, 20, 30))
    assert isinstance(found, tilenet.Scores)
    assert found.confusion == wanted["confusion"]
    for window, said in (("-1,0,5,5", "lies inside the image"), ("0,0,5", "four whole numbers")):
        assert main([*paths, "--window", window]) == 1
        assert said in capsys.readouterr().err
    assert main([*paths, "--window", "0,0,5,x"]) == 2


@pytest.mark.parametrize("window", [None, (4, 2, 11, 9)])
def test_numbers_of_a_part(
    write_raster: Write, capsys: Capture, window: tuple[int, ...] | None
) -> None:
    rng = np.random.default_rng(6)
    mapped, truth = rng.normal(size=(2, *SIZE)).astype("float32")
    moved = GRID @ Affine.translation(-3, -2)
    labels = write_raster("labels.tif", np.pad(truth, ((2, 5), (3, 1))), transform=moved)
    found = tilenet.evaluate(write_raster("map.tif", mapped), labels, window=window)
    assert isinstance(found, tilenet.NumberScores)
    row, col, height, width = window or (0, 0, *SIZE)
    errors = (mapped.astype(float) - truth)[row : row + height, col : col + width]
    assert found.num_pixels == errors.size
    assert found.rmse == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-12)
    assert ("the map covers 37 × 53 of the 44 × 57 px" in capsys.readouterr().err) != bool(window)


def test_labels_may_be_polygons(write_raster: Write, write_vector: Write, capsys: Capture) -> None:
    def box(top: int, left: int, bottom: int, right: int) -> shapely.Polygon:
        places = shapely.box(left + 0.3, top + 0.3, right + 0.3, bottom + 0.3).exterior.coords
        return shapely.Polygon([GRID @ place for place in places])

    truth = np.zeros(SIZE, np.int64)
    truth[3:9, 5:20], truth[20:31, 30:50], truth[1:3, 1:53] = 2, 5, IGNORE
    shapes = [box(3, 5, 9, 20), box(20, 30, 31, 50), box(1, 1, 3, 53)]
    # two layers, neither of which says where it lies
    labels = write_vector("labels.gpkg", shapes[:1], ["field"], None, layer="a")
    kinds = ["field", "road", "fog"]
    write_vector("labels.gpkg", shapes, kinds, None, layer="b", append=True)
    mapped = a_pair()[0]
    paths = [write_raster("map.tif", mapped, nodata=200), labels]
    options = ["--field", "class", "--classes", "field=2,road=5,fog=ignore", "--layer", "b"]
    assert main([*paths, *options, "--label-crs", "EPSG:32630", "--json"]) == 0
    wanted = by_hand(mapped, truth)
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("confusion", "num_pixels", "num_unmapped")} == {
        name: wanted[name] for name in ("confusion", "num_pixels", "num_unmapped")
    }
    touched = [*paths, "--layer", "b", "--label-crs", "image", "--all-touched", "--json"]
    assert main(touched) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["label_pixels"][1] > (truth > 0).sum()


def test_errors_are_one_line(write_raster: Write, refusal: Callable[..., str]) -> None:
    labels = write_raster("labels.tif", a_pair()[1])
    for arguments, code, said in (
        (["/nowhere.tif", labels], 1, "/nowhere.tif"),
        ([labels, "/nowhere.tif"], 1, "/nowhere.tif"),
        ([labels], 2, "labels"),
        ([labels, labels, "--ignore-index", "none"], 2, "--ignore-index"),
        ([labels, labels, "--classes", "a=1"], 2, "name it with vectors.field (--field)"),
        ([labels, labels, "--field", "kind", "--classes", "a=one"], 2, "argument --classes"),
        ([labels, labels, "--field", "f", "--classes", "a=2,a=1"], 2, "value (a: 2 and 1); delete"),
        ([labels, labels, "--field", "kind"], 1, "vectors.field (--field) is read only where"),
        ([labels, labels, "--all-touched"], 1, "(vectors.all_touched: True, labels: "),
        (
            [labels, labels, "--label-crs", "image"],
            1,
            "vectors.crs (--label-crs) is read only where labels",
        ),
    ):
        assert said in refusal(main, code, *arguments)


@pytest.mark.parametrize(
    "values",
    [
        [0, 1, 2, 3],
        [-1, 4, 7],
        [-5, -3],
        [0, SMALL_SPAN - 1],
        [0, SMALL_SPAN],
        [-(2**63), 2**63 - 1, 12],
        [2**40, 2**40 + 3],
    ],
    ids=repr,
)
def test_pairs_are_counted_whatever_their_values(values: list[int]) -> None:
    rng = np.random.default_rng(len(values))
    labels, found = rng.choice(np.array(values, np.int64), (2, 301))
    assert count_pairs(labels, found) == Counter(zip(labels.tolist(), found.tolist(), strict=True))
    assert count_pairs(labels[:0], found[:0]) == {}


def test_classes_that_do_not_occur_have_no_scores_and_none_is_ignored_by_chance(
    write_raster: Write, capsys: Capture
) -> None:
    rng = np.random.default_rng(6)
    values = rng.integers(0, 2, (2, 1, 12, 15)).astype(np.uint16)
    paths = [write_raster("map.tif", values[0]), write_raster("labels.tif", values[1])]
    tagged(paths[0], [f"c{number}" for number in range(4)])
    assert main([*paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["iou"][2:] == found["f1"][2:] == [None, None]
    assert np.shape(found["confusion"]) == (4, 4)
    assert found["mean_iou"] == np.mean(found["iou"][:2])
    tagged(paths[0], [f"c{number}" for number in range(300)])
    assert main(paths) == 1
    assert "ignore_index may not be a class (ignore_index: 255" in capsys.readouterr().err
    assert main([*paths, "--ignore-index", "65535"]) == 0


def test_names_without_text_count_among_the_tags(write_raster: Write, capsys: Capture) -> None:
    mapped, truth = a_pair()
    paths = [write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)]
    tagged(paths[0], ["a", "", "c"])
    assert main([*paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == ["a", "", "c"]


@pytest.mark.parametrize("truth", [0.1, 3.7e5, -1 / 3])
def test_labels_of_one_number_have_no_r2(
    write_raster: Write, capsys: Capture, truth: float
) -> None:
    shape = 1, 41, 37  # whose mean rounds
    mapped = np.random.default_rng(7).normal(truth, 1, shape)
    paths = [write_raster("map.tif", mapped), write_raster("labels.tif", np.full(shape, truth))]
    assert main([*paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["r2"] is None
    write_raster(
        "labels.tif", np.full(shape, truth) + np.random.default_rng(8).normal(0, 1e-6, shape)
    )
    assert main([*paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["r2"] < -1e6


def test_empty_names_at_the_end_are_none(write_raster: Write, capsys: Capture) -> None:
    """Other programs list 256 of them."""
    mapped, truth = a_pair()
    paths = [write_raster("map.tif", mapped, nodata=200), write_raster("labels.tif", truth)]
    names_beside(paths[0], ["a", "b", *[""] * 254])
    assert main([*paths, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["iou"]) == 6
