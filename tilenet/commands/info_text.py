"""What `tilenet info` found, as people read it."""

from typing import Any

__all__ = ["block_of"]


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
    packed = f", {found['compression']}" if found["compression"] else ", not compressed"
    return [
        _line("file", f"{found['driver']}{on_disk}{packed}; {_blocks(found)}"),
        _line("size", size),
        _line("bands", _bands(found["bands"])),
        _line("grid", _grid(found)),
        _line("data", found["data"]),
    ]


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
    for place, band in enumerate(bands):
        text = f"{band['number']} {band['name']}".strip()
        text += "" if band["read"] else " (not read)"
        last = place + 1 == len(bands) or bands[place + 1]["dtype"] != band["dtype"]
        parts.append(f"{text}: {band['dtype']}" if last else text)
    return ", ".join(parts)


def _grid(found: dict[str, Any]) -> str:
    width, height = found["pixel"]
    if found["crs"] is None and (width, height) == (1.0, 1.0):
        return "no CRS and no transform: pixels only"
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
        lines.append(
            _line(
                "",
                f"x {left:.9g} to {right:.9g}, y {bottom:.9g} to {top:.9g} in the image's CRS: "
                f"{labels['share']:.1%} of its rectangle",
            )
        )
    return lines


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
    without = f"{share:.2%} of {pixels['num_pixels']:,} pixels are without data"
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


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        _line("", "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
        for row in [heads, *rows]
    ]


def _bytes(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number = number / 1024  # type: ignore[assignment]
    return f"{number:,.2f} GiB"
