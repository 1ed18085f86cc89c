"""Arrays from .npy and .npz files, whose headers are checked against the bytes that are there.

`numpy.load` allocates the array that a header asks for before it reads. Here a header that asks for
more than the file holds is an error before anything is allocated. So is one that asks for very many
rows without an entry. Nothing is unpickled.
"""

from __future__ import annotations

import stat
import warnings
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError, one_line
from .safetensors import byte_size, quote

_HEADERS: dict[tuple[int, int], Callable[[Any], tuple[Any, bool, Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# The most that deflate compresses.
_DEFLATED = 1032
# Rows without entries take no bytes of the file, but memory for their results.
_MOST_EMPTY_ROWS = 1 << 20
_SHOWN_NAMES = 10


def read_array(path: Path, name: str | None = None) -> NDArray[Any]:
    """Read the array of a .npy file, or the one of that name of a .npz file (or its only one).

    Raises:
        CertkError: The file is neither, is damaged, or has no such array.
        OSError: The file cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CertkError(f"{path} is not a regular file: give a .npy or .npz file")
    with path.open("rb") as file:
        magic = file.read(2)
        if magic not in (b"\x93N", b"PK"):
            raise CertkError(f"{path} is not a .npy or .npz file: write it with numpy.save")
        try:
            if magic == b"PK":
                with zipfile.ZipFile(file) as archive:
                    return _member(path, archive, name, status.st_size)

            def again() -> IO[bytes]:
                file.seek(0)
                return file

            return _array(again, status.st_size)
        except (OSError, MemoryError, CertkError):
            raise
        except Exception as error:  # NumPy, zipfile and zlib raise many kinds
            raise CertkError(f"{path} cannot be read ({one_line(error)}): write it again") from None


def _member(path: Path, archive: zipfile.ZipFile, name: str | None, size: int) -> NDArray[Any]:
    held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if name is None and len(held) == 1:
        [name] = held
    if name not in held:
        shown = ", ".join([*held][:_SHOWN_NAMES]) + ", ..." * (len(held) > _SHOWN_NAMES)
        raise CertkError(f"{path} holds the arrays {shown or 'none'}: name one with --array")
    info = held[name]
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{quote(name)} is compressed in a way that numpy.savez does not use")
    most = size if info.compress_type == zipfile.ZIP_STORED else _DEFLATED * size
    if info.file_size > most:
        raise ValueError(f"{quote(name)} claims {info.file_size} bytes in a file of {size}")
    return _array(lambda: archive.open(info), info.file_size)


def _array(begin: Callable[[], IO[bytes]], size: int) -> NDArray[Any]:
    """Read the array of a stream of `size` bytes, which `begin` opens at its beginning."""
    stream = begin()
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"a header of version {version} is none of an array of numbers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Python 2 wrote is read as well
        shape, _, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled; save numbers")
    whole = all(type(axis) is int and axis >= 0 for axis in shape)
    need = byte_size(dtype.itemsize, shape) if whole and dtype.itemsize else None
    left = size - stream.tell()
    if need is None or need > left:
        raise ValueError(
            f"its header claims {quote(str(dtype))} of shape {quote(shape)}, the file has {left} "
            "bytes for it"
        )
    if need == 0 and (rows := prod(shape[:-1])) > _MOST_EMPTY_ROWS:
        raise ValueError(f"its header claims {rows} rows without an entry")
    array: NDArray[Any] = np.lib.format.read_array(begin(), allow_pickle=False)
    return array
