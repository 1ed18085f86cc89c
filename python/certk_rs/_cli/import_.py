"""`certk import`: a cache file of what another program has stored."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .options import Argument, Option, need_new, read_text
from .terminal import print_json, say

OPTIONS = {
    "form": Argument(metavar="FORMAT", help="vllm, lmcache, hicache, mlx or llama."),
    "source": Argument(metavar="SOURCE", help="A file, or a directory of files of one prompt."),
    "out": Option("-o", "--out", metavar="CACHE", help="The cache file."),
    "order": Option(
        metavar="LIST", help="A text file: names of chunks or pages by their tokens, a name a line."
    ),
    "layers": Option(metavar="N", min=1, help="Layers of the model."),
    "kv_heads": Option(metavar="N", min=1, help="Heads of keys and values."),
    "head_dim": Option(metavar="N", min=1, help="Entries of a key."),
    "dtype": Option(metavar="float32|float16|bfloat16", help="Numbers of a page or a chunk."),
    "page_layout": Option(help="SGLang's --hicache-mem-layout."),
}


def import_(
    form: Literal["vllm", "lmcache", "hicache", "mlx", "llama"],
    source: str,
    out: Path,
    order: Path | None = None,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    page_layout: Literal["layer_first", "page_first", "page_first_direct"] | None = None,
    as_json: bool = False,
) -> int:
    """Make a cache file of what another program has stored.

    It holds keys and values, and prune takes it with --queries none. What files do not tell must be
    given, and nothing is guessed. Quantised caches are refused.
    """
    from .._foreign.convert import import_cache
    from .._foreign.source import Given

    need_new(out)
    listed = None
    if order is not None:
        listed = tuple(line.strip() for line in read_text(order).splitlines() if line.strip())
    given = Given(layers, kv_heads, head_dim, dtype, page_layout, listed)
    found = import_cache(form, source, out, given)
    if as_json:
        shapes = {str(n): {"dtype": t, "shape": shape} for n, (t, shape) in found.forms.items()}
        print_json({"output": str(out), "layers": shapes, "about": dict(found.about)})
    else:
        dtype_, (heads, n, d) = next(iter(found.forms.values()))
        say(f"{out}: {len(found.forms)} layers of {heads} heads, {n} tokens, d {d}, {dtype_}")
    return 0
