"""Choose how many of a partition's layers swap, from the first on: TFLMS's threshold, simulated.

Backward needs the oldest last, so that their copies have most time. Whatever fits stays, and
of the thresholds that fit the one with the fastest simulated step is taken.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from tilenet.parallel.swap.in_flight import must_wait
from tilenet.planning.swap.layers import SavingLayer

MOST_AHEAD = 2  # layers that have their maps fetched ahead of use


@dataclass(frozen=True)
class Threshold:
    """A number of layers that swap, and its cost.

    Attributes:
        layers: Number of layers that swap, from the first on; the others keep.
        seconds: Forward and backward of all micro-batches, with stalls.
        peak_bytes: Peak without the fixed bytes: parameters, gradients, optimizer, inputs.
        swapped_bytes: Bytes that go out in a step, of all micro-batches.
        in_flight_bytes: Most bytes of copies out under way, as many as the limit leaves.
    """

    layers: int
    seconds: float
    peak_bytes: int
    swapped_bytes: int
    in_flight_bytes: float


def choose(
    layers: Sequence[SavingLayer], limit_bytes: float, bandwidth: float, micro_batches: int = 1
) -> Threshold | None:
    """The threshold that is predicted to be fastest within a limit; None: nothing fits.

    Args:
        limit_bytes: Limit for the layers, without the fixed bytes.
        bandwidth: Bytes per second to the host, and as many back.
    """
    computing = sum(layer.forward_s + layer.backward_s for layer in layers)
    copied, best = 0, None
    for k in range(len(layers) + 1):
        copied += layers[k - 1].swapped_bytes if k else 0
        # Tensors that go out come back, so that more layers take no less; rounding aside.
        least_s = micro_batches * max(computing, 2 * copied / bandwidth) * (1 - 1e-12)
        if best is not None and best.seconds <= least_s:
            break
        if _Step.of(layers, k).least_peak(micro_batches) <= limit_bytes:
            threshold = simulate(layers, k, bandwidth, micro_batches, limit_bytes)
            best = threshold if best is None or threshold.seconds < best.seconds else best
    return best


@dataclass(frozen=True)
class _Step:
    """Bytes of each layer for one micro-batch, in the order of forward.

    Attributes:
        left: Bytes that all layers leave until backward.
        forward: Peak of each layer's forward.
        backward: Peak of each layer's backward.
        out: Bytes copied out.
        back: Bytes copied back for its backward.
        weights: Gradients of the weights of the layers up to each.
        between: Gradients between two micro-batches, see `SavingLayer`.
    """

    left: int
    forward: list[int]
    backward: list[int]
    out: list[int]
    back: list[int]
    weights: list[int]
    between: int

    @classmethod
    def of(cls, layers: Sequence[SavingLayer], k: int) -> "_Step":
        """Return the step in which the first k layers swap.

        A map that several layers need counts once: while the layer that saved it keeps it, it is
        there for the others, too. One that went out, a layer that keeps saves for itself.
        """
        left, forward, backward = 0, [], []
        out = [layer.swapped_bytes * (index < k) for index, layer in enumerate(layers)]
        back = list(out)
        for index, layer in enumerate(layers):
            lost = layer.input_bytes * (layer.input_keeper < min(k, index))
            held = sum(layers[n].input_bytes for n in layer.held if _is_gone(layers, n, index, k))
            forward.append(left + layer.forward_bytes + lost + held)
            backward.append(left + layer.backward_bytes + lost * layer.needs_input)
            left += layer.saved_bytes - out[index]
            if lost and layer.needs_input and index < k:  # it is back for the later of the two
                back[index] += lost
                back[layer.input_keeper] = max(0, back[layer.input_keeper] - lost)
            elif layer.needs_input:
                left += lost
        weights = list(accumulate(layer.weight_bytes for layer in layers))
        return cls(left, forward, backward, out, back, weights, layers[-1].between_bytes)

    def least_peak(self, micro_batches: int) -> int:
        """Return the peak if computing waits for each copy out, and nothing is fetched ahead."""
        forward = (micro_batches - 1) * self.left + max(self.forward)
        rounds = {0, max(0, micro_batches - 2), micro_batches - 1}  # the fullest of each kind
        return max(forward, *(max(self.backward_of(n, micro_batches)) for n in rounds))

    def backward_of(self, number: int, micro_batches: int) -> list[int]:
        """Return the peak of each layer's backward; the last micro-batch goes back first.

        Gradients of weights wait for those of the other micro-batches (`memory.block`).
        """
        waiting = [self.weights[-1]] * len(self.weights)
        if micro_batches == 1:
            waiting = [0] * len(self.weights)
        elif number == micro_batches - 1:
            waiting = [self.weights[-1] - size for size in self.weights]
        elif number == 0:
            waiting = self.weights
        peaks = [
            number * self.left + size + wait
            for size, wait in zip(self.backward, waiting, strict=True)
        ]
        if number < micro_batches - 1:
            comes = (number + 1) * self.left + self.weights[-1] + self.between
            peaks[-1] = max(peaks[-1], comes)
        return peaks


def _is_gone(layers: Sequence[SavingLayer], stash: int, index: int, k: int) -> bool:
    """Whether a stashed map is not on the device among the maps of the layers before one."""
    behind = stash + 1
    if layers[behind].needs_input and behind >= k:
        return False
    return not k <= layers[stash].input_keeper < index


def simulate(
    layers: Sequence[SavingLayer],
    k: int,
    bandwidth: float,
    micro_batches: int = 1,
    limit_bytes: float = inf,
) -> Threshold:
    """Simulate a step with its first k layers swapping: all forward, then backward in reverse.

    Copies out run one after another, in the order of forward; copies back follow, in the order in
    which backward needs them. Tensors on their way out still take room: a layer waits for the
    oldest copies until the rest is no more than the limit leaves to them at the fullest moment, one
    number that `HostCopies` keeps to. A map is fetched ahead where it fits until it is used. Both
    depend on bytes and not on times, so that more room never makes a step slower.

    Args:
        limit_bytes: Limit of the peak; a step that needs more takes what it needs.
    """
    step, rounds = _Step.of(layers, k), range(micro_batches)
    least = float(step.least_peak(micro_batches))
    limit = max(limit_bytes, least)
    backward = [size for n in rounds[::-1] for size in step.backward_of(n, micro_batches)[::-1]]
    back = step.back[::-1] * micro_batches
    starts, ahead = _fetches(backward, back, limit)
    now = free_s = 0.0  # of computing, and of the link
    leaving: deque[tuple[float, int]] = deque()  # ends and bytes of copies
    under_way = most = 0

    def make_room(num_bytes: int) -> None:
        nonlocal now, under_way, most
        while leaving and (
            must_wait(len(leaving), under_way, limit - least) or leaving[0][0] <= now
        ):
            end, size = leaving.popleft()
            now, under_way = max(now, end), under_way - size
        most = max(most, num_bytes + under_way)

    for n in rounds:
        for layer, num_bytes, size in zip(layers, step.forward, step.out, strict=True):
            make_room(n * step.left + num_bytes)
            now += layer.forward_s
            if size:
                free_s = max(now, free_s) + size / bandwidth
                leaving.append((free_s, size))
                under_way += size
    arrives: dict[int, float] = {}
    for event, layer in enumerate([*reversed(layers)] * micro_batches):
        if back[event] and leaving:  # nothing comes back before all is out
            now, under_way = max(now, leaving[-1][0]), 0
            leaving.clear()
        make_room(backward[event])
        for need in starts.get(event, ()):
            arrives[need] = free_s = max(now, free_s) + back[need] / bandwidth
            if need == event:
                now = free_s
        now = max(now, arrives.get(event, now))
        most = max(most, backward[event] + ahead[event])
        now += layer.backward_s
    return Threshold(k, now, most, micro_batches * sum(step.out), limit - least)


def _fetches(
    base: Sequence[int], back: Sequence[int], limit: float
) -> tuple[dict[int, list[int]], list[int]]:
    """Return when each fetch is issued, and the bytes that are fetched ahead of use.

    Args:
        base: Bytes at each event of backward, without bytes fetched ahead.
        back: Bytes that must be back for each event.

    Returns:
        The events to fetch for at an event's start, by that event, and the bytes ahead.
    """
    ahead = [0] * len(base)
    issued: list[int] = []
    starts: dict[int, list[int]] = {}
    needs = [event for event, size in enumerate(back) if size]
    for place, need in enumerate(needs):
        # In their order, and once the last but one before is being used.
        first = issued[-1] if issued else 0
        if place >= MOST_AHEAD:
            first = max(first, needs[place - MOST_AHEAD])
        start = need
        while start > first and base[start - 1] + ahead[start - 1] + back[need] <= limit:
            start -= 1
            ahead[start] += back[need]
        issued.append(start)
        starts.setdefault(start, []).append(need)
    return starts, ahead
