"""The layers that write their output over their input."""

from tilenet.geometry.layers import Activation, Conv, Dropout, Join, Layer, Norm, TransposedConv


def in_place(layers: tuple[Layer, ...], index: int) -> bool:
    """Whether a layer writes its output over its input.

    A rectifier does, since its backward needs its output only, where no other layer holds the
    input: neither the layer before, for its own backward, nor a stash.
    """
    layer, before = layers[index], layers[index - 1] if index else None
    if not isinstance(layer, Activation):
        return False
    while isinstance(before, Dropout):  # in evaluation it gives its input itself
        index -= 1
        before = layers[index - 1] if index else None
    if isinstance(before, Join):
        return before.how in ("concatenate", "add")
    return isinstance(before, Conv | TransposedConv | Norm)
