"""Scores of a map against labels: of classes from counts of pixels, of numbers from sums."""

from collections.abc import Iterable, Sequence
from math import fsum, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUE_SCORES = "rmse", "mae", "bias", "r2"
SMALLEST = "loss", "rmse", "mae"  # scores with the smallest value as the best

ROUNDING = 1e-13  # of a mean, relative to it: numbers that differ by less are one number

SMALL_SPAN = 1024  # a table of all pairs of so many values takes 8 MB


def count_pairs(labels: NDArray[np.int64], mapped: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """Number of pixels for each pair of (label, mapped class); both (N,), of any values."""
    if not len(labels):
        return {}
    low = min(int(labels.min()), int(mapped.min()))
    span = max(int(labels.max()), int(mapped.max())) - low + 1
    if span <= SMALL_SPAN:
        counts = np.bincount((labels - low) * span + (mapped - low))
        codes = np.flatnonzero(counts)
        pairs, counts = np.stack(np.divmod(codes, span)) + low, counts[codes]
    else:  # sorting is a hundred times slower, but values so far apart are rarely classes
        pairs, counts = np.unique(np.stack([labels, mapped]), axis=1, return_counts=True)
    keys = zip(*pairs.tolist(), strict=True)
    return dict(zip(keys, counts.tolist(), strict=True))


def scores(matrix: NDArray[np.int64]) -> dict[str, Any]:
    """Scores of a confusion matrix (K, K + 1): labels in rows, classes of the map in columns.

    Pixels without data in the map, the last column, are counted and not scored: the image shows
    nothing there. A class that is neither in the labels nor in the map has no IoU (None) and does
    not count in the means.
    """
    classes = len(matrix)
    matrix, unmapped = matrix[:, :classes], int(matrix[:, classes].sum())
    hits = np.diagonal(matrix)
    labelled, mapped = matrix.sum(axis=1), matrix.sum(axis=0)
    union = labelled + mapped - hits
    present = union > 0
    iou = hits / np.maximum(union, 1)
    f1 = 2 * hits / np.maximum(labelled + mapped, 1)
    return {
        "accuracy": float(hits.sum() / matrix.sum()),
        "mean_iou": float(iou[present].mean()),
        "mean_f1": float(f1[present].mean()),
        "iou": [float(x) if p else None for x, p in zip(iou, present, strict=True)],
        "f1": [float(x) if p else None for x, p in zip(f1, present, strict=True)],
        "label_pixels": labelled.tolist(),
        "map_pixels": mapped.tolist(),
        "num_pixels": int(matrix.sum()),
        "num_unmapped": unmapped,
        "confusion": matrix.tolist(),
    }


def number_sums(mapped: NDArray[Any], truth: NDArray[Any]) -> tuple[float, ...]:
    """Sums over the pixels of a piece of a map, for `number_scores`; both (N,), N > 0.

    Returns:
        N, Σe, Σ|e|, Σe² of the errors e = mapped − truth; the mean of the truth, and the sum of its
        squared deviations from that mean, which loses no digits where the truth is far from 0.
    """
    mapped, truth = mapped.astype(np.float64), truth.astype(np.float64)
    errors, mean = mapped - truth, truth.mean()
    sums = errors.sum(), np.abs(errors).sum(), np.square(errors).sum()
    return len(truth), *map(float, sums), float(mean), float(np.square(truth - mean).sum())


def number_scores(pieces: Sequence[tuple[float, ...]], unmapped: int) -> dict[str, Any]:
    """Scores of all pieces; their order does not matter, since they are summed exactly.

    Args:
        pieces: Results of `number_sums`; if there are none, all scores are NaN.
        unmapped: Number of labelled pixels without data in the map, which are not scored.

    Returns:
        Root mean square, mean absolute value and mean (`bias`) of the errors, and `r2` = 1 − Σe² /
        Σ(truth − mean)², None where all the truth is one number.
    """
    count, error, size, square = (_sum(piece[place] for piece in pieces) for place in range(4))
    if not count:
        return dict.fromkeys(VALUE_SCORES, nan) | {"num_pixels": 0, "num_unmapped": unmapped}
    mean = _sum(piece[0] * piece[4] for piece in pieces) / count
    spread = _sum(piece[5] + piece[0] * (piece[4] - mean) ** 2 for piece in pieces)
    return {
        "rmse": sqrt(square / count),
        "mae": size / count,
        "bias": error / count,
        "r2": 1 - square / spread if spread > count * (ROUNDING * mean) ** 2 else None,
        "num_pixels": int(count),
        "num_unmapped": unmapped,
    }


def _sum(numbers: Iterable[float]) -> float:
    """Exact sum of numbers; NaN or infinite if one of them is, after a network diverged."""
    listed = list(numbers)
    return fsum(listed) if np.isfinite(listed).all() else float(np.sum(listed))


def better(name: str, value: float, other: float) -> bool:
    """Whether a value of a score is better than another: of losses and errors the smaller is."""
    return value < other if name in SMALLEST else value > other
