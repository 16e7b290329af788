"""Small random chains of layer groups: maps shrink and grow again as in a U-Net, shared or not."""

import random
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap.choose import ACTIONS, options_of
from tilenet.planning.swap.groups import LayerGroup


def random_chain(draw: random.Random, count: int) -> tuple[LayerGroup, ...]:
    """Groups whose seconds have little to do with their bytes, some of them stashes."""
    groups: list[LayerGroup] = []
    widest = draw.choice([64_000, 100_000, 250_000])
    for index in range(count):
        level = min(index, count - 1 - index)
        size = int(widest * draw.uniform(0.7, 1.3) / 2**level)
        given = int(size * draw.choice([0.5, 1, 2])) if index else 0
        is_stash = 0 < index < count - 1 and draw.random() < 0.2
        shares = index > 0 and draw.random() < 0.7 and groups[-1].swapped_bytes >= given
        saved = 0 if is_stash else int(size * draw.uniform(1, 3))
        forward_s = 0.0 if is_stash else draw.uniform(2e-9, 2e-8) * size
        groups.append(
            LayerGroup(
                forward_s=forward_s,
                backward_s=forward_s * draw.uniform(1.5, 2.5),
                input_bytes=given,
                saved_bytes=saved,
                swapped_bytes=int(saved * draw.choice([0, 0.5, 0.9, 1, 1])),
                forward_bytes=int((saved + size) * draw.uniform(0.9, 1.2)),
                backward_bytes=saved + int(size * draw.uniform(1, 2)),
                may_checkpoint=not is_stash and draw.random() < 0.9,
                again_bytes=saved + int(size * draw.uniform(1, 3)),
                input_from=int(shares),
                needs_input=draw.random() < 0.7,
                may_swap_input=draw.random() < 0.9,
                held_groups=draw.randint(1, count - 1 - index) if is_stash else 0,
            )
        )
    return tuple(groups)


def random_bandwidth(draw: random.Random, groups: tuple[LayerGroup, ...]) -> float:
    """Bytes per second with which copying all takes a tenth to ten times as long as computing."""
    seconds = sum(group.forward_s + group.backward_s for group in groups)
    return sum(group.saved_bytes for group in groups) / seconds * 10 ** draw.uniform(-1, 1)


def all_choices(groups: tuple[LayerGroup, ...]) -> NDArray[np.int8]:
    """Every choice, as indices of actions."""
    return np.array(list(product(*(options_of(group, ACTIONS) for group in groups))), np.int8)
