"""Keys of the run file on held-out data, and on scoring the network with it."""

from dataclasses import dataclass
from typing import Literal

from tilenet.data.lists.image_patterns import is_list_file
from tilenet.errors import TilenetError


@dataclass(frozen=True)
class ValidationKeys:
    """Images or blocks held out from training, and the scores of the network on them."""

    images: str | tuple[str, ...] | None = None
    """images that training does not see, given as `images` are, and their labels
    ([below](#validation))"""
    labels: str | tuple[str, ...] | None = None
    """their labels"""
    share: float = 0.0
    """share of the training images' square blocks that is held out, at least one block and never
    all"""
    block_px: int = 512
    """side of these blocks, in pixels at the resolution that is read; several times the network's
    context (`tilenet halo`), or little is left to train on"""
    every: int | None = None
    """steps between validations; the last step always has one. Default: an epoch."""
    batch_size: int = 1
    """tiles of a rank in the pipeline at a time; it changes speed and memory, never the scores"""
    score: Literal["mean_iou", "mean_f1", "accuracy", "loss", "rmse", "mae", "r2"] | None = None
    """score that chooses the checkpoint [`best`](#validation): `mean_iou`, `mean_f1`, `accuracy`,
    or `loss` (the smallest); of a regression `rmse`, `mae` or `loss` (the smallest), or `r2`; of
    equals the earlier. Default: `mean_iou`; of a regression `rmse`."""

    @property
    def image_paths(self) -> tuple[str, ...]:
        """Images that training does not see, in order."""
        return listed(self.images)

    @property
    def label_paths(self) -> tuple[str, ...]:
        """Their labels, one per image."""
        return listed(self.labels)

    @property
    def held_out(self) -> str | None:
        """Description of the held-out share of blocks; None: no blocks are held out."""
        return f"{self.share} of blocks of {self.block_px} px" if self.share else None

    @property
    def holds_out(self) -> bool:
        """Whether anything is held out."""
        return bool(self.image_paths) or self.share > 0

    def check_unread(self) -> None:
        """Refuse keys of validations where nothing is held out; lists of images must be read.

        Raises:
            TilenetError: The error names the first of them.
        """
        for name in ("every", "batch_size", "score"):
            value = getattr(self, name)
            if value != getattr(ValidationKeys, name) and not self.holds_out:
                raise TilenetError(
                    f"validation.{name} is read only where something is held out (validation."
                    f"{name}: {value}, validation.images: none, validation.share: {self.share}); "
                    f"set one of these, or leave validation.{name} out"
                )


def check_pairs(images: tuple[str, ...], labels: tuple[str, ...], group: str = "") -> None:
    """Refuse images without labels, unless they are one list of both.

    Args:
        group: Group of the keys, with its dot.

    Raises:
        TilenetError: Images and labels do not pair up; the error names their numbers.
    """
    lists = [path for path in images if is_list_file(path, with_labels=bool(labels))]
    if lists and (len(images) > 1 or labels):
        raise TilenetError(
            f"a list of images stands alone, since it names their labels too ({group}images: "
            f"{', '.join(images[:3])}, {group}labels: {', '.join(labels[:3]) or 'none'}); leave "
            f"{group}labels out, or join lists"
        )
    if not lists and (len(images) != len(labels) or not (images or group)):
        raise TilenetError(
            f"each image needs one label file ({group}images: {len(images)}, {group}labels: "
            f"{len(labels)}); list them in the same order"
        )


def listed(paths: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The paths of a key, which may be one path."""
    if paths is None:
        return ()
    return (paths,) if isinstance(paths, str) else tuple(paths)
