"""Patterns and lists of images: which label belongs to which image, and everything wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import shapely

from tilenet.data.lists.image_list import read_image_list
from tilenet.data.lists.image_patterns import is_list_file, is_pattern, matched
from tilenet.errors import TilenetError
from tilenet.training.config.read import with_listed_images
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def a_run(images: Any, labels: Any = None, validation: ValidationKeys | None = None) -> RunFile:
    more = {} if validation is None else {"validation": validation}
    return RunFile(images=images, labels=labels, classes=2, output="out", steps=1, **more)


def test_labels_are_matched_by_what_the_stars_stand_for(here: Path) -> None:
    labels = ["l/a_mask.tif", "l/aB_mask.tif", "l/b_mask.tif"]
    assert sorted(labels) != labels  # each for itself, the files would be matched wrongly
    touch("s/b.tif", "s/aB.tif", "s/a.tif", *labels)
    touch("s/.hidden.tif", "s/other.png", "s/folder.tif/x")
    images = ["s/a.tif", "s/aB.tif", "s/b.tif"]
    assert matched("s/*.tif", "l/*_mask.tif") == list(zip(images, labels, strict=True))


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("s/**/*.tif", "l/**/*.gpkg"),
        ("s//**/*.tif", "./l/**/*.gpkg"),
        ("s/**/[!c-z].tif", "l/**/[!c-z].gpkg"),
        ("s/**/?.tif", "l/**/?.gpkg"),
        ("s/**/*.tif", "l/**/?.gpkg"),
    ],
)
def test_folders_in_folders(here: Path, images: str, labels: str) -> None:
    touch("s/x/y/a.tif", "s/b.tif", "s/x/b.tif", "l/x/y/a.gpkg", "l/b.gpkg", "l/x/b.gpkg")
    pairs = [tuple(str(Path(path)) for path in pair) for pair in matched(images, labels)]
    assert pairs == [
        ("s/b.tif", "l/b.gpkg"),
        ("s/x/b.tif", "l/x/b.gpkg"),
        ("s/x/y/a.tif", "l/x/y/a.gpkg"),
    ]


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        ("s/*.png", "l/*.tif", r"met by files \(s/\*\.png: by none\)"),
        ("s/*+s/*", "l/*+l/*", r"by none; stacks of several files are listed in a CSV file\)"),
        ("s/*.tif", "l/*.tif", r"3 files, labels: .*, 2 files; no label for s/b\.tif\)"),
        ("s/[ac]*.tif", "m/[abcd]*.tif", r"no label for s/c\.tif\)"),
        ("s/*.tif", "n/*.tif", r"no image for n/d\.tif and 1 more\)"),
        ("s/*.tif", "l/a.tif", "needs one of labels"),
        (
            "s\0/?.tif",
            "l/?.tif",
            r"name of a pattern is UTF-8 without NUL bytes \('s\\x00/\?\.tif'\)",
        ),
    ],
)
def test_patterns_that_do_not_match_are_refused(
    here: Path, images: str, labels: str, said: str
) -> None:
    touch("s/a.tif", "s/b.tif", "s/c.tif", "l/a.tif", "l/c.tif", "m/a.tif", "m/b.tif", "m/d.tif")
    touch(*(f"n/{name}.tif" for name in "abcde"))
    with pytest.raises(TilenetError, match=said) as raised:
        matched(images, labels)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("start", ["", "t/"])
def test_a_folder_for_each_image(here: Path, start: str) -> None:
    touch(*(f"{start}{folder}/{file}.tif" for folder in "xy" for file in ("image", "mask")))
    pairs = [(f"{start}{folder}/image.tif", f"{start}{folder}/mask.tif") for folder in "xy"]
    assert matched(f"{start}*/image.tif", f"{start}*/mask.tif") == pairs
    touch(f"{start}image.tif", f"{start}mask.tif")
    pairs.insert(0, (f"{start}image.tif", f"{start}mask.tif"))
    assert sorted(matched(f"{start}**/image.tif", f"{start}**/mask.tif")) == sorted(pairs)


def test_what_is_a_pattern_and_what_a_list(here: Path) -> None:
    touch("a[1].tif")
    assert not is_pattern("a[1].tif")
    assert is_pattern("b[1].tif")
    assert not is_pattern("/vsicurl/https://example.org/x.tif?token=1")
    assert not is_pattern("https://example.org/*.tif")
    assert is_list_file("x/LIST.CSV", with_labels=True)
    assert is_list_file("list.gpkg")
    assert not is_list_file("image.gpkg", with_labels=True)
    assert not is_list_file("list.csv.tif")


TABLE = [
    ("a.tif", "a.gpkg", "train"),
    ("sub/R.tif+sub/G+x.tif", "b.tif", "val"),
    ("/abs/c.tif", "c.tif", "Validation"),
    ("d.tif", "", "test"),
    ("e.tif", "e.tif", "train"),
]


def write_table(path: Path, names: list[str], rows: list[tuple[Any, ...]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in [names, *rows, ()]))
    else:
        columns = [np.array(column, object) for column in zip(*rows, strict=True)]
        points = shapely.to_wkb(shapely.points(np.arange(len(rows)), 1))
        pyogrio.raw.write(path, points, columns, names, crs="EPSG:4326", geometry_type="Point")
    return str(path)


@pytest.mark.parametrize("name", ["list.csv", "list.geojson", "list.gpkg", "list.shp", "list.fgb"])
def test_a_list_names_images_relative_to_its_folder(here: Path, name: str) -> None:
    touch("data/sub/R.tif", "data/sub/G+x.tif")
    names = ["Image", "label", "split"]
    found = read_image_list(write_table(Path("data") / name, names, TABLE))
    assert sorted(found.train) == [("data/a.tif", "data/a.gpkg"), ("data/e.tif", "data/e.tif")]
    assert sorted(found.validation) == [
        ("/abs/c.tif", "data/c.tif"),
        ("data/sub/R.tif+data/sub/G+x.tif", "data/b.tif"),
    ]
    assert (found.num_test, found.has_splits) == (1, True)


def test_a_list_without_geometry_or_splits(here: Path) -> None:
    features = [
        {"type": "Feature", "geometry": None, "properties": {"image": name, "label": "l.tif"}}
        for name in ("c.tif", "a.tif", [1, 2])
    ]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    Path("list.json").write_text(text)
    found = read_image_list("list.json")
    # As they stand; a list within a list is a text.
    assert [image for image, _ in found.train] == ["c.tif", "a.tif", "[ 1, 2 ]"]
    assert (found.validation, found.has_splits) == ((), False)


def test_spreadsheets_write_marks_semicolons_and_blanks(here: Path) -> None:
    text = '\ufeffimage ; Label;note\r\n"a;1.tif"; l.tif; \r\n;;\r\nb.tif;l.tif;"x, y"\r\n'
    Path("list.csv").write_text(text)
    found = read_image_list("list.csv")
    assert found.train == (("a;1.tif", "l.tif"), ("b.tif", "l.tif"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"columns image, label .*list\.csv: none\)"),
        ("image,label", r"must name at least one \(list\.csv: none\)"),
        ("image,mask\na,b", r"each once \(list\.csv: image, mask\)"),
        ("image,label,Image\na,b,c", r"each once \(list\.csv: image, label, image\)"),
        ("image,label\na", r"line 2, columns: 2\)"),
        ("image,label\n\na,b,c", r"line 3, columns: 2\)"),
        ("image,label\na,b\nc, ", r"names a file for its label \(list\.csv, entry 2: ''\)"),
        ("image,label\n ,b", r"names a file for its image \(list\.csv, entry 1: ''\)"),
        ("image,label,split\na,,val", "names a file for its label"),
        ("image,label,split\na,b,tset", r"train, validation, val or test .*entry 1: 'tset'\)"),
        ("image,label,split\na,b,", r"train, validation, val or test .*entry 1: ''\)"),
        ("image,label\na,b\n./a,c", r"each image once \(list\.csv: \./a in entries 1 and 2\)"),
        ("image,label\na\0,b", r"names a file for its image .*'a\\x00'\)"),
        ("image,label\na," + "b" * 200_000, r"must be readable \(list\.csv: field larger"),
        ('image,label\na,"b\nc', r"must be readable \(list\.csv: unexpected end of data\)"),
        ("image,label\né,b".encode("latin-1"), r"must be readable \(list\.csv: 'utf-8' codec"),
    ],
)
def test_a_wrong_list_has_its_sentence(here: Path, text: str | bytes, said: str) -> None:
    Path("list.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TilenetError, match=said) as raised:
        read_image_list("list.csv")
    assert "\n" not in str(raised.value)


def test_lists_that_are_no_files(here: Path) -> None:
    with pytest.raises(TilenetError, match="No such file"):
        read_image_list("list.csv")
    Path("folder.csv").mkdir()
    with pytest.raises(TilenetError, match="Is a directory"):
        read_image_list("folder.csv")
    Path("list.geojson").write_text('{"type": "Feat')
    with pytest.raises(TilenetError, match=r"a file that GDAL can read \(list\.geojson"):
        read_image_list("list.geojson")


def test_a_run_holds_plain_lists_afterwards(here: Path) -> None:
    touch("s/a.tif", "s/b.tif", "l/a.tif", "l/b.tif")
    run, notes = with_listed_images(a_run(["x.tif", "s/*.tif"], ["y.tif", "l/*.tif"]))
    assert run.images == ("x.tif", "s/a.tif", "s/b.tif")
    assert run.labels == ("y.tif", "l/a.tif", "l/b.tif")
    assert run.validation == ValidationKeys()
    assert notes == ["s/*.tif: 2 images"]
    path = write_table(Path("list.csv"), ["image", "label", "split"], TABLE[:1] + TABLE[2:])
    run, notes = with_listed_images(a_run(path))
    assert (run.images, run.labels) == (("a.tif", "e.tif"), ("a.gpkg", "e.tif"))
    assert run.validation == ValidationKeys(("/abs/c.tif",), ("c.tif",))
    assert notes == [
        "list.csv: 2 images to train on, 1 for validation, 1 for test; those for test are left out"
    ]
    again, notes = with_listed_images(run)
    assert (again, notes) == (run, [])


def test_a_list_for_validation(here: Path) -> None:
    rows = [("a.tif", "b.tif"), ("c.tif", "d.tif")]
    path = write_table(Path("some.csv"), ["image", "label"], rows)
    run, notes = with_listed_images(a_run("x.tif", "y.tif", ValidationKeys(path)))
    assert notes == ["some.csv: 2 images for validation"]
    assert (run.images, run.labels) == (("x.tif",), ("y.tif",))
    assert run.validation.image_paths == ("a.tif", "c.tif")
    path = write_table(Path("all.csv"), ["image", "label", "split"], TABLE)
    run, notes = with_listed_images(a_run("x.tif", "y.tif", ValidationKeys(path)))
    assert run.validation.label_paths == ("b.tif", "c.tif")
    assert notes == ["all.csv: 2 images for validation; 2 to train on and 1 for test are left out"]


@pytest.mark.parametrize(
    ("images", "labels", "validation", "said"),
    [
        ("all.csv", None, ValidationKeys("v.tif", "w.tif"), "from one place .*all.csv has 1"),
        ("none.csv", None, ValidationKeys(), r"none\.csv: none of train\)"),
        ("x.tif", "y.tif", ValidationKeys("train.csv"), r"none of validation\)"),
        (["s/*.tif", "s/a*"], ["s/*.tif", "s/a*"], ValidationKeys(), r"\(s/a\.tif: several"),
        ("s/*.tif", "s/a.tif", ValidationKeys(), "needs one of labels"),
        ("s/a.tif", "s/*.tif", ValidationKeys(), "needs one of labels"),
    ],
)
def test_what_a_run_cannot_mean(
    here: Path, images: Any, labels: Any, validation: ValidationKeys, said: str
) -> None:
    touch("s/a.tif", "s/b.tif")
    names = ["image", "label", "split"]
    write_table(Path("all.csv"), names, [("a", "b", "train"), ("c", "d", "val")])
    write_table(Path("none.csv"), names, [("a", "b", "test"), ("c", "d", "val")])
    write_table(Path("train.csv"), names, [("a", "b", "train")])
    with pytest.raises(TilenetError, match=said) as raised:
        with_listed_images(a_run(images, labels, validation))
    assert "\n" not in str(raised.value)
