"""The images, or crops of images, of each step: a function of (seed, step) and nothing else."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tilenet.data.crop_places import CropPlaces
from tilenet.geometry.symmetries import AS_IS, Symmetry
from tilenet.geometry.windows import Window
from tilenet.random_keys import key, uniform


@dataclass(frozen=True)
class Sample:
    """A whole image or a crop, which a step treats as one image.

    Attributes:
        number: Number within the run (whole image) or the step (crop); keys dropout masks.
        image: Place of the image in the run's list.
        region: Pixels of that image.
        symmetry: Turn of the region; the turned image is tiled.
    """

    number: int
    image: int
    region: Window
    symmetry: Symmetry = AS_IS

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, turned."""
        return self.symmetry.size(self.region.height, self.region.width)


@dataclass(frozen=True)
class ImageSchedule:
    """Whole images, in a new keyed order each epoch.

    Attributes:
        symmetries: Turns, one of which is drawn for each image of a step.
    """

    seed: int
    batch_size: int
    sizes: tuple[tuple[int, int], ...]
    symmetries: tuple[Symmetry, ...] = (AS_IS,)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until each image was seen once; the last may hold fewer images."""
        return -(-len(self.sizes) // self.batch_size)

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The images of a step; steps count from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.argsort(uniform(len(self.sizes), self.seed, "order", epoch), kind="stable")
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return tuple(
            Sample(
                int(image),
                int(image),
                Window(0, 0, *self.sizes[image]),
                _drawn(self.symmetries, self.seed, step, int(image)),
            )
            for image in chosen
        )


@dataclass(frozen=True)
class CropSchedule:
    """`batch_size` crops a step, drawn from all places that hold a labelled pixel.

    A crop that reaches over the image's lower or right edge is cut off there, and so a little
    smaller: crops start on the alignment grid, and yet no pixel of an image is out of their reach.

    Attributes:
        sizes: Height and width of each image.
        places: Places of the crops of each image, with their classes where `oversample` asks.
        symmetries: Turns, one of which is drawn for each crop.
        oversample: Share of the crops that are drawn by class: first a class, each as likely, then
            a place among those that hold it.
    """

    seed: int
    batch_size: int
    crop_px: int
    sizes: tuple[tuple[int, int], ...]
    places: tuple[CropPlaces, ...]
    symmetries: tuple[Symmetry, ...] = (AS_IS,)
    oversample: float = 0.0

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that draw as many pixels as lie within reach of the crops."""
        reach_px = sum(places.reach_px() for places in self.places)
        return max(1, -(-reach_px // (self.crop_px**2 * self.batch_size)))

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The crops of a step; steps count from 0."""
        samples = []
        for number in range(self.batch_size):
            image, row, col = self._place(step, number)
            height = min(self.crop_px, self.sizes[image][0] - row)
            width = min(self.crop_px, self.sizes[image][1] - col)
            region = Window(row, col, height, width)
            turned = _drawn(self.symmetries, self.seed, step, number)
            samples.append(Sample(number, image, region, turned))
        return tuple(samples)

    def _place(self, step: int, number: int) -> tuple[int, int, int]:
        """Image, row and column of a crop."""
        draw = key(self.seed, "crop", step, number)
        if key(self.seed, "oversample", step, number) < self.oversample * 2**128:
            classes = self._places_of_classes
            label = list(classes)[key(self.seed, "class", step, number) % len(classes)]
            image, place = _nth(classes[label], draw)
            return image, *self.places[image].of_class(label, place)
        image, place = _nth(self._num_places, draw)
        return image, *self.places[image][place]

    @cached_property
    def _num_places(self) -> NDArray[np.int64]:
        """Number of places of each image."""
        return np.array([len(places) for places in self.places], np.int64)

    @cached_property
    def _places_of_classes(self) -> dict[int, NDArray[np.int64]]:
        """Number of places of each image that hold a class, for each class that occurs."""
        counts = {
            label: np.zeros(len(self.places), np.int64)
            for label in sorted({label for places in self.places for label in places.classes})
        }
        for image, places in enumerate(self.places):
            for label, number in places.classes.items():
                counts[label][image] = number
        return counts


def _nth(counts: NDArray[np.int64], draw: int) -> tuple[int, int]:
    """Image and place there of a draw among the places of all images."""
    ends = np.cumsum(counts)
    draw %= int(ends[-1])
    image = int(np.searchsorted(ends, draw, side="right"))
    return image, draw - int(ends[image]) + int(counts[image])


def _drawn(symmetries: tuple[Symmetry, ...], seed: int, step: int, number: int) -> Symmetry:
    return symmetries[key(seed, "symmetry", step, number) % len(symmetries)]
