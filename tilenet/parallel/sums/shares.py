"""Which weights each rank updates, where the optimizer's states are shared out (ZeRO, stage 1).

Each piece of gradients is cut into as many blocks as there are ranks: a rank gets the sum of its
block, updates the weights there, and keeps states of these alone. Then all gather the blocks. The
two messages send together what the sum of the piece did, and shares are even to one value, however
few the pieces are. The rank's weights are views of the parameters, so nothing is kept twice.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from tilenet.mpi import Intracomm


def whole_blocks(values: int, ranks: int) -> int:
    """The next number of values that `ranks` ranks can cut into equal blocks."""
    return -(-values // ranks) * ranks


def values_of_piece(piece_bytes: int, item_bytes: int, ranks: int = 1) -> int:
    """Values of a piece that `ranks` ranks cut into blocks."""
    return whole_blocks(max(1, piece_bytes // item_bytes), ranks)


def block(part: Tensor, comm: Intracomm) -> Tensor:
    """This rank's block of a part that ranks cut into equal blocks."""
    return part.chunk(comm.size)[comm.rank]


@dataclass(frozen=True)
class Part:
    """Values of a parameter that follow one another, and that one rank updates.

    Attributes:
        parameter: Index of the parameter, as the buffer of gradients lays them out.
        start: The first value, of the flattened parameter.
        stop: End of the values.
    """

    parameter: int
    start: int
    stop: int


def owned_parts(sizes: Sequence[int], piece: int, ranks: int, rank: int) -> Iterator[Part]:
    """The parts that a rank updates of the parameters of a device.

    Args:
        sizes: Values of each parameter; they lie behind one another, and what fills the last
            piece up to whole blocks belongs to none.
        piece: Values of a piece, a multiple of `ranks`.
    """
    starts = [0, *accumulate(sizes)]
    total = whole_blocks(starts[-1], ranks)
    for at in range(0, total, piece):
        block = min(piece, total - at) // ranks
        begin, end = at + rank * block, min(at + (rank + 1) * block, starts[-1])
        index = bisect_right(starts, begin) - 1
        while begin < end:
            stop = min(end, starts[index + 1])
            if begin < stop:
                yield Part(index, begin - starts[index], stop - starts[index])
            begin, index = stop, index + 1


class Shares:
    """How ranks share out the update of `parameters`.

    Args:
        parameters: In the network's order, as `GradientSum` takes them.
        comm: All ranks.
        piece_bytes: Size of the pieces of gradients.

    Attributes:
        parameters: The parameters in the order of their gradients.
        own: Views of the parts that this rank updates, each a parameter for the optimizer. Never
            empty, since torch's optimizers need a parameter.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Intracomm, piece_bytes: int) -> None:
        self.parameters, self.comm, self.piece_bytes = parameters[::-1], comm, piece_bytes
        flat = [parameter.detach().view(-1) for parameter in self.parameters]
        self.own = [
            nn.Parameter(flat[part.parameter][part.start : part.stop])
            for part in self.parts(comm.rank)
        ] or [nn.Parameter(torch.empty(0))]

    def parts(self, rank: int) -> list[Part]:
        """The parts that a rank updates, in the order of its `own`."""
        parts, first = [], 0
        for _, group in groupby(self.parameters, key=lambda parameter: parameter.device):
            of_device = list(group)
            piece = values_of_piece(self.piece_bytes, of_device[0].element_size(), self.comm.size)
            sizes = [parameter.numel() for parameter in of_device]
            parts += [
                Part(first + part.parameter, part.start, part.stop)
                for part in owned_parts(sizes, piece, self.comm.size, rank)
            ]
            first += len(of_device)
        return parts

    @cached_property
    def own_of(self) -> dict[Tensor, list[tuple[Part, nn.Parameter]]]:
        """The parts of each parameter that this rank updates."""
        own_of: dict[Tensor, list[tuple[Part, nn.Parameter]]] = {}
        for part, own in zip(self.parts(self.comm.rank), self.own, strict=False):
            own_of.setdefault(self.parameters[part.parameter], []).append((part, own))
        return own_of
