"""`tilenet info`: say what images and their labels are, before anything is trained on them.

What `tilenet info` found, as people read it.
"""

import json
import sys
from collections.abc import Callable
from itertools import groupby
from math import isfinite
from typing import Any

from tilenet.cli.data_options import add_labels, band_names, nodata_value, vectors_of
from tilenet.cli.options import Arguments
from tilenet.data.inspect import Asked, describe
from tilenet.data.labels.vector_keys import is_whole, shown_value
from tilenet.errors import UsageError
from tilenet.parallel.ranks.comm import launched, run_as_rank, world
from tilenet.training.config.read import flow_text

__all__ = ["block_of", "main"]

MOST_OTHERS = 5  # rasters and palettes of a file that are named
MOST_QUANTITIES = 20
MOST_COLOURS = 12  # of a palette
MOST_LETTERS = 80  # of a value of a field


def block_of(found: dict[str, Any]) -> str:
    """One image's facts (of `describe`), a block of lines."""
    lines = [found["path"]]
    if "size" in found:
        lines += _header(found)
    if "kind" in found.get("labels", {}):
        lines += _labels(found["labels"])
    if "pixels" in found:
        lines += _pixels(found)
    if "class_pixels" in found.get("labels", {}):
        lines += _classes(found["labels"])
    lines += [_line("note", note) for note in found.get("notes", [])]
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """Without what a terminal would obey: names of bands, layers and fields come from files."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in line)


def _line(name: str, text: str) -> str:
    return f"  {name:<8} {text}"


def _header(found: dict[str, Any]) -> list[str]:
    rows, cols = found["size"]
    size = f"{rows:,} × {cols:,} px (rows × columns)"
    if found["read_size"] != found["size"]:
        size += ", read as {:,} × {:,}".format(*found["read_size"])
    on_disk = "" if found["num_bytes"] is None else f", {_bytes(found['num_bytes'])}"
    packed = {None: "", "": ", not compressed"}.get(
        found["compression"], f", {found['compression']}"
    )
    return [
        _line("file", f"{found['driver']}{on_disk}{packed}; {_blocks(found)}"),
        *_contents(found),
        _line("size", size),
        _line("bands", _bands(found["bands"])),
        *_quantities(found["bands"]),
        *_palettes(found["bands"]),
        _line("grid", _grid(found)),
        *_places(found["places"]),
        _line("data", found["data"]),
    ]


def _contents(found: dict[str, Any]) -> list[str]:
    """Which of several arrays or rasters of a file is read."""
    lines = []
    if found["array"] is not None:
        lines.append(_line("array", f"{found['array']} is read"))
    others = found["others"]
    if others:
        shown = ", ".join(others[:MOST_OTHERS]) + " …" * (len(others) > MOST_OTHERS)
        lines.append(
            _line("rasters", f"1 of {len(others) + 1:,} in the file is read; also: {shown}")
        )
    return lines


def _blocks(found: dict[str, Any]) -> str:
    strips = found["block"][1] == found["size"][1]
    text = "{} of {:,} × {:,} px".format("strips" if strips else "tiles", *found["block"])
    if not found["suits_windows"]:
        return f"{text} do not suit window reads"
    return (
        f"{text}, of a file so small that it does not matter"
        if strips
        else f"{text} suit window reads"
    )


def _bands(bands: list[dict[str, Any]]) -> str:
    """`1 red, 2 green (uint8)`; those of one dtype together, those that are not read said."""
    parts: list[str] = []
    for first, last in _alike(
        bands, lambda band: (band["dtype"], band["read"], bool(band["name"]))
    ):
        if bands[first]["name"]:
            texts = [f"{band['number']} {band['name']}" for band in bands[first : last + 1]]
        else:
            texts = [_numbers(bands[first]["number"], bands[last]["number"])]
        texts = texts if bands[first]["read"] else [f"{text} (not read)" for text in texts]
        ends = last + 1 == len(bands) or bands[last + 1]["dtype"] != bands[first]["dtype"]
        parts += [*texts[:-1], f"{texts[-1]}: {bands[first]['dtype']}" if ends else texts[-1]]
    return ", ".join(parts)


def _alike(
    bands: list[dict[str, Any]], facts: Callable[[dict[str, Any]], Any]
) -> list[tuple[int, int]]:
    """First and last places of neighbouring bands of the same facts."""
    runs = [list(run) for _, run in groupby(range(len(bands)), lambda place: facts(bands[place]))]
    return [(run[0], run[-1]) for run in runs]


def _numbers(first: int, last: int) -> str:
    return ", ".join(map(str, range(first, last + 1))) if last - first < 4 else f"{first}–{last}"


def _quantities(bands: list[dict[str, Any]]) -> list[str]:
    """What physical quantity the numbers of bands stand for, where the file says so."""
    parts = []
    for first, last in _alike(bands, lambda band: [band[n] for n in ("scale", "offset", "unit")]):
        scale, offset, unit = (bands[first][name] for name in ("scale", "offset", "unit"))
        if (scale, offset, unit) == (1, 0, None):
            continue
        text = "number" + (f" × {scale:.9g}" if scale != 1 else "")
        text += f" {'−' if offset < 0 else '+'} {abs(offset):.9g}" if offset else ""
        text += f" {unit}" if unit else ""
        parts.append(f"{_numbers(bands[first]['number'], bands[last]['number'])}: {text}")
    if not parts:
        return []
    shown = "; ".join(parts[:MOST_QUANTITIES]) + " …" * (len(parts) > MOST_QUANTITIES)
    return [_line("value", f"{shown} (tilenet reads the numbers as they are stored)")]


def _palettes(bands: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for band in bands:
        if band["palette"] is None or len(lines) == MOST_OTHERS:
            continue
        colours = band["palette"]["colours"]
        shown = ", ".join(
            f"{number} {colour}" for number, colour in list(colours.items())[:MOST_COLOURS]
        )
        more = len(colours) - MOST_COLOURS
        shown += f" and {more} more" if more > 0 else ""
        text = (
            f"band {band['number']} holds numbers of colours or classes ({shown or 'all black'}), "
            "read as these numbers"
        )
        lines.append(_line("palette", text))
    return lines


def _places(places: dict[str, Any]) -> list[str]:
    parts = []
    if places["gcps"]:
        crs = places["gcps_crs"] or "no CRS"
        parts.append(f"{places['gcps']:,} ground control points ({crs})")
    parts += ["RPCs"] * places["rpcs"] + ["arrays of coordinates"] * places["geolocation"]
    return [_line("", f"{' and '.join(parts)} in the file, not used")] if parts else []


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


def _labels(labels: dict[str, Any]) -> list[str]:
    crs = labels["crs"] or "no CRS"
    lines = [
        _line("labels", f"{labels['path']}: {labels['kind']}, {crs}"),
        _line("", labels["grid"]),
    ]
    if labels["bounds"] is not None:
        left, bottom, right, top = labels["bounds"]
        about = "" if labels["exact"] else "about "
        lines.append(
            _line(
                "",
                f"{about}x {left:.9g} to {right:.9g}, y {bottom:.9g} to {top:.9g} in the image's "
                "CRS",
            )
        )
        lines.append(
            _line("", f"this rectangle covers {about}{labels['share']:.1%} of the image's")
        )
        if labels["share_inside"] is not None:
            lines[-1] += f"; {about}{labels['share_inside']:.1%} of it lies on the image"
    if labels["names"]:
        names = [f"{label} {name}" for label, name in labels["names"].items()]
        shown = ", ".join(names[:MOST_COLOURS]) + " …" * (len(names) > MOST_COLOURS)
        lines.append(_line("", f"classes are named: {shown}"))
    if labels["values"] is not None:
        lines += _values(labels["values"])
    return lines


def _values(values: dict[str, Any]) -> list[str]:
    """Values of the field, and the mapping that a run file needs."""
    number, shown = values["distinct"], len(values["counts"])
    features = values["features"]
    counted = (
        f"{number:,} value{'s' * (number != 1)} in {features:,} polygon{'s' * (features != 1)}"
    )
    if shown < number:
        counted += f", the {shown} most frequent of them:"
    rows = [
        [f"{count:,}", _class(text, values), _cut(shown_value(text))]
        for text, count in values["counts"].items()
    ]
    # In the order of the classes, what does not count last.
    short = [pair for pair in values["classes"].items() if _cut(pair[0]) == pair[0]]
    classes = sorted(short, key=lambda pair: (pair[1] is None, pair[1] or 0))
    pairs = ", ".join(f"{_key(text)}: {flow_text(label)}" for text, label in classes)
    lines = [_line("field", f"{values['field']}: {counted}")]
    lines += _table(["polygons", "class", "value"], rows, left=1)
    if pairs:
        told = "for the run file (0 is what lies in no polygon, null does not count):"
        keys = f"vectors: {{field: {flow_text(values['field'])}, classes: {{{pairs}}}}}"
        lines += [_line("", told), _line("", keys)]
    return lines


def _cut(text: str) -> str:
    """The beginning of what is too long to be the name of a class."""
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _class(text: str, values: dict[str, Any]) -> str:
    if text in values["missing"]:
        return "not given"
    label = values["classes"][text]
    return "null" if label is None else str(label)


def _key(text: str) -> str:
    """A value as a key of YAML."""
    plain = text == "null" or (is_whole(text) and str(int(text)) == text)
    return text if plain else flow_text(text)


def _pixels(found: dict[str, Any]) -> list[str]:
    pixels = found["pixels"]
    share = pixels["share_without_data"]
    percents = list(pixels["bands"][0]["percentiles"])
    heads = ["band", "mean", "std", "min", *(f"{percent} %" for percent in percents), "max"]
    rows = [
        [
            str(band["band"]),
            *(f"{band[name]:.6g}" for name in ("mean", "std", "minimum")),
            *(f"{value:.6g}" for value in band["percentiles"].values()),
            f"{band['maximum']:.6g}",
        ]
        for band in pixels["bands"]
    ]
    number = pixels["num_pixels"]
    without = (
        f"{number - pixels['num_valid']:,} of {number:,} pixels ({share:.2%}) are without data"
    )
    return [_line("pixels", without), *_table(heads, rows)]


def _classes(labels: dict[str, Any]) -> list[str]:
    total = sum(labels["class_pixels"])
    pairs = zip(labels["class_pixels"], labels["class_weights"], strict=True)
    rows = [
        [str(label), f"{pixels:,}", f"{pixels / total:.2%}", f"{weight:.6g}"]
        for label, (pixels, weight) in enumerate(pairs)
        if pixels
    ]
    return [
        _line("classes", f"{labels['share_labelled']:.2%} of the pixels with data are labelled"),
        *_table(["class", "pixels", "share", "balanced weight"], rows),
    ]


def _table(heads: list[str], rows: list[list[str]], left: int = 0) -> list[str]:
    """Columns, of which the last `left` begin below each other."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    signs = [">"] * (len(heads) - left) + ["<"] * left
    columns = list(zip(signs, widths, strict=True))
    return [
        _line(
            "",
            "  ".join(
                f"{cell:{sign}{width}}" for cell, (sign, width) in zip(row, columns, strict=True)
            ),
        ).rstrip()
        for row in [heads, *rows]
    ]


def _bytes(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number = number / 1024  # type: ignore[assignment]
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
        help="raster; files on one grid are stacked where plus signs join them: R.tif+G.tif+B.tif",
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
