"""Weights that make rare classes count as much as frequent ones."""

from collections.abc import Sequence


def balanced_weights(class_pixels: Sequence[int]) -> tuple[float, ...]:
    """The inverse frequency of each class, with a mean of 1 over the labelled pixels.

    w = N / (K·n): N labelled pixels, K classes that occur, n pixels of the class (King and Zeng,
    "Logistic Regression in Rare Events Data", 2001; scikit-learn's `balanced`). So all classes
    together weigh as much as without weights. A class that does not occur has no pixel to weigh;
    its weight is 0.

    Args:
        class_pixels: Labelled pixels of each class, not all 0.
    """
    total, occurring = sum(class_pixels), sum(count > 0 for count in class_pixels)
    return tuple(total / (occurring * count) if count else 0.0 for count in class_pixels)
