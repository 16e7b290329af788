"""Commands that mend files, as messages name them: GDAL's, which its installations bring, and rio.

`rio` comes with rasterio, and so with every tilenet; GDAL's commands do not.
"""

# rio keeps the blocks of a file in strips unless told theirs.
TILED_OPTIONS = "--co TILED=YES --co BLOCKXSIZE=512 --co BLOCKYSIZE=512"


def _either(gdal: str, rio: str) -> str:
    return f"{gdal}, or rio {rio}"


AVERAGE = _either("gdalwarp -r average", "warp --resampling average --like FIRST IN OUT.tif")
CHECK = _either("gdalinfo -checksum", "info --verbose")
JOIN = _either("gdalbuildvrt", "merge IN... OUT.tif")
LIKE = _either("gdalwarp", "warp --like FIRST IN OUT.tif")
MOVE = _either("gdalwarp -t_srs", "warp --dst-crs EPSG:… IN OUT.tif")
NEAREST = _either("gdalwarp -r near", "warp --resampling nearest --like IMAGE IN OUT.tif")
# rio warp finds the bounds of GCPs by itself, but not of RPCs: --like helps there.
ON_THE_GROUND = "put it on the ground with " + _either(
    "gdalwarp -t_srs (with -rpc)", "warp --dst-crs EPSG:… (with RPCs: --like MAP) IN OUT.tif"
)
SET_CRS = _either("gdal_edit -a_srs", "edit-info --crs EPSG:… FILE")
SET_TRANSFORM = _either("gdal_edit -a_ullr", "edit-info --transform '[A,B,C,D,E,F]' FILE")
TILED = _either("gdal_translate -co TILED=YES", f"convert {TILED_OPTIONS} IN OUT.tif")
VECTOR_INFO = "ogrinfo -al, or python -c 'import pyogrio; print(pyogrio.read_info(FILE))'"


def tiled_copy(path: str) -> str:
    """The whole line that makes a tiled and compressed copy.

    Args:
        path: Path as a shell reads it.
    """
    return _either(
        f"gdal_translate -co TILED=YES -co COMPRESS=DEFLATE -co BIGTIFF=IF_SAFER {path} tiled.tif",
        f"convert {TILED_OPTIONS} --co COMPRESS=DEFLATE --co BIGTIFF=IF_SAFER {path} tiled.tif",
    )
