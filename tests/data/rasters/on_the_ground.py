"""Ground control points and RPCs of a slightly turned image of 47 × 59 px at 10° E, 50° N."""

from rasterio.control import GroundControlPoint
from rasterio.rpc import RPC

# Degrees of a row and column.
DOWN, RIGHT = (2e-5, -1e-4), (9e-5, 1.5e-5)


def place(row: float, col: float) -> tuple[float, float]:
    return 10 + row * DOWN[0] + col * RIGHT[0], 50 + row * DOWN[1] + col * RIGHT[1]


POINTS = [
    GroundControlPoint(row, col, *place(row, col), 12.5)
    for row in (0.25, 20, 47)
    for col in (0, 33.5, 59)
]
MODEL = RPC(
    height_off=100,
    height_scale=500,
    lat_off=50,
    lat_scale=0.1,
    line_den_coeff=[1.0] + [0.0] * 19,
    line_num_coeff=[0.0, 0.05, -1.0] + [0.0] * 17,
    line_off=22.5,
    line_scale=23,
    long_off=10,
    long_scale=0.1,
    samp_den_coeff=[1.0] + [0.0] * 19,
    samp_num_coeff=[0.0, 1.0, 0.02] + [0.0] * 17,
    samp_off=29,
    samp_scale=30,
    err_bias=1.0,
    err_rand=0.5,
)
