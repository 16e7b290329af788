"""From patterns and list files of a run file to plain lists of images and labels.

Once, on one rank: folders that differ between nodes would have ranks train on different images.
"""

from collections.abc import Sequence
from dataclasses import replace
from os.path import normpath

from tilenet.errors import TilenetError
from tilenet.files.image_list import ImageList, Pair, read_image_list
from tilenet.files.image_patterns import is_list_file, is_pattern, matched
from tilenet.run.file import RunFile

__all__ = ["with_listed_images"]


def with_listed_images(run: RunFile) -> tuple[RunFile, list[str]]:
    """The run with every pattern and list replaced by the files that it names.

    Returns:
        The run, and sentences to be said on what the lists hold.

    Raises:
        TilenetError: A list or pattern is wrong, or names nothing for training or validation.
    """
    notes: list[str] = []
    held = run.validation
    train, listed = _expanded(run.image_paths, run.label_paths, notes)
    validation, chosen = _expanded(held.image_paths, held.label_paths, notes)
    if listed is not None:
        train = list(listed.train)
        if listed.validation and held.image_paths:
            raise TilenetError(
                f"images for validation come from one place (images: {run.image_paths[0]} has "
                f"{len(listed.validation)}, validation.images: {', '.join(held.image_paths[:3])}); "
                "leave validation.images out, or the column split"
            )
        validation = validation or list(listed.validation)
    if chosen is not None:
        validation = list(chosen.validation if chosen.has_splits else chosen.train)
    for pairs, given, split in (
        (train, run.image_paths, "train"),
        (validation, held.image_paths, "validation"),
    ):
        if given and not pairs:
            raise TilenetError(
                f"a list must name images of the split that it is given for ({given[0]}: none of "
                f"{split}); correct its column split"
            )
    held = replace(
        held,
        images=[image for image, _ in validation] or None,
        labels=[label for _, label in validation] or None,
    )
    images, labels = [image for image, _ in train], [label for _, label in train]
    return replace(run, images=images, labels=labels, validation=held), notes


def _expanded(
    images: Sequence[str], labels: Sequence[str], notes: list[str]
) -> tuple[list[Pair], ImageList | None]:
    """The pairs of paths and patterns, or the list that stands in their place."""
    if len(images) == 1 and is_list_file(images[0], with_labels=bool(labels)):
        found = read_image_list(images[0])
        of_splits = f", {len(found.validation)} for validation, {found.num_test} for test"
        notes.append(
            f"{images[0]}: {len(found.train)} images to train on"
            + of_splits * found.has_splits
            + "; those for test are left out" * (found.num_test > 0)
        )
        return [], found
    pairs: list[Pair] = []
    for image, label in zip(images, labels, strict=True):
        if not is_pattern(image) and not is_pattern(label):
            pairs.append((image, label))
            continue
        found_pairs = matched(image, label)
        notes.append(f"{image}: {len(found_pairs)} images")
        pairs += found_pairs
    if len(pairs) > len(images):
        _check_once([image for image, _ in pairs])
    return pairs, None


def _check_once(images: Sequence[str]) -> None:
    seen: set[str] = set()
    for image in images:
        if normpath(image) in seen:
            raise TilenetError(
                f"patterns name each image once ({image}: several times); let one of them go"
            )
        seen.add(normpath(image))
