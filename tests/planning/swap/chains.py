"""Small random chains of layers: maps shrink and grow again as in a U-Net, shared or not."""

import random

from tilenet.planning.swap.layers import NO_LAYER, SavingLayer


def random_chain(draw: random.Random, count: int) -> tuple[SavingLayer, ...]:
    """Layers whose seconds have little to do with their bytes, some of them stashes."""
    layers: list[SavingLayer] = []
    widest = draw.choice([64_000, 100_000, 250_000])
    pops: dict[int, int] = {}
    for index in range(count):
        level = min(index, count - 1 - index)
        size = int(widest * draw.uniform(0.7, 1.3) / 2**level)
        given = int(size * draw.choice([0.5, 1, 2])) if index else 0
        is_stash = 0 < index < count - 1 and draw.random() < 0.2
        if is_stash:
            pops[index] = draw.randint(index + 1, count - 1)
        shares = index > 0 and draw.random() < 0.7 and layers[-1].swapped_bytes >= given
        saved = 0 if is_stash else int(size * draw.uniform(1, 3))
        forward_s = 0.0 if is_stash else draw.uniform(2e-9, 2e-8) * size
        layers.append(
            SavingLayer(
                forward_s=forward_s,
                backward_s=forward_s * draw.uniform(1.5, 2.5),
                saved_bytes=saved,
                swapped_bytes=int(saved * draw.choice([0, 0.5, 0.9, 1, 1])),
                forward_bytes=int((saved + size) * draw.uniform(0.9, 1.2)),
                backward_bytes=saved + int(size * draw.uniform(1, 2)),
                input_bytes=given,
                input_keeper=index - 1 if shares else NO_LAYER,
                needs_input=draw.random() < 0.7,
                held=tuple(n for n, pop in pops.items() if n < index - 1 and index <= pop),
            )
        )
    return tuple(layers)


def random_bandwidth(draw: random.Random, layers: tuple[SavingLayer, ...]) -> float:
    """Bytes per second with which copying all takes a tenth to ten times as long as computing."""
    seconds = sum(layer.forward_s + layer.backward_s for layer in layers)
    return sum(layer.saved_bytes for layer in layers) / seconds * 10 ** draw.uniform(-1, 1)
