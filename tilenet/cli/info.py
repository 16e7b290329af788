"""`tilenet info`: describe images and their labels before anything is trained on them."""

import json
import sys
from itertools import groupby
from math import isfinite
from typing import Any

from tilenet.cli.options.arguments import Arguments
from tilenet.cli.options.data import band_names, nodata_value
from tilenet.cli.options.labels import add_labels, vectors_of
from tilenet.data.inspect import InfoRequest, describe
from tilenet.data.labels.vector_keys import is_whole, quoted
from tilenet.errors import UsageError, printable
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world
from tilenet.parallel.ranks.start import launched
from tilenet.training.config.read import yaml_text

MOST_NAMES = 12  # of classes that a map names
MOST_LETTERS = 80  # of a value of a field

Row = tuple[str, str]  # a name, empty in further rows of one name, and the text on it


def block_of(facts: dict[str, Any]) -> str:
    """One image's facts (of `describe`), a block of lines."""
    rows = _header(facts) if "size" in facts else []
    labels = facts.get("labels", {})
    if "kind" in labels:
        rows += _labels(labels)
    if "pixels" in facts:
        rows += _pixels(facts["pixels"])
    if "class_pixels" in labels:
        rows += _classes(labels)
    rows += [("note", note) for note in facts.get("notes", [])]
    lines = [facts["path"], *(f"  {name:<8} {text}".rstrip() for name, text in rows)]
    return "\n".join(map(printable, lines))  # names of bands, layers and fields come from files


def _header(facts: dict[str, Any]) -> list[Row]:
    size = "{:,} × {:,} px (rows × columns)".format(*facts["size"])
    if facts["read_size"] != facts["size"]:
        size += ", read as {:,} × {:,}".format(*facts["read_size"])
    rows = [("size", size), ("bands", _bands(facts["bands"])), ("grid", _grid(facts))]
    for file in facts["resampled"]:
        size = "{:,} × {:,} px".format(*file["size"])
        rows.append(
            ("", f"{file['path']}: {size}, {file['crs']}, resampled to it ({file['method']})")
        )
    kind = "strips" if facts["block"][1] == facts["size"][1] else "tiles"
    suits = "suit window reads" if facts["suits_windows"] else "do not suit window reads"
    blocks = "{} of {:,} × {:,} px {}".format(kind, *facts["block"], suits)
    return [*rows, ("data", facts["data"]), ("blocks", blocks)]


def _bands(bands: list[dict[str, Any]]) -> str:
    """Return `1 red, 2 green: uint8`: bands grouped by dtype, with a note on those not read."""
    groups = []
    for dtype, alike in groupby(bands, lambda band: band["dtype"]):
        texts: list[str] = []
        for (read, named), run in groupby(alike, lambda band: (band["read"], bool(band["name"]))):
            bands_of_run = list(run)
            first, last = bands_of_run[0]["number"], bands_of_run[-1]["number"]
            names = [f"{band['number']} {band['name']}".rstrip() for band in bands_of_run]
            if not named and last - first >= 4:
                names = [f"{first}–{last}"]
            texts += [name + " (not read)" * (not read) for name in names]
        groups.append(f"{', '.join(texts)}: {dtype}")
    return ", ".join(groups)


def _grid(facts: dict[str, Any]) -> str:
    width, height = facts["pixel"]
    if facts["crs"] is None and (width, height) == (1.0, 1.0):
        return f"{facts['lacks'] or 'no CRS and no transform'}: pixels only"
    pixel = f"{width:.6g} × {height:.6g} {facts['unit'] or 'units'}"
    return f"{facts['crs'] or 'no CRS'}, pixels of {pixel} (width × height)"


def _labels(labels: dict[str, Any]) -> list[Row]:
    rows = [
        ("labels", f"{labels['path']}: {labels['kind']}, {labels['crs'] or 'no CRS'}"),
        ("", labels["grid"]),
    ]
    if labels["bounds"] is not None:
        where = "left {:.9g}, bottom {:.9g}, right {:.9g}, top {:.9g}".format(*labels["bounds"])
        share = f"this rectangle covers {labels['share']:.1%} of the image's"
        rows.append(("", f"{where} in the image's CRS; {share}"))
    if labels["names"]:
        names = [f"{label} {name}" for label, name in labels["names"].items()]
        more = " …" * (len(names) > MOST_NAMES)
        rows.append(("", f"classes are named: {', '.join(names[:MOST_NAMES])}{more}"))
    return rows + ([] if labels["values"] is None else _values(labels["values"]))


def _values(values: dict[str, Any]) -> list[Row]:
    """Values of the field, and the mapping that a run file needs."""
    number, num_listed, features = values["distinct"], len(values["counts"]), values["features"]
    counted = (
        f"{number:,} value{'s' * (number != 1)} in {features:,} polygon{'s' * (features != 1)}"
    )
    if num_listed < number:
        counted += f", the {num_listed} most frequent of them:"
    classes = values["classes"]
    names = {text: "null" if label is None else str(label) for text, label in classes.items()}
    names |= dict.fromkeys(values["missing"], "not given")
    table = [
        [f"{count:,}", names[text], _cut(quoted(text))] for text, count in values["counts"].items()
    ]
    rows = [("field", f"{values['field']}: {counted}")]
    rows += _table([["polygons", "class", "value"], *table])
    # In the order of the classes, values that do not count last.
    short = [pair for pair in classes.items() if _cut(pair[0]) == pair[0]]
    short.sort(key=lambda pair: (pair[1] is None, pair[1] or 0))
    if short:
        keys = {"field": values["field"], "classes": {_key(text): label for text, label in short}}
        told = "for the run file (0 is what lies in no polygon, null does not count):"
        rows += [("", told), ("", f"vectors: {yaml_text(keys, flow=True, width=2**30).strip()}")]
    return rows


def _cut(text: str) -> str:
    """Return the beginning of a text that is too long to be the name of a class."""
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _key(text: str) -> str | int | None:
    """A value as a key of YAML."""
    if text == "null":
        return None
    return int(text) if is_whole(text) and str(int(text)) == text else text


def _pixels(pixels: dict[str, Any]) -> list[Row]:
    names = ("mean", "std", "minimum", "maximum")
    table = [
        [str(band["band"]), *(f"{band[name]:.6g}" for name in names)] for band in pixels["bands"]
    ]
    number, share = pixels["num_pixels"], pixels["share_without_data"]
    without = (
        f"{number - pixels['num_valid']:,} of {number:,} pixels ({share:.2%}) are without data"
    )
    return [("pixels", without), *_table([["band", "mean", "std", "min", "max"], *table])]


def _classes(labels: dict[str, Any]) -> list[Row]:
    total = sum(labels["class_pixels"])
    pairs = zip(labels["class_pixels"], labels["class_weights"], strict=True)
    table = [
        [str(label), f"{pixels:,}", f"{pixels / total:.2%}", f"{weight:.6g}"]
        for label, (pixels, weight) in enumerate(pairs)
        if pixels
    ]
    return [
        ("classes", f"{labels['share_labelled']:.2%} of the pixels with data are labelled"),
        *_table([["class", "pixels", "share", "balanced weight"], *table]),
    ]


def _table(rows: list[list[str]]) -> list[Row]:
    """Columns, the first row their heads; the last one begins below its head where it is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = [">"] * (len(widths) - 1) + ["<" if rows[0][-1] == "value" else ">"]
    columns = list(zip(signs, widths, strict=True))
    return [
        ("", "  ".join(f"{c:{sign}{w}}" for c, (sign, w) in zip(row, columns, strict=True)))
        for row in rows
    ]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _info(arguments))


def _info(arguments: list[str]) -> int:
    # A header is read on login nodes too, where MPI may not start. Who exits after its help while
    # MPI runs would end the job.
    alone = {"-h", "--help"} & set(arguments) or not (launched() or "--pixels" in arguments)
    comm = None if alone else world()
    first = comm is None or comm.rank == 0
    try:
        options = _parser().parse_args(arguments)
        labels = options.labels or [None] * len(options.images)
        if len(labels) != len(options.images):
            raise UsageError(
                f"each image needs one label file (images: {len(options.images)}, --labels: "
                f"{len(labels)}); list them in the same order"
            )
        request = InfoRequest(
            bands=options.bands,
            nodata=options.nodata,
            resolution=options.resolution,
            ignore_index=options.ignore_index,
            vectors=vectors_of(options),
            pixels=options.pixels,
        )
    except UsageError as error:
        if first:
            print(f"tilenet info: {error}", file=sys.stderr)
        return 2
    everything = []
    for path, labels_path in zip(options.images, labels, strict=True):
        facts = describe(path, labels_path, request, comm)
        everything.append(facts)
        if first and not options.json:
            if len(facts) > 2:  # more than its path and why it was refused
                print(block_of(facts), end="\n\n", flush=True)
            if "refused" in facts:
                print(f"tilenet: {facts['refused']}", file=sys.stderr, flush=True)
    if first and options.json:
        print(json.dumps({"images": _plain(everything)}))
    return int(any("refused" in facts for facts in everything))


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet info",
        allow_abbrev=False,  # whether MPI is started is seen before
        description="Say what images and their labels are: grid, bands, nodata, how labels lie; "
        "with --pixels also statistics and classes, over all MPI ranks.",
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="raster; files that plus signs join are stacked on the grid of the first: "
        "R.tif+G.tif+B.tif",
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABELS",
        help="label raster or file of polygons of each image, in the same order",
    )
    parser.add_argument(
        "--bands",
        type=band_names,
        metavar="BAND,…",
        help="names or numbers of the bands to read (all but alpha)",
    )
    parser.add_argument(
        "--nodata",
        type=nodata_value,
        help="value without data, none, or collar (default: what the file says)",
    )
    parser.add_argument(
        "--resolution", type=float, help="pixel size to read at (default: the file's)"
    )
    add_labels(parser)
    parser.add_argument(
        "--pixels", action="store_true", help="read all pixels: statistics, classes, weights"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _plain(value: Any) -> Any:
    """The value without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
