"""Pages of a file in the system's memory: dropped, and counted."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE


def drop(path: Path) -> None:
    """Let go of a file's pages; skips where that cannot be, as in a file system of memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if held(path).any():
        pytest.skip(f"{path.parent} is in memory: nothing is ever read there")


def held(path: Path) -> np.ndarray:
    """Return for each page of a file True if it is in memory; no page is read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    assert at not in (None, ctypes.c_void_p(-1).value)
    answer = ctypes.create_string_buffer(-(-size // PAGE))
    done = libc.mincore(at, size, answer)
    libc.munmap(at, size)
    assert done == 0, os.strerror(ctypes.get_errno())
    return np.frombuffer(answer, np.uint8) & 1 != 0
