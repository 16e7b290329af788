"""What operators of a graph write over, and whether that is read again under another name.

A result that is written over has its new value from then on. Views of its memory, and what it is a
view of, change in torch too, but their layers are made already: such a write is refused.
"""

import torch
from torch import Tensor, fx

# In evaluation these return their argument itself.
DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
# These change a tensor's shape, not its cells.
RESHAPING = frozenset({"squeeze_", "unsqueeze_", "transpose_", "t_"})
# These read only the shape or the type of their arguments: of all, or of all but the first.
LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
AS = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


class Memory:
    """The results of a graph by the memory that they lie in."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._same: dict[int, int] = {}  # memory of a dropout's result, and of its argument
        self._sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            source = node.args[0] if _operator(node) in DROPOUTS else None
            if isinstance(source, fx.Node):
                (own,), (before,) = _storages(node), self._memories(source)
                self._same[own] = before
            for memory in self._memories(node):
                self._sharing.setdefault(memory, []).append(node)
        self._needed = self._before(graph.output_node().args[0])

    def read_again(self, write: fx.Node) -> fx.Node | None:
        """The first operator that reads what a write changes, under a name that it does not change.

        Args:
            write: The operator that writes over its first argument.
        """
        if _changes_no_cell(write):
            return None
        now, name = self._order[write], _name(write)
        (memory,) = self._memories(write)
        changed: set[fx.Node] = set()  # in torch, and not in the list of layers
        for node in self._sharing[memory]:
            stale = self._order[node] < now or any(node.args[0] is other for other in changed)
            if stale and _name(node) is not name and _overlap(node, write):
                changed.add(node)
        users = {user for node in changed for user in node.users if self._order[user] > now}
        reads = [user for user in users & self._needed if self._reads(user, changed, memory)]
        return min(reads, key=self._order.__getitem__, default=None)

    def _reads(self, user: fx.Node, changed: set[fx.Node], memory: int) -> bool:
        """Whether an operator reads cells of changed results; views and writes of one do not."""
        operator, inputs = _operator(user), set(user.all_input_nodes) & changed
        if operator in LIKE:
            return False
        others = any(node is not user.args[0] for node in inputs) and operator not in AS
        first = any(node is user.args[0] for node in inputs)
        apart = memory not in self._memories(user)
        return (first and apart) or (others and (apart or writes(user)))

    def _before(self, result: object) -> set[fx.Node]:
        """All operators that the first result of a graph depends on, through writes too."""
        first = result[0] if isinstance(result, list | tuple) and result else result
        ahead, needed = [first] if isinstance(first, fx.Node) else [], set[fx.Node]()
        while ahead:
            node = ahead.pop()
            if node not in needed:
                needed.add(node)
                ahead += node.all_input_nodes
                ahead += [n for m in self._memories(node) for n in self._sharing[m] if writes(n)]
        return needed | {node for node in self._order if node.op == "output"}

    def _memories(self, node: fx.Node) -> set[int]:
        return {self._same.get(storage, storage) for storage in _storages(node)}


def writes(node: fx.Node) -> bool:
    """Whether an operator writes over its first argument."""
    return written_arguments(node)[:1] == [True]


def written_arguments(node: fx.Node) -> list[bool]:
    """For each argument of an operator whether it is written over."""
    schema = getattr(node.target, "_schema", None)
    alias = [argument.alias_info for argument in schema.arguments] if schema else []
    return [info is not None and bool(info.is_write) for info in alias]


def memory_owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory an operator writes to, through views of it."""
    owner = node.args[0]
    assert isinstance(owner, fx.Node)
    while owner.op == "call_function" and (schema := getattr(owner.target, "_schema", None)):
        if not schema.returns or schema.returns[0].alias_info is None:
            break
        if not isinstance(owner.args[0], fx.Node):
            break
        owner = owner.args[0]
    return owner


def _operator(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _changes_no_cell(write: fx.Node) -> bool:
    operator = _operator(write)
    if operator.removesuffix("_") in DROPOUTS:
        return write.args[1:] in ((0.0, True), (0.0, False)) or write.args[2:] == (False,)
    return operator in RESHAPING


def _name(node: fx.Node) -> fx.Node:
    """The operator that made the result: of a write, that of what it writes over."""
    while writes(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor) and part.layout is torch.strided]


def _storages(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(node)}


def _overlap(first: fx.Node, second: fx.Node) -> bool:
    """Whether results of two operators, which lie in one memory, have cells in common."""
    return any(_cells_in_common(a, b) for a in _tensors(first) for b in _tensors(second))


def _cells_in_common(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have cells in common, as far as their strides tell; else true."""
    memory, strides = first.untyped_storage(), first.stride()
    if memory._cdata != second.untyped_storage()._cdata or strides != second.stride():
        return True  # dropout is recorded apart; or they are views of other kinds
    rests = first.storage_offset(), second.storage_offset()
    dims = sorted(zip(strides, first.shape, second.shape, strict=True), reverse=True)
    for stride, cells, others in (dim for dim in dims if dim[0]):
        # The first cells along this dimension: what is left of the offsets lies along the others.
        begins = [rest // stride for rest in rests]
        if begins[1] >= begins[0] + cells or begins[0] >= begins[1] + others:
            return False
        rests = rests[0] % stride, rests[1] % stride
    return True
