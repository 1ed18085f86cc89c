"""Other programs' caches as cache files without queries, and the way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._files.cache import Cache
from .._files.location import Location, Place, locate
from .._files.new_file import new_file
from .._files.safetensors import canonical
from .._files.sharded import open_tensors
from .._files.values import FiniteCheck
from ..errors import CertkError
from . import hicache, llama, lmcache, mlx, vllm
from .source import Foreign, Given

FORMATS: dict[str, Callable[[Location, Given], Foreign]] = {
    "hicache": hicache.read,
    "llama": llama.read,
    "lmcache": lmcache.read,
    "mlx": mlx.read,
    "vllm": vllm.read,
}

# Chunks, pages and folders have names that are hashes of tokens, which a cache file does not hold.
WRITERS = {"mlx": mlx.write}


def import_cache(form: str, place: Place, out: Place, given: Given) -> Foreign:
    """Write `layers.{i}.key` and `layers.{i}.value` of a source; memory holds one of them.

    Raises:
        CertkError: The source is not of this form, needs options, or holds NaN or infinities; or
            the output is there.
        OSError: The system refuses.
    """
    if form not in FORMATS:
        raise CertkError(f"format is {form!r}: give {', '.join(FORMATS)}")
    where = locate(place)
    if where.kind() is None:
        raise FileNotFoundError(2, "No such file or directory", str(where))
    source = FORMATS[form](where, given)
    tensors = {
        f"layers.{layer}.{role}": stored
        for layer, stored in source.forms.items()
        for role in ("key", "value")
    }
    header = canonical(tensors, source.about)
    with new_file(locate(out)) as file:
        file.write_at(0, header.raw)
        for layer, (dtype, shape) in source.forms.items():
            check = FiniteCheck(dtype)
            for role in ("key", "value"):
                rows = source.read(layer, role)
                if rows.shape != shape:
                    raise AssertionError(f"{role} {layer}: {rows.shape} is not the planned {shape}")
                data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                _check_finite(check.first_bad(data), f"{place}: layer {layer}: {role}", shape)
                entry = header.entries[f"layers.{layer}.{role}"]
                file.write_at(len(header.raw) + entry.start, data.data)
        file.commit()
    return source


def export_cache(
    form: str, place: Place, out: Place, names: str | None = None, layout: str | None = None
) -> tuple[int, int]:
    """Write a cache file as another program stores it; return its layers and keys.

    Raises:
        CertkError: The form is not written, or the file is no cache: outputs of prune are none,
            since other programs count positions by the keys that they hold.
        OSError: The system refuses.
    """
    if form not in WRITERS:
        raise CertkError(f"format is {form!r}: give {', '.join(WRITERS)}, the one that is written")
    with open_tensors(place) as file:
        if "certk" in file.header.metadata:
            raise CertkError(f"{place}: is an output of certk prune: give its input")
    with Cache(place, names, layout, "any") as cache:
        WRITERS[form](cache, locate(out))
        return len(cache.layers), cache.layers[0].n


def _check_finite(bad: int | None, where: str, shape: tuple[int, ...]) -> None:
    if bad is not None:
        at = ", ".join(str(int(axis)) for axis in np.unravel_index(bad, shape))
        raise CertkError(
            f"{where} has NaN or an infinity at [{at}]: the source is damaged, or its shape and "
            "dtype are not those given"
        )
