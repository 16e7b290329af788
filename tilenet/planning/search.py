"""Choose a layout: of all that fit, the one whose step is predicted to be fastest."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Cut, cut
from tilenet.planning.balance import check_balance, least_bytes, least_time
from tilenet.planning.estimate import Estimator
from tilenet.planning.layer_bytes import LARGEST_MAP, largest_map
from tilenet.planning.plan import Checkpointing, Layout, Plan, Question

__all__ = ["Search"]

FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # tiles of a rank along an axis
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MODES: tuple[Checkpointing, ...] = ("never", "except_last", "always")
Pixels = tuple[int, int]
Balance = tuple[int, ...]


class Search:
    """All layouts that answer a question, and what each is predicted to cost.

    Raises:
        TilenetError: The question contradicts itself.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.estimator = Estimator(question)
        _check(question, len(self.estimator.layers))
        self.fastest = lru_cache(maxsize=None)(self._fastest)
        self._at_best: dict[tuple[int, int, int], bool] = {}
        self._too_large: set[tuple[int, int, int, int, str]] = set()

    def best(self, count: int = 3) -> list[Plan]:
        """The fastest plans that fit, best first; none where nothing fits."""
        # Sorted by what they would take if memory were endless, which no plan beats: once `count`
        # plans are faster than that, no later layout can be among them.
        layouts = list(self.layouts())
        if not layouts:
            raise TilenetError(self._no_layout())
        bounds = [(self._least_seconds(layout), layout) for layout in layouts]
        bounds.sort(key=lambda bound: bound[0])
        found: list[Plan] = []
        for least_s, layout in bounds:
            if len(found) >= count and least_s >= found[count - 1].step_s:
                break
            plan = self.plan(layout)
            if plan is not None:
                found = sorted([*found, plan], key=lambda one: one.step_s)
        return found[:count]

    def layouts(self) -> Iterator[Layout]:
        """Every layout that the question leaves open."""
        asked = self.question
        devices = asked.machine.devices_per_node
        for partitions in [asked.partitions] if asked.partitions else range(1, devices + 1):
            if asked.partitions is None and devices % partitions:
                continue  # devices would stand idle
            if partitions > len(self.estimator.layers):
                continue
            for grid in self._grids(partitions):
                tiles = self._tiles(grid, partitions)
                for micro_batches in self._micro_batches(partitions, tiles):
                    if micro_batches > tiles:
                        continue
                    for mode in [asked.checkpointing] if asked.checkpointing else MODES:
                        if asked.checkpointing is None and partitions == 1 and mode != "never":
                            continue  # computes everything twice and has the same peak
                        yield Layout(grid, partitions, micro_batches, mode)

    def _no_layout(self) -> str:
        asked = self.question
        partitions = asked.partitions or 1
        tiles = max(self._tiles(grid, partitions) for grid in self._grids(partitions))
        return (
            f"a rank needs at least as many tiles as micro-batches (micro-batches: "
            f"{self._micro_batches(partitions, tiles)[0]}, tiles of a rank: {tiles}); ask for at "
            f"most {tiles}, a finer grid, fewer nodes or a larger batch"
        )

    def _tiles(self, grid: Pixels, partitions: int) -> int:
        return self.estimator.tiles_per_rank(grid, partitions)

    def _micro_batches(self, partitions: int, tiles: int) -> list[int]:
        asked = self.question
        if asked.micro_batches is not None:
            return [asked.micro_batches]
        if asked.mbpp is not None:
            return [asked.mbpp * partitions]
        if partitions == 1:
            return [1]
        return sorted({min(count, tiles) for count in (*MICRO_BATCHES, tiles)})

    def _grids(self, partitions: int) -> list[Pixels]:
        asked, mesh = self.question, self.estimator.mesh(partitions)
        height, width = asked.image
        if asked.halo_mode == "exchange":
            grid = mesh.rows, mesh.columns
            if asked.grid not in (None, grid):
                raise TilenetError(
                    f"with halo_mode exchange each rank holds one tile of an image (grid: "
                    f"{asked.grid}, mesh: {grid[0]} × {grid[1]} ranks); "
                    "leave the grid out"
                )
            return [grid]
        if asked.grid is not None:
            return [asked.grid]
        if asked.tile_px is not None:
            return [cut(height, width, Cut(size_px=asked.tile_px), self.estimator.rule).grid]
        unit = self.estimator.rule.alignment_px
        most = -(-height // unit), -(-width // unit)
        grids = {
            (min(mesh.rows * a, most[0]), min(mesh.columns * b, most[1]))
            for a in FACTORS
            for b in FACTORS
        }
        # Oblong tiles only where nothing squarer is possible: they read more for the same work.
        square = sorted(grid for grid in grids if _oblong(asked.image, grid) <= 1.5)
        few = {
            (*sorted(self.estimator.read_px(grid)), self._tiles(grid, partitions)): grid
            for grid in square or [min(grids, key=lambda grid: _oblong(asked.image, grid))]
        }
        return list(few.values())  # of tiles turned by a right angle, one kind

    def plan(self, layout: Layout) -> Plan | None:
        """The fastest plan with this layout; None where no balance fits."""
        read_px, limit_bytes = self.estimator.read_px(layout.grid), self.question.limit_bytes
        if largest_map(self.estimator.layers, *read_px)[1] >= LARGEST_MAP:
            return None
        fastest = self.fastest(read_px, layout.partitions)
        if self.estimator.num_bytes(layout, fastest) <= limit_bytes:
            return self.estimator.describe(layout, fastest)
        if self._refused(layout) or not self._fits_at_best(layout):
            return None
        few = self._balances(layout)
        fitting = [one for one in few if self.estimator.num_bytes(layout, one) <= limit_bytes]
        if not fitting:
            self._refuse(layout, layout.checkpointing)
            return None
        best = min(fitting, key=lambda balance: self.estimator.step_s(layout, balance)[0])
        return self.estimator.describe(layout, best)

    def _balances(self, layout: Layout) -> list[Balance]:
        asked = self.question
        if asked.balance is not None:
            return [asked.balance]
        read_px = self.estimator.read_px(layout.grid)
        room = self.estimator.blocks(
            read_px, layout.micro_batches, layout.checkpointing, layout.partitions
        )
        seconds = self.estimator.seconds(read_px)
        few = least_time(seconds, layout.partitions, room, asked.limit_bytes)
        # Blocks are charged at most what they may need, so that the leanest may fit all the same.
        return few or least_bytes(room, layout.partitions, seconds)

    def leanest(self, layout: Layout) -> Plan:
        """The plan with this layout that needs least memory, whether it fits or not."""
        asked = self.question
        read_px = self.estimator.read_px(layout.grid)
        room = self.estimator.blocks(
            read_px, layout.micro_batches, layout.checkpointing, layout.partitions
        )
        few = [asked.balance] if asked.balance else least_bytes(room, layout.partitions)
        best = min(few, key=lambda balance: self.estimator.num_bytes(layout, balance))
        return self.estimator.describe(layout, best)

    def _refused(self, layout: Layout) -> bool:
        """Whether a layout did not fit that asks for no more of anything."""
        height, width = self.estimator.read_px(layout.grid)
        return any(
            partitions == layout.partitions
            and mode in (layout.checkpointing, "at best")
            and micro_batches <= layout.micro_batches
            and rows <= height
            and cols <= width
            for rows, cols, partitions, micro_batches, mode in self._too_large
        )

    def _refuse(self, layout: Layout, mode: str) -> None:
        read_px = self.estimator.read_px(layout.grid)
        self._too_large.add((*read_px, layout.partitions, layout.micro_batches, mode))

    def _fits_at_best(self, layout: Layout) -> bool:
        """Whether one micro-batch at a time fits, with activations computed again."""
        least = replace(layout, micro_batches=1, checkpointing="always")
        key = (*self.estimator.read_px(layout.grid), layout.partitions)
        if key not in self._at_best:
            self._at_best[key] = self.leanest(least).device_bytes <= self.question.limit_bytes
            if not self._at_best[key]:
                self._refuse(least, "at best")
        return self._at_best[key]

    def _fastest(self, read_px: Pixels, partitions: int) -> Balance:
        """The best balance if memory were endless."""
        if self.question.balance is not None:
            return self.question.balance
        return least_time(self.estimator.seconds(read_px), partitions, few=1)[0]

    def _least_seconds(self, layout: Layout) -> float:
        read_px = self.estimator.read_px(layout.grid)
        return self.estimator.step_s(layout, self.fastest(read_px, layout.partitions))[0]


def _oblong(image: Pixels, grid: Pixels) -> float:
    """Longer side of a tile by its shorter one."""
    sides = image[0] / grid[0], image[1] / grid[1]
    return max(sides) / min(sides)


def _check(asked: Question, num_layers: int) -> None:
    """Refuse what no search can answer."""
    devices = asked.machine.devices_per_node
    if asked.balance is not None:
        check_balance(asked.balance, num_layers, asked.partitions)
    if (asked.partitions or 1) > num_layers:
        check_balance([1] * (asked.partitions or 1), num_layers)
    if (asked.partitions or 1) > devices:
        raise TilenetError(
            f"a rank's partitions stand on devices of one node (partitions: {asked.partitions}, "
            f"devices per node of {asked.machine.name}: {devices}); ask for at most {devices}"
        )
    for name in ("nodes", "num_images", "batch_size", "partitions", "micro_batches", "mbpp"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise TilenetError(f"{name} must be at least 1 ({name}: {value})")
    if asked.micro_batches is not None and asked.mbpp is not None:
        raise TilenetError(
            f"micro-batches are given in all or per partition, not both (micro_batches: "
            f"{asked.micro_batches}, mbpp: {asked.mbpp}); leave one out"
        )
    if not 0 <= asked.reserve < 1:
        raise TilenetError(
            f"reserve is a share of a device's memory (reserve: {asked.reserve}); 0.1 is usual"
        )
