"""Simulated steps against ones worked out by hand, and choices against all that there are."""

import random
from dataclasses import replace

import numpy as np
import pytest
from chains import all_choices, random_bandwidth, random_chain

from tilenet.parallel.swap.actions import Action
from tilenet.planning.swap.choose import ACTIONS, Choices, choose, predict
from tilenet.planning.swap.groups import LayerGroup

# Three groups: 7 + 2·k s of forward, twice of backward; what each saves feeds the next.
FIRST = LayerGroup(7, 14, 0, 50, 50, 60, 90)
SECOND = LayerGroup(9, 18, 30, 40, 40, 55, 85, again_bytes=88, input_from=1, needs_input=True)
THIRD = LayerGroup(11, 22, 20, 35, 35, 45, 65, again_bytes=70, input_from=1, needs_input=True)
GROUPS = (FIRST, SECOND, THIRD)
Case = tuple[random.Random, tuple[LayerGroup, ...], int, float]


def test_all_kept_takes_the_seconds_and_the_bytes_of_all() -> None:
    found = predict(GROUPS, ["keep"] * 3, 1.0, 4)
    assert found.seconds == 4 * 3 * (7 + 9 + 11)
    # The last micro-batch, in the backward of the second group or of the third.
    assert found.peak_bytes == 3 * (50 + 40 + 35) + max(50 + 85, 50 + 40 + 65)
    assert found.swapped_bytes == 0


def test_what_is_computed_again_leaves_its_input_unless_the_group_before_kept_it() -> None:
    found = predict(GROUPS, ["keep", "checkpoint", "checkpoint"], 1.0, 2)
    assert found.seconds == 2 * (3 * (7 + 9 + 11) + 9 + 11)
    # The second's input counts with the first; the third's, the second's output, at the third.
    assert found.peak_bytes == (50 + 20) + max(90, 50 + 88, 50 + 20 + 70)


def test_a_group_behind_one_computed_again_keeps_its_input_itself() -> None:
    found = predict(GROUPS, ["keep", "checkpoint", "keep"], 1.0, 2)
    assert found.peak_bytes == (50 + 20 + 35) + max(90, 50 + 88, 50 + 20 + 65)
    careless = replace(THIRD, needs_input=False)
    found = predict((FIRST, SECOND, careless), ["keep", "checkpoint", "keep"], 1.0, 2)
    assert found.peak_bytes == (50 + 35) + max(90, 50 + 88, 50 + 20 + 65)


COPIED = (
    LayerGroup(3, 6, 0, 40, 40, 45, 60),
    LayerGroup(4, 8, 40, 20, 20, 30, 50),
    LayerGroup(5, 10, 0, 9, 0, 9, 9),
)


def test_copies_out_and_back_as_worked_out_by_hand() -> None:
    found = predict(COPIED, ["swap", "swap", "keep"], 10.0)
    # Out: 3 to 7 and 7 to 9; forward ends at 12. Back: the second's from 12 to 14, the first's to
    # 18, both hidden behind the third's backward, to 22, and the second's, to 30. Then the first's.
    assert found.seconds == 12 + 10 + 8 + 6
    # Everything is back in the backward of the second.
    assert found.peak_bytes == 40 + 50
    assert found.swapped_bytes == 60
    slow = predict(COPIED, ["swap", "swap", "keep"], 2.0)
    # Out: 3 to 23 and 23 to 33. Back: 33 to 43, then 43 to 63; the last backward begins then.
    assert slow.seconds == 63 + 6


def test_a_limit_makes_copies_wait() -> None:
    found = predict(COPIED, ["swap", "swap", "keep"], 10.0, limit_bytes=60)
    # Nothing is left for copies. The second's forward begins when the first's copy is out, at 7;
    # the third's when the second's is, from 11 to 13, and ends at 18. Its way back is hidden: 18 to
    # 20. The first's waits for room until 36, when the second is done, and comes from there to 40.
    assert found.seconds == 18 + 10 + 8 + 4 + 6
    assert (found.peak_bytes, found.in_flight_bytes) == (60, 0)
    # Next to its 20 bytes on their way the third's may run, to 16; next to the first's 40 not yet.
    found = predict(COPIED, ["swap", "swap", "keep"], 10.0, limit_bytes=80)
    assert (found.seconds, found.in_flight_bytes) == (16 + 10 + 8 + 4 + 6, 20)
    # At 100 both hide, and so does what comes back.
    found = predict(COPIED, ["swap", "swap", "keep"], 10.0, limit_bytes=100)
    assert (found.seconds, found.in_flight_bytes) == (12 + 10 + 8 + 6, 40)


def test_at_most_four_copies_out_are_under_way() -> None:
    groups = tuple(LayerGroup(1, 2, 0, 10 + k, 10 + k, 15, 20) for k in range(7))
    found = predict(groups, ["swap"] * 7, 0.1)
    # Out one after another from 1 s on, 910 s; back likewise, and the last backward.
    assert found.seconds == pytest.approx(1 + 910 + 910 + 2)
    # Four during the forward of the last group.
    assert found.peak_bytes == 12 + 13 + 14 + 15 + 15


def test_an_infinite_link_swaps_for_nothing() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        groups = random_chain(draw, draw.randint(3, 9))
        kept = predict(groups, ["keep"] * len(groups), 1e30, 3)
        gone = predict(groups, ["swap"] * len(groups), 1e30, 3, 0)
        assert gone.seconds == pytest.approx(kept.seconds, rel=1e-12)
        assert gone.peak_bytes < kept.peak_bytes


def random_case(seed: int, counts: list[int], manies: list[int]) -> Case:
    draw = random.Random(seed)
    groups = random_chain(draw, draw.choice(counts))
    return draw, groups, draw.choice(manies), random_bandwidth(draw, groups)


def test_a_slow_link_leaves_it_to_recomputation() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        groups = tuple(
            replace(group, may_checkpoint=True, saved_bytes=group.saved_bytes + group.input_bytes)
            for group in random_chain(draw, 6)
            if group.forward_s
        )
        kept = predict(groups, ["keep"] * len(groups), 1.0, 2)
        again = predict(groups, ["checkpoint"] * len(groups), 1.0, 2)
        limit = (kept.peak_bytes + again.peak_bytes) // 2
        found = choose(groups, limit, 1.0, 2)
        assert found is not None
        assert "checkpoint" in found.actions
        assert found.swapped_bytes == 0


def test_the_oldest_groups_are_swapped_first() -> None:
    # Of equal groups, backward needs the oldest last, so that their copies hide best.
    groups = tuple(LayerGroup(1, 2, 0, 100, 100, 110, 150) for _ in range(12))
    found = choose(groups, 12 * 100, 120.0)
    assert found is not None
    assert found.seconds == 36
    places = [place for place, action in enumerate(found.actions) if action == "swap"]
    assert places
    assert max(places) < 6


def test_everything_is_kept_where_that_fits() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        groups = random_chain(draw, draw.randint(2, 8))
        keep: list[Action] = ["keep"] * len(groups)
        most = predict(groups, keep, 1e6, 2).peak_bytes
        assert choose(groups, most, 1e6, 2) == predict(groups, keep, 1e6, 2, most)


def test_a_limit_is_kept_and_more_room_never_takes_longer() -> None:
    for seed in range(150):
        draw, groups, many, bandwidth = random_case(seed, [*range(2, 13)], [1, 2, 5])
        options = [[ACTIONS[row] for row in set(all_choices((group,))[:, 0])] for group in groups]
        actions = [draw.choice(found) for found in options]
        least = predict(groups, actions, bandwidth, many, 0)
        free = predict(groups, actions, bandwidth, many)
        seconds = least.seconds
        for limit in np.linspace(least.peak_bytes, free.peak_bytes * 1.2, 9):
            found = predict(groups, actions, bandwidth, many, limit)
            assert found.peak_bytes <= limit
            assert free.seconds <= found.seconds <= seconds
            seconds = found.seconds


@pytest.mark.parametrize("most", [2, 3, 4, 5, 6])
def test_choices_are_nearly_the_best_of_all_and_a_fit_is_always_found(most: int) -> None:
    ratios = []
    for seed in range(60):
        draw, groups, many, bandwidth = random_case(1000 * most + seed, [most], [1, 1, 2, 3, 6])
        choices = Choices(groups, all_choices(groups), bandwidth, many)
        peaks = choices.least_peaks
        low, high = int(peaks.min()), int(peaks[0])
        assert choose(groups, low - 1, bandwidth, many) is None
        for limit in (low, int(draw.uniform(low, high)), int(draw.choice(list(peaks)))):
            best = choices.fastest(limit, np.inf)
            found = choose(groups, limit, bandwidth, many)
            assert found is not None
            assert found.peak_bytes <= limit
            assert found == predict(groups, found.actions, bandwidth, many, limit)
            ratios.append(found.seconds / best.seconds)
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 1.002


def test_the_fastest_is_that_of_all_that_fit() -> None:
    for seed in range(30):
        draw, groups, many, bandwidth = random_case(seed, [3], [1, 3])
        choices = Choices(groups, all_choices(groups), bandwidth, many)
        limit = int(draw.choice(list(choices.least_peaks)))
        fits = np.flatnonzero(choices.least_peaks <= limit)
        seconds = min(choices.simulate(int(row), limit).seconds for row in fits)
        assert choices.fastest(limit, np.inf).seconds == seconds
        assert choices.fastest(limit, seconds) is None


def test_no_choice_has_a_bound_that_it_beats() -> None:
    for seed in range(40):
        draw, groups, many, bandwidth = random_case(seed, [4], [1, 3])
        choices = Choices(groups, all_choices(groups), bandwidth, many)
        count = len(choices.least_seconds)
        for row in draw.sample(range(count), min(20, count)):
            assert choices.simulate(row, np.inf).seconds >= choices.least_seconds[row]


@pytest.mark.parametrize("allowed", [ACTIONS, ("checkpoint",), ("swap",), ("keep", "both")])
def test_more_room_is_used_and_only_what_is_allowed_is_done(allowed: tuple[str, ...]) -> None:
    for seed in range(8):
        _, groups, many, bandwidth = random_case(seed, [5, 12, 25], [1, 4])
        most = predict(groups, ["keep"] * len(groups), bandwidth, many).peak_bytes
        before = np.inf
        for limit in np.geomspace(most / 8, most, 40):
            found = choose(groups, limit, bandwidth, many, allowed)  # type: ignore[arg-type]
            if found is None:
                assert before == np.inf
                continue
            assert set(found.actions) <= {"keep", *allowed}
            assert found.seconds <= 1.05 * before
            before = min(before, found.seconds)
        assert before < np.inf


def test_a_stashed_map_lives_until_it_is_popped() -> None:
    make = LayerGroup(2, 4, 0, 30, 30, 35, 50)
    stash = LayerGroup(0, 0, 30, 0, 0, 0, 20, may_checkpoint=False, input_from=1, held_groups=2)
    pool = LayerGroup(1, 2, 30, 5, 5, 12, 40, input_from=2, needs_input=True)
    deep = LayerGroup(2, 4, 8, 10, 10, 100, 60)
    swapped = ["swap", "keep", "swap", "keep"]
    # Nothing of what was left has it: not the group that made it, and not the pooling.
    assert predict((make, stash, pool, deep), swapped, 1e30, 1, 0).peak_bytes == 30 + 100
    popped = replace(stash, held_groups=1)
    assert predict((make, popped, pool, deep), swapped, 1e30, 1, 0).peak_bytes == 100
    # As the pooling's input it is there anyway, once.
    again = ["swap", "keep", "checkpoint", "keep"]
    assert predict((make, stash, pool, deep), again, 1e30, 1, 0).peak_bytes == 30 + 100
    kept = ["keep", "keep", "swap", "keep"]
    assert predict((make, stash, pool, deep), kept, 1e30, 1, 0).peak_bytes == 30 + 100


def test_two_groups_are_fetched_ahead() -> None:
    # While the newest has its backward, both others come back; they take room from its start on.
    groups = (
        LayerGroup(1, 2, 0, 10, 10, 12, 20),
        LayerGroup(1, 2, 0, 30, 30, 32, 40),
        LayerGroup(1, 9, 0, 5, 0, 6, 50),
    )
    found = predict(groups, ["swap", "swap", "keep"], 10.0)
    # Out: 1 to 2 and 2 to 5; back: 5 to 8 and 8 to 9, all before 12.
    assert (found.seconds, found.peak_bytes) == (3 + 9 + 2 + 2, 50 + 30 + 10)


def test_a_map_that_two_swapped_groups_need_is_back_for_the_first_of_them() -> None:
    groups = (
        LayerGroup(1, 2, 0, 40, 40, 45, 60),
        LayerGroup(1, 2, 40, 20, 20, 30, 35, input_from=1, needs_input=True),
    )
    found = predict(groups, ["swap", "swap"], 10.0, limit_bytes=0)
    # Forward: 1, out to 5, 6, out to 8. Back: 20 and the shared 40 bytes, to 14; 16; 18.
    assert (found.seconds, found.peak_bytes) == (18, 75)


def test_the_least_limit_that_fits_is_the_least_of_all() -> None:
    for seed in range(6):
        draw = random.Random(seed)
        groups, many = random_chain(draw, 20), draw.choice([1, 3])
        below, least = 0, predict(groups, ["keep"] * len(groups), 1e6, many).peak_bytes
        while least - below > 1:
            middle = (below + least) // 2
            found = choose(groups, middle, 1e6, many)
            below, least = (below, middle) if found else (middle, least)
        found = choose(groups, least, 1e6, many)
        assert found is not None
        assert found.peak_bytes == least
        # Of random changes of one to three groups none needs less.
        choices = np.array([[ACTIONS.index(action) for action in found.actions]] * 2000, np.int8)
        for row in choices:
            for place in draw.sample(range(20), draw.randint(1, 3)):
                row[place] = draw.choice(list(all_choices((groups[place],))[:, 0]))
        assert Choices(groups, choices, 1e6, many).least_peaks.min() >= least


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one action per group"):
        predict(GROUPS, ["keep"], 1.0)
    with pytest.raises(ValueError, match="group 1 may not be computed again"):
        predict((FIRST, replace(SECOND, may_checkpoint=False)), ["keep", "both"], 1.0)
