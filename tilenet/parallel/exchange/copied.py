"""The convolutions that work on a copy of their input: one rule of a step and of its plan."""

from tilenet.geometry.layers import Conv
from tilenet.model.cellwise import taps_of

FEWEST_CELLS = 4  # per weight of an input channel, see `takes_copy`


def takes_copy(layer: Conv, cells: int) -> bool:
    """Whether a convolution works on a copy of its input with the halo around it.

    One that keeps sizes can add the halo's convolution to its output instead. That takes the kernel
    apart for the four sides, which costs as much as moving cells: deep in a network there are few
    of these and many weights. (Measured on a CPU: 32 channels, 512² cells: the sum takes 0.99 × the
    plain convolution, the copy 1.18 ×; 256 channels, 64²: 1.28 × and 1.01 ×.)

    Args:
        cells: Cells of all samples of the input.
    """
    weights = layer.out_channels // layer.groups * layer.kernel**2
    return (
        not (layer.keeps_size and layer.is_square and layer.edge == "zeros")
        or cells < FEWEST_CELLS * weights
        or bool(taps_of(layer))
    )
