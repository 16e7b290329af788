"""What a file is by its first bytes, and which of GDAL's drivers would read it."""

from typing import NamedTuple

__all__ = ["Format", "format_of"]


class Format(NamedTuple):
    """A format of rasters.

    Attributes:
        name: As people call it.
        drivers: GDAL's, of which one is enough.
    """

    name: str
    drivers: tuple[str, ...]


HDF4 = Format("HDF4", ("HDF4",))
HDF5 = Format("HDF5 or netCDF-4", ("HDF5", "netCDF", "KEA", "BAG"))
NETCDF = Format("netCDF", ("netCDF",))
JPEG_2000 = Format("JPEG 2000", ("JP2OpenJPEG", "JP2ECW", "JP2KAK", "JP2MrSID", "JP2Lura"))
JPEG_XL = Format("JPEG XL", ("JPEGXL",))

FIRST_BYTES = 16
# Where they begin, the bytes, and what begins so.
SIGNATURES = (
    (0, b"\x0e\x03\x13\x01", HDF4),
    (0, b"\x89HDF\r\n\x1a\n", HDF5),
    (0, b"CDF\x01", NETCDF),
    (0, b"CDF\x02", NETCDF),
    (0, b"CDF\x05", NETCDF),
    (0, b"\x00\x00\x00\x0cjP  ", JPEG_2000),
    (0, b"\xff\x4f\xff\x51", JPEG_2000),
    (0, b"\x00\x00\x00\x0cJXL ", JPEG_XL),
    (0, b"\xff\x0a", JPEG_XL),
    (0, b"GRIB", Format("GRIB", ("GRIB",))),
    (0, b"msid", Format("MrSID", ("MrSID",))),
    (4, b"ftypavi", Format("AVIF", ("AVIF", "HEIF"))),
    (4, b"ftyphei", Format("HEIF", ("HEIF",))),
    (4, b"ftypmif1", Format("HEIF", ("HEIF",))),
    (0, b"SIMPLE  =", Format("FITS", ("FITS",))),
    (0, b"\x76\x2f\x31\x01", Format("OpenEXR", ("EXR",))),
    (0, b"PAR1", Format("Parquet", ("Parquet",))),
    (0, b"DDS ", Format("DDS", ("DDS",))),
    (0, b"%PDF", Format("PDF", ("PDF",))),
    (8, b"WEBP", Format("WebP", ("WEBP",))),
    (0, b"II*\x00", Format("TIFF", ("GTiff",))),
    (0, b"MM\x00*", Format("TIFF", ("GTiff",))),
    (0, b"\x89PNG", Format("PNG", ("PNG",))),
    (0, b"\xff\xd8\xff", Format("JPEG", ("JPEG",))),
)
# Of names such as HDF4_SDS:UNKNOWN:file:0.
PREFIXES = {
    "HDF4_SDS": HDF4,
    "HDF4_EOS": HDF4,
    "HDF5": HDF5,
    "NETCDF": NETCDF,
    "FITS": Format("FITS", ("FITS",)),
    "TILEDB": Format("TileDB", ("TileDB",)),
    "ZARR": Format("Zarr", ("Zarr",)),
}


def format_of(name: str, file: str | None) -> Format | None:
    """What a name for GDAL says that a file is, or else its first bytes; None: unknown.

    Args:
        name: As it is handed to GDAL.
        file: The file that it leads to, which is no pipe; None: it is elsewhere.
    """
    prefix = PREFIXES.get(name.partition(":")[0].upper())
    if prefix is not None or file is None:
        return prefix
    try:
        with open(file, "rb") as opened:
            head = opened.read(FIRST_BYTES)
    except OSError:
        return None
    starts = (f for at, found, f in SIGNATURES if head[at : at + len(found)] == found)
    # ECW's has no more than a byte for itself, and its ending.
    ecw = Format("ECW", ("ECW",)) if file.lower().endswith(".ecw") and head[:1] == b"e" else None
    return next(starts, ecw)
