"""How well a map agrees with labels, from counts of pixels alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["better", "count_pairs", "scores"]

SMALL_SPAN = 1024  # of values: a table of all their pairs takes 8 MB


def count_pairs(labels: NDArray[np.int64], found: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """How many pixels have which label and which class; both (N,), whatever their values."""
    if not len(labels):
        return {}
    low = min(int(labels.min()), int(found.min()))
    span = max(int(labels.max()), int(found.max())) - low + 1
    if span <= SMALL_SPAN:
        counts = np.bincount((labels - low) * span + (found - low))
        codes = np.flatnonzero(counts)
        cells, counts = np.stack(np.divmod(codes, span)) + low, counts[codes]
    else:  # sorts pairs: a hundred times slower, for values that are hardly classes
        cells, counts = np.unique(np.stack([labels, found]), axis=1, return_counts=True)
    pairs = zip(cells.T.tolist(), counts.tolist(), strict=True)
    return {(label, guess): count for (label, guess), count in pairs}


def scores(matrix: NDArray[np.int64]) -> dict[str, Any]:
    """Scores of a confusion matrix (K, K + 1): labels in rows, classes of the map in columns.

    Pixels without data in the map, the last column, are only counted: there is nothing to score
    where the image shows nothing. A class that stands neither in the labels nor in the map has no
    IoU (None) and does not count in the means.
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


def better(name: str, value: float, other: float) -> bool:
    """Whether a value of that score beats another one: of a loss the smaller does."""
    return value < other if name == "loss" else value > other
