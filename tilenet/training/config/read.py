"""Read a run file and options of the command line into a `RunFile`, and write one as text.

Patterns and list files become plain lists of images and labels, once, on one rank: folders that
differ between nodes would have ranks train on different images.
"""

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from os.path import normpath
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader, set_parsing_settings

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.lists.image_list import ImageList, Pair, read_image_list
from tilenet.data.lists.image_patterns import is_items, is_list_file, is_pattern, matched
from tilenet.data.lists.item_list import read_items
from tilenet.errors import TilenetError, UsageError, one_line
from tilenet.planning.plan import read_plan
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.wrong_values import in_our_words


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader, but that a key stands once, 1e-4 is a number and a date is a text."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        first: dict[tuple[str, str], Any] = {}
        for key, _ in node.value:
            before = first.setdefault((key.tag, str(key.value)), key)
            if before is not key:
                lines = f"{before.start_mark.line + 1} and {key.start_mark.line + 1}"
                raise UsageError(
                    f"a key stands once in a run file ({key.value} in lines {lines}); delete one "
                    "of them"
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """YAML's safe dumper; texts that `_Loader` takes for numbers are quoted."""


_EXPONENT = "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), "+-0123456789"
_Loader.add_implicit_resolver(*_EXPONENT)
_Dumper.add_implicit_resolver(*_EXPONENT)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
set_loader("run file", lambda text: yaml.load(text, _Loader), (yaml.YAMLError,))


@cache  # takes 0.2 s, and a run's report reads its run file once more
def parser() -> ArgumentParser:
    """The parser of `tilenet train`; its help is the fields' docstrings."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    train_parser = ArgumentParser(
        prog="tilenet train",
        description="Train a network on images and their labels, over all MPI ranks.",
        parser_mode="run file",
        exit_on_error=False,
        allow_abbrev=False,
    )
    train_parser.add_argument("-c", "--config", action="config", help="run file (YAML)")
    train_parser.add_argument(
        "--resume", action="store_true", help="go on from output/last, where it exists"
    )
    train_parser.add_argument(
        "--overwrite", action="store_true", help="start over where output holds a run"
    )
    train_parser.add_class_arguments(RunFile)
    return train_parser


def read_run_file(arguments: list[str]) -> tuple[RunFile, Namespace]:
    """Parse the arguments of `tilenet train`.

    Returns:
        The run, and the namespace it was built from (with `resume` and `overwrite`).

    Raises:
        UsageError: A key is unknown or missing, or a value has the wrong type.
        TilenetError: The values contradict each other.
    """
    train_parser = parser()
    namespace = _parse(train_parser, arguments)
    if namespace.plan is not None:
        # First, so that the run file and the command line have the last word.
        keys = json.dumps(read_plan(Path(namespace.plan)).keys)
        namespace = _parse(train_parser, ["--config", keys, *arguments])
    for part in fields(RunFile):
        if is_dataclass(part.default_factory) and not isinstance(namespace[part.name], Namespace):
            raise UsageError(
                f"{part.name} is a group of keys ({part.name}: {namespace[part.name]}); write keys "
                "under it, or leave it out"
            )
    parts = train_parser.instantiate(namespace)
    return RunFile(**{part.name: parts[part.name] for part in fields(RunFile)}), namespace


def read_keys(keys: Mapping[str, Any]) -> RunFile:
    """The run of a dictionary of keys, as a run file would hold them.

    Paths count as texts, tuples as lists.

    Raises:
        UsageError: A key is unknown or missing, or a value has the wrong type.
        TilenetError: The values contradict each other.
    """
    return read_run_file(["--config", yaml_text(_plain(keys))])[0]


def read_vector_keys(keys: Mapping[str, Any]) -> VectorKeys:
    """What polygons mean, of the keys that a run file has under `vectors`.

    Raises:
        UsageError: A key is unknown, or a value has the wrong type.
    """
    vector_parser = ArgumentParser(exit_on_error=False)
    vector_parser.add_class_arguments(VectorKeys, "vectors")
    with _in_words_of(vector_parser):
        namespace = vector_parser.parse_object({"vectors": _plain(keys)})
        read: VectorKeys = vector_parser.instantiate(namespace).vectors
    return read


def _plain(value: Any) -> Any:
    """A value in types that YAML has."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a number of numpy's or torch's
        return value.item()
    return value


def _parse(train_parser: ArgumentParser, arguments: list[str]) -> Namespace:
    with _in_words_of(train_parser):
        return train_parser.parse_args(arguments)


@contextmanager
def _in_words_of(key_parser: ArgumentParser) -> Generator[None, None, None]:
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # jsonargparse raises several kinds; all speak of the user's input
        raise UsageError(_explain(" ".join(str(error).split()), key_parser)) from None


def _explain(message: str, key_parser: ArgumentParser) -> str:
    """The sentence on a wrong value, or the nearest known key where a key is unknown."""
    match = re.search(r"(?:Group '([\w.]+)' does not accept o|O)ption '([\w.]+)'", message)
    match = match or re.search(r"unrecognized arguments:()\s*--([\w.]+)", message)
    if not match:
        return in_our_words(message)
    unknown = f"{match[1]}.{match[2]}" if match[1] else match[2]
    known = list(key_parser.get_defaults().keys(branches=True))
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0)
    return f"{message.rstrip('.')} (unknown key {unknown}; the nearest known key is {near[0]})"


def run_file_text(run: RunFile) -> str:
    """YAML with every key that has a value, defaults too: they may be others in later versions."""
    return yaml_text(
        asdict(
            run, dict_factory=lambda keys: {key: value for key, value in keys if value is not None}
        )
    )


def yaml_text(value: Any, *, flow: bool | None = None, width: int = 100) -> str:
    """A dictionary as a run file holds it; the innermost lists and dictionaries are in one line.

    Args:
        flow: True: all of it is in one line.
        width: Longer lines are broken.
    """
    form = {"default_flow_style": flow, "width": width, "allow_unicode": True, "sort_keys": False}
    try:
        return str(yaml.dump(value, None, _Dumper, **form))
    except yaml.YAMLError as error:
        raise UsageError(
            f"keys of a run are numbers, texts, lists and dictionaries ({one_line(str(error))}); "
            "write such values"
        ) from error


def with_listed_images(run: RunFile) -> tuple[RunFile, list[str]]:
    """The run with every pattern and list replaced by the files that it names.

    Returns:
        The run, and sentences to print on the contents of the lists.

    Raises:
        TilenetError: A list or pattern is wrong, or names nothing for training or validation; or
            nothing is held out, and a key is about validations.
    """
    notes: list[str] = []
    held_out = run.validation
    train, listed = _expanded(run.image_paths, run.label_paths, notes)
    validation, chosen = _expanded(held_out.image_paths, held_out.label_paths, notes, held_out=True)
    if listed is not None:
        train = list(listed.train)
        if listed.validation and held_out.image_paths:
            raise TilenetError(
                f"images for validation come from one place (images: {run.image_paths[0]} has "
                f"{len(listed.validation)}, validation.images: "
                f"{', '.join(held_out.image_paths[:3])}); leave validation.images out, or the "
                "column split"
            )
        validation = validation or list(listed.validation)
    if chosen is not None:
        validation = list(chosen.validation if chosen.has_splits else chosen.train)
    for pairs, paths, split in (
        (train, run.image_paths, "train"),
        (validation, held_out.image_paths, "validation"),
    ):
        if paths and not pairs:
            raise TilenetError(
                f"a list must name images of the split that it is given for ({paths[0]}: none of "
                f"{split}); correct its column split"
            )
    held_out = replace(
        held_out,
        images=tuple(image for image, _ in validation) or None,
        labels=tuple(label for _, label in validation) or None,
    )
    held_out.check_unread()
    images, labels = tuple(image for image, _ in train), tuple(label for _, label in train)
    return replace(run, images=images, labels=labels, validation=held_out), notes


def _expanded(
    images: Sequence[str], labels: Sequence[str], notes: list[str], *, held_out: bool = False
) -> tuple[list[Pair], ImageList | None]:
    """The pairs of paths and patterns, or the list that stands in their place."""
    items = len(images) == 1 and is_items(images[0])
    if items or (len(images) == 1 and is_list_file(images[0], with_labels=bool(labels))):
        listed = read_items(images[0], labels[0]) if items else read_image_list(images[0])
        notes.append(f"{images[0]}: {_contents(listed, held_out=held_out)}")
        return [], listed
    pairs: list[Pair] = []
    for image, label in zip(images, labels, strict=True):
        if not is_pattern(image) and not is_pattern(label):
            pairs.append((image, label))
            continue
        matches = matched(image, label)
        notes.append(f"{image}: {len(matches)} images")
        pairs += matches
    if len(pairs) > len(images):
        image, times = Counter(normpath(image) for image, _ in pairs).most_common(1)[0]
        if times > 1:
            raise TilenetError(
                f"patterns name each image once ({image}: several times); let one of them go"
            )
    return pairs, None


def _contents(listed: ImageList, *, held_out: bool) -> str:
    """What a list names, and what of it is left out.

    Args:
        held_out: Whether it is given as `validation.images`.
    """
    train, validation = len(listed.train), len(listed.validation)
    if held_out:
        left_out = f"; {train} to train on and {listed.num_test} for test are left out"
        count = validation if listed.has_splits else train
        return f"{count} images for validation" + left_out * listed.has_splits
    of_splits = f", {validation} for validation, {listed.num_test} for test"
    return (
        f"{train} images to train on"
        + of_splits * listed.has_splits
        + "; those for test are left out" * (listed.num_test > 0)
    )
