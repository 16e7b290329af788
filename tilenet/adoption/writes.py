"""What operators of a graph write over, and whether that is read again under another name.

A result that is written over has its new value from then on. Views of its memory, and what it is a
view of, change in torch too, but their layers are made already: such a write is refused.
"""

import torch
from torch import Tensor, fx

# In evaluation these return their argument itself.
DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})


class Memory:
    """The results of a graph by the memory that they lie in."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._same: dict[int, int] = {}  # memory of a dropout's result, and of its argument
        self._sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            source = node.args[0] if getattr(node.target, "_opname", "") in DROPOUTS else None
            if isinstance(source, fx.Node):
                (own,), (before,) = _storages(node), self._memories(source)
                self._same[own] = before
            for memory in self._memories(node):
                self._sharing.setdefault(memory, []).append(node)

    def read_again(self, write: fx.Node) -> fx.Node | None:
        """The first operator that reads what a write changes, under a name that it does not change.

        Args:
            write: The operator that writes over its first argument.
        """
        now, name = self._order[write], _name(write)
        (memory,) = self._memories(write)
        changed: set[fx.Node] = set()  # in torch, and not in the list of layers
        for node in self._sharing[memory]:
            before = self._order[node] < now or node.args[0] in changed
            if _name(node) is not name and before and _overlap(node, write):
                changed.add(node)
        users = {user for node in changed for user in node.users if self._order[user] > now}
        reads = [user for user in users if memory not in self._memories(user)]
        return min(reads, key=self._order.__getitem__, default=None)

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
    memory = first.untyped_storage()
    size = memory.nbytes() // first.element_size()
    recorded_apart = memory._cdata != second.untyped_storage()._cdata
    if recorded_apart or size in (first.numel(), second.numel()):
        return True
    numbers, touched = torch.arange(size), torch.zeros(size, dtype=torch.bool)
    places = [numbers.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (first, second)]
    touched[places[0]] = True
    return bool(touched[places[1]].any())
