"""Memory of each partition of a sweep in training.

It holds the tensors of a sweep of its layers, and the graphs of as many strips more as there are
partitions behind it. Tensors from other partitions wait for it, most where it is the slowest and
the others are as far ahead as they may: rows of as many strips as it lies behind the partition that
computed them, and gradients of all strips that a partition behind it has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Strip, strip_edges, sweep
from tilenet.planning.balance import blocks_of
from tilenet.planning.memory.sweeps.swept_training import RecomputedStrip, SweptBackward, SweptRows
from tilenet.planning.memory.sweeps.tall_parts import SweepBytes, bytes_of_height
from tilenet.planning.memory.sweeps.trained_sweeps import strip_costs


@lru_cache(maxsize=256)
def partition_peaks(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    strip_rows: int,
    item_bytes: int,
    balance: tuple[int, ...],
) -> tuple[int, ...]:
    """Most bytes of tensors that live on each partition's device while a part is swept.

    Counted are the tensors that `trained_bytes` counts, and those that wait for the partition.

    Args:
        balance: Layers per partition; none of them averages over the whole image.
    """
    costs = strip_costs(layers, width, item_bytes)
    owned = [range(*block) for block in blocks_of(balance)]

    def peak(number: int) -> int:
        own = owned[number]
        alone = costs[own.start].first if number else None  # received rows are not written over
        changed = (*costs[: own.start], alone or costs[own.start], *costs[own.start + 1 :])

        def walk(rows: int) -> SweepBytes:
            swept = SweptBackward(layers, (rows, width), item_bytes, changed, own=own)
            strips = tuple(sweep(layers, strip_edges(rows, strip_rows), own))
            return _Partition(swept, strips, _links(swept, owned, number)).walk()

        return bytes_of_height(walk, layers, height, strip_rows).peak

    return tuple(map(peak, range(len(owned))))


@dataclass(frozen=True)
class _Links:
    """Distances from a partition to the partitions that it exchanges maps with.

    Attributes:
        num_behind: Number of partitions behind it.
        makers: Distance back to the partition that computes a map, by the map's number.
        readers: Distances forward to the partitions that read a map, by the map's number.
    """

    num_behind: int
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]


def _links(swept: SweptBackward, owned: Sequence[range], number: int) -> _Links:
    own = owned[number]
    reads = [{map_ for layer in layers for map_ in swept.reads[layer]} for layers in owned]
    made_by = [partition for partition, layers in enumerate(owned) for _ in layers]
    makers = {map_: number - made_by[map_ - 1] for map_ in reads[number] if 0 < map_ <= own.start}
    readers = {
        layer + 1: [
            other - number for other in range(number + 1, len(owned)) if layer + 1 in reads[other]
        ]
        for layer in own
    }
    return _Links(len(owned) - 1 - number, makers, readers)


@dataclass
class _OpenStrip:
    """A strip that waits for gradients.

    Attributes:
        recomputed: The strip with its graph.
        received: Storages of the rows that came for it.
        gradients: Rows that it sent, with the storages of their gradients.
        gradients_from: Distances forward to the partitions that have sent gradients.
    """

    recomputed: RecomputedStrip
    received: Sequence[int]
    gradients: list[tuple[SweptRows, int]] = field(default_factory=list)
    gradients_from: set[int] = field(default_factory=set)


@dataclass
class _Partition:
    """Counts the bytes of a partition that is the slowest."""

    swept: SweptBackward
    strips: Sequence[Strip]
    links: _Links

    def walk(self) -> SweepBytes:
        """Bytes on its device."""
        swept, states, inbox = self.swept, [], _ReceivedRows(self.swept, self.strips, self.links)
        for number, strip in enumerate(self.strips):
            states.append(swept.kept_state())
            received = inbox.take(number)
            swept.pass_strip(strip, received)
            swept.drop(*received.values())
        states_bytes = swept.end_forward()
        strips, behind = self.strips[::-1], self.links.num_behind
        inbox = _ReceivedRows(swept, strips, self.links)
        open_strips, of_state = dict[int, _OpenStrip](), list[int | None]()
        for turn in range(len(strips) + behind):
            if turn < len(strips):
                received = inbox.take(turn)
                recomputed = swept.recompute(
                    strips[turn], states.pop(), received, keeps_logits=not behind
                )
                open_strips[turn] = _OpenStrip(recomputed, tuple(received.values()))
            self._take_gradients(open_strips, turn)
            if turn >= behind:
                ended = open_strips.pop(turn - behind)
                of_state = swept.backpropagate(ended.recomputed, of_state, ended.gradients)
                swept.drop(*ended.received)
        return SweepBytes(swept.peak_bytes, states_bytes)

    def _take_gradients(self, open_strips: Mapping[int, _OpenStrip], turn: int) -> None:
        """Take the gradients that can have come once a strip was begun."""
        for place in range(1, self.links.num_behind + 1):
            # Fewer partitions lie behind that one, so its gradients come earlier.
            last = turn - (self.links.num_behind - place)
            for number, strip in open_strips.items():
                if place in strip.gradients_from or (number > last and turn < len(self.strips) - 1):
                    continue
                strip.gradients_from.add(place)
                strip.gradients += [
                    (rows, self.swept.make(self.swept.size(rows.map_, rows.rows)))
                    for rows in strip.recomputed.sent
                    if place in self.links.readers[rows.map_]
                ]


class _ReceivedRows:
    """Rows that come from other partitions."""

    def __init__(self, swept: SweptBackward, strips: Sequence[Strip], links: _Links) -> None:
        self.swept, self.strips, self.makers = swept, strips, links.makers
        self.waiting: list[dict[int, int]] = [{} for _ in strips]
        self.arrived = dict.fromkeys(links.makers, 0)  # strips of which rows of a map have come

    def take(self, number: int) -> Mapping[int, int]:
        """Storages of a strip's rows by map, while those of strips to come arrive."""
        for map_, ahead in self.makers.items():
            stop = min(number + ahead + 1, len(self.strips))
            for strip in range(self.arrived[map_], stop):
                first, last = self.strips[strip].layers[map_ - 1].out
                if first < last:
                    self.waiting[strip][map_] = self.swept.make(self.swept.size(map_, last - first))
            self.arrived[map_] = stop
        return self.waiting[number]
