"""What whole choices of actions cost: bytes and seconds of every cell, many choices at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap_bytes import BOTH, CHECKPOINT, Cell, cell_bytes
from tilenet.planning.swap_timeline import StepCosts

__all__ = ["Choices"]


@dataclass(frozen=True)
class Choices:
    """Choices and what they cost; arrays (choices, cells), with bytes as in `StepCosts`.

    Attributes:
        cells: In the order of forward.
        chosen: Places of the actions in `ALL`.
    """

    cells: tuple[Cell, ...]
    chosen: NDArray[np.int8]
    backward_s: NDArray[np.float64]
    left: NDArray[np.int64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    out: NDArray[np.int64]
    back: NDArray[np.int64]

    @classmethod
    def of(cls, cells: Sequence[Cell], chosen: NDArray[np.int8]) -> "Choices":
        single = [cell_bytes(cells, index, chosen) for index in range(len(cells))]
        left, forward, backward, out, early = (
            np.stack([getattr(one, name) for one in single], axis=1)
            for name in ("left", "forward", "backward", "out", "early")
        )
        before = np.cumsum(left, axis=1) - left
        back = out + early
        for index, cell in enumerate(cells):
            if cell.input_from:
                back[:, index - cell.input_from] -= early[:, index]
        again = (chosen == CHECKPOINT) | (chosen == BOTH)
        backward_s = np.array([cell.backward_s for cell in cells])
        backward_s = backward_s + again * np.array([cell.forward_s for cell in cells])
        found = (left, before + forward, before + backward, out, np.maximum(back, 0))
        return cls(tuple(cells), chosen, backward_s, *found)

    def least_peaks(self, micro_batches: int) -> NDArray[np.int64]:
        """Bytes that each choice needs at the least."""
        most = np.maximum(self.forward, self.backward).max(axis=1)
        total: NDArray[np.int64] = (micro_batches - 1) * self.left.sum(axis=1) + most
        return total

    def least_seconds(self, bandwidth: float, micro_batches: int) -> NDArray[np.float64]:
        """Seconds that no step with each choice can be faster than."""
        forward_s = sum(cell.forward_s for cell in self.cells)
        computing = forward_s + self.backward_s.sum(axis=1)
        copying = (self.out.sum(axis=1) + self.back.sum(axis=1)) / bandwidth
        found: NDArray[np.float64] = micro_batches * np.maximum(computing, copying) * (1 - 1e-12)
        return found

    def step_costs(self, row: int) -> StepCosts:
        """What a step of one choice is simulated from."""
        return StepCosts(
            [cell.forward_s for cell in self.cells],
            self.backward_s[row].tolist(),
            self.left[row].tolist(),
            self.forward[row].tolist(),
            self.backward[row].tolist(),
            self.out[row].tolist(),
            self.back[row].tolist(),
        )
