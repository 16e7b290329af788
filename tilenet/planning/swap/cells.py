"""What cells leave on their device for backward, whether they keep, swap or are computed again.

Many choices are looked at together: arrays over choices, one row each.

A map that two cells need counts once. Where the cell that made it keeps it, it is there for the
next one too; where that cell gave it up, the next one must see to it by itself. And whatever is
done with a stashed map, it lives in forward until it is popped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALL", "Action", "Cell", "CellBytes", "cell_bytes", "held_stashes", "options_of"]

Action = Literal["keep", "checkpoint", "swap", "both"]
ALL: tuple[Action, ...] = ("keep", "checkpoint", "swap", "both")
KEEP, CHECKPOINT, SWAP, BOTH = range(4)  # their places there
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cell:
    """Consecutive layers that share one action; figures are one micro-batch's.

    Attributes:
        forward_s: Seconds.
        backward_s: Seconds.
        input_bytes: Bytes of the map that comes in, which stays where the cell is computed again.
        saved_bytes: What stays for backward when the cell keeps; a map counts at the first cell
            that keeps it.
        swapped_bytes: Part of these that is large enough to be swapped.
        forward_bytes: Most bytes in its forward, above what the cells before have left when they
            keep.
        backward_bytes: Most bytes in its backward, above the same; what it saved is among them.
        may_checkpoint: Whether it may be computed again; not so with a stash or a pop.
        again_bytes: Most bytes from its recomputation to the end of its backward, above the same,
            where these are more than the two above.
        input_from: So many cells before stands the one among whose saved bytes this one's input
            counts; 0: none does.
        needs_input: Whether backward needs the input even when the cell keeps.
        may_swap_input: Whether the input is large enough to be swapped.
        held_cells: So many of the next cells run forward while the input is held: from a stash to
            its pop.
    """

    forward_s: float
    backward_s: float
    input_bytes: int
    saved_bytes: int
    swapped_bytes: int
    forward_bytes: int
    backward_bytes: int
    may_checkpoint: bool = True
    again_bytes: int = 0
    input_from: int = 0
    needs_input: bool = False
    may_swap_input: bool = True
    held_cells: int = 0


@dataclass(frozen=True)
class CellBytes:
    """One cell's bytes; arrays over choices.

    Attributes:
        left: Stays until its backward.
        forward: Most in its forward, above what the cells before have left as they were chosen.
        backward: Most bytes in its backward, above the same.
        out: Is copied out.
        early: Of what an earlier cell copied out, what this one's backward needs back already.
    """

    left: Ints
    forward: Ints
    backward: Ints
    out: Ints
    early: Ints


def options_of(cell: Cell, allowed: Sequence[Action]) -> list[int]:
    """Places in `ALL` of the actions that a cell can take and that differ; keep is among them."""
    found = [KEEP]
    if cell.may_checkpoint and "checkpoint" in allowed:
        found.append(CHECKPOINT)
    shares = cell.input_from > 0 and cell.needs_input and cell.may_swap_input
    if "swap" in allowed and (cell.swapped_bytes or (shares and cell.input_bytes)):
        found.append(SWAP)
    if cell.may_checkpoint and "both" in allowed and cell.may_swap_input and cell.input_bytes:
        found.append(BOTH)
    return found


def cell_bytes(cells: Sequence[Cell], index: int, chosen: NDArray[np.int8]) -> CellBytes:
    """Bytes of one cell.

    Args:
        chosen: Places in `ALL`, (choices, cells up to this one or more).
    """
    cell = cells[index]
    now = chosen[:, index]
    again = (now == CHECKPOINT) | (now == BOTH)
    none = np.zeros(len(chosen), bool)
    alone, lost, out_with, given_up = ~none, none, none, none
    if cell.input_from:
        before = chosen[:, index - cell.input_from]
        alone = none
        out_with = (before == SWAP) & cell.may_swap_input
        given_up = (before == CHECKPOINT) | (before == BOTH)
        lost = out_with | given_up
    # A cell that keeps or swaps counts an input that nobody else keeps among what it saves.
    wanted = lost & (cell.needs_input | again) | alone & again
    stays = wanted & ((now == KEEP) | (now == CHECKPOINT))
    goes = wanted & ~stays & ~out_with
    if not cell.may_swap_input:
        stays, goes = stays | goes, none
    swaps = now == SWAP
    size = cell.input_bytes
    left = np.where(again, 0, cell.saved_bytes - swaps * cell.swapped_bytes)
    forward = cell.forward_bytes + size * lost + _held(cells, index, chosen)
    most = max(cell.again_bytes, cell.forward_bytes, cell.backward_bytes)
    backward = np.where(again, most, cell.backward_bytes)
    # Else it is among what the cell saved.
    backward = backward + size * (lost | alone & again & (not cell.needs_input))
    return CellBytes(
        left + size * stays,
        forward,
        backward,
        swaps * cell.swapped_bytes + size * goes,
        size * (wanted & out_with & (swaps | (now == BOTH))),
    )


def held_stashes(cells: Sequence[Cell], index: int) -> list[int]:
    """Cells before the last one whose input is still held while one runs forward."""
    return [
        number
        for number, cell in enumerate(cells[: max(0, index - 1)])
        if number + cell.held_cells >= index
    ]


def stash_is_left(
    cells: Sequence[Cell], number: int, chosen: NDArray[np.int8]
) -> NDArray[np.bool_]:
    """Whether a stashed map counts among what the cells up to the next one have left."""
    stash, behind = cells[number], cells[number + 1]
    now = chosen[:, number + 1]
    there: NDArray[np.bool_] = (now == CHECKPOINT) | (now == KEEP) & behind.needs_input
    if not behind.may_swap_input:
        there = there | (now == BOTH) | (now == SWAP) & behind.needs_input
    if stash.input_from:
        before = chosen[:, number - stash.input_from]
        there = there | (before == KEEP) | (before == SWAP) & (not stash.may_swap_input)
    return there


def _held(cells: Sequence[Cell], index: int, chosen: NDArray[np.int8]) -> Ints:
    """Stashed maps that live on in forward though nothing of what was left has them."""
    total = np.zeros(len(chosen), np.int64)
    for number in held_stashes(cells, index):
        total += cells[number].input_bytes * ~stash_is_left(cells, number, chosen)
    return total
