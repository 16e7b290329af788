"""How long a partition computes for a step while maps are copied out and back meanwhile.

Forward of all micro-batches, then backward in reverse of both, as GPipe has it inside of one
partition. Copies out run one after another on a lane of their own, in the order of forward; copies
in on another, in the order in which backward needs them, once all copies out have ended.

Memory rules both. What is on its way out still takes room, so that a cell waits for the oldest
copies until it fits. A map is fetched ahead, at the start of some cell's backward, where it fits
from there until it is used; at most two cells' maps are ahead. Both depend on bytes alone and not
on times, which is why more room never makes a step slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MOST_IN_FLIGHT", "StepCosts", "simulate_step"]

MOST_IN_FLIGHT = 4  # copies out, as host_copies has it; computing waits for the oldest of more
CELLS_AHEAD = 2


@dataclass(frozen=True)
class StepCosts:
    """What each cell of a partition takes for one micro-batch, as it was chosen.

    Attributes:
        forward_s: Seconds.
        backward_s: Seconds, with recomputation.
        left: Bytes that stay until its backward.
        forward: Most bytes in its forward, with what the cells before have left.
        backward: Most bytes in its backward, with the same.
        out: Bytes that it copies out.
        back: Bytes that must be back for its backward.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    left: Sequence[int]
    forward: Sequence[int]
    backward: Sequence[int]
    out: Sequence[int]
    back: Sequence[int]

    def least_peak(self, micro_batches: int) -> int:
        """Most bytes where computing waits for each copy out and nothing is fetched ahead."""
        return (micro_batches - 1) * sum(self.left) + max(*self.forward, *self.backward)


def simulate_step(
    costs: StepCosts, bandwidth: float, micro_batches: int, limit_bytes: float
) -> tuple[float, int]:
    """Seconds of a step, and the most bytes at a time.

    Args:
        bandwidth: Bytes per second, in each direction.
        limit_bytes: Copies wait, and less is fetched ahead, so that it holds; it is taken to be
            `least_peak` at least.
    """
    least = costs.least_peak(micro_batches)
    if not any(costs.out) and not any(costs.back):
        return micro_batches * (sum(costs.forward_s) + sum(costs.backward_s)), least
    limit = max(limit_bytes, least)
    lane = _Forward(bandwidth, limit)
    all_left = sum(costs.left)
    for number in range(micro_batches):
        earlier = number * all_left
        for takes_s, num_bytes, out in zip(costs.forward_s, costs.forward, costs.out, strict=True):
            lane.compute(takes_s, earlier + num_bytes, out)
    base = [
        number * all_left + num_bytes
        for number in reversed(range(micro_batches))
        for num_bytes in reversed(costs.backward)
    ]
    backs = [num_bytes for _ in range(micro_batches) for num_bytes in reversed(costs.back)]
    issued, ahead = _fetches(base, backs, limit)
    at_start: dict[int, list[int]] = {}
    for need, start in issued.items():
        at_start.setdefault(start, []).append(need)
    arrives: dict[int, float] = {}
    free_s = lane.ends[-1] if lane.ends else 0.0
    most = 0
    seconds = list(reversed(costs.backward_s)) * micro_batches
    for event, (takes_s, num_bytes, back) in enumerate(zip(seconds, base, backs, strict=True)):
        if back:
            lane.wait_for_all()  # before anything comes back
        lane.wait_for_room(num_bytes)
        # What is needed now and was not fetched ahead comes first in its lane anyway.
        for need in at_start.get(event, ()):
            free_s = max(lane.now, free_s) + backs[need] / bandwidth
            arrives[need] = free_s
            if need == event:
                lane.now = free_s
        if back:
            lane.now = max(lane.now, arrives[event])
        most = max(most, num_bytes + ahead[event])
        lane.now += takes_s
    return lane.now, max(lane.most, most)


class _Forward:
    """The time, and the copies out that are under way."""

    def __init__(self, bandwidth: float, limit: float) -> None:
        self.bandwidth, self.limit = bandwidth, limit
        self.now = 0.0
        self.most = 0
        self.ends: list[float] = []
        self._sizes: list[int] = []
        self._first = 0  # all copies before have been waited for
        self._under_way = 0

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait for copies until the given bytes fit next to those that continue."""
        while self._first < len(self.ends) and (
            num_bytes + self._under_way > self.limit
            or len(self.ends) - self._first > MOST_IN_FLIGHT
            or self.ends[self._first] <= self.now
        ):
            self.now = max(self.now, self.ends[self._first])
            self._under_way -= self._sizes[self._first]
            self._first += 1
        self.most = max(self.most, num_bytes + self._under_way)

    def wait_for_all(self) -> None:
        """Wait for the last copy."""
        if self._first < len(self.ends):
            self.now = max(self.now, self.ends[-1])
            self._first, self._under_way = len(self.ends), 0

    def compute(self, takes_s: float, num_bytes: int, out: int) -> None:
        """Run a cell's forward, and let it copy out behind that."""
        self.wait_for_room(num_bytes)
        self.now += takes_s
        if out:
            begin = max(self.now, self.ends[-1]) if self.ends else self.now
            self.ends.append(begin + out / self.bandwidth)
            self._sizes.append(out)
            self._under_way += out


def _fetches(
    base: Sequence[int], backs: Sequence[int], limit: float
) -> tuple[dict[int, int], list[int]]:
    """When each fetch is issued, and what is ahead of its use.

    Args:
        base: Bytes at each event of backward, without what is ahead.
        backs: Bytes that must be back for each.

    Returns:
        The event at whose start a fetch is issued, by the event that needs it; and by event the
        bytes fetched for later ones.
    """
    ahead = [0] * len(base)
    issued: dict[int, int] = {}
    needs = [event for event, back in enumerate(backs) if back]
    for place, need in enumerate(needs):
        # In their order, and once the last but one before is being used.
        first = issued[needs[place - 1]] if place else 0
        if place >= CELLS_AHEAD:
            first = max(first, needs[place - CELLS_AHEAD])
        start = need
        while start > first and base[start - 1] + ahead[start - 1] + backs[need] <= limit:
            start -= 1
            ahead[start] += backs[need]
        issued[need] = start
    return issued, ahead
