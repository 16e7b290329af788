"""Choose a layout: of all that fit, the one with the fastest predicted step."""

import heapq
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

from tilenet.choices import Checkpointing, HaloMode
from tilenet.errors import TilenetError
from tilenet.geometry.maps import check_cells, output_size
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.windows import Window
from tilenet.planning.balance import (
    Balance,
    check_balance,
    check_partitions,
    least_bytes,
    least_time,
    most_partitions,
)
from tilenet.planning.bounds import Bounds
from tilenet.planning.compatibility import flow_obstacle, whole_image
from tilenet.planning.estimate import Estimator, Pixels
from tilenet.planning.memory.map_limits import countable
from tilenet.planning.plan import Layout, Plan, Question, round_seconds

FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # tiles of a rank along an axis
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MODES: tuple[Checkpointing, ...] = ("never", "except_last", "always")


class Search:
    """All layouts that answer a question, with their predicted costs.

    Raises:
        TilenetError: The question contradicts itself.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.estimator = Estimator(question)
        check_question(question)
        self.planned = lru_cache(maxsize=None)(self._planned)

    def best(self, count: int = 3, among: Callable[[Layout], bool] | None = None) -> list[Plan]:
        """The fastest plans that fit, best first, a layout each; empty where nothing fits.

        Args:
            count: Most plans to return.
            among: Filter of the layouts; None: all.

        Raises:
            TilenetError: No layout answers the question.
        """
        if not self._bounded:
            raise TilenetError(self._no_layout())
        # Best first: the next layout is either planned, which only adds to its seconds, or, being
        # a plan already, no slower than whatever comes after it. All are rounded, so that plans
        # wait for those that may be as fast and have fewer partitions; each plan has one or more.
        queue: list[tuple[float, int, int, int]] = [
            (round_seconds(seconds), 0, 0, number)
            for number, (seconds, layout) in enumerate(self._bounded)
            if among is None or among(layout)
        ]
        heapq.heapify(queue)
        by_number: dict[int, Plan] = {}
        fastest: list[Plan] = []
        while queue and len(fastest) < count:
            number = heapq.heappop(queue)[-1]
            if number in by_number:
                fastest.append(by_number[number])
            elif plan := self.planned(self._bounded[number][1]):
                by_number[number] = plan
                heapq.heappush(queue, (*plan.order, number))
        return fastest

    def answer(self) -> list[Plan]:
        """The fastest plan that fits, and its nearest rivals; empty if nothing fits.

        Rivals differ in the number of partitions, else in the tiles, else in how tiles go through
        the pipeline: the fastest of each kind, two at most.

        Raises:
            TilenetError: No layout answers the question.
        """
        plans = self.best(1)
        if not plans:
            return []
        chosen = plans[0].layout
        here = chosen.partitions, chosen.grid
        kinds: tuple[Callable[[Layout], bool], ...] = (
            lambda layout: layout.partitions != chosen.partitions,
            lambda layout: layout.partitions == chosen.partitions and layout.grid != chosen.grid,
            lambda layout: layout != chosen and (layout.partitions, layout.grid) == here,
        )
        rivals = [plan for among in kinds for plan in self.best(1, among)]
        return [*plans, *sorted(rivals[:2], key=lambda plan: plan.order)]

    @cached_property
    def bounds(self) -> Bounds:
        """Seconds that no plan can beat."""
        return Bounds(self.estimator)

    @cached_property
    def _bounded(self) -> list[tuple[float, Layout]]:
        return [(self.bounds.seconds(layout), layout) for layout in self.layouts()]

    def layouts(self) -> Iterator[Layout]:
        """Every layout that the question leaves open."""
        question = self.question
        for partitions in self._partitions():
            for grid in self._grids(partitions):
                most = self.estimator.micro_batches(grid, partitions)
                for micro_batches in self._micro_batches(partitions, most):
                    if micro_batches > most:
                        continue
                    for mode in [question.checkpointing] if question.checkpointing else MODES:
                        if mode != "never" and micro_batches == 1 and not question.checkpointing:
                            continue  # computes everything twice and has no lower peak
                        layout = Layout(grid, partitions, micro_batches, mode)
                        if question.pipeline == "1f1b":
                            if not self._flow_obstacle(layout):
                                yield replace(layout, pipeline="1f1b")
                            continue
                        if question.swap != "all":
                            yield layout
                        if question.swap != "off":
                            yield replace(layout, swap=True)

    def _partitions(self) -> list[int]:
        most = most_partitions(len(self.estimator.layers), self.question.together)
        return partition_counts(self.question, most)

    def _no_layout(self) -> str:
        question = self.question
        if question.pipeline == "1f1b":
            devices = question.machine.devices_per_node
            most = question.machine.most_partitions
            several = [count for count in range(2, most + 1) if devices % count == 0]
            partitions = question.partitions or next(iter(several), 1)
            layout = Layout((1, 1), partitions, 1, question.checkpointing or "never")
            if reason := self._flow_obstacle(layout):
                return reason
        counts = [
            (self.estimator.micro_batches(grid, partitions), partitions)
            for partitions in self._partitions()
            for grid in self._grids(partitions)
        ]
        if not counts:
            return self._no_grid()
        most, partitions = max(counts, key=lambda count: count[0])  # of equal ones the first
        whole = whole_image(self.estimator.layers)
        tiles = f"stacks of tiles, for {whole}," if whole else "tiles"
        return (
            f"a rank needs at least as many {tiles} as micro-batches (micro-batches: "
            f"{self._micro_batches(partitions, most)[0]}, of a rank: {most}); ask for at most "
            f"{most}" + ", a finer grid, fewer nodes or a larger batch" * (whole is None)
        )

    def _no_grid(self) -> str:
        """Why no ranks can hold a tile each.

        Raises:
            TilenetError: Tiles are too small for the network, even of the fewest ranks.
        """
        meshes = [self.estimator.mesh(partitions) for partitions in self._partitions()]
        grids = list(dict.fromkeys((mesh.rows, mesh.columns) for mesh in meshes))
        grid, fitting = self._requested_grid(), list(filter(self._computes, grids))
        if grid in grids or not fitting:
            self._checked(grid if grid in grids else grids[-1])
        assert grid is not None
        *others, last = (f"{rows} × {cols}" for rows, cols in fitting)
        legal = " or ".join([", ".join(others), last] if others else [last])
        return (
            f"with halo_mode exchange each rank holds one tile of an image (tiles: {grid[0]} × "
            f"{grid[1]}, ranks of an image: {legal}); ask for as many tiles as ranks, or leave "
            "the tiles out"
        )

    def _flow_obstacle(self, layout: Layout) -> str | None:
        """Why the layout is none of one forward, one backward."""
        question = self.question
        mode: HaloMode = "overlap" if question.halo_mode == "auto" else question.halo_mode
        return flow_obstacle(
            self.estimator.layers,
            layout.partitions,
            layout.checkpointing,
            question.swap,
            loss_terms=(),
            halo_mode=mode,
        )

    def _micro_batches(self, partitions: int, most: int) -> list[int]:
        question = self.question
        if question.pipeline == "1f1b":  # more would change nothing
            most = min(most, partitions)
        if question.micro_batches is not None:
            return [question.micro_batches]
        if partitions == 1:
            return [1]
        return sorted({min(count, most) for count in (*MICRO_BATCHES, most)})

    def _requested_grid(self) -> Pixels | None:
        """The tiles of an image that the question asks for; None: it leaves them open."""
        question = self.question
        if question.tile_px is None:
            return question.grid
        return cut(*question.image, Cut(size_px=question.tile_px), self.estimator.rule).grid

    def _grids(self, partitions: int) -> list[Pixels]:
        """Tiles of an image, along rows and columns; none where ranks cannot hold one each."""
        question, mesh = self.question, self.estimator.mesh(partitions)
        requested = self._requested_grid()
        if question.halo_mode == "exchange":
            grid = mesh.rows, mesh.columns
            return [grid] if requested in (None, grid) and self._computes(grid) else []
        if requested is not None:
            return [self._checked(requested)]
        unit = self.estimator.rule.alignment_px
        most = -(-question.image[0] // unit), -(-question.image[1] // unit)
        grids = {
            (min(mesh.rows * a, most[0]), min(mesh.columns * b, most[1]))
            for a in FACTORS
            for b in FACTORS
        }
        grids = {grid for grid in grids if self._computes(grid)} or {self._checked((1, 1))}
        # Oblong tiles only where nothing squarer is possible: they read more for the same work.
        square = sorted(grid for grid in grids if _oblong(question.image, grid) <= 1.5)
        tiles = self.estimator.tiles_per_rank
        few = {
            (*sorted(self.estimator.read_px(grid)), tiles(grid, partitions)): grid
            for grid in square or [min(grids, key=lambda grid: _oblong(question.image, grid))]
        }
        return list(few.values())  # of tiles turned by a right angle, one kind

    def _checked(self, grid: Pixels) -> Pixels:
        """The grid.

        Raises:
            TilenetError: Its tiles are too small for the network.
        """
        layers, (height, width) = self.estimator.layers, self.estimator.read_px(grid)
        if min(output_size(layers, height), output_size(layers, width)) < 1:
            raise TilenetError(
                f"a tile must leave every pooling something (tile: {height} × {width} px); take "
                "larger tiles, or fewer poolings"
            )
        check_cells(layers, Window(0, 0, height, width))
        return grid

    def _computes(self, grid: Pixels) -> bool:
        with suppress(TilenetError):
            return bool(self._checked(grid))
        return False

    def plan(self, layout: Layout) -> Plan | None:
        """The fastest plan with this layout; None where no balance fits.

        Of the few balances with the smallest bottlenecks the one that is fastest when simulated.
        """
        estimator = self.estimator
        if not self._countable(layout):
            return None
        fits = self._swap_fits if layout.swap else self._fits
        fitting = [balance for balance in self._balances(layout) if fits(layout, balance)]
        if not fitting:
            return None
        return estimator.describe(
            layout, min(fitting, key=lambda balance: estimator.step_s(layout, balance)[0])
        )

    def _planned(self, layout: Layout) -> Plan | None:
        """`plan`, which is not asked where fewer micro-batches at once do not fit either."""
        if not layout.swap:  # with `auto` fewer may fit without, and are no plans that swap
            first = self._micro_batches(layout.partitions, layout.micro_batches)[0]
            fewest = replace(layout, micro_batches=first)
            if fewest != layout and self.planned(fewest) is None:
                return None
        return self.plan(layout)

    def _fits(self, layout: Layout, balance: Balance) -> bool:
        return self.estimator.num_bytes(layout, balance) <= self.question.limit_bytes

    def _swap_fits(self, layout: Layout, balance: Balance) -> bool:
        """Whether devices and host hold it; where nothing has to go, not as a plan that swaps."""
        swaps = self.estimator.swaps(layout, balance)
        if swaps is None or (self.question.swap == "auto" and swaps.idle):
            return False
        host = self.estimator.host_bytes(layout, swaps.swapped_bytes)
        return self._fits(layout, balance) and (
            swaps.idle or host <= self.question.machine.rank_bytes
        )

    def _balances(self, layout: Layout) -> list[Balance]:
        question, partitions = self.question, layout.partitions
        if question.balance is not None:
            return [question.balance]
        shape = self.estimator.shape(layout)
        if partitions == 1:
            return [(len(self.estimator.layers),)]
        room = self.estimator.blocks(
            shape, layout.micro_batches, layout.checkpointing, partitions, layout.swap
        )
        seconds = self.estimator.seconds(shape)
        if layout.swap:  # fewer of these: choosing the swaps takes a while
            few = least_time(seconds, partitions, room, question.limit_bytes, few=1)
            more = least_time(seconds, partitions, few=1)
            return list(dict.fromkeys([*few, *more, *least_bytes(room, partitions, few=1)]))
        few = least_time(seconds, partitions, room, question.limit_bytes)
        # Blocks are charged the most that they may need, so that more balances may fit.
        more = least_time(seconds, partitions) or few
        return list(dict.fromkeys([*few, *more, *least_bytes(room, partitions, seconds, few=1)]))

    def leanest(self) -> Plan | None:
        """The plan of all layouts that needs least memory, whether it fits or not.

        None where even the smallest tile has maps that are too large for any device.
        """
        fewest: dict[int, Layout] = {}
        for layout in self.layouts():
            # Of layouts with as many partitions the smallest micro-batch, and the fewest at once.
            least = fewest.setdefault(layout.partitions, layout)
            if self._asks(layout) < self._asks(least):
                fewest[layout.partitions] = layout
        plans = [self._leanest(layout) for layout in fewest.values() if self._countable(layout)]
        return min(plans, key=lambda plan: plan.device_bytes, default=None)

    def _asks(self, layout: Layout) -> tuple[int, int, bool]:
        """Pixels of a micro-batch, how many at once, and whether all their activations live."""
        return (
            prod(self.estimator.shape(layout)),
            layout.micro_batches,
            layout.checkpointing != "always",
        )

    def _countable(self, layout: Layout) -> bool:
        """Whether kernels can index all maps."""
        stacked, rows, cols = self.estimator.shape(layout)
        return countable(self.estimator.layers, rows, cols, stacked)

    def _leanest(self, layout: Layout) -> Plan:
        question, partitions = self.question, layout.partitions
        shape = self.estimator.shape(layout)
        room = self.estimator.blocks(shape, layout.micro_batches, layout.checkpointing, partitions)
        few = [question.balance] if question.balance else least_bytes(room, partitions)
        best = min(few, key=lambda balance: self.estimator.num_bytes(layout, balance))
        return self.estimator.describe(layout, best)


def partition_counts(question: Question, most: int) -> list[int]:
    """Numbers of partitions up to `most` with which every device of a node has layers."""
    if question.partitions is not None:
        return [question.partitions]
    machine = question.machine
    counts = range(1, min(most, machine.most_partitions) + 1)
    return [count for count in counts if machine.devices_per_node % count == 0]


def _oblong(image: Pixels, grid: Pixels) -> float:
    """Longer side of a tile by its shorter one."""
    sides = image[0] / grid[0], image[1] / grid[1]
    return max(sides) / min(sides)


def check_question(question: Question) -> None:
    """Refuse a question that no plan can answer.

    Raises:
        TilenetError: It contradicts itself; the error names the rule, the values and the remedy.
    """
    num_layers = len(question.layers)
    for name in ("nodes", "num_images", "batch_size", "partitions", "micro_batches"):
        value = getattr(question, name)
        if value is not None and value < 1:
            raise TilenetError(f"{name} must be at least 1 ({name}: {value})")
    if min(question.image) < 1:
        raise TilenetError(
            f"an image must have at least one pixel a side (image: {question.image[0]} × "
            f"{question.image[1]} px)"
        )
    if question.balance is not None:
        check_balance(question.balance, num_layers, question.partitions, question.together)
    check_partitions(question.partitions or 1, num_layers, question.together)
    if question.halo_mode == "exchange" and question.halo != "exact":
        raise TilenetError(
            f"with halo_mode exchange each layer takes just what it needs (halo: {question.halo}); "
            "leave halo out, or take halo_mode overlap"
        )
    question.machine.check_partitions(question.partitions or 1)
    if not 0 <= question.reserve < 1:
        raise TilenetError(
            f"reserve is a share of a device's memory (reserve: {question.reserve}); 0.1 is usual"
        )
