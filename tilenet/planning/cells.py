"""Cells of a partition; provisional, a worked out version is under way."""

from tilenet.geometry.layers import Conv, Pool, Pop, Stash, TransposedConv, Upsample
from tilenet.planning.swap_policy import Cell


def cell_sizes(layers):
    starts = [
        i
        for i, l in enumerate(layers)
        if i == 0
        or isinstance(l, Conv | Pool | Pop | Stash | TransposedConv | Upsample)
        or isinstance(layers[i - 1], Stash | Pop)
    ]
    return tuple(b - a for a, b in zip(starts, [*starts[1:], len(layers)], strict=False))


def cells_of(costs, times, start, stop, min_bytes):
    out = []
    at = start
    for n in cell_sizes([c.layer for c in costs[start:stop]]):
        part = costs[at : at + n]
        tt = times[at : at + n]
        saved = sum(c.saved + c.keeps_input * c.input + c.keeps_output * c.output for c in part)
        out.append(
            Cell(
                sum(t.forward_s for t in tt),
                sum(t.backward_s for t in tt),
                part[0].input,
                saved,
                saved if saved >= min_bytes else 0,
                saved + part[-1].output,
                saved + part[-1].output + part[0].input,
                not any(isinstance(c.layer, Stash | Pop) for c in part),
            )
        )
        at += n
    return tuple(out)
