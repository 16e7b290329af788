"""Combinations that cannot work: layers that need more than their tile need it at that layer.

Tiles that run one after another, or micro-batches of a pipeline, cannot wait for one another at a
layer. A layer that exchanges halos, or takes statistics over a whole image, needs all tiles of the
image in flight at once (DESIGN.md, section 7). Tiles of one micro-batch run at once.
"""

from collections.abc import Sequence

from tilenet.choices import Checkpointing, HaloMode, Pipelining
from tilenet.geometry.halo import context_of, norm_context
from tilenet.geometry.layers import GlobalPool, Layer, Norm


def whole_image(layers: tuple[Layer, ...]) -> str | None:
    """Return the statistic of whole images, or of a step's images, that layers take; None: none.

    `batch norm`, which takes most, before `instance norm`, `group norm`, `global maximum` and
    `global average`.
    """
    norms = [layer.norm for layer in layers if isinstance(layer, Norm) and layer.scope == "image"]
    if norms:
        return f"{'batch' if 'batch' in norms else norms[0]} norm"
    pools = [layer.takes for layer in layers if isinstance(layer, GlobalPool)]
    if "maximum" in pools:
        return "global maximum"
    return "global average" if pools else None


def sweep_obstacle(layers: tuple[Layer, ...], partitions: int) -> str | None:
    """Why training by sweeps cannot compute these layers; None where it can."""
    if context_of(layers).valid:
        return (
            "a sweep pads each layer (halo_mode: sweep, padding: valid); use network.padding: same"
        )
    whole = whole_image(layers)
    unswept = "norms" if norm_context(layers) == "tile" else whole
    if unswept not in (None, "global average"):
        return (
            "a sweep in training takes averages of an image, but no norms and maxima "
            f"(halo_mode: sweep, over whole images or tiles: {unswept}); use "
            "network.norm: none, network.batch_norm: frozen for a module, or another halo_mode"
        )
    if whole and partitions > 1:
        return (
            "a sweep over partitions knows no averages of the whole image (halo_mode: sweep, over "
            f"whole images: {whole}, partitions: {partitions}); set partitions: 1, or use another "
            "halo_mode"
        )
    return None


def needs_all_tiles(layers: tuple[Layer, ...], halo_mode: HaloMode) -> bool:
    """Whether some layer takes something of the other tiles, which must be computed for it then.

    A tile without labels may be left out of a step only where this is not so.
    """
    return halo_mode == "exchange" or whole_image(layers) is not None


def obstacle(
    layers: tuple[Layer, ...],
    grid: tuple[int, int],
    mesh: tuple[int, int, int],
    halo_mode: HaloMode = "overlap",
) -> str | None:
    """Why a network cannot be trained exactly on these tiles; None where it can.

    Args:
        grid: Tiles of an image along rows and columns.
        mesh: Replicas, rows and columns of ranks.
        halo_mode: Source of the tiles' context, see `HaloMode`.
    """
    whole = whole_image(layers)
    replicas, rows, columns = mesh
    counts = f"tiles: {grid[0]} × {grid[1]}, mesh: {replicas} × {rows} × {columns}"
    if halo_mode == "exchange" and grid != (rows, columns):
        return (
            "ranks that exchange halos hold one window of an image each, as large as their shares "
            f"({counts}); leave tiles out, use fewer ranks per image (mesh.rows, "
            "mesh.columns) where images are small, halo_mode: overlap, or tiles with halo_mode: "
            "sweep"
        )
    if (halo_mode == "exchange" or whole) and context_of(layers).valid:
        what = "halo_mode: exchange" if halo_mode == "exchange" else f"over whole images: {whole}"
        local = " with network.norm_scope: tile or network.norm: none" * bool(whole)
        return (
            f"an unpadded network reflects the image beyond its edges, where no rank owns a pixel "
            f"(network.padding: valid, {what}); use network.padding: same, or halo_mode: "
            f"overlap{local}"
        )
    if whole and (grid[0] < rows or grid[1] < columns):
        local = ", or network.norm_scope: tile (approximate)" * whole.endswith("norm")
        return (
            f"{whole} over the whole image sums over all ranks of the image, so each needs a "
            f"tile of it ({counts}); use at most {grid[0]} × {grid[1]} ranks per image (mesh.rows, "
            f"mesh.columns), or smaller tiles{local}"
        )
    return None


def device_obstacle(
    devices: Sequence[str],
    layers: tuple[Layer, ...],
    mesh: tuple[int, int, int],
    halo_mode: HaloMode = "overlap",
    pipeline: Pipelining = "gpipe",
) -> str | None:
    """Why a rank's partitions may not share these devices; None where they may.

    Autograd has a thread per device, which takes whichever partition is ready: on one rank another
    than on the rank that it waits for. With GPipe all may share one device, since the order is the
    same on all ranks then; with 1F1B each partition goes back when it may. On CPUs backward runs in
    the thread that calls it.

    Args:
        devices: Names of the devices of the partitions.
        mesh: Replicas, rows and columns of ranks.
        halo_mode: Source of the tiles' context, see `HaloMode`.
        pipeline: Order of micro-batches in the partitions, `gpipe` or `1f1b`.
    """
    names = ["cuda:0" if name == "cuda" else name for name in devices]
    whole, (replicas, rows, columns) = whole_image(layers), mesh
    together = rows * columns * (replicas if whole == "batch norm" else 1)
    twice = len(set(names)) < len(names) and names[0] != "cpu"
    if halo_mode == "sweep" and columns > 1 and twice:
        return (
            "partitions of a sweep over columns of ranks need a GPU each, since two ranks could "
            f"wait in different partitions without an end (device: {', '.join(devices)}, "
            f"mesh.columns: {columns}); name each once"
        )
    if not twice or together == 1 or not needs_all_tiles(layers, halo_mode):
        return None
    what = "halo_mode: exchange" if halo_mode == "exchange" else f"over whole images: {whole}"
    values = f"device: {', '.join(devices)}, {what}, ranks that wait: {together}"
    if pipeline == "1f1b":
        return (
            "partitions in which ranks wait for one another while others go back need a device "
            f"each, since two ranks could wait in different partitions without an end ({values}, "
            "pipeline: 1f1b); name each device once, or the same one for all with pipeline: gpipe"
        )
    if len(set(names)) == 1:
        return None
    return (
        "partitions in which ranks wait for one another need a device each, or one for all, since "
        f"two ranks could wait in different partitions without an end ({values}); name each device "
        "once, or the same one for all"
    )


def flow_obstacle(
    layers: tuple[Layer, ...],
    partitions: int,
    checkpointing: Checkpointing,
    swap: str | bool,
    loss_terms: Sequence[str],
    halo_mode: HaloMode,
) -> str | None:
    """Why micro-batches may not go back while others go forward (1F1B); None where they may.

    Layers may wait for other ranks of the image, which have as many micro-batches in one order: a
    partition computes them in the same order on all of these ranks.

    Args:
        swap: Swapped tensors: `off`, `auto` or `all`.
        loss_terms: Summands of the loss.
    """
    reasons = (
        (partitions == 1, "partitions: 1", "needs several partitions", "more partitions"),
        (
            halo_mode == "sweep",
            "halo_mode: sweep",
            "takes whole tiles, and a sweep strips",
            "halo_mode: overlap or exchange",
        ),
        (
            whole_image(layers) == "batch norm",
            "over whole images: batch norm",
            "takes images one after another, and batch norm needs all images of a step at once",
            "network.norm: instance or group, or network.norm_scope: tile (approximate)",
        ),
        (
            "dice" in loss_terms,
            "loss: dice",
            "goes back from the loss of each micro-batch, and Dice is one loss of all tiles",
            "loss: ce",
        ),
        (
            checkpointing == "except_last",
            "checkpointing: except_last",
            "computes all micro-batches again, or none",
            "checkpointing: always or never",
        ),
        (
            swap not in ("off", False),
            f"swap: {swap}",
            "swaps nothing, since it holds few micro-batches",
            "swap: off",
        ),
    )
    for wrong, value, rule, remedy in reasons:
        if wrong:
            return (
                f"one forward, one backward {rule} (pipeline: 1f1b, {value}); use pipeline: gpipe, "
                f"or {remedy}"
            )
    return None


def batch_obstacle(
    layers: tuple[Layer, ...],
    replicas: int,
    per_step: Sequence[int],
    sizes: Sequence[object],
    *,
    cropped: bool = False,
) -> str | None:
    """Why batch norm cannot see all images of a step at once; None where it can.

    Args:
        per_step: Numbers of images or crops that steps have.
        sizes: Sizes of the extended images or crops.
        cropped: Whether they are crops, which are cut off where an image is smaller.
    """
    if whole_image(layers) != "batch norm":
        return None
    uneven = [count for count in per_step if count % replicas]
    if uneven:
        return (
            "batch norm over a step sums over all ranks, so each replica needs as many images of "
            f"it as the others (mesh.replicas: {replicas}, images of a step: {uneven[0]}); choose "
            "a number of replicas that divides it, network.norm: instance or group, or "
            "network.norm_scope: tile (approximate)"
        )
    if (most := max(per_step)) > replicas and len(set(sizes)) > 1:
        enough = f"mesh.replicas: {most}, " if all(count % most == 0 for count in per_step) else ""
        crops = "a smaller crop_px, which all images hold" if cropped else "crop_px"
        return (
            "batch norm over a step takes its images in one batch, so they must be of one size "
            f"(sizes: {' and '.join(str(size) for size in sorted(map(str, set(sizes)))[:2])}, "
            f"images per replica: {most // replicas}); set {enough}{crops}, network.norm: instance "
            "or group, or network.norm_scope: tile (approximate)"
        )
    return None


def off_grid(layers: tuple[Layer, ...], halo: int | str, alignment_px: int) -> str | None:
    """Why a network cannot be trained on tiles with this alignment, as of ε; None: it can."""
    if alignment_px == context_of(layers).alignment_px or not whole_image(layers):
        return None
    return (
        f"tiles must lie on the network's grid for statistics over whole images (halo: {halo}, "
        "network.norm_scope: image); use halo: exact, or network.norm_scope: tile"
    )
