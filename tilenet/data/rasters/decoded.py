"""Blocks of files, which GDAL decodes on several cores, and keeps: what is read again costs little.

A crop of 128² px lies in one block of 512² px or in up to four, and all of them are decoded. Crops
at random places read each block again and again, and strips of a map each row of blocks.
"""

import os

from rasterio.env import set_gdal_config

from tilenet.choices import DECODED_SHARE
from tilenet.parallel.health.node_memory import node_memory_bytes

__all__ = ["LEAST_BYTES", "decode_in_threads", "keep_decoded"]

LEAST_BYTES = 64 << 20  # the blocks that neighbouring tiles share
CHOSEN_BY_USER = "GDAL_CACHEMAX" in os.environ


def keep_decoded(ranks_of_node: int, most_bytes: int | None = None) -> None:
    """Let GDAL keep decoded blocks in this rank's part of `DECODED_SHARE` of the node's memory.

    GDAL's own default is 5 % of the node's memory *per process*: of 40 ranks twice the memory. What
    `GDAL_CACHEMAX` says in the environment holds.

    Args:
        most_bytes: What is of use, if less; None: all blocks are.
    """
    share = int(node_memory_bytes() * DECODED_SHARE) // ranks_of_node
    _allow(share if most_bytes is None else min(share, most_bytes))


def decode_in_threads(count: int) -> None:
    """Let GDAL decode the blocks of a window side by side, of files that are opened from now on.

    Of GeoTIFFs and some other formats. What `GDAL_NUM_THREADS` says in the environment holds.
    """
    if count > 1 and "GDAL_NUM_THREADS" not in os.environ:
        set_gdal_config("GDAL_NUM_THREADS", count)


def _allow(num_bytes: int) -> None:
    if not CHOSEN_BY_USER:
        set_gdal_config("GDAL_CACHEMAX", max(LEAST_BYTES, num_bytes))


_allow(LEAST_BYTES)
