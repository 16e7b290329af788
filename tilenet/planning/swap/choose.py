"""Keep, compute again, or swap: what each layer group does with what backward needs.

Everything that fits is kept. Computing a group again costs its forward; swapping costs nothing
while the link is idle; both at once leave nothing on the device. A dynamic programme over the
groups finds choices that fit the limit: of those that leave about the same bytes it keeps the
cheapest, at several prices of a copied byte. The fastest of them in a simulated step is improved
by changing one group at a time.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tilenet.parallel.swap.actions import Action
from tilenet.parallel.swap.copies import must_wait
from tilenet.planning.swap.groups import LayerGroup

__all__ = ["ACTIONS", "Choice", "Choices", "choose", "options_of", "predict"]

ACTIONS: tuple[Action, ...] = get_args(Action)
KEEP, CHECKPOINT, SWAP, BOTH = range(4)  # their indices
PRICES = (0.0, 0.3, 1.0, 2.0)  # of a copied byte, as a share of its time on the link
LEVELS = 64  # of bytes left, between the least and the most
MOST_AHEAD = 2  # groups whose maps are fetched ahead of their use
Actions = NDArray[np.int8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Choice:
    """What each group does, and what that costs.

    Attributes:
        actions: One per group.
        seconds: Forward and backward of all micro-batches, with stalls and recomputation.
        peak_bytes: Without the fixed bytes: parameters, gradients, optimizer, what comes in.
        swapped_bytes: Bytes that go out in a step, of all micro-batches.
        in_flight_bytes: Bytes of copies out that may be under way: what the limit leaves.
    """

    actions: tuple[Action, ...]
    seconds: float
    peak_bytes: int
    swapped_bytes: int
    in_flight_bytes: float


def predict(
    groups: Sequence[LayerGroup],
    actions: Sequence[Action],
    bandwidth: float,
    micro_batches: int = 1,
    limit_bytes: float = inf,
) -> Choice:
    """Simulate a step.

    Args:
        groups: In the order of forward.
        actions: One per group.
        bandwidth: Bytes per second to the host, and as many back.
        limit_bytes: Copies wait for it, and less is fetched ahead; where the actions need more,
            that is the limit.

    Raises:
        ValueError: A group that may not be computed again shall be, or the numbers differ.
    """
    if len(actions) != len(groups) or not groups:
        raise ValueError(f"one action per group (actions: {len(actions)}, groups: {len(groups)})")
    for index, (group, action) in enumerate(zip(groups, actions, strict=True)):
        if action in ("checkpoint", "both") and not group.may_checkpoint:
            raise ValueError(f"group {index} may not be computed again ({action})")
    chosen = np.array([[ACTIONS.index(action) for action in actions]], np.int8)
    return Choices(groups, chosen, bandwidth, micro_batches).simulate(0, limit_bytes)


def choose(
    groups: Sequence[LayerGroup],
    limit_bytes: float,
    bandwidth: float,
    micro_batches: int = 1,
    allowed: Collection[Action] = ACTIONS,
) -> Choice | None:
    """The actions that are predicted to be fastest within a limit; None: nothing fits.

    Within a few per cent: what fits is found if there is any, the fastest is searched for.

    Args:
        limit_bytes: For the groups; the fixed bytes are taken off already.
        allowed: Actions besides keep.
    """
    options = [options_of(group, allowed) for group in groups]
    chosen = _search(groups, options, limit_bytes, bandwidth, micro_batches)
    best: Choice | None = None
    while chosen is not None:
        choices = Choices(groups, chosen, bandwidth, micro_batches)
        found = choices.fastest(limit_bytes, inf if best is None else best.seconds)
        if found is None:
            break
        best = found
        chosen = _neighbours(np.array([ACTIONS.index(a) for a in best.actions], np.int8), options)
    return best


def options_of(group: LayerGroup, allowed: Collection[Action]) -> list[int]:
    """Actions that a group can take and that differ; keep is the first."""
    shares = group.input_from > 0 and group.needs_input and group.may_swap_input
    differs = {
        KEEP: True,
        CHECKPOINT: group.may_checkpoint,
        SWAP: group.swapped_bytes > 0 or (shares and group.input_bytes > 0),
        BOTH: group.may_checkpoint and group.may_swap_input and group.input_bytes > 0,
    }
    return [a for a, may in differs.items() if may and (a == KEEP or ACTIONS[a] in allowed)]


def _neighbours(chosen: Actions, options: Sequence[Sequence[int]]) -> Actions:
    """All choices that differ in one group."""
    found = []
    for index, possible in enumerate(options):
        for action in possible:
            found.append(chosen.copy())
            found[-1][index] = action
    return np.array(found)


def _search(
    groups: Sequence[LayerGroup],
    options: Sequence[Sequence[int]],
    limit: float,
    bandwidth: float,
    micro_batches: int,
) -> Actions | None:
    """Choices that fit, shape (choices, groups); None: there is none."""
    chosen = np.zeros((1, 0), np.int8)
    left = peak = copied = again_s = np.zeros(1)  # float64 counts bytes exactly
    for index, group in enumerate(groups):
        many = len(options[index])
        column = np.repeat(np.array(options[index], np.int8), len(left))
        chosen = np.hstack([np.tile(chosen, (many, 1)), column[:, None]])
        left, peak, copied, again_s = np.tile([left, peak, copied, again_s], many)
        stays, forward, backward, out, _ = _group_bytes(groups, index, chosen)
        peak = np.maximum(peak, left + np.maximum(forward, backward))
        left, copied = left + stays, copied + out
        again_s = again_s + group.forward_s * _is_again(column)
        rows = np.flatnonzero(peak + (micro_batches - 1) * left <= limit)
        if not len(rows):
            return None
        if index < len(groups) - 1:
            costs = again_s + np.array(PRICES)[:, None] * copied / bandwidth
            rows = rows[_thin(groups, chosen[rows], left[rows], peak[rows], costs[:, rows])]
        chosen = chosen[rows]
        left, peak, copied, again_s = np.array([left, peak, copied, again_s])[:, rows]
    return chosen


def _thin(
    groups: Sequence[LayerGroup],
    chosen: Actions,
    left: Floats,
    peak: Floats,
    costs: Floats,
) -> NDArray[np.intp]:
    """Rows that go on: the cheapest of each level and price, and whatever is leanest."""
    index = chosen.shape[1] - 1
    # Two choices with the same key mean the same to the groups that follow.
    key = np.zeros(len(left), np.int64)
    asked = {n - group.input_from for n, group in enumerate(groups) if n > index}
    for number in sorted(asked):
        if number <= index:
            now = chosen[:, number]
            key = 3 * key + np.where(now == BOTH, CHECKPOINT, now)
    levels = (left - left.min()) * LEVELS // (np.ptp(left) + 1)
    found = []
    for cost in costs:
        order = np.lexsort((left, cost, levels, key))
        found.append(order[_changes(key[order], levels[order])])
    for number in _held(groups, index + 1):
        key = 2 * key + _is_left(groups, number, chosen)
    # A fit must be found where there is one: all whose bytes left and peak are not both beaten.
    order = np.lexsort((peak, left, key))
    starts = np.flatnonzero(_changes(key[order]))
    for place, end in zip(starts, [*starts[1:], len(order)], strict=True):
        rows = order[place:end]
        found.append(rows[np.diff(np.minimum.accumulate(peak[rows]), prepend=inf) < 0])
    return np.unique(np.concatenate(found))


def _changes(*keys: Ints) -> Flags:
    """Where any of some sorted keys is not that of the row before."""
    changed: Flags = np.any([np.diff(key, prepend=key[0] - 1) != 0 for key in keys], axis=0)
    return changed


def _is_again(chosen: Actions) -> Flags:
    return np.isin(chosen, (CHECKPOINT, BOTH))


def _leaves_input(group: LayerGroup, now: Actions) -> Flags:
    """Whether a group leaves its input on the device, if nobody before it does."""
    found: Flags = (now == CHECKPOINT) | (now == KEEP) & group.needs_input
    if not group.may_swap_input:
        found = found | (now == BOTH) | (now == SWAP) & group.needs_input
    return found


def _held(groups: Sequence[LayerGroup], index: int) -> list[int]:
    """Groups before the last one whose input is still held while a group runs forward."""
    return [n for n in range(index - 1) if n + groups[n].held_groups >= index]


def _is_left(groups: Sequence[LayerGroup], stash: int, chosen: Actions) -> Flags:
    """Whether a stashed map is among what the groups up to the one behind the stash have left."""
    found = _leaves_input(groups[stash + 1], chosen[:, stash + 1])
    if groups[stash].input_from:
        before = chosen[:, stash - groups[stash].input_from]
        found = found | (before == KEEP) | (before == SWAP) & (not groups[stash].may_swap_input)
    return found


def _group_bytes(
    groups: Sequence[LayerGroup], index: int, chosen: Actions
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Bytes of one group.

    A map that two groups need counts once. Where the group that made it keeps it, it is there for
    the next one, too; where that one gave it up, the next one must see to it by itself.

    Args:
        chosen: Indices of actions, (choices, groups up to this one or more).

    Returns:
        For each choice: what stays until the group's backward; the peaks of forward and backward,
        above what the groups before have left; what is copied out; and what of an earlier group's
        copies this one's backward needs back already.
    """
    group, now = groups[index], chosen[:, index]
    size, again, swaps = group.input_bytes, _is_again(now), now == SWAP
    # Nobody before keeps the input; if this group keeps or swaps, it is among what it saves.
    alone = np.full(len(now), group.input_from == 0)
    before = chosen[:, index - group.input_from]
    went = ~alone & (before == SWAP) & group.may_swap_input
    lost = went | ~alone & _is_again(before)
    wanted = lost & (group.needs_input | again) | alone & again
    stays = wanted & _leaves_input(group, now)
    goes = wanted & ~stays & ~went
    forward = group.forward_bytes + size * lost
    for number in _held(groups, index):
        forward = forward + groups[number].input_bytes * ~_is_left(groups, number, chosen)
    most = max(group.again_bytes, group.forward_bytes, group.backward_bytes)
    backward = np.where(again, most, group.backward_bytes)
    return (
        np.where(again, 0, group.saved_bytes - swaps * group.swapped_bytes) + size * stays,
        forward,
        backward + size * (lost | alone & again & (not group.needs_input)),
        swaps * group.swapped_bytes + size * goes,
        size * (wanted & went & (swaps | (now == BOTH))),
    )


class Choices:
    """Whole choices and what they cost, arrays (choices, groups).

    Args:
        groups: In the order of forward.
        chosen: Indices of actions.
        bandwidth: Bytes per second in each direction.

    Attributes:
        least_peaks: Bytes that each choice needs at the least: where computing waits for each copy
            out and nothing is fetched ahead.
        least_seconds: Seconds that no step with each choice can be faster than.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], chosen: Actions, bandwidth: float, micro_batches: int
    ) -> None:
        self._chosen, self._bandwidth, self._micro_batches = chosen, bandwidth, micro_batches
        single = [_group_bytes(groups, index, chosen) for index in range(len(groups))]
        left, forward, backward, self._out, early = (
            np.stack(x, axis=1) for x in zip(*single, strict=True)
        )
        before = np.cumsum(left, axis=1) - left
        self._left, self._forward, self._backward = (
            left.sum(axis=1),
            before + forward,
            before + backward,
        )
        self._back = self._out + early
        for index, group in enumerate(groups):
            if group.input_from:
                self._back[:, index - group.input_from] -= early[:, index]
        self._back = np.maximum(self._back, 0)
        self._forward_s = np.array([group.forward_s for group in groups])
        self._backward_s = np.array([group.backward_s for group in groups])
        self._backward_s = self._backward_s + _is_again(chosen) * self._forward_s
        most = np.maximum(self._forward, self._backward).max(axis=1)
        self.least_peaks: Ints = (micro_batches - 1) * self._left + most
        computing = self._forward_s.sum() + self._backward_s.sum(axis=1)
        copying = (self._out + self._back).sum(axis=1) / bandwidth
        self.least_seconds = micro_batches * np.maximum(computing, copying) * (1 - 1e-12)

    def fastest(self, limit: float, most_s: float) -> Choice | None:
        """The fastest that fits a limit, and takes less than some seconds."""
        best = None
        fits = np.flatnonzero(self.least_peaks <= limit)
        copied = self._out.sum(axis=1)
        for row in fits[np.lexsort((copied[fits], self.least_seconds[fits]))]:
            if self.least_seconds[row] >= most_s:
                break
            found = self.simulate(int(row), limit)
            if found.seconds < most_s:
                best, most_s = found, found.seconds
        return best

    def simulate(self, row: int, limit: float) -> Choice:
        """A step of one choice: forward of all micro-batches, backward in reverse, as in GPipe.

        Copies out run one after another, in the order of forward; copies back follow, in the order
        in which backward needs them. What is on its way out still takes room: a group waits for the
        oldest copies until the rest is no more than the limit leaves to them at the fullest moment,
        one number that `HostCopies` keeps to. A map is fetched ahead where it fits until it is
        used. Both depend on bytes and not on times, so that more room never makes a step slower.
        """
        many, least = self._micro_batches, float(self.least_peaks[row])
        limit = max(limit, least)
        out = self._out[row].tolist() * many
        earlier = np.repeat(np.arange(many) * int(self._left[row]), self._forward.shape[1])
        forward = (earlier + np.tile(self._forward[row], many)).tolist()
        backward = (earlier + np.tile(self._backward[row], many))[::-1].tolist()
        back = self._back[row, ::-1].tolist() * many
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

        for takes_s, num_bytes, size in zip(
            self._forward_s.tolist() * many, forward, out, strict=True
        ):
            make_room(num_bytes)
            now += takes_s
            if size:
                free_s = max(now, free_s) + size / self._bandwidth
                leaving.append((free_s, size))
                under_way += size
        arrives: dict[int, float] = {}
        for event, takes_s in enumerate(self._backward_s[row, ::-1].tolist() * many):
            if back[event] and leaving:  # nothing comes back before all is out
                now, under_way = max(now, leaving[-1][0]), 0
                leaving.clear()
            make_room(backward[event])
            for need in starts.get(event, ()):
                arrives[need] = free_s = max(now, free_s) + back[need] / self._bandwidth
                if need == event:
                    now = free_s
            now = max(now, arrives.get(event, now))
            most = max(most, backward[event] + ahead[event])
            now += takes_s
        actions = tuple(ACTIONS[action] for action in self._chosen[row])
        return Choice(actions, now, int(most), sum(out), limit - least)


def _fetches(
    base: Sequence[int], back: Sequence[int], limit: float
) -> tuple[dict[int, list[int]], list[int]]:
    """When each fetch is issued, and what is ahead of its use.

    Args:
        base: Bytes at each event of backward, without what is ahead.
        back: Bytes that must be back for each.

    Returns:
        By event the events whose fetch is issued at its start, and the bytes that are ahead.
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
