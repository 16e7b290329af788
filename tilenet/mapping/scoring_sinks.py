"""A map that is counted instead of written: its pixels by label and class, and their loss.

Of a regression sums over the errors of its numbers.
"""

from abc import ABC, abstractmethod
from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from tilenet.data.labels.source import ValidationImage, check_classes
from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.model.loss import Loss, cross_entropy, value_loss
from tilenet.scores import number_sums


class ScoringSink(ABC):
    """Takes up the pieces of a map that this rank computes.

    Attributes:
        losses: Summed loss of each piece.
    """

    def __init__(self, image: ValidationImage, rank: int) -> None:
        self.image, self.rank = image, rank
        self.losses: list[float] = []
        windows = image.windows
        self._windows = None if windows is None else np.array([astuple(w) for w in windows])

    def wants(self, rank: int, window: Window) -> bool:
        """Each rank has to do with its own pieces, where something counts."""
        return rank == self.rank and self._counts(window)

    def _counts(self, window: Window) -> bool:
        if self._windows is None:
            return True
        rows, cols, heights, widths = self._windows.reshape(-1, 4).T
        below = (rows < window.row + window.height) & (window.row < rows + heights)
        across = (cols < window.col + window.width) & (window.col < cols + widths)
        return bool((below & across).any())

    @abstractmethod
    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Score a piece."""


class CountingSink(ScoringSink):
    """Counts the pixels of a map of classes.

    Args:
        mapper: Computes classes.
        weights: Weights of the classes, in the loss.

    Attributes:
        matrix: (K, K + 1), as `scores` takes it.
        losses: Summed cross-entropy of each piece.
    """

    def __init__(self, mapper: Mapper, image: ValidationImage, weights: Tensor, rank: int) -> None:
        super().__init__(image, rank)
        self.mapper, self.weights = mapper, weights
        self.matrix = np.zeros((len(weights), len(weights) + 1), np.int64)

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Count a piece.

        Raises:
            TilenetError: Its labels cannot be read, or are no classes.
        """
        assert computed is not None, "ranks take up what they computed"
        labels, ignored = self.image.labels.read(window), self.image.labels.ignore_index
        count = len(self.weights)
        check_classes(self.image.labels, labels, window, count)
        counted = labels != ignored
        truth = labels[counted]
        mapped = self.mapper.values(computed)[0].astype(np.int64)
        mapped[~computed.valid] = count
        pairs = truth * (count + 1) + mapped[counted]
        self.matrix += np.bincount(pairs, minlength=self.matrix.size).reshape(self.matrix.shape)
        target = torch.from_numpy(np.where(computed.valid, labels, ignored))[None]
        logits = computed.logits[None]
        with torch.inference_mode():
            loss = cross_entropy(logits, target.to(logits.device), ignored, self.weights)
        self.losses.append(float(loss))


class NumbersSink(ScoringSink):
    """Adds up the errors of a map of numbers.

    Args:
        loss: Loss of the run.

    Attributes:
        pieces: `number_sums` of each piece that holds a labelled pixel with data.
        unmapped: Labelled pixels without data.
    """

    def __init__(self, image: ValidationImage, loss: Loss, rank: int) -> None:
        super().__init__(image, rank)
        self.loss, self.unmapped = loss, 0
        self.pieces: list[tuple[float, ...]] = []

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Add a piece.

        Raises:
            TilenetError: Its labels cannot be read.
        """
        assert computed is not None, "ranks take up what they computed"
        truth = self.image.labels.targets(window)
        labelled = self.image.labels.counted(truth)
        counted = labelled & computed.valid
        self.unmapped += int((labelled & ~computed.valid).sum())
        if not counted.any():
            return
        mapped = computed.logits[0].cpu().numpy()
        self.pieces.append(number_sums(mapped[counted], truth[counted]))
        target = torch.from_numpy(np.where(counted, truth, np.nan))[None]
        logits, name = computed.logits[None], self.loss.terms[0]
        with torch.inference_mode():
            sums = value_loss(name, logits, target.to(logits.device), self.loss.huber_delta)
        self.losses.append(float(sums[0]))
