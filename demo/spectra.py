"""What land looks like from above: four bands in which no class has a colour of its own.

Bare soil, gravel, concrete and tiles are the same few colours on fields, roads and roofs; lush
crops look like woods, and shade, slate and wet soil like water. What tells them apart is their
shape, their texture and what lies next to them, which is what a network sees and a classifier of
single pixels does not.
"""

import numpy as np
from land import BUILDING, FIELD, FOREST, WATER, Land
from noise import Floats, blend, byte, fractal_noise, hashed, smooth_noise
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

__all__ = ["MARGIN_PX", "cloudy", "reflectance"]

MARGIN_PX = 8  # of land that `reflectance` needs around its window, for shadows

# Blue, green, red, near infrared, in ten-thousandths.
COLOURS = {
    "lush": (380, 720, 440, 3900),
    "meadow": (480, 860, 620, 3100),
    "dark green": (300, 500, 330, 2600),
    "ripe": (780, 1220, 1500, 2700),
    "soil": (850, 1150, 1500, 2000),
    "dry soil": (1200, 1600, 2000, 2500),
    "wet soil": (480, 620, 760, 1000),
    "gravel": (1350, 1600, 1850, 2150),
    "asphalt": (800, 920, 1000, 1150),
    "tiles": (800, 1050, 1700, 2250),
    "slate": (520, 600, 640, 760),
    "concrete": (1700, 1900, 2050, 2300),
    "clear water": (360, 420, 300, 190),
    "murky water": (560, 760, 640, 520),
    "algae": (400, 700, 460, 1500),
}

# Sixteenths of a class's objects that have a colour, in the order of the classes; gardens last.
SHARES = (
    {"lush": 4, "meadow": 4, "dark green": 1, "ripe": 2, "soil": 2, "dry soil": 1, "wet soil": 2},
    {"asphalt": 7, "gravel": 3, "soil": 2, "concrete": 2, "slate": 2},
    {"lush": 4, "dark green": 9, "meadow": 3},
    {"tiles": 5, "slate": 3, "concrete": 2, "asphalt": 3, "gravel": 1, "soil": 2},
    {"clear water": 5, "murky water": 5, "algae": 3, "wet soil": 3},
    {"meadow": 7, "lush": 5, "dark green": 2, "soil": 1, "ripe": 1},
)
NAMES = tuple(COLOURS)
PALETTE = np.array(list(COLOURS.values()), np.float32)
CHOICE = np.array(
    [[NAMES.index(name) for name, share in row.items() for _ in range(share)] for row in SHARES]
)
SUN_SHARE = np.array([0.45, 0.58, 0.64, 0.7], np.float32)  # the sky's light is blue
CLOUDY = 0.7
CLOUD_SHADOW_PX = (38, 24)


def reflectance(seed: int, window: Window, land: Land) -> NDArray[np.uint16]:
    """The image of a window, (4, H, W); 0 under clouds.

    Args:
        land: Of the window with `MARGIN_PX` on all sides.
    """
    lit = _sun(land)
    inner = slice(MARGIN_PX, -MARGIN_PX), slice(MARGIN_PX, -MARGIN_PX)
    kind, bits, lit = land.kind[inner], land.bits[inner], lit[inner]
    rows = np.arange(window.row, window.row + window.height)[:, None]
    cols = np.arange(window.col, window.col + window.width)[None, :]
    grain = hashed(seed + 1, rows, cols)
    look = hashed(seed + 2, bits)
    colour = CHOICE[kind, (look & np.uint64(15)).astype(np.intp)]
    light = _texture(seed + 10, window, land.across[inner], land.side[inner], kind, look)
    light *= 0.9 + 0.2 * smooth_noise(seed + 3, window, 500)
    bright = light * (0.75 + 0.5 * byte(look, 7))

    cloud = _cloud(seed, window)
    below = Window(
        window.row + CLOUD_SHADOW_PX[0],
        window.col + CLOUD_SHADOW_PX[1],
        window.height,
        window.width,
    )
    lit = lit * (1 - 0.8 * blend(_cloud(seed, below), CLOUDY - 0.04, CLOUDY + 0.03))
    haze = 700 * blend(cloud, CLOUDY - 0.1, CLOUDY + 0.04)

    # Mud comes and goes along a river, so that no river is the only one of its colour.
    mud = blend(smooth_noise(seed + 4, window, 150), 0.3, 0.7) * (kind == WATER)
    noisy = np.where(kind == WATER, np.float32(0.1), np.float32(0.2))
    image = np.empty((4, *kind.shape), np.uint16)
    for band in range(4):
        shades = PALETTE[:, band]
        values = shades[colour] + mud * (shades[NAMES.index("murky water")] - shades[colour])
        values *= bright * (0.86 + 0.28 * byte(look, 1 + band))
        values *= 1 - SUN_SHARE[band] * (1 - lit)
        values *= 1 + noisy * (byte(grain, 2 * band) + byte(grain, 2 * band + 1) - 1)
        image[band] = np.clip(values + haze * (1 - 0.2 * band), 1, 10000).astype(np.uint16)
    image[:, cloud > CLOUDY] = 0
    return image


def cloudy(seed: int, window: Window) -> NDArray[np.bool_]:
    """Where clouds hide the land."""
    return np.asarray(_cloud(seed, window) > CLOUDY)


def _cloud(seed: int, window: Window) -> Floats:
    return fractal_noise(seed + 100, window, 300, 6)


def _sun(land: Land) -> Floats:
    """Share of direct sunlight: 0 in the shadow of what stands to the south-east."""
    lit = np.ones(land.kind.shape, np.float32)
    for step in range(1, 6):
        down, right = step, (step + 1) // 2
        taller = np.zeros_like(lit, np.bool_)
        over = land.height[down:, right:] - step
        taller[:-down, :-right] = over >= land.height[:-down, :-right]
        lit[taller & (land.kind != BUILDING)] = 0
    return lit


def _texture(
    seed: int,
    window: Window,
    across: Floats,
    side: Floats,
    kind: NDArray[np.uint8],
    look: NDArray[np.uint64],
) -> Floats:
    """Brightness within objects: rows of crops, crowns of trees, sides of roofs, worn patches."""
    light = 0.88 + 0.24 * smooth_noise(seed, window, 26)
    period = 4 + 6 * byte(look, 5)
    rows = 0.16 * byte(look, 6) * np.sin(across * (np.float32(2 * np.pi) / period))
    light += np.where(kind == FIELD, rows, 0)
    crowns = smooth_noise(seed + 1, window, 4.3) + 0.6 * smooth_noise(seed + 2, window, 2.3)
    light += np.where(kind == FOREST, 0.75 * (crowns - 0.8), 0)
    light += np.where(kind == BUILDING, 0.2 * side, 0)
    light = np.where(kind == WATER, 0.94 + 0.12 * smooth_noise(seed + 3, window, 90), light)
    return light.astype(np.float32)
