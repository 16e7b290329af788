"""Predict the cost of a layout: seconds, bytes of devices, and bytes of nodes."""

from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilenet.choices import READ_AHEAD, Checkpointing, HaloMode
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.balance import Balance, block_seconds, blocks_of, without_cuts
from tilenet.planning.memory.flow import flow_bytes
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import Costs, block_bytes, partition_bytes
from tilenet.planning.memory.states import OPTIMIZER_STATES, sharers, states_kept
from tilenet.planning.mesh import MeshShape, choose_mesh, most_tiles
from tilenet.planning.micro_batches import mini_batch_sizes, most_micro_batches, most_stacked
from tilenet.planning.plan import Layout, PartitionPlan, Plan, Question
from tilenet.planning.swap.plan import (
    MIN_BYTES,
    Demand,
    PartitionSwaps,
    Speeds,
    SwapPlan,
    plan_swaps,
)
from tilenet.planning.time.messages import Link, Times, halo_times, norm_times, together
from tilenet.planning.time.profile import layer_times_of_profile
from tilenet.planning.time.roofline import ITEM_BYTES, roofline
from tilenet.planning.time.timeline import Timeline, simulate, simulate_flow

PROCESS_BYTES = 600 << 20  # Python, torch, GDAL and MPI; measured 0.4 GiB, CUDA's context more
GDAL_CACHE_BYTES = 64 << 20  # at least; `Machine.rank_bytes` leaves room for more
READ_COPIES = 3  # the raster's own dtype, float64 while it is standardised, and the result
PIECE_BYTES = 4 << 20  # of gradients that are summed at once, see docs/run-file.md
LABEL_BYTES = 8 + 1  # int64, and the mask of valid pixels

Pixels = tuple[int, int]
Shape = tuple[int, int, int]  # tiles, rows and columns of a micro-batch
NO_SWAPS = PartitionSwaps(0, 0)


class Estimator:
    """Seconds and bytes of the layouts that answer a question; it caches its results."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.layers = question.layers
        exchanged = question.halo_mode in ("exchange", "sweep")
        self.rule = halo_rule(question.halo, self.layers, question.epsilon_px, exchanged=exchanged)
        self.mesh = lru_cache(maxsize=None)(self._mesh)
        self.tiling = lru_cache(maxsize=None)(self._tiling)
        self.times = lru_cache(maxsize=None)(self._times)
        self.waits = lru_cache(maxsize=None)(self._waits)
        self.shape = lru_cache(maxsize=None)(self._shape)
        self.costs = lru_cache(maxsize=None)(self._costs)
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        self.blocks = lru_cache(maxsize=None)(self._blocks)
        self.swaps = lru_cache(maxsize=None)(self._swaps)

    def _mesh(self, partitions: int) -> MeshShape:
        """Ranks of a job with a number of devices per rank."""
        question = self.question
        ranks = question.nodes * self.ranks_per_node(partitions)
        # In a sweep ranks hold columns of an image.
        return choose_mesh(
            ranks, question.batch_size, rows=1 if question.halo_mode == "sweep" else None
        )

    def ranks_per_node(self, partitions: int) -> int:
        return max(1, self.question.machine.devices_per_node // partitions)

    def tiles_per_rank(self, grid: Pixels, partitions: int) -> int:
        """Most tiles of a rank in a step."""
        mesh = self.mesh(partitions)
        return most_tiles(mesh, grid) * self.images(partitions)

    def images(self, partitions: int) -> int:
        """Most images of a replica in a step."""
        return -(-self.question.batch_size // self.mesh(partitions).replicas)

    def micro_batches(self, grid: Pixels, partitions: int) -> int:
        """Most micro-batches of a rank in a step."""
        tiles = most_tiles(self.mesh(partitions), grid)
        return most_micro_batches(self.layers, tiles, self.images(partitions))

    def _shape(self, layout: Layout) -> Shape:
        """Tiles of a micro-batch, and rows and columns that each holds at the input."""
        grid, partitions = layout.grid, layout.partitions
        tiles = most_tiles(self.mesh(partitions), grid)
        stacked = most_stacked(self.layers, tiles, self.images(partitions))
        return stacked, *self.read_px(grid)

    def _tiling(self, grid: Pixels) -> Tiling:
        return cut(*self.question.image, Cut(grid=grid), self.rule)

    def read_px(self, grid: Pixels) -> Pixels:
        """Rows and columns that a tile holds at its input."""
        tiling = self.tiling(grid)
        if self.rule.exchanged:
            return tiling.largest_own
        return tiling.rows[0].read, tiling.cols[0].read

    def _times(self, shape: Shape) -> Times:
        question, (stacked, rows, cols) = self.question, shape
        if question.profile is not None:
            return layer_times_of_profile(question.profile, self.layers, stacked * rows, cols)
        return roofline(self.layers, rows, cols, question.precision, question.machine, stacked)

    def link(self, partitions: int) -> Link:
        """Return the link of a rank when its node's other ranks send as much as it does."""
        facts = self.question.machine
        # Within a node through its memory; else some rank's neighbours are all on other nodes.
        bandwidth = facts.host_bandwidth
        if self.question.nodes > 1:
            bandwidth = facts.network_bandwidth / self.ranks_per_node(partitions)
        return Link(facts.message_s, facts.latency_s, bandwidth * facts.memory_efficiency)

    def _waits(self, layout: Layout) -> Times:
        """Seconds that each layer waits for other ranks, of one micro-batch."""
        question, mesh = self.question, self.mesh(layout.partitions)
        link = self.link(layout.partitions)
        at_image = mesh.rows * mesh.columns
        waits = [norm_times(self.layers, at_image, mesh.num_ranks, link)]
        if self.rule.exchanged and at_image > 1:
            item_bytes = ITEM_BYTES[question.precision] * self.shape(layout)[0]
            waits.append(halo_times(self.layers, self.tiling(layout.grid), item_bytes, link))
        return together(*waits)

    def exchange_s(self, layout: Layout, balance: Balance) -> float:
        """Return the seconds of a step that layers wait for other ranks, forward and backward."""
        waits, many = self.waits(layout), self.micro_batches(layout.grid, layout.partitions)
        again = waits if layout.checkpointing != "never" else ()
        if layout.flows:  # its last partition computes nothing again
            again = again[: -balance[-1]]
        once = sum(wait.forward_s + wait.backward_s for wait in waits)
        return many * (once + sum(wait.forward_s for wait in again))

    def read_s(self, layout: Layout) -> float:
        """Return the seconds a node reads a step's tiles, of two bytes a band and one of labels."""
        question = self.question
        rows, cols = self.read_px(layout.grid)
        tiles = self.tiles_per_rank(layout.grid, layout.partitions)
        pixels = tiles * rows * cols * self.ranks_per_node(layout.partitions)
        return pixels * (2 * question.options.bands + 1) / question.machine.file_bandwidth

    def _costs(self, shape: Shape) -> Costs:
        question, (stacked, rows, cols) = self.question, shape
        mode: HaloMode = "exchange" if self.rule.exchanged else "overlap"
        return layer_bytes(self.layers, rows, cols, question.precision, stacked, mode)

    def _seconds(self, shape: Shape) -> NDArray[np.float64]:
        seconds = block_seconds(self.times(shape), self.transfers(shape))
        return without_cuts(seconds, self.question.together)

    def transfers(self, shape: Shape) -> list[float]:
        """Seconds to hand a micro-batch's map over in front of each layer, and behind the last.

        Skips are copied straight from the stash's device to the pop's, long before they are needed.
        """
        cell_bytes = shape[0] * ITEM_BYTES[self.question.precision]
        maps = map_shapes(self.layers, *shape[1:])
        return [self.question.machine.transfer_s(map_.num_elements * cell_bytes) for map_ in maps]

    def _blocks(
        self,
        shape: Shape,
        micro_batches: int,
        mode: Checkpointing,
        partitions: int,
        stored: bool = False,
    ) -> NDArray[np.float64]:
        optimizer = self.question.optimizer
        costs = self.costs(shape)
        ranks = self.sharers(partitions)
        sizes = block_bytes(costs, micro_batches, mode, optimizer, partitions, stored, ranks)
        return without_cuts(sizes, self.question.together)

    def _swaps(self, layout: Layout, balance: Balance) -> SwapPlan | None:
        """Plan the swaps of a rank; None: nothing makes it fit."""
        question, shape = self.question, self.shape(layout)
        link = question.machine.host_bandwidth * question.machine.memory_efficiency
        demand = Demand(
            self.costs(shape),
            balance,
            layout.micro_batches,
            layout.checkpointing,
            question.optimizer,
            range(len(balance)),
            self.sharers(layout.partitions),
        )
        speeds = Speeds(self.times(shape), link, MIN_BYTES)
        everything = question.swap == "all"
        return plan_swaps(demand, question.limit_bytes, lambda: speeds, everything=everything)

    def timeline(self, layout: Layout, balance: Balance, micro_batches: int) -> Timeline:
        """The pipeline's timeline for one mini-batch."""
        shape, waits = self.shape(layout), self.waits(layout)
        times, moves = together(self.times(shape), waits), self.transfers(shape)
        swaps = self.swaps(layout, balance) if layout.swap else None
        late = swaps.partitions if swaps else [NO_SWAPS] * len(balance)
        blocks = list(zip(blocks_of(balance), late, strict=True))
        forward_s = [sum(t.forward_s for t in times[a:b]) + w.forward_s for (a, b), w in blocks]
        backward_s = [sum(t.backward_s for t in times[a:b]) + w.backward_s for (a, b), w in blocks]
        transfer_s = [moves[stop] for (_, stop), _ in blocks[:-1]]
        if layout.flows:
            return simulate_flow(
                forward_s,
                backward_s,
                transfer_s,
                micro_batches,
                most=layout.micro_batches,
                recompute=layout.checkpointing != "never",
            )
        return simulate(forward_s, backward_s, transfer_s, micro_batches, layout.checkpointing)

    def step_s(self, layout: Layout, balance: Balance) -> tuple[float, float, float]:
        """Seconds of a step, of its pipeline, and of the sum of gradients."""
        many = self.micro_batches(layout.grid, layout.partitions)
        sizes = (many,) if layout.flows else mini_batch_sizes(many, layout.micro_batches)
        took = {size: self.timeline(layout, balance, size).makespan_s for size in set(sizes)}
        pipeline_s = sum(took[size] for size in sizes)
        sum_s = self.sum_s(layout.partitions)
        step_s = pipeline_s + sum_s + self.update_s(balance)
        # The next step's tiles are read meanwhile
        return max(step_s, self.read_s(layout)), pipeline_s, sum_s

    def least_rest_s(self, partitions: int) -> float:
        """Seconds of a step outside its pipeline, with the best of balances."""
        moved = self._update_moves(partitions) * float(self.parameter_bytes.sum()) / partitions
        return self.sum_s(partitions) + self.question.machine.memory_s(moved)

    @cached_property
    def parameter_bytes(self) -> NDArray[np.int64]:
        """Bytes of each layer."""
        item = 8 if self.question.precision == "float64" else 4
        return np.array([layer.num_parameters * item for layer in self.layers])

    def sum_s(self, partitions: int) -> float:
        mesh = self.mesh(partitions)
        whole = float(self.parameter_bytes.sum())
        pieces = max(1, round(whole / PIECE_BYTES))
        return pieces * self.link(partitions).sum_s(mesh.num_ranks, whole / pieces)

    def update_s(self, balance: Balance) -> float:
        parts = np.split(self.parameter_bytes, np.cumsum(balance)[:-1])
        most = max(float(part.sum()) for part in parts)
        return self.question.machine.memory_s(self._update_moves(len(balance)) * most)

    def _update_moves(self, partitions: int) -> float:
        """Times that the update reads or writes the bytes of the parameters."""
        shared, whole = states_kept(self.question.optimizer)
        moves, ranks = 2 * (2 + shared), self.sharers(partitions)
        # Shared out, weights go into the buffer of gradients, and all of them out of it.
        return 3 * whole + (moves if ranks == 1 else (moves + 2) / ranks + 2)

    def sharers(self, partitions: int) -> int:
        """Ranks that share out the optimizer's states; as runs do unless their file says else."""
        weights, ranks = int(self.parameter_bytes.sum()), self.mesh(partitions).num_ranks
        return sharers("auto", self.question.optimizer, weights, ranks)

    def num_bytes(self, layout: Layout, balance: Balance) -> int:
        """Peak of the fullest device."""
        return max(self._partition_bytes(layout, balance))

    def _partition_bytes(self, layout: Layout, balance: Balance) -> list[int]:
        swaps = self.swaps(layout, balance) if layout.swap else None
        if swaps:
            return [part.device_bytes for part in swaps.partitions]
        predict = flow_bytes if layout.flows else partition_bytes
        parts = predict(
            self.costs(self.shape(layout)),
            balance,
            layout.micro_batches,
            layout.checkpointing,
            self.question.optimizer,
            sharers=self.sharers(layout.partitions),
        )
        return [part.total for part in parts]

    def host_bytes(self, layout: Layout, swapped_bytes: int) -> int:
        """Return the bytes of a node with ranks that swap so much each."""
        pixels, band_bytes = prod(self.shape(layout)), 4 * self.question.options.bands
        tiles = layout.micro_batches * pixels * (band_bytes * READ_COPIES + LABEL_BYTES)
        # Copies made while waiting tiles are read are counted there.
        ahead = READ_AHEAD * pixels * (band_bytes + LABEL_BYTES)
        # As they are drawn or loaded before they go to the devices, and the copy of them and of the
        # optimizer's states that a checkpoint is written from: there is one at a time.
        copies = 1 + OPTIMIZER_STATES[self.question.optimizer]
        weights = int(self.parameter_bytes.sum()) * copies
        of_rank = PROCESS_BYTES + GDAL_CACHE_BYTES + tiles + ahead + weights + PIECE_BYTES
        return self.ranks_per_node(layout.partitions) * (of_rank + swapped_bytes)

    def describe(self, layout: Layout, balance: Balance) -> Plan:
        """All that a plan says."""
        question, tiling = self.question, self.tiling(layout.grid)
        mesh = self.mesh(layout.partitions)
        stacked, *_ = shape = self.shape(layout)
        times = self.times(shape)
        blocks = blocks_of(balance)
        seconds = [sum(time.forward_s + time.backward_s for time in times[a:b]) for a, b in blocks]
        sizes = self._partition_bytes(layout, balance)
        parts = tuple(
            PartitionPlan(
                layers=b - a,
                parameters=sum(layer.num_parameters for layer in self.layers[a:b]),
                num_bytes=int(size),
                seconds=took,
                share=took / sum(seconds),
            )
            for (a, b), size, took in zip(blocks, sizes, seconds, strict=True)
        )
        step_s, pipeline_s, sum_s = self.step_s(layout, balance)
        swaps = self.swaps(layout, balance) if layout.swap else None
        swapped = swaps.swapped_bytes if swaps else 0
        endless_s = self.step_s(replace(layout, swap=False), balance)[0]
        of_step = self.micro_batches(layout.grid, layout.partitions)
        at_once = of_step if layout.flows else layout.micro_batches
        return Plan(
            question=question,
            layout=layout,
            mesh=(mesh.replicas, mesh.rows, mesh.columns),
            ranks_per_node=self.ranks_per_node(layout.partitions),
            halo_px=self.rule.halo_px,
            tile_own_px=tiling.largest_own,
            tile_read_px=self.read_px(layout.grid),
            work_ratio=tiling.work_ratio,
            tiles_per_rank=self.tiles_per_rank(layout.grid, layout.partitions),
            stacked=stacked,
            balance=balance,
            parts=parts,
            device_bytes=max(part.num_bytes for part in parts),
            host_bytes=self.host_bytes(layout, swapped),
            bubble=self.timeline(layout, balance, at_once).bubble,
            pipeline_s=pipeline_s,
            sum_s=sum_s,
            exchange_s=self.exchange_s(layout, balance),
            read_s=self.read_s(layout),
            step_s=step_s,
            epoch_s=step_s * -(-question.num_images // question.batch_size),
            swaps=swaps,
            swap_overhead=step_s / endless_s - 1,
            sharers=self.sharers(layout.partitions),
        )
