"""`tilenet info`: say what images and their labels are, before anything is trained on them."""

import json
import sys
from itertools import groupby
from math import isfinite
from typing import Any

from tilenet.cli.data_options import add_labels, band_names, nodata_value, vectors_of
from tilenet.cli.options import Arguments
from tilenet.data.inspect import Asked, describe
from tilenet.data.labels.vector_keys import is_whole, shown_value
from tilenet.errors import UsageError
from tilenet.parallel.ranks.comm import launched, run_as_rank, world
from tilenet.training.config.read import yaml_text

__all__ = ["block_of", "main"]

MOST_OTHERS = 5  # rasters and palettes of a file that are named
MOST_QUANTITIES = 20
MOST_COLOURS = 12  # of a palette
MOST_LETTERS = 80  # of a value of a field

Row = tuple[str, str]  # a name, empty below one, and what is said


def block_of(found: dict[str, Any]) -> str:
    """One image's facts (of `describe`), a block of lines."""
    rows = _header(found) if "size" in found else []
    labels = found.get("labels", {})
    if "kind" in labels:
        rows += _labels(labels)
    if "pixels" in found:
        rows += _pixels(found["pixels"])
    if "class_pixels" in labels:
        rows += _classes(labels)
    rows += [("note", note) for note in found.get("notes", [])]
    lines = [found["path"], *(f"  {name:<8} {text}".rstrip() for name, text in rows)]
    # Without what a terminal would obey: names of bands, layers and fields come from files.
    return "\n".join(
        "".join(sign if sign.isprintable() else "\ufffd" for sign in line) for line in lines
    )


def _header(found: dict[str, Any]) -> list[Row]:
    file = found["driver"]
    if found["num_bytes"] is not None:
        file += f", {_bytes(found['num_bytes'])}"
    if found["compression"] is not None:
        file += f", {found['compression'] or 'not compressed'}"
    rows = [("file", f"{file}; {_blocks(found)}")]
    if found["array"] is not None:
        rows.append(("array", f"{found['array']} is read"))
    if others := found["others"]:
        shown = _some(others, MOST_OTHERS)
        rows.append(("rasters", f"1 of {len(others) + 1:,} in the file is read; also: {shown}"))
    size = "{:,} × {:,} px (rows × columns)".format(*found["size"])
    if found["read_size"] != found["size"]:
        size += ", read as {:,} × {:,}".format(*found["read_size"])
    rows += [("size", size), ("bands", _bands(found["bands"]))]
    if values := _quantities(found["bands"]):
        shown = _some(values, MOST_QUANTITIES, "; ")
        rows.append(("value", f"{shown} (tilenet reads the numbers as they are stored)"))
    palettes = [band for band in found["bands"] if band["palette"] is not None]
    rows += [("palette", _palette(band)) for band in palettes[:MOST_OTHERS]]
    rows.append(("grid", _grid(found)))
    for file in found["resampled"]:
        size = "{:,} × {:,} px".format(*file["size"])
        rows.append(
            ("", f"{file['path']}: {size}, {file['crs']}, resampled to it ({file['method']})")
        )
    places = found["places"]
    gcps = f"{places['gcps']:,} ground control points ({places['gcps_crs'] or 'no CRS'})"
    unused = [gcps] * bool(places["gcps"]) + ["RPCs"] * places["rpcs"]
    if unused := [*unused, *["arrays of coordinates"] * places["geolocation"]]:
        rows.append(("", f"{' and '.join(unused)} in the file, not used"))
    return [*rows, ("data", found["data"])]


def _some(texts: list[str], most: int, comma: str = ", ") -> str:
    return comma.join(texts[:most]) + " …" * (len(texts) > most)


def _blocks(found: dict[str, Any]) -> str:
    strips = found["block"][1] == found["size"][1]
    text = "{} of {:,} × {:,} px".format("strips" if strips else "tiles", *found["block"])
    if not found["suits_windows"]:
        return f"{text} do not suit window reads"
    if strips:
        return f"{text}, of a file so small that it does not matter"
    return f"{text} suit window reads"


def _bands(bands: list[dict[str, Any]]) -> str:
    """`1 red, 2 green: uint8`; those of one dtype together, those that are not read said."""
    groups = []
    for dtype, alike in groupby(bands, lambda band: band["dtype"]):
        texts: list[str] = []
        for (read, named), run in groupby(alike, lambda band: (band["read"], bool(band["name"]))):
            some = list(run)
            names = [f"{band['number']} {band['name']}" for band in some]
            texts += [
                text + " (not read)" * (not read) for text in (names if named else [_numbers(some)])
            ]
        groups.append(f"{', '.join(texts)}: {dtype}")
    return ", ".join(groups)


def _numbers(bands: list[dict[str, Any]]) -> str:
    first, last = bands[0]["number"], bands[-1]["number"]
    return ", ".join(map(str, range(first, last + 1))) if last - first < 4 else f"{first}–{last}"


def _quantities(bands: list[dict[str, Any]]) -> list[str]:
    """What physical quantity the numbers of bands stand for, where the file says so."""
    parts = []
    facts = groupby(bands, lambda band: (band["scale"], band["offset"], band["unit"]))
    for (scale, offset, unit), alike in facts:
        if (scale, offset, unit) == (1, 0, None):
            continue
        text = "number" + (f" × {scale:.9g}" if scale != 1 else "")
        text += f" {'−' if offset < 0 else '+'} {abs(offset):.9g}" if offset else ""
        parts.append(f"{_numbers(list(alike))}: {text}{f' {unit}' if unit else ''}")
    return parts


def _palette(band: dict[str, Any]) -> str:
    colours = [f"{number} {colour}" for number, colour in band["palette"].items()]
    more = len(colours) - MOST_COLOURS
    shown = ", ".join(colours[:MOST_COLOURS]) + (f" and {more} more" if more > 0 else "")
    return (
        f"band {band['number']} holds numbers of colours or classes ({shown or 'all black'}), "
        "read as these numbers"
    )


def _grid(found: dict[str, Any]) -> str:
    width, height = found["pixel"]
    if found["crs"] is None and (width, height) == (1.0, 1.0):
        return f"{found['lacks'] or 'no CRS and no transform'}: pixels only"
    unit = found["unit"] or "units"
    pixel = f"{width:.6g} × {height:.6g} {unit}"
    text = f"{found['crs'] or 'no CRS'}, pixels of {pixel} (width × height)"
    if abs(width / height - 1) > 1e-6:
        text += ", not square"
    if abs(found["rotation"]) > 1e-3:
        text += f", rotated by {found['rotation']:.4g}°"
    if abs(found["corner"] - 90) > 1e-3:
        text += f", sheared (rows and columns meet at {found['corner']:.4g}°)"
    return text + (", mirrored" if found["mirrored"] else "")


def _labels(labels: dict[str, Any]) -> list[Row]:
    rows = [
        ("labels", f"{labels['path']}: {labels['kind']}, {labels['crs'] or 'no CRS'}"),
        ("", labels["grid"]),
    ]
    if labels["bounds"] is not None:
        about = "" if labels["exact"] else "about "
        share = f"this rectangle covers {about}{labels['share']:.1%} of the image's"
        if labels["share_inside"] is not None:
            share += f"; {about}{labels['share_inside']:.1%} of it lies on the image"
        rows += [("", f"{about}{labels['bounds']} in the image's CRS"), ("", share)]
    if labels["names"]:
        names = [f"{label} {name}" for label, name in labels["names"].items()]
        rows.append(("", f"classes are named: {_some(names, MOST_COLOURS)}"))
    return rows + ([] if labels["values"] is None else _values(labels["values"]))


def _values(values: dict[str, Any]) -> list[Row]:
    """Values of the field, and the mapping that a run file needs."""
    number, shown, features = values["distinct"], len(values["counts"]), values["features"]
    counted = (
        f"{number:,} value{'s' * (number != 1)} in {features:,} polygon{'s' * (features != 1)}"
    )
    if shown < number:
        counted += f", the {shown} most frequent of them:"
    classes = values["classes"]
    names = {text: "null" if label is None else str(label) for text, label in classes.items()}
    names |= dict.fromkeys(values["missing"], "not given")
    table = [
        [f"{count:,}", names[text], _cut(shown_value(text))]
        for text, count in values["counts"].items()
    ]
    rows = [("field", f"{values['field']}: {counted}")]
    rows += _table(["polygons", "class", "value"], table, left=1)
    # In the order of the classes, what does not count last.
    short = [pair for pair in classes.items() if _cut(pair[0]) == pair[0]]
    short.sort(key=lambda pair: (pair[1] is None, pair[1] or 0))
    if short:
        keys = {"field": values["field"], "classes": {_key(text): label for text, label in short}}
        told = "for the run file (0 is what lies in no polygon, null does not count):"
        rows += [("", told), ("", f"vectors: {yaml_text(keys, flow=True, width=2**30).strip()}")]
    return rows


def _cut(text: str) -> str:
    """The beginning of what is too long to be the name of a class."""
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
    return [("pixels", without), *_table(["band", "mean", "std", "min", "max"], table)]


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
        *_table(["class", "pixels", "share", "balanced weight"], table),
    ]


def _table(heads: list[str], rows: list[list[str]], left: int = 0) -> list[Row]:
    """Columns, of which the last `left` begin below each other."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    signs = [">"] * (len(heads) - left) + ["<"] * left
    return [
        (
            "",
            "  ".join(f"{c:{sign}{w}}" for c, sign, w in zip(row, signs, widths, strict=True)),
        )
        for row in [heads, *rows]
    ]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


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
        given = _parser().parse_args(arguments)
        labels = given.labels or [None] * len(given.images)
        if len(labels) != len(given.images):
            raise UsageError(
                f"each image needs one label file (images: {len(given.images)}, --labels: "
                f"{len(labels)}); list them in the same order"
            )
        asked = Asked(
            bands=given.bands,
            nodata=given.nodata,
            resolution=given.resolution,
            ignore_index=given.ignore_index,
            vectors=vectors_of(given),
            pixels=given.pixels,
        )
    except UsageError as error:
        if first:
            print(f"tilenet info: {error}", file=sys.stderr)
        return 2
    everything = []
    for path, labels_path in zip(given.images, labels, strict=True):
        found = describe(path, labels_path, asked, comm)
        everything.append(found)
        if first and not given.json:
            if len(found) > 2:  # more than its path and why it was refused
                print(block_of(found), end="\n\n", flush=True)
            if "refused" in found:
                print(f"tilenet: {found['refused']}", file=sys.stderr, flush=True)
    if first and given.json:
        print(json.dumps({"images": _plain(everything)}))
    return int(any("refused" in found for found in everything))


def _plain(value: Any) -> Any:
    """Without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


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
