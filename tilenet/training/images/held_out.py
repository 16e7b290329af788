"""Blocks of the training images that are held out for validation."""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tilenet.data.holdout import HeldOut, blocks_of, choose_held_out
from tilenet.data.labelled_blocks import labelled_blocks
from tilenet.data.labels.source import HeldOutLabels, LabelSource, ValidationImage
from tilenet.geometry.windows import Window
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images.open import RunImages


def hold_out(
    opened: RunImages,
    keys: ValidationKeys,
    num_classes: int,
    seed: int,
    context_px: int,
    control: RankControl,
) -> RunImages:
    """Hold blocks out from training, and give them to validation. Collective.

    Training does not see their labels, nor those of pixels whose network looks at a held-out one.

    Args:
        keys: Which share of which blocks is held out.
        seed: Seed of their choice.
        context_px: Context of the network around any pixel.
        control: Ranks of the run; the watchdog is armed for each piece of the labels.

    Raises:
        AgreedError: Labels cannot be read or are no class, or blocks are too few to be shared out.
        StopAgreed: A rank was asked to stop.
    """
    if not keys.share:
        return opened
    sizes = [image.size for image in opened.images]
    with agreed(control.comm):
        blocks = blocks_of(sizes, keys.block_px)
    labelled = labelled_blocks(opened.images, opened.labels, blocks, num_classes, control)
    with together(control.comm, control.stop) as turns:
        held_out = choose_held_out(labelled, sizes, keys.block_px, keys.share, seed)
        held_out.check_rest(context_px, turns.part_done)
    train: list[LabelSource] = []
    validation = list(opened.validation)
    for number, (image, labels) in enumerate(zip(opened.images, opened.labels, strict=True)):
        train.append(HeldOutLabels(labels, partial(held_out.mask, number, margin_px=context_px)))
        if windows := held_out.windows(number):
            inside = HeldOutLabels(labels, partial(_outside, held_out, number))
            validation.append(ValidationImage(image, inside, windows))
    return replace(opened, labels=train, validation=validation, held_out=held_out)


def _outside(held_out: HeldOut, number: int, window: Window) -> NDArray[np.bool_]:
    return ~held_out.mask(number, window)
