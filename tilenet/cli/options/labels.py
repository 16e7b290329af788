"""Options of several commands on the meaning of labels."""

import argparse

from tilenet.data.labels.vector_keys import VectorKeys, classes_by_text
from tilenet.errors import TilenetError, UsageError


def add_labels(parser: argparse.ArgumentParser, *, choice: bool = False) -> None:
    """Add the options that `vectors_of` reads, and `--ignore-index`.

    Args:
        choice: Whether `--classes` may name classes instead of mapping values to them.
    """
    mapped = "polygons: class of each value of --field, or ignore (default: values are classes)"
    chosen = "classes to show, by name or number; VALUE=CLASS,… says what values of --field mean"
    parser.add_argument(
        "--ignore-index", type=int, default=255, help="label that does not count (255)"
    )
    parser.add_argument(
        "--field", help="polygons: attribute that holds the class (default: all are class 1)"
    )
    parser.add_argument(
        "--classes",
        type=_mapping_or_choice if choice else _mapping,
        metavar="CLASS,…" if choice else "VALUE=CLASS,…",
        help=chosen if choice else mapped,
    )
    parser.add_argument("--layer", help="polygons: layer, where the file has several")
    parser.add_argument(
        "--label-crs", help="polygons: their CRS where the file has none (EPSG:…, or image)"
    )
    parser.add_argument(
        "--all-touched", action="store_true", help="polygons: every pixel they touch"
    )


def vectors_of(options: argparse.Namespace) -> VectorKeys:
    """The options of a file of polygons, which say how it is burned.

    Raises:
        UsageError: Options contradict each other.
    """
    classes = options.classes if isinstance(options.classes, dict) else None
    keys = VectorKeys(
        field=options.field,
        classes=classes,
        layer=options.layer,
        crs=options.label_crs,
        all_touched=options.all_touched,
    )
    try:
        keys.check_alone()
    except TilenetError as error:
        raise UsageError(str(error)) from None
    return keys


def _mapping_or_choice(
    text: str,
) -> dict[str | int | float | bool | None, int | None] | tuple[str, ...]:
    return _mapping(text) if "=" in text else tuple(part.strip() for part in text.split(","))


def _mapping(text: str) -> dict[str | int | float | bool | None, int | None]:
    """`road=1,water=ignore` as `VectorKeys.classes`."""
    pairs = [pair.rpartition("=") for pair in text.split(",")]
    try:
        classes = classes_by_text((value, _class_of(label)) for value, _, label in pairs)
        return dict(classes.items())
    except TilenetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a class is a whole number or ignore ({text}); write for instance road=1,ruin=ignore"
        ) from None


def _class_of(label: str) -> int | None:
    return None if label == "ignore" else int(label)
