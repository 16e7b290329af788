"""Simulated steps against ones worked out by hand, and thresholds against all that there are."""

import random
from dataclasses import replace

import numpy as np
import pytest
from chains import random_bandwidth, random_chain

from tilenet.planning.swap.layers import SavingLayer
from tilenet.planning.swap.threshold import Threshold, choose, simulate

# Three layers: 7 + 2·k s of forward, twice of backward; what each saves feeds the next.
FIRST = SavingLayer(7, 14, 50, 50, 60, 90)
SECOND = SavingLayer(9, 18, 40, 40, 55, 85, 30, input_keeper=0, needs_input=True)
THIRD = SavingLayer(11, 22, 35, 35, 45, 65, 20, input_keeper=1, needs_input=True)
LAYERS = (FIRST, SECOND, THIRD)
Case = tuple[random.Random, tuple[SavingLayer, ...], int, float]


def test_all_kept_takes_the_seconds_and_the_bytes_of_all() -> None:
    found = simulate(LAYERS, 0, 1.0, 4)
    assert found.seconds == 4 * 3 * (7 + 9 + 11)
    # The last micro-batch, in the backward of the second layer or of the third.
    assert found.peak_bytes == 3 * (50 + 40 + 35) + max(50 + 85, 50 + 40 + 65)
    assert found.swapped_bytes == 0


def test_a_layer_behind_one_that_swaps_keeps_its_input_itself() -> None:
    found = simulate(LAYERS, 1, 1e30, 2, 0)
    # The second's input went with what the first saved; it is among what the second leaves.
    assert found.peak_bytes == (30 + 40 + 35) + max(90, 30 + 85, 30 + 40 + 65)
    careless = replace(SECOND, needs_input=False)
    found = simulate((FIRST, careless, THIRD), 1, 1e30, 2, 0)
    # Its backward leaves the input where it went.
    assert found.peak_bytes == (40 + 35) + max(90, 85, 40 + 65)
    # All swap: nothing stays, and an input comes back on top of what a layer's own peak has.
    assert simulate(LAYERS, 3, 1e30, 2, 0).peak_bytes == max(90, 30 + 85, 20 + 65)


COPIED = (
    SavingLayer(3, 6, 40, 40, 45, 60),
    SavingLayer(4, 8, 20, 20, 30, 50),
    SavingLayer(5, 10, 9, 0, 9, 9),
)


def test_copies_out_and_back_as_worked_out_by_hand() -> None:
    found = simulate(COPIED, 2, 10.0)
    # Out: 3 to 7 and 7 to 9; forward ends at 12. Back: the second's from 12 to 14, the first's to
    # 18, both hidden behind the third's backward, to 22, and the second's, to 30. Then the first's.
    assert found.seconds == 12 + 10 + 8 + 6
    # Everything is back in the backward of the second.
    assert found.peak_bytes == 40 + 50
    assert found.swapped_bytes == 60
    slow = simulate(COPIED, 2, 2.0)
    # Out: 3 to 23 and 23 to 33. Back: 33 to 43, then 43 to 63; the last backward begins then.
    assert slow.seconds == 63 + 6


def test_a_limit_makes_copies_wait() -> None:
    found = simulate(COPIED, 2, 10.0, limit_bytes=60)
    # Nothing is left for copies. The second's forward begins when the first's copy is out, at 7;
    # the third's when the second's is, from 11 to 13, and ends at 18. Its way back is hidden: 18 to
    # 20. The first's waits for room until 36, when the second is done, and comes from there to 40.
    assert found.seconds == 18 + 10 + 8 + 4 + 6
    assert (found.peak_bytes, found.in_flight_bytes) == (60, 0)
    # Next to its 20 bytes on their way the third's may run, to 16; next to the first's 40 not yet.
    found = simulate(COPIED, 2, 10.0, limit_bytes=80)
    assert (found.seconds, found.in_flight_bytes) == (16 + 10 + 8 + 4 + 6, 20)
    # At 100 both hide, and so does what comes back.
    found = simulate(COPIED, 2, 10.0, limit_bytes=100)
    assert (found.seconds, found.in_flight_bytes) == (12 + 10 + 8 + 6, 40)


def test_at_most_four_copies_out_are_under_way() -> None:
    layers = tuple(SavingLayer(1, 2, 10 + k, 10 + k, 15, 20) for k in range(7))
    found = simulate(layers, 7, 0.1)
    # Out one after another from 1 s on, 910 s; back in the same way, and the last backward.
    assert found.seconds == pytest.approx(1 + 910 + 910 + 2)
    # Four during the forward of the last layer.
    assert found.peak_bytes == 12 + 13 + 14 + 15 + 15


def random_case(seed: int, counts: list[int], manies: list[int]) -> Case:
    draw = random.Random(seed)
    layers = random_chain(draw, draw.choice(counts))
    return draw, layers, draw.choice(manies), random_bandwidth(draw, layers)


def test_an_infinite_link_swaps_for_nothing() -> None:
    for seed in range(30):
        _, layers, many, _ = random_case(seed, [*range(3, 10)], [3])
        kept = simulate(layers, 0, 1e30, many)
        gone = simulate(layers, len(layers), 1e30, many, 0)
        assert gone.seconds == pytest.approx(kept.seconds, rel=1e-12)
        assert gone.peak_bytes < kept.peak_bytes


def test_everything_is_kept_where_that_fits() -> None:
    for seed in range(20):
        _, layers, many, bandwidth = random_case(seed, [*range(2, 9)], [2])
        most = simulate(layers, 0, bandwidth, many).peak_bytes
        assert choose(layers, most, bandwidth, many) == simulate(layers, 0, bandwidth, many, most)


def test_a_limit_is_kept_and_more_room_never_takes_longer() -> None:
    for seed in range(150):
        draw, layers, many, bandwidth = random_case(seed, [*range(2, 13)], [1, 2, 5])
        k = draw.randint(0, len(layers))
        least = simulate(layers, k, bandwidth, many, 0)
        free = simulate(layers, k, bandwidth, many)
        seconds = least.seconds
        for limit in np.linspace(least.peak_bytes, free.peak_bytes * 1.2, 9):
            found = simulate(layers, k, bandwidth, many, limit)
            assert found.peak_bytes <= limit
            assert free.seconds <= found.seconds <= seconds
            seconds = found.seconds


def test_the_threshold_is_the_fastest_that_fits_and_a_fit_is_always_found() -> None:
    chosen = set()
    for seed in range(200):
        draw, layers, many, bandwidth = random_case(seed, [*range(1, 15)], [1, 1, 2, 3, 6])
        peaks = [simulate(layers, k, bandwidth, many, 0).peak_bytes for k in range(len(layers) + 1)]
        low, high = min(peaks), peaks[0]
        assert choose(layers, low - 1, bandwidth, many) is None
        for limit in (low, int(draw.uniform(low, high)), draw.choice(peaks), 2 * high):
            fitting: list[Threshold] = [
                simulate(layers, k, bandwidth, many, limit)
                for k, peak in enumerate(peaks)
                if peak <= limit
            ]
            assert choose(layers, limit, bandwidth, many) == min(fitting, key=lambda t: t.seconds)
            best = min(fitting, key=lambda t: t.seconds)
            chosen.add((best.layers > fitting[0].layers, best.layers == len(layers)))
    # Among them ones that swap more than they must, since copies then have more room.
    assert chosen == {(False, False), (False, True), (True, False), (True, True)}


def test_a_stashed_map_lives_until_it_is_popped() -> None:
    make = SavingLayer(2, 4, 30, 30, 35, 50)
    stash = SavingLayer(0, 0, 0, 0, 0, 20, 30, input_keeper=0)
    pool = SavingLayer(1, 2, 5, 5, 12, 40, 30, input_keeper=0, needs_input=True)
    deep = SavingLayer(2, 4, 10, 10, 100, 60, held=(1,))
    # Nothing of what was left has it: not the layer that made it, and not the pooling.
    assert simulate((make, stash, pool, deep), 3, 1e30, 1, 0).peak_bytes == 30 + 100
    popped = replace(deep, held=())
    assert simulate((make, stash, pool, popped), 3, 1e30, 1, 0).peak_bytes == 100
    # As what the pooling keeps, or the layer that made it, it is there anyway, once.
    for k, pool_saves in ((1, 30 + 5), (0, 5)):
        found = simulate((make, stash, pool, deep), k, 1e30, 1, 0)
        assert found.peak_bytes == (k == 0) * 30 + pool_saves + 100


def test_two_layers_are_fetched_ahead() -> None:
    # While the newest has its backward, both others come back; they take room from its start on.
    layers = (
        SavingLayer(1, 2, 10, 10, 12, 20),
        SavingLayer(1, 2, 30, 30, 32, 40),
        SavingLayer(1, 9, 5, 0, 6, 50),
    )
    found = simulate(layers, 2, 10.0)
    # Out: 1 to 2 and 2 to 5; back: 5 to 8 and 8 to 9, all before 12.
    assert (found.seconds, found.peak_bytes) == (3 + 9 + 2 + 2, 50 + 30 + 10)


def test_a_map_that_two_swapped_layers_need_is_back_for_the_first_of_them() -> None:
    layers = (
        SavingLayer(1, 2, 40, 40, 45, 60),
        SavingLayer(1, 2, 20, 20, 30, 35, 40, input_keeper=0, needs_input=True),
    )
    found = simulate(layers, 2, 10.0, limit_bytes=0)
    # Forward: 1, out to 5, 6, out to 8. Back: 20 and the shared 40 bytes, to 14; 16; 18.
    assert (found.seconds, found.peak_bytes) == (18, 75)
