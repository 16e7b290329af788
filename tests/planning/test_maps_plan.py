"""Which way an image is mapped, and what that costs."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from mpi4py import MPI

import tilenet.mapping.choose
from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.layers import Norm
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.mapping.choose import decide_map
from tilenet.planning.maps.choose import _tile_px, choose_map
from tilenet.planning.maps.passes import plan_passes
from tilenet.planning.maps.question import MapQuestion
from tilenet.planning.maps.strips import GPU_STRIP_PX
from tilenet.planning.memory.inference import inference_bytes
from tilenet.planning.memory.map_limits import countable
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes

OPTIONS = UNetOptions(poolings=5, base=64, bands=4, classes=1, norm="instance")
LAYERS = unet_layers(OPTIONS)
SIZE = (1000, 1200)
# Of the image extended to 1024 × 1216 px.
WHOLE_BYTES = inference_bytes(LAYERS, 1024, 1216, 4)


def question(ranks: int = 4, budget: int = WHOLE_BYTES, options: UNetOptions = OPTIONS, **more):  # type: ignore[no-untyped-def]
    layers = unet_layers(options)
    halo = more.pop("halo", "exact")
    asked = MapQuestion(
        layers=layers,
        size=SIZE,
        rule=halo_rule(halo, layers, 92),
        halo_asked=halo != "exact",
        tile_px=None,
        num_ranks=ranks,
        item_bytes=4,
        budget_bytes=budget,
        most_px=1024,
    )
    return replace(asked, **more)


def test_ranks_share_an_image_that_they_hold() -> None:
    plan = choose_map(question())
    assert (plan.method, plan.tiling.grid, plan.passes, plan.work) == ("exchange", (2, 2), (), 1.0)
    assert all(tile.read == tile.own for tile in plan.tiling.tiles)
    # of uneven shares the largest must fit
    largest = max(s.own for s in plan.tiling.rows), max(s.own for s in plan.tiling.cols)
    need = inference_bytes(LAYERS, *largest, 4)
    assert choose_map(question(budget=need)).method == "exchange"
    assert choose_map(question(budget=need - 1)).method == "passes"


def test_one_rank_needs_nobody() -> None:
    plan = choose_map(question(ranks=1))
    assert (plan.method, plan.tiling.grid) == ("tiles", (1, 1))
    assert choose_map(question(ranks=1, budget=WHOLE_BYTES - 1)).method == "passes"


def test_passes_cost_less_than_their_number() -> None:
    plan = choose_map(question(budget=WHOLE_BYTES // 8))
    norms = [i for i, layer in enumerate(LAYERS) if isinstance(layer, Norm)]
    assert [index for index, _ in plan.passes] == norms
    assert len(norms) == 22
    assert 1 + len(norms) / 4 < plan.work < 1 + len(norms)
    halos = [tiling.rule.halo_px for _, tiling in plan.passes]
    assert halos[0] == 32
    assert halos == sorted(halos)
    assert halos[-1] == plan.tiling.rule.halo_px == 192
    owns = {tuple(tile.own for tile in tiling.tiles) for _, tiling in plan.passes}
    assert owns == {tuple(tile.own for tile in plan.tiling.tiles)}
    assert plan.why.startswith("4 × ")
    enough = int(plan.why.split("; ")[1].split()[0])
    assert choose_map(question(enough, WHOLE_BYTES // 8)).method == "exchange"
    assert enough < 16


def test_tiles_that_share_a_ranks_memory_are_smaller_and_the_method_stays() -> None:
    none = replace(OPTIONS, norm="none")
    owns = {}
    for at_once in (1, 4):
        plan = choose_map(question(budget=2 * WHOLE_BYTES, options=none, at_once=at_once))
        owns[at_once] = plan.tiling.rows[0].own
        read = plan.tiling.tiles[0].read
        need = inference_bytes(unet_layers(none), read.height, read.width, 4)
        assert need * at_once <= 2 * WHOLE_BYTES
    assert owns[4] < owns[1]
    assert choose_map(question(at_once=4)).method == "exchange"


def test_a_tile_that_is_narrow_for_its_halo_may_take_more_memory() -> None:
    options = replace(OPTIONS, norm="none")
    layers = unet_layers(options)
    halo, unit = context_of(layers).halo_px, context_of(layers).alignment_px

    def need(own: int) -> int:
        return inference_bytes(layers, own + 2 * halo, own + 2 * halo, 4)

    def widest(budget: int) -> int:
        return _tile_px(question(options=options, budget=budget))

    assert widest(need(2 * halo) // 4) == 2 * halo
    assert widest(need(2 * halo) // 4 - 1) == 2 * halo - unit
    assert widest(need(2 * halo + unit) - 1) == 2 * halo
    assert widest(need(2 * halo + unit)) == 2 * halo + unit


@pytest.mark.parametrize("poolings", [4, 5])
def test_no_tile_of_a_large_device_has_maps_that_kernels_cannot_count(poolings: int) -> None:
    layers = unet_layers(options := replace(OPTIONS, norm="none", poolings=poolings))
    asked = question(1, 80 << 30, options, size=(20_000, 20_000), most_px=4096)
    read = choose_map(asked).tiling.tiles[0].read
    assert countable(layers, read.height, read.width)
    larger = _tile_px(asked) + asked.unit_px + 2 * asked.rule.halo_px
    assert not countable(layers, larger, larger)
    # Nor has a rank's share of an image, nor a strip.
    asked = question(4, 1 << 50, size=(10_000, 10_000))
    assert choose_map(asked).method == "passes"
    swept = question(1, 0, options, size=(2048, 400_000), sweep_bytes=1 << 50)
    tiling = choose_map(swept).tiling
    assert tiling.grid[1] > 1
    assert countable(layers, tiling.rows[0].own, tiling.cols[0].read)


def test_a_tile_or_a_halo_that_is_asked_for_means_passes() -> None:
    plan = choose_map(question(tile_px=512))
    assert (plan.method, plan.tiling.grid) == ("passes", (2, 3))
    assert plan.why == "a tile's size was asked for; without it one pass would do"
    tight = choose_map(question(tile_px=512, budget=WHOLE_BYTES // 8))
    assert tight.why == "a tile's size was asked for"
    swept = choose_map(question(tile_px=512, budget=WHOLE_BYTES // 8, sweep_bytes=WHOLE_BYTES))
    assert swept.why == "a tile's size was asked for"
    assert choose_map(question(halo=96, budget=WHOLE_BYTES // 2)).method == "passes"
    whole = choose_map(question(tile_px=4096))
    assert (whole.method, whole.tiling.grid) == ("tiles", (1, 1))


def test_a_grid_that_rims_allow_is_found() -> None:
    plan = choose_map(question(ranks=6, size=(32, 3000)))
    assert (plan.method, plan.tiling.grid) == ("exchange", (1, 6))
    plan = choose_map(question(ranks=6, size=(32, 90)))
    assert (plan.method, plan.tiling.grid) == ("tiles", (1, 1))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_other_networks_are_mapped_tile_by_tile(norm: str) -> None:
    plan = choose_map(question(options=replace(OPTIONS, norm=norm)))
    assert (plan.method, plan.passes) == ("tiles", ())
    assert len(plan.tiling.tiles) > 1
    plan = choose_map(question(options=replace(OPTIONS, norm_scope="tile")))
    assert plan.method == "tiles"


def test_an_image_with_one_cell_on_a_level_is_refused() -> None:
    with pytest.raises(TilenetError, match=r"image: 30 × 9 px, 32 × 32 px with its extension"):
        choose_map(question(size=(30, 9)))
    # a tile may have one: its cells are not what is counted
    assert choose_map(question(tile_px=32, halo=0)).method == "passes"


def test_the_papers_tiles_are_refused() -> None:
    with pytest.raises(TilenetError, match="use halo: exact or a multiple of the stride"):
        choose_map(question(halo="epsilon", tile_px=250))


SWEPT = replace(OPTIONS, norm="batch")


def test_a_sweep_is_taken_where_it_computes_less() -> None:
    more = {"size": (4000, 4096), "sweep_bytes": 1 << 30}
    sweep = choose_map(question(1, 1 << 28, SWEPT, **more))
    assert (sweep.method, sweep.tiling.grid[1], sweep.passes) == ("sweep", 1, ())
    assert sweep.work_ratio == pytest.approx(4000 / 4000, abs=0.01)
    for other in ({"sweep_bytes": 0}, {"tile_px": 512}, {"halo": 96}, {"size": (200, 300)}):
        assert choose_map(question(1, 1 << 28, SWEPT, **{**more, **other})).method == "tiles"


def test_little_memory_sweeps_columns() -> None:
    size = 4000, 4096
    whole = choose_map(question(1, 1 << 26, SWEPT, size=size, sweep_bytes=1 << 30))
    strip = max(span.own for span in whole.tiling.rows)
    need = swept_bytes(unet_layers(SWEPT), 4000, 4096, strip, 4)
    less = choose_map(question(1, 1 << 26, SWEPT, size=size, sweep_bytes=need // 3))
    assert (less.method, less.tiling.grid[1] > 1) == ("sweep", True)
    width, rows = less.tiling.cols[0].read, max(span.own for span in less.tiling.rows)
    assert swept_bytes(unet_layers(SWEPT), 4000, width, rows, 4) <= need // 3
    assert less.work_ratio > whole.work_ratio


def test_passes_of_sweeps() -> None:
    plan = choose_map(question(2, 1 << 22, size=(2000, 2048), sweep_bytes=1 << 30))
    tiles = choose_map(question(2, 1 << 22, size=(2000, 2048)))
    assert (plan.method, tiles.method) == ("sweep", "passes")
    assert [index for index, _ in plan.passes] == [index for index, _ in tiles.passes]
    assert plan.work_ratio < tiles.work_ratio


def test_ranks_sweep_columns_where_bands_would_be_flat() -> None:
    plan = choose_map(question(64, 1 << 26, SWEPT, size=(4096, 4096), sweep_bytes=1 << 30))
    assert plan.method == "sweep"
    assert plan.tiling.grid[1] > 1
    flat = cut(4096, 4096, Cut(grid=(plan.tiling.grid[0], 1)), plan.tiling.rule)
    assert plan.work_ratio < read_ratio(flat, 64)


@pytest.mark.parametrize("strip_px", [0, GPU_STRIP_PX])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_what_another_number_of_ranks_may_go_on_with_does_not_depend_on_it(
    norm: Any, strip_px: int
) -> None:
    options = replace(SWEPT, norm=norm, poolings=3, base=16)
    more = {"size": (4096, 4096), "sweep_bytes": 5 << 28, "most_px": 4096}
    more |= {"steady": True, "strip_overhead_px": strip_px}
    one, many = (choose_map(question(ranks, 1 << 20, options, **more)) for ranks in (1, 64))
    assert (one.method, one.tiling) == ("sweep", many.tiling)
    assert many.work_ratio > one.work_ratio


def test_ranks_that_sweep_exchange_halos_where_that_saves_a_tenth() -> None:
    asked = question(
        options=replace(OPTIONS, norm="none"),
        budget=1 << 20,
        size=(1217, 2003),
        sweep_bytes=1 << 40,
    )
    bands = choose_map(asked)
    columns = choose_map(replace(asked, exchanges=True))
    assert (bands.method, columns.method) == ("sweep", "sweep")
    assert not bands.tiling.rule.exchanged
    assert columns.tiling.rule.exchanged
    assert columns.tiling.grid[1] == 4
    # 63 units of 32 px over four ranks
    assert columns.work_ratio == 4 * 16 * 32 * 1248 / (1217 * 2003)
    assert columns.work_ratio <= 0.9 * bands.work_ratio
    assert choose_map(replace(asked, exchanges=True, num_ranks=1)) == choose_map(
        replace(asked, num_ranks=1)
    )
    # Another number of ranks may go on with it; or bands of a long image lose little.
    for same in ({"steady": True}, {"size": (40_003, 997)}):
        some = replace(asked, **same)
        assert choose_map(replace(some, exchanges=True)) == choose_map(some)


def largest(tiling: Tiling) -> tuple[int, int]:
    return max(span.own for span in tiling.rows), max(span.read for span in tiling.cols)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_strips_are_as_tall_as_pays_and_fits(norm: Any) -> None:
    """On a GPU, on which a strip takes time before it computes anything."""
    layers = unet_layers(options := replace(SWEPT, norm=norm, base=16, poolings=3))
    size, strip_px = (6000, 4096), 1 << 18
    least = swept_bytes(layers, 6000, 4096, 64, 4)
    heights, least_costs = [], []
    for sweep_bytes in (least, *(least * times // 4 for times in range(5, 90, 7)), 1 << 40):
        low = question(1, 1 << 26, options, size=size, sweep_bytes=sweep_bytes, most_px=4096)
        asked = replace(low, strip_overhead_px=strip_px)
        plan = choose_map(asked)
        assert (plan.method, plan.tiling.grid[1]) == ("sweep", 1)
        height, width = largest(plan.tiling)
        assert swept_bytes(layers, 6000, width, height, 4) <= sweep_bytes
        costs, strips = {}, 94
        assert choose_map(low).tiling.grid == (strips, 1)
        while strips > 1:
            tiling = cut(*size, Cut(grid=(strips, 1)), asked.rule)
            rows, cols = largest(tiling)
            if rows <= 4096 and swept_bytes(layers, 6000, cols, rows, 4) <= sweep_bytes:
                work = plan_passes(asked, tiling, "", 1.0).work
                costs[strips] = work * (1 + strip_px / (rows * cols))
            strips = -(-strips // 2)
        assert costs[plan.tiling.grid[0]] == min(costs.values())
        heights.append(height)
        least_costs.append(costs[plan.tiling.grid[0]])
    assert (heights[0], heights[-1]) == (64, 3000)
    assert len(set(heights)) > 3
    assert least_costs == sorted(least_costs, reverse=True)
    # Passes that begin from kept maps are worth more than tall strips.
    assert (heights != sorted(heights)) == (norm == "instance")


def test_no_rank_is_idle_for_tall_strips() -> None:
    asked = question(8, 1 << 28, SWEPT, size=(4096, 4096), sweep_bytes=1 << 40, most_px=4096)
    plan = choose_map(replace(asked, strip_overhead_px=GPU_STRIP_PX))
    assert len(plan.tiling.tiles) >= 8
    assert plan.work_ratio < 1.3 * choose_map(asked).work_ratio
    # Columns are as many as take the least time, not as read the fewest pixels.
    plan = choose_map(replace(asked, num_ranks=12, strip_overhead_px=GPU_STRIP_PX))
    fewer = cut(4096, 4096, Cut(grid=(16, 4)), asked.rule)
    times = [
        read_ratio(one, 12) * (1 + GPU_STRIP_PX / prod(largest(one)))
        for one in (plan.tiling, fewer)
    ]
    assert times[0] < times[1]
    # Of what is read at once a node has no more than of the largest tile.
    for most_px in (1024, 2048):
        plan = choose_map(replace(asked, most_px=most_px, strip_overhead_px=1 << 24, num_ranks=1))
        rows, cols = largest(plan.tiling)
        assert most_px**2 / 2 <= rows * cols <= most_px**2


@pytest.mark.parametrize(("device", "strip_px"), [("cpu", 0), ("cuda", GPU_STRIP_PX)])
def test_strips_cost_a_gpu_more(
    device: str, strip_px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = question(1, 1 << 28, SWEPT, size=(4096, 4096))
    monkeypatch.setattr(tilenet.mapping.choose, "_memory", lambda *_: (1 << 32, 4096))
    plan = decide_map(asked, None, torch.device(device), MPI.COMM_SELF, sweeps=True)
    times = 1 if device == "cuda" else 8
    more = {"budget_bytes": 1 << 32, "sweep_bytes": times << 32, "most_px": 4096}
    assert plan == choose_map(replace(asked, strip_overhead_px=strip_px, **more))
    assert (max(span.own for span in plan.tiling.rows) > 128) == (device == "cuda")
