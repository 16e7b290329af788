"""Memory for blocks of files that were decoded: what is read of them again costs little.

A crop of 128² px lies in one block of 512² px or in up to four, and all of them are decoded. Crops
at random places read each block again and again, and strips of a map each row of blocks.
"""

import os

from rasterio.env import get_gdal_config, set_gdal_config

from tilenet.data.rasters.block_cache import BLOCKS
from tilenet.parallel.health.node_memory import (
    BLOCKS_SHARE,
    LEAST_BLOCKS_BYTES,
    node_memory_bytes,
)

CHOSEN_BY_USER = "GDAL_CACHEMAX" in os.environ


def keep_blocks(ranks_of_node: int) -> None:
    """Keep blocks in this rank's part of `BLOCKS_SHARE` of the node's memory.

    GDAL keeps decoded ones in four fifths of it; the rest is for burned and resampled ones. GDAL's
    own default is 5 % of the node's memory *per process*: of 40 ranks twice the memory. What
    `GDAL_CACHEMAX` says in the environment holds.
    """
    share = _share(ranks_of_node)
    BLOCKS.most_bytes = max(LEAST_BLOCKS_BYTES, share // 5)
    _allow(share - share // 5)


def keep_rows(num_bytes: int, ranks_of_node: int) -> None:
    """Have GDAL keep so many bytes of decoded blocks, or a rank's part, unless it keeps more."""
    _allow(max(min(num_bytes, _share(ranks_of_node)), int(get_gdal_config("GDAL_CACHEMAX"))))


def _share(ranks_of_node: int) -> int:
    return int(node_memory_bytes() * BLOCKS_SHARE) // ranks_of_node


def _allow(num_bytes: int) -> None:
    if not CHOSEN_BY_USER:
        set_gdal_config("GDAL_CACHEMAX", max(LEAST_BLOCKS_BYTES, num_bytes))


_allow(LEAST_BLOCKS_BYTES)
