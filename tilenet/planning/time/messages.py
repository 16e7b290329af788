"""Seconds that ranks spend on messages: halos before layers, sums inside norms, sums of gradients.

A closed form after LogGP (A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP:
incorporating long messages into the LogP model", SPAA 1995): a message costs its rank overhead, its
way takes a latency and, for each byte, the inverse of the bandwidth. A sum over p ranks takes
2 log2 p such ways and moves 2 (p − 1) / p of its bytes, in and out (R. Thakur, R. Rabenseifner,
W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005).
Nothing is assumed to hide behind computing, and no rank to be late.
"""

from dataclasses import dataclass

from tilenet.geometry.layers import Layer, Norm
from tilenet.geometry.ownership import halo_of, tiling_shares
from tilenet.geometry.tiles import Tiling
from tilenet.planning.time.layer_time import LayerTime

Times = tuple[LayerTime, ...]  # of each layer

STATISTIC_BYTES = 8  # sums are float64
# Sums that `exchange/norm.py` takes: of values and cells, of the mean's rest and of squares;
# backward one of two values each.
FORWARD_SUMS, BACKWARD_SUMS = 2, 1


@dataclass(frozen=True)
class Link:
    """The cost of a rank's messages.

    Attributes:
        message_s: Seconds of the rank's work for a message: copying, posting, waiting.
        latency_s: A message's way, whatever it holds.
        bandwidth: Bandwidth of the rank, bytes/s in one direction.
    """

    message_s: float
    latency_s: float
    bandwidth: float

    def messages_s(self, count: int, num_bytes: float) -> float:
        """Seconds until all messages of a layer are through, posted at once."""
        if not count:
            return 0.0
        return self.latency_s + count * self.message_s + num_bytes / self.bandwidth

    def sum_s(self, ranks: int, num_bytes: float) -> float:
        """Seconds of a sum over a number of ranks."""
        if ranks < 2:
            return 0.0
        ways = 2 * (ranks - 1).bit_length()
        moved = 2 * (ranks - 1) / ranks * num_bytes
        return self.message_s + ways * self.latency_s + moved / self.bandwidth


def halo_times(
    layers: tuple[Layer, ...], tiling: Tiling, item_bytes: int, link: Link, parts: int = 1
) -> Times:
    """Seconds of each layer's halos for one micro-batch; backward their gradients go back.

    They are those of the rank with most neighbours.

    Args:
        parts: Number of parts that a tile is computed in, each with messages of its own.
    """
    busiest = min(1, tiling.grid[0] - 1), min(1, tiling.grid[1] - 1)
    times, trained = [], False
    for layer, rows, cols in zip(layers, *tiling_shares(layers, tiling), strict=True):
        halo = halo_of(rows, cols, busiest)
        cells = [sum(w.height * w.width for _, w in part) for part in (halo.gives, halo.takes)]
        count = len(halo.gives) + len(halo.takes)
        # Both directions at once, so that the larger one counts
        num_bytes = item_bytes * layer.in_channels * max(cells)
        seconds = parts * link.messages_s(count, num_bytes / parts)
        # The image has no gradient, and whatever stands before the first weights needs none.
        times.append(LayerTime(seconds, seconds if trained else 0.0))
        trained = trained or layer.num_parameters > 0
    return tuple(times)


def norm_times(layers: tuple[Layer, ...], image_ranks: int, step_ranks: int, link: Link) -> Times:
    """Seconds of the sums inside each norm over the image, for one micro-batch.

    Args:
        image_ranks: Ranks that hold the same image: over them instance and group norm sum.
        step_ranks: All ranks: over them batch norm sums.
    """
    times = []
    for layer in layers:
        if not isinstance(layer, Norm) or layer.scope != "image":
            times.append(LayerTime(0.0, 0.0))
            continue
        ranks = step_ranks if layer.norm == "batch" else image_ranks
        groups = layer.groups if layer.norm == "group" else layer.out_channels
        sum_s = link.sum_s(ranks, STATISTIC_BYTES * 2 * groups)
        times.append(LayerTime(FORWARD_SUMS * sum_s, BACKWARD_SUMS * sum_s))
    return tuple(times)


def together(*parts: Times) -> Times:
    """Layer by layer the sum of seconds of several kinds."""
    return tuple(
        LayerTime(sum(t.forward_s for t in times), sum(t.backward_s for t in times))
        for times in zip(*parts, strict=True)
    )
