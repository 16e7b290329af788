"""Memory of one sweep in training: states before all strips, and for one strip the tensors that its
layers keep for backward and the gradients that come back through them.

Each strip's backward is walked through as autograd goes: a layer's gradients come, the tensors that
it kept go, and rows of a map that several layers look at add up the gradients of these layers. The
bytes that a layer keeps and takes for itself are measured once (`layer.py`).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from tilenet.geometry.by_place import by_corners
from tilenet.geometry.layers import Conv, Join, Layer, Pool, Stash, Upsample
from tilenet.geometry.maps import map_grids, map_shapes
from tilenet.geometry.sweep import (
    LayerRows,
    Strip,
    last_readers,
    maps_before,
    row_readers,
    sweep,
)
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.sweeps.strip_layers import (
    WEIGHT_BYTES,
    cast_bytes,
    copied_cols,
    forward_bytes,
)
from tilenet.planning.memory.sweeps.swept_maps import Piece
from tilenet.planning.memory.sweeps.tall_parts import SweepBytes

LABEL_BYTES = 8  # of a pixel's label, as the loss takes it


@dataclass(eq=False)
class SweptRows(Piece):
    """Rows of a map that get gradients."""

    map_: int = 0
    is_leaf: bool = False
    readers: int = 0
    gradient: int | None = None


@dataclass
class _Read:
    """The rows of a map that a layer reads: pieces, whether each is read whole, and their bytes."""

    pieces: list[tuple[SweptRows, bool]]
    size: int
    border: int = 0  # bytes with the map's border around them, where that takes a copy


@dataclass
class _Node:
    """A layer's part of a strip's graph.

    Attributes:
        number: Number of the layer; None: rows that are kept are copied.
        out: Rows of its output.
        saved: Storages that live until its backward.
        share: Number of its cells over that of the measured layer.
    """

    number: int | None
    out: SweptRows
    reads: list[_Read]
    saved: list[int] = field(default_factory=list)
    share: float = 0.0


@dataclass
class RecomputedStrip:
    """A strip that was computed again and waits for gradients.

    Attributes:
        state: Rows that were kept before it.
        leaves: The same rows as leaves of the graph, which take gradients.
        received: Rows that came from other partitions.
        after: Rows that are kept after it.
        sent: Rows that go to other partitions.
        logits: Rows of logits for the loss; None: none.
        loss: Storage that the loss keeps of the logits.
        labels: Storage of their labels.
        measured_bytes: Bytes of the logits in the loss's dtype.
        tape: Graph of the strip.
    """

    state: list[list[SweptRows]]
    leaves: list[SweptRows]
    received: list[SweptRows]
    after: list[SweptRows]
    sent: list[SweptRows]
    logits: SweptRows | None
    loss: int
    labels: int
    measured_bytes: int
    tape: list[_Node]


class SweptBackward:
    """Storages that live in a sweep forward and backward, in bytes.

    Args:
        size: Rows and columns of the part.
        stored: Whole maps that it takes, which count elsewhere.
        keeps: Whole maps that it keeps, which count elsewhere too.
        own: The layers that it computes, where other partitions compute the rest; None: all.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        size: tuple[int, int],
        item_bytes: int,
        costs: tuple[LayerBytes, ...],
        stored: Collection[int] = (),
        keeps: Collection[int] = (),
        own: range | None = None,
    ) -> None:
        self.layers, self.costs, self.item_bytes = layers, costs, item_bytes
        self.keeps, self.own = keeps, own or range(len(layers))
        self.computed, read = maps_before(layers, [len(layers)], stored)
        self.reads_image, self.taken = 0 in read, read - {0}
        self.shapes = map_shapes(layers, *size)
        self.whole = [grid.whole for grid in map_grids(layers)]
        self.reads, self.done_with = row_readers(layers), last_readers(layers, own)
        if own is not None:
            self.reads_image = any(0 in self.reads[number] for number in own)
        # Maps that layers behind its own look at, and their rows of the strip.
        self.read_behind = frozenset[int]().union(*self.reads[self.own.stop :])
        self.sent: list[SweptRows] = []
        self.maps: list[list[SweptRows]] = [[] for _ in self.shapes]
        self.sizes: list[int] = []  # of storages that were ever made
        self.uses: Counter[int] = Counter()
        self.now = self.most = self.state_gradient_bytes = 0
        self.tape: list[_Node] | None = None  # None: nothing is kept for backward

    def walk(self, edges: tuple[int, ...], *, keeps_logits: bool) -> SweepBytes:
        """Bytes of a sweep.

        Args:
            keeps_logits: Whether the loss keeps as many bytes as the last map has.
        """
        strips, states = list(sweep(self.layers, edges)), []
        for strip in strips:
            states.append(self.kept_state())
            self.pass_strip(strip)
        states_bytes = self.end_forward()
        of_state: list[int | None] = []
        for strip, state in zip(reversed(strips), reversed(states), strict=True):
            of_state = self.backpropagate(
                self.recompute(strip, state, keeps_logits=keeps_logits), of_state
            )
        return SweepBytes(self.peak_bytes, states_bytes)

    def end_forward(self) -> int:
        """Let the last rows go, and the weights come; return the bytes of all states."""
        self.clear(*self.maps)
        states_bytes = self.now
        self.now += self.weight_bytes
        return states_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes so far.

        The gradients of a state count once more, since autograd may make them before it lets go of
        those of the state after it: so it is never less than the bytes alive.
        """
        return self.most + self.state_gradient_bytes

    def kept_state(self) -> list[list[SweptRows]]:
        """The rows that are kept now, which live until they are handed to `backpropagate`."""
        for piece in chain(*self.maps):
            self.hold(piece.storage)
        return [list(pieces) for pieces in self.maps]

    def pass_strip(self, strip: Strip, received: Mapping[int, int] | None = None) -> None:
        """Pass a strip forward.

        Args:
            received: Storages of the rows that came from other partitions, by map.
        """
        self._pass(strip, received or {})
        self.clear(self.maps[-1])
        self.sent = []

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of the layers that it computes."""
        return sum(
            cost.parameters
            for number, cost in enumerate(self.costs, start=1)
            if number - 1 in self.own and (number in self.computed or self.whole[number])
        )

    def map_bytes(self, number: int) -> int:
        """Bytes of a whole map."""
        return self.size(number, self.shapes[number].rows)

    def size(self, number: int, rows: int) -> int:
        """Bytes of rows of a map."""
        shape = self.shapes[number]
        # Autocast leaves the image as it is.
        item_bytes = self.item_bytes if number else max(WEIGHT_BYTES, self.item_bytes)
        return rows * shape.cols * shape.channels * item_bytes

    def make(self, size: int) -> int:
        """A storage, held once."""
        self.sizes.append(size)
        self.hold(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def hold(self, storage: int) -> None:
        """Let a storage live until it is dropped once more."""
        if not self.uses[storage]:
            self.now += self.sizes[storage]
            self._touch(0)
        self.uses[storage] += 1

    def drop(self, *storages: int) -> None:
        """End the uses of storages that `make` or `hold` began."""
        for storage in storages:
            self.uses[storage] -= 1
            if not self.uses[storage]:
                self.now -= self.sizes[storage]

    def _touch(self, more: int) -> None:
        """Count bytes that live for a moment, beyond those of now."""
        self.most = max(self.most, self.now + more)

    def clear(self, *maps: list[SweptRows]) -> None:
        """Let rows go."""
        for pieces in maps:
            self.drop(*(piece.storage for piece in pieces))
            pieces.clear()

    def _pass(self, strip: Strip, received: Mapping[int, int]) -> list[SweptRows]:
        """Pass a strip as `Sweep.pass_strip` does; return the rows that were received."""
        first, stop = strip.image
        if first < stop and self.reads_image:  # a view of the image, or a copy on another device
            size = self.size(0, stop - first) if self.own.start else 0
            self.maps[0].append(SweptRows(first, stop - first, self.make(size)))
        arrived = []
        for map_, storage in received.items():
            self.hold(storage)
            first, stop = strip.layers[map_ - 1].out
            arrived.append(SweptRows(first, stop - first, storage, map_))
            self.maps[map_].append(arrived[-1])
        for number in self.own:
            rows = strip.layers[number]
            if number + 1 in self.computed and rows.out[0] < rows.out[1]:
                self._compute(number, rows)
            for map_ in self.done_with[number]:
                self._let_go(map_, strip.held[map_][0])
        self.drop(*(piece.storage for piece in self.sent))
        return arrived

    def _let_go(self, number: int, first: int) -> None:
        pieces = self.maps[number]
        while pieces and pieces[0].first + pieces[0].rows <= first:
            self.drop(pieces.pop(0).storage)
        if pieces and first > pieces[0].first:
            old, rows = pieces[0], pieces[0].first + pieces[0].rows - first
            size = self.size(number, rows)
            pieces[0] = SweptRows(first, rows, self.make(size), number)
            self.drop(old.storage)
            self._note(_Node(None, pieces[0], [_Read([(old, False)], size)]))

    def _note(self, node: _Node) -> None:
        if self.tape is not None:
            self.tape.append(node)
            for piece, _ in chain(*(read.pieces for read in node.reads)):
                piece.readers += 1

    def _compute(self, number: int, rows: LayerRows) -> None:
        layer, cost = self.layers[number], self.costs[number]
        reads = [self._read(number, map_, rows) for map_ in self.reads[number]]
        inputs = [self._put_together(read) for read in reads]
        size = self.size(number + 1, rows.out[1] - rows.out[0])
        if inputs and (cost.in_place or (isinstance(layer, Join) and layer.how == "take")):
            self.hold(storage := inputs[0])
        else:
            out_bytes = size
            if isinstance(layer, Upsample) and not by_corners(layer):
                # Cells that are looked at are enlarged, and the rows cut out of that.
                low, high = max(rows.need[0], 0), min(rows.need[1], self.shapes[number].rows)
                out_bytes = self.size(number + 1, (high - low) * layer.factor)
            self._touch(forward_bytes(layer, cost, out_bytes))
            storage = self.make(out_bytes)
        out = SweptRows(rows.out[0], rows.out[1] - rows.out[0], storage, number + 1)
        self.maps[number + 1].append(out)
        if number + 1 in self.read_behind:
            self.hold(storage)
            self.sent.append(out)
        if self.tape is not None:
            node = _Node(number, out, reads, share=size / cost.output)
            node.saved = [*inputs * cost.keeps_input, *[storage] * cost.keeps_output]
            for saved in node.saved:
                self.hold(saved)
            if not isinstance(layer, Join):  # a join keeps its inputs alone
                cast = min(cast_bytes(layer, cost, self.item_bytes), cost.saved)
                # Less than a row: of channels, such as a norm's, whatever the rows.
                many = node.share if cost.saved - cast >= self.size(number + 1, 1) else 1
                node.saved.append(self.make(int((cost.saved - cast) * many) + cast))
            self._note(node)
        self.drop(*inputs)

    def _read(self, number: int, map_: int, rows: LayerRows) -> _Read:
        layer, shape = self.layers[number], self.shapes[map_]
        low, high = max(rows.need[0], 0), min(rows.need[1], shape.rows)
        pieces = [
            (piece, low <= piece.first and piece.first + piece.rows <= high)
            for piece in self.maps[map_]
            if piece.first < high and low < piece.first + piece.rows
        ]
        read = _Read(pieces, self.size(map_, high - low))
        if isinstance(layer, Conv | Pool):
            cols = copied_cols(layer, shape, self.shapes[number + 1].cols, rows.need)
            read.border = self.size(map_, rows.need[1] - rows.need[0]) * cols // shape.cols
        return read

    def _put_together(self, read: _Read) -> int:
        """The storage of an input; it is held."""
        if len(read.pieces) != 1:  # several, or a copy of rows of a whole map
            storage = self.make(read.size)
        else:
            self.hold(storage := read.pieces[0][0].storage)
        if read.border:
            whole = self.make(read.border)
            self.drop(storage)
            return whole
        return storage

    def recompute(
        self,
        strip: Strip,
        state: list[list[SweptRows]],
        received: Mapping[int, int] | None = None,
        *,
        keeps_logits: bool,
    ) -> RecomputedStrip:
        """Compute a strip again, for backward; arguments as of `pass_strip` and `peak`."""
        self.maps = [
            [replace(piece, is_leaf=piece.map_ > 0, readers=0, gradient=None) for piece in pieces]
            for pieces in state
        ]
        leaves = list(chain(*self.maps[1:]))
        for piece in chain(*self.maps):
            self.hold(piece.storage)
        tape = self.tape = []
        rows = self._pass(strip, received or {})
        self.tape = None
        sent, self.sent = self.sent, []
        logits = self.maps[-1].pop() if self.maps[-1] else None
        loss = labels = measured_bytes = 0
        if logits is not None:
            loss, labels, measured_bytes = self._measure(logits, keeps_logits=keeps_logits)
            self.drop(logits.storage)
        after = list(chain(*self.maps[1:]))
        self.clear(*self.maps)
        return RecomputedStrip(
            state, leaves, rows, after, sent, logits, loss, labels, measured_bytes, tape
        )

    def _measure(self, logits: SweptRows, *, keeps_logits: bool) -> tuple[int, int, int]:
        """Make the storages that the loss keeps, of logits and labels; return them with the bytes.

        Bytes are those in the loss's dtype: cross-entropy keeps logarithms, in float32 at least.
        """
        size = self.size(logits.map_, logits.rows)
        if not keeps_logits:
            return self.make(0), self.make(0), size
        cells = size // self.item_bytes
        pixels, value_bytes = cells // self.shapes[-1].channels, max(WEIGHT_BYTES, self.item_bytes)
        wide = cells * value_bytes
        copy = self.make(wide if wide > size else 0)
        loss, labels = self.make(wide), self.make(pixels * LABEL_BYTES)
        self._touch(pixels * value_bytes)  # each pixel's loss
        self.drop(copy)
        return loss, labels, wide

    def backpropagate(
        self,
        strip: RecomputedStrip,
        of_state: list[int | None],
        of_sent: list[tuple[SweptRows, int]] | None = None,
    ) -> list[int | None]:
        """Pass a strip backward; return the gradients of its state.

        Args:
            of_state: Gradients of the state after it; empty for the last strip.
            of_sent: Rows that it sent to other partitions, with their gradients.
        """
        gradients = [*zip(strip.after, of_state or [None] * len(strip.after), strict=True)]
        for piece, gradient in [*gradients, *(of_sent or [])]:
            if gradient is not None:
                self.hold(gradient)
                self._add(piece, gradient)
        if strip.logits is not None:
            size = self.size(strip.logits.map_, strip.logits.rows)
            between = self.make(strip.measured_bytes)
            self._touch(self.sizes[strip.labels])  # a number for each pixel
            self.drop(strip.labels)
            gradient = self.make(strip.measured_bytes)
            self.drop(between, strip.loss)
            if strip.measured_bytes > size:
                wide, gradient = gradient, self.make(size)
                self.drop(wide)
            self._add(strip.logits, gradient)
        for node in strip.tape:
            if node.out.map_ in self.keeps:  # the gradient of the whole map comes
                self._add(node.out, self.make(0))
        for node in reversed(strip.tape):
            self._backpropagate_node(node)
        self.drop(*(piece for _, piece in [*gradients, *(of_sent or [])] if piece is not None))
        self.drop(*(piece.gradient for piece in strip.received if piece.gradient is not None))
        self.drop(*(piece.storage for piece in chain(*strip.state)))
        size = sum(self.size(piece.map_, piece.rows) for piece in strip.leaves)
        self.state_gradient_bytes = max(self.state_gradient_bytes, size)
        return [piece.gradient for piece in strip.leaves]

    def _add(self, piece: SweptRows, gradient: int) -> None:
        """Give a piece a gradient, which it holds; the sum of two is a third storage."""
        before, piece.gradient = piece.gradient, gradient
        if before is not None:
            piece.gradient = self.make(self.size(piece.map_, piece.rows))
            self.drop(before, gradient)

    def _backpropagate_node(self, node: _Node) -> None:
        gradient, node.out.gradient = node.out.gradient, None
        if gradient is None:
            self.drop(*node.saved)
        else:
            self._touch(self._backward_bytes(node, gradient))
            coming = [self._coming(node, read, gradient) for read in node.reads]
            self.drop(gradient, *node.saved)
            for read, arriving in zip(node.reads, coming, strict=True):
                self._hand_on(read, arriving)
        for piece, _ in chain(*(read.pieces for read in node.reads)):
            piece.readers -= 1
            size = self.size(piece.map_, piece.rows)
            held = piece.gradient
            if piece.is_leaf and not piece.readers and held is not None and self.sizes[held] > size:
                piece.gradient = self.make(size)  # alone
                self.drop(held)

    def _backward_bytes(self, node: _Node, gradient: int) -> int:
        """Bytes that a layer's backward takes, with those of its inputs' gradients."""
        if node.number is None:
            return 0
        layer, cost = self.layers[node.number], self.costs[node.number]
        if by_corners(layer):  # of each direction's difference
            size = self.size(node.out.map_, node.out.rows)
            if isinstance(layer, Pool):  # of all cells zeros, and lower and upper ones with them
                return ((3 * layer.stride + 1) * layer.stride - 1) * size
            return 3 * size
        first = node.saved[0] if node.saved else 0
        is_held = cost.keeps_input and self.uses[first] > node.saved.count(first)
        taken = cost.backward[is_held + 2 * (self.uses[gradient] > 1)]
        of_weights = cost.parameters + cast_bytes(layer, cost, self.item_bytes)
        return int(max(taken - of_weights, 0) * node.share) + of_weights

    def _coming(self, node: _Node, read: _Read, gradient: int) -> int | None:
        """Return the storage of the gradient of rows that a node reads; None for the image."""
        layer = None if node.number is None else self.layers[node.number]
        if read.pieces and read.pieces[0][0].map_ == 0:
            return None
        if (
            layer is None
            or isinstance(layer, Stash)
            or (isinstance(layer, Join) and layer.how != "multiply")
        ):
            self.hold(gradient)
            return gradient
        return self.make(read.border or read.size)

    def _hand_on(self, read: _Read, gradient: int | None) -> None:
        """Give a gradient to the pieces that were read; a part of one takes a map of zeros."""
        if gradient is None:
            return
        if read.border:
            inside = self.make(read.size)
            self.drop(gradient)
            gradient = inside
        for piece, is_whole in read.pieces:
            if is_whole:
                self.hold(gradient)
                self._add(piece, gradient)
            else:
                self._add(piece, self.make(self.size(piece.map_, piece.rows)))
        self.drop(gradient)
