"""Simulated steps against ones worked out by hand, and choices against all that there are."""

import random
from dataclasses import replace

import numpy as np
import pytest
from chains import all_choices, random_bandwidth, random_chain

from tilenet.parallel.swap import copies as host_copies
from tilenet.planning.swap.policy import ALL, Cell, Choices, choose, leanest, predict
from tilenet.planning.swap.simulate import MOST_IN_FLIGHT, simulate_step

# Three cells: 7 + 2·k s of forward, twice of backward; what each saves feeds the next.
FIRST = Cell(7, 14, 0, 50, 50, 60, 90)
SECOND = Cell(9, 18, 30, 40, 40, 55, 85, again_bytes=88, input_from=1, needs_input=True)
THIRD = Cell(11, 22, 20, 35, 35, 45, 65, again_bytes=70, input_from=1, needs_input=True)
CELLS = (FIRST, SECOND, THIRD)
SHRINKING = (
    Cell(3, 6, 0, 40, 40, 45, 60),
    Cell(4, 8, 40, 20, 20, 30, 50),
    Cell(5, 10, 0, 9, 0, 9, 9),
)


def test_all_kept_takes_the_seconds_and_the_bytes_of_all() -> None:
    found = predict(CELLS, ["keep"] * 3, 1.0, 4)
    assert found.seconds == 4 * 3 * (7 + 9 + 11)
    # The last micro-batch, in the backward of the second cell or of the third.
    assert found.peak_bytes == 3 * (50 + 40 + 35) + max(50 + 85, 50 + 40 + 65)
    assert found.swapped_bytes == 0


def test_what_is_computed_again_leaves_its_input_unless_the_cell_before_kept_it() -> None:
    found = predict(CELLS, ["keep", "checkpoint", "checkpoint"], 1.0, 2)
    assert found.seconds == 2 * (3 * (7 + 9 + 11) + 9 + 11)
    # The second's input counts with the first; the third's, the second's output, at the third.
    assert found.peak_bytes == (50 + 20) + max(90, 50 + 88, 50 + 20 + 70)


def test_a_cell_behind_one_computed_again_keeps_its_input_itself() -> None:
    found = predict(CELLS, ["keep", "checkpoint", "keep"], 1.0, 2)
    assert found.peak_bytes == (50 + 20 + 35) + max(90, 50 + 88, 50 + 20 + 65)
    careless = replace(THIRD, needs_input=False)
    found = predict((FIRST, SECOND, careless), ["keep", "checkpoint", "keep"], 1.0, 2)
    assert found.peak_bytes == (50 + 35) + max(90, 50 + 88, 50 + 20 + 65)


def test_copies_out_and_back_as_worked_out_by_hand() -> None:
    found = predict(SHRINKING, ["swap", "swap", "keep"], 10.0)
    # Out: 3 to 7 and 7 to 9; forward ends at 12. Back: the second's from 12 to 14, the first's to
    # 18, both hidden behind the third's backward, to 22, and the second's, to 30. Then the first's.
    assert found.seconds == 12 + 10 + 8 + 6
    # Everything is back in the backward of the second.
    assert found.peak_bytes == 40 + 50
    assert found.swapped_bytes == 60
    slow = predict(SHRINKING, ["swap", "swap", "keep"], 2.0)
    # Out: 3 to 23 and 23 to 33. Back: 33 to 43, then 43 to 63; the last backward begins then.
    assert slow.seconds == 63 + 6


def test_a_limit_makes_copies_wait() -> None:
    found = predict(SHRINKING, ["swap", "swap", "keep"], 10.0, limit_bytes=60)
    # The second's forward begins when the first's copy is out, at 7; the second's goes from 11 to
    # 13 while the third's runs, to 16. Its way back is hidden: 16 to 18. The first's would have
    # been at 22, but waits for room until 36, when the second is done: 34, and comes from there to
    # 38.
    assert found.seconds == 16 + 10 + 8 + 4 + 6
    assert found.peak_bytes == 60


def test_at_most_four_copies_out_are_under_way() -> None:
    assert MOST_IN_FLIGHT == host_copies.MOST_IN_FLIGHT
    cells = tuple(Cell(1, 2, 0, 10 + k, 10 + k, 15, 20) for k in range(7))
    found = predict(cells, ["swap"] * 7, 0.1)
    # Out one after another from 1 s on, 910 s; back likewise, and the last backward.
    assert found.seconds == pytest.approx(1 + 910 + 910 + 2)
    # Four during the forward of the last cell.
    assert found.peak_bytes == 12 + 13 + 14 + 15 + 15


def test_an_infinite_link_swaps_for_nothing() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        cells = random_chain(draw, draw.randint(3, 9))
        kept = predict(cells, ["keep"] * len(cells), 1e30, 3)
        gone = predict(cells, ["swap"] * len(cells), 1e30, 3, 0)
        assert gone.seconds == pytest.approx(kept.seconds, rel=1e-12)
        assert gone.peak_bytes < kept.peak_bytes


def test_everything_is_kept_where_that_fits() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        cells = random_chain(draw, draw.randint(2, 8))
        kept = predict(cells, ["keep"] * len(cells), 1e6, 2)
        assert choose(cells, kept.peak_bytes, 1e6, 2) == kept


def test_a_limit_is_kept_and_more_room_never_takes_longer() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        cells = random_chain(draw, draw.randint(2, 12))
        many, bandwidth = draw.choice([1, 2, 5]), random_bandwidth(draw, cells)
        options = [[ALL[row] for row in set(all_choices((cell,))[:, 0])] for cell in cells]
        actions = [draw.choice(found) for found in options]
        least = predict(cells, actions, bandwidth, many, 0)
        free = predict(cells, actions, bandwidth, many)
        seconds = least.seconds
        for limit in np.linspace(least.peak_bytes, free.peak_bytes * 1.2, 9):
            found = predict(cells, actions, bandwidth, many, limit)
            assert found.peak_bytes <= limit
            assert free.seconds <= found.seconds <= seconds
            seconds = found.seconds


@pytest.mark.parametrize("most", [2, 3, 4, 5, 6])
def test_choices_are_nearly_the_best_of_all_and_a_fit_is_always_found(most: int) -> None:
    ratios = []
    for seed in range(60):
        draw = random.Random(1000 * most + seed)
        cells = random_chain(draw, most)
        many, bandwidth = draw.choice([1, 1, 2, 3, 6]), random_bandwidth(draw, cells)
        choices = Choices.of(cells, all_choices(cells))
        peaks = choices.least_peaks(many)
        bounds = choices.least_seconds(bandwidth, many)
        low, high = int(peaks.min()), int(peaks[0])
        assert choose(cells, low - 1, bandwidth, many) is None
        for limit in (low, int(draw.uniform(low, high)), int(draw.choice(list(peaks)))):
            best = np.inf
            for row in np.flatnonzero(peaks <= limit):
                if bounds[row] < best:
                    costs = choices.step_costs(row)
                    best = min(best, simulate_step(costs, bandwidth, many, limit)[0])
            found = choose(cells, limit, bandwidth, many)
            assert found is not None
            assert found.peak_bytes <= limit
            assert found == predict(cells, found.actions, bandwidth, many, limit)
            ratios.append(found.seconds / best)
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 1.002


def test_no_choice_has_a_bound_that_it_beats() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        cells = random_chain(draw, 4)
        many, bandwidth = draw.choice([1, 3]), random_bandwidth(draw, cells)
        choices = Choices.of(cells, all_choices(cells))
        bounds = choices.least_seconds(bandwidth, many)
        for row in draw.sample(range(len(bounds)), min(20, len(bounds))):
            actions = [ALL[place] for place in choices.chosen[row]]
            assert predict(cells, actions, bandwidth, many).seconds >= bounds[row]


@pytest.mark.parametrize("allowed", [ALL, ("checkpoint",), ("swap",), ("keep", "both")])
def test_choosing_is_monotone_and_takes_only_what_is_allowed(allowed: tuple[str, ...]) -> None:
    for seed in range(8):
        draw = random.Random(seed)
        cells = random_chain(draw, draw.choice([5, 12, 25]))
        many, bandwidth = draw.choice([1, 4]), random_bandwidth(draw, cells)
        most = predict(cells, ["keep"] * len(cells), bandwidth, many).peak_bytes
        before = np.inf
        for limit in np.geomspace(most / 8, most, 40):
            found = choose(cells, limit, bandwidth, many, allowed)  # type: ignore[arg-type]
            if found is None:
                assert before == np.inf
                continue
            assert set(found.actions) <= {"keep", *allowed}
            assert found.seconds <= before
            before = found.seconds
        assert before < np.inf


def test_a_stashed_map_lives_until_it_is_popped() -> None:
    make = Cell(2, 4, 0, 30, 30, 35, 50)
    stash = Cell(0, 0, 30, 0, 0, 0, 20, may_checkpoint=False, input_from=1, held_cells=2)
    pool = Cell(1, 2, 30, 5, 5, 12, 40, input_from=2, needs_input=True)
    deep = Cell(2, 4, 8, 10, 10, 100, 60)
    swapped = ["swap", "keep", "swap", "keep"]
    # Nothing of what was left has it: not the cell that made it, and not the pooling.
    assert predict((make, stash, pool, deep), swapped, 1e30, 1, 0).peak_bytes == 30 + 100
    popped = replace(stash, held_cells=1)
    assert predict((make, popped, pool, deep), swapped, 1e30, 1, 0).peak_bytes == 100
    # As the pooling's input it is there anyway, once.
    again = ["swap", "keep", "checkpoint", "keep"]
    assert predict((make, stash, pool, deep), again, 1e30, 1, 0).peak_bytes == 30 + 100
    kept = ["keep", "keep", "swap", "keep"]
    assert predict((make, stash, pool, deep), kept, 1e30, 1, 0).peak_bytes == 30 + 100


def test_two_cells_are_fetched_ahead() -> None:
    # While the newest has its backward, both others come back; they take room from its start on.
    cells = (
        Cell(1, 2, 0, 10, 10, 12, 20),
        Cell(1, 2, 0, 30, 30, 32, 40),
        Cell(1, 9, 0, 5, 0, 6, 50),
    )
    found = predict(cells, ["swap", "swap", "keep"], 10.0)
    # Out: 1 to 2 and 2 to 5; back: 5 to 8 and 8 to 9, all before 12.
    assert (found.seconds, found.peak_bytes) == (3 + 9 + 2 + 2, 50 + 30 + 10)


def test_a_map_that_two_swapped_cells_need_is_back_for_the_first_of_them() -> None:
    cells = (
        Cell(1, 2, 0, 40, 40, 45, 60),
        Cell(1, 2, 40, 20, 20, 30, 35, input_from=1, needs_input=True),
    )
    found = predict(cells, ["swap", "swap"], 10.0, limit_bytes=0)
    # Forward: 1, out to 5, 6, out to 8. Back: 20 and the shared 40 bytes, to 14; 16; 18.
    assert (found.seconds, found.peak_bytes) == (18, 75)


def test_a_fit_is_found_in_long_chains_too() -> None:
    for seed in range(6):
        draw = random.Random(seed)
        cells, many = random_chain(draw, 20), draw.choice([1, 3])
        actions = [ALL[place] for place in leanest(cells, many)]
        least = predict(cells, actions, 1e6, many, 0).peak_bytes
        found = choose(cells, least, 1e6, many)
        assert found is not None
        assert found.peak_bytes == least
        # No single other action needs less.
        for place, cell in enumerate(cells):
            for option in all_choices((cell,))[:, 0]:
                other = [*actions[:place], ALL[option], *actions[place + 1 :]]
                assert predict(cells, other, 1e6, many, 0).peak_bytes >= least


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one action per cell"):
        predict(CELLS, ["keep"], 1.0)
    with pytest.raises(ValueError, match="cell 1 may not be computed again"):
        predict((FIRST, replace(SECOND, may_checkpoint=False)), ["keep", "both"], 1.0)
