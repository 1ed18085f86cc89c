"""The Rust extension. Arrays are coerced by `_arrays`; values and shapes are judged in Rust.

What is declared as object is handed on as the user gave it, and judged in Rust, too.

Arrays have a contiguous last axis and non-negative strides that are multiples of the item size.
float16 and bfloat16 are lent as uint16 views beside the dtype's name. `rows` is the product of the
batch shape; lengths and radius are 1-D, of length `rows`, or 1 where one value serves all rows.
Every function raises `certk_rs.CertkError` for bad input and lets KeyboardInterrupt pass.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

__all__ = [
    "Attended",
    "Cancellation",
    "Certified",
    "DefaultFloats",
    "Estimated",
    "Kept",
    "KeyIndex",
    "MappedPieces",
    "OpenMpTeam",
    "OutputBounds",
    "OutputSelected",
    "Recalled",
    "Searched",
    "Selected",
    "ValueBall",
    "ValueIndex",
    "__version__",
    "attention",
    "attention_from_codes",
    "attention_of_ragged",
    "best_cuts",
    "blockwise",
    "bretagnolle_huber",
    "certify",
    "keep_set",
    "keep_set_of_queries",
    "kl_from_tail_mass",
    "mean_bounds",
    "multi_gap",
    "nearest_rsqrt",
    "output_error",
    "pinsker",
    "products",
    "required_gap",
    "score_gap",
    "select",
    "select_output",
    "set_simd_level",
    "simd_level",
    "single_gap",
    "smallest_k",
    "tail_mass",
    "tail_mass_from_kl",
    "visible_rows",
]

__version__: str

# An array and the name of its dtype.
_Stored = tuple[NDArray[Any], str]
# Or with numbers of pages and how many rows each sequence has.
_MaybePaged = _Stored | tuple[NDArray[Any], str, NDArray[np.uint32], list[int]]
_Rows = tuple[
    _Stored,  # scores
    object,  # kind
    object,  # scale
    _Stored | None,  # mask
    NDArray[np.int64] | None,  # lengths
    NDArray[np.int64] | None,  # indptr
    object,  # causal_offset
]
# A mask, or indptr and indices.
_Keep = tuple[NDArray[np.bool_] | None, NDArray[np.int64] | None, NDArray[np.int64] | None]

@disjoint_base
class Selected:
    """The fields of a `Selection`. Each is made when it is first asked for, and is read-only."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...
    @property
    def eps(self) -> NDArray[np.float64]: ...
    @property
    def k(self) -> NDArray[np.int64]: ...
    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[np.int32] | NDArray[np.int64]: ...
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def tail_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def minimal(self) -> NDArray[np.bool_]: ...
    @property
    def status(self) -> NDArray[np.uint8]: ...
    @property
    def score_indptr(self) -> NDArray[np.int64] | None: ...

@final
class Searched(Selected):
    """What the fields of a `SearchResult` are beyond those of a `Selection`."""

    @property
    def scored(self) -> NDArray[np.int64]: ...
    @property
    def rung(self) -> NDArray[np.uint8]: ...

_Head = tuple[
    NDArray[np.uint8],  # codes, in lines
    NDArray[np.uint16],  # scales, bfloat16
    NDArray[np.uint16],  # radii, bfloat16
    NDArray[np.uint32],  # keys without a code
    NDArray[np.float32],  # mean
    NDArray[np.float64],  # Gram matrix, flat
    NDArray[np.float64],  # seven numbers
    NDArray[np.uint64],  # fingerprint of the keys, two words
]

_Weighing = tuple[
    object,  # scale
    NDArray[np.int64] | None,  # lengths
    NDArray[np.bool_] | None,  # mask
    object,  # threads
]

@final
class Recalled:
    """The fields of a `RecallResult`."""

    @property
    def lost_upper(self) -> NDArray[np.float64]: ...
    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[np.int64]: ...
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def tail_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def log_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def log_mass_upper(self) -> NDArray[np.float64]: ...

@final
class KeyIndex:
    """Codes of keys (..., n, d); queries q are (..., m, d)."""

    @staticmethod
    def build(keys: _MaybePaged, bits: int, rotate: object, threads: object) -> KeyIndex: ...
    def append(self, keys: _MaybePaged, threads: object) -> None: ...
    def search(
        self,
        q: _Stored,
        keys: _MaybePaged | None,
        eps: float | NDArray[np.float64] | None,
        batch: tuple[int, ...],
        how: tuple[
            object,
            object,
            object,
            object,
            object,
            object,
            NDArray[np.int64] | None,
            NDArray[np.bool_] | None,
        ],
    ) -> Searched:
        """How: scale, rule, k, max_scored, threads; then causal, lengths, mask."""

    def log_mass(
        self, q: _Stored, how: _Weighing
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the two ends, a number per row."""

    def recall(
        self,
        q: _Stored,
        beside: tuple[NDArray[np.float64], ...],  # two, a number per row each
        eps: float | NDArray[np.float64],
        batch: tuple[int, ...],
        how: _Weighing,
    ) -> Recalled: ...
    def check(self, keys: _MaybePaged, threads: object) -> None: ...
    def write_to(self, file: BinaryIO) -> None: ...
    @staticmethod
    def read_from(file: BinaryIO) -> KeyIndex:
        """Read an index, and nothing behind it."""

    def parts(self) -> list[_Head]:
        """Return copies of the arrays of each head."""

    @staticmethod
    def of_parts(shape: tuple[int, ...], dtype: str, heads: list[_Head]) -> KeyIndex: ...
    def crop(self, len: int) -> None: ...
    def take(self, entries: list[int]) -> KeyIndex: ...
    def uncoded(self) -> list[NDArray[np.uint32]]: ...
    @property
    def bits(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bytes(self) -> int: ...

@final
class ValueIndex:
    """Codes of values (..., n, d)."""

    @staticmethod
    def build(values: _MaybePaged, bits: int, threads: object) -> ValueIndex: ...
    def append_beside(
        self, values: _MaybePaged, index: KeyIndex, keys: _MaybePaged, threads: object
    ) -> None:
        """Append to both indexes, or on an error to neither."""

    def crop(self, len: int) -> None: ...
    def take(self, entries: list[int]) -> ValueIndex: ...
    def check(self, values: _MaybePaged, threads: object) -> None: ...
    def write_to(self, file: BinaryIO) -> None: ...
    def to_operators(self) -> NDArray[np.uint8]:
        """Return the bytes of a file, and bounds of its matrices."""

    @staticmethod
    def read_from(file: BinaryIO) -> ValueIndex:
        """Read an index, and nothing behind it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class Certified:
    """The fields of a `Certificate`, as those of `Selected`."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...
    @property
    def k(self) -> NDArray[np.int64]: ...
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def tail_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def eps(self) -> NDArray[np.float64] | None: ...
    @property
    def holds(self) -> NDArray[np.bool_] | None: ...
    @property
    def minimal(self) -> NDArray[np.bool_] | None: ...

@final
class Estimated:
    """The fields of a `TailEstimate` that are found, as those of `Selected`."""

    @property
    def lower(self) -> NDArray[np.float64]: ...
    @property
    def upper(self) -> NDArray[np.float64]: ...
    @property
    def point(self) -> NDArray[np.float64]: ...
    @property
    def draws(self) -> NDArray[np.int64]: ...

@final
class Kept:
    """The fields of a `KeepSet`, as those of `Selected`; the status as a number."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def eps(self) -> NDArray[np.float64]: ...
    @property
    def indices(self) -> NDArray[np.int64]: ...
    @property
    def status(self) -> int: ...
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def tail_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def lower_bound(self) -> int: ...
    @property
    def weights(self) -> NDArray[np.float64]: ...

@final
class OutputBounds:
    """The fields of an `OutputError`, as those of `Selected`; names as numbers."""

    @property
    def exact(self) -> NDArray[np.float64]: ...
    @property
    def diameter(self) -> NDArray[np.float64]: ...
    @property
    def ball(self) -> NDArray[np.float64]: ...
    @property
    def spectral(self) -> NDArray[np.float64]: ...
    @property
    def variance(self) -> NDArray[np.float64]: ...
    @property
    def best(self) -> NDArray[np.float64]: ...
    @property
    def which(self) -> NDArray[np.uint8]: ...
    @property
    def farthest_pair(self) -> NDArray[np.bool_]: ...
    @property
    def norm(self) -> NDArray[np.float64]: ...
    @property
    def chi_square(self) -> NDArray[np.float64]: ...

@final
class OutputSelected:
    """What the fields of an `OutputSelection` come from, as those of `Selected`."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[np.int32] | NDArray[np.int64]: ...
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def tail_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def out_tol(self) -> NDArray[np.float64]: ...
    @property
    def error_upper(self) -> NDArray[np.float64]: ...
    @property
    def minimal(self) -> NDArray[np.bool_]: ...

def select(
    rows: _Rows,
    eps: float | NDArray[np.float64],
    min_keep: object,
    max_keep: object,
    keep_first: object,
    keep_last: object,
    block_size: object,
    prove_minimal: object,
    threads: object,
) -> Selected: ...
def certify(
    rows: _Rows,
    eps: float | NDArray[np.float64] | None,
    keep: _Keep,
    independent: object,
    threads: object,
) -> Certified: ...
def keep_set(
    rows: _Rows,
    eps: float | NDArray[np.float64],
    radius: NDArray[np.float64] | None,
    max_keep: object,
    keep_first: object,
    keep_last: object,
    effort: object,
    threads: object,
) -> Kept: ...

# Blocks of queries (..., m, d), keys (..., n, d) and a scale; eps (rows,) or one number, counted
# (rows,), rows = blocks, heads, queries in order. The result has the shape of the queries of a
# single block, else (rows,).
def keep_set_of_queries(
    blocks: Sequence[tuple[_Stored, _MaybePaged, float]],
    eps: float | NDArray[np.float64],
    counted: NDArray[np.bool_] | None,
    given: NDArray[np.bool_] | None,  # the keys (n,) that are kept, where that is decided already
    slack: float,
    roundings: int,
    causal_offset: object,
    max_keep: object,
    keep_first: object,
    keep_last: object,
    block_size: object,
    effort: object,
    threads: object,
) -> Kept: ...

# queries (heads, m, d), keys (kv_heads, n, d), float32 or half; out (heads, m, n) in C order.
def products(
    queries: _Stored,
    keys: _Stored,
    causal_offset: object,
    out: NDArray[np.float64],
    threads: object,
) -> NDArray[np.float64]: ...  # (heads * m,): |q| times the largest |k|, rounded up

# Arrays of any shape in C order; the answers are flat.
def kl_from_tail_mass(tail_mass: NDArray[np.float64]) -> NDArray[np.float64]: ...
def tail_mass_from_kl(kl: NDArray[np.float64]) -> NDArray[np.float64]: ...
def pinsker(kl: NDArray[np.float64]) -> NDArray[np.float64]: ...
def bretagnolle_huber(kl: NDArray[np.float64]) -> NDArray[np.float64]: ...
def required_gap(
    n: NDArray[np.int64], k: NDArray[np.int64], eps: NDArray[np.float64]
) -> NDArray[np.float64]: ...

# k is 1-D, of length `rows`, or 1 where one value serves all rows; so are the answers' rows.
def score_gap(scores: _Stored, k: NDArray[np.int64], threads: object) -> NDArray[np.float64]: ...
def single_gap(scores: _Stored, k: NDArray[np.int64], threads: object) -> NDArray[np.float64]: ...
def multi_gap(
    scores: _Stored,
    k: NDArray[np.int64],
    cuts: NDArray[np.int64] | None,
    n_cuts: object,
    threads: object,
) -> NDArray[np.float64]: ...
def best_cuts(
    scores: _Stored, k: NDArray[np.int64], n_cuts: object, threads: object
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cuts of all rows, one row after another, and the count of each row."""

def blockwise(
    sizes: NDArray[np.int64],
    upper: NDArray[np.float64],
    lower: NDArray[np.float64],
    kept: NDArray[np.uint8],
    threads: object,
) -> NDArray[np.float64]: ...
def smallest_k(
    scores: _Stored,
    eps: float | NDArray[np.float64],
    rule: object,
    n_cuts: object,
    threads: object,
) -> NDArray[np.int64]: ...
def output_error(
    rows: _Rows,
    values: _Stored,
    keep: _Keep,
    threads: object,
) -> OutputBounds: ...
def select_output(
    rows: _Rows,
    values: _Stored,
    out_tol: float | NDArray[np.float64],
    threads: object,
) -> OutputSelected: ...
def visible_rows(
    rows: _Rows, first: int, threads: object
) -> tuple[
    NDArray[np.float64],  # visible scores of some rows from `first` on, row after row
    NDArray[np.int64],  # how many each row has (rows,)
    NDArray[np.float64],  # factor to natural-log units, 0 where scores are weights (rows,)
    NDArray[np.float64],  # radius, natural-log units (rows,)
]: ...
def tail_mass(
    rows: _Rows,
    keep: _Keep,
    bounds: _Stored | None,
    options: tuple[
        object, object, object, object, float | NDArray[np.float64] | None, bool, object
    ],
) -> Estimated:
    """Options are delta, draws, method, seed, eps, whether delta is for all rows, threads."""

def mean_bounds(
    values: NDArray[np.float64],
    population: object,
    delta: object,
    method_name: object,
    horizon: object,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Confidence bounds (samples,) of a mean from values (samples, draws), in the order drawn."""

@final
class MappedPieces:
    """Pieces of files, mapped side by side; NumPy takes it for an array of bytes."""

    def __new__(
        cls,
        len: int,
        # Of each: where it goes, its length, the descriptor of its file, where it is there, and
        # whether what is written to the memory is written to the file.
        pieces: Sequence[tuple[int, int, int, int, bool]],
        /,
    ) -> MappedPieces: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def let_go(self) -> None:
        """Let go of the pages; they come again from their files when they are read."""

@final
class ValueBall:
    """A ball around the values of each head; values (..., n, d_v)."""

    @staticmethod
    def build(values: _Stored, threads: object) -> ValueBall: ...
    def append(self, values: _Stored) -> None: ...
    def parts(self) -> tuple[list[int], list[NDArray[np.float64]]]:
        """Return the shape of the values, and of each head the centre and behind it the radius."""
    @staticmethod
    def of_parts(shape: Sequence[int], heads: list[NDArray[np.float64]]) -> ValueBall: ...
    def radii(self) -> NDArray[np.float64]:
        """(heads,), inf where a value is not finite."""
    @property
    def len(self) -> int: ...

@final
class Attended:
    """The fields of an `AttentionResult`; the error bound is computed when it is asked for."""

    @property
    def out(self) -> NDArray[Any]:
        """(rows * d_v,), of the queries' dtype, half precisions as uint16."""
    @property
    def tail_mass_upper(self) -> NDArray[np.float64]: ...
    @property
    def error_bound(self) -> NDArray[np.float64]: ...
    @property
    def k(self) -> NDArray[np.int64]: ...
    @property
    def scored(self) -> NDArray[np.int64]: ...
    @property
    def rung(self) -> NDArray[np.uint8]: ...
    @property
    def log_mass_lower(self) -> NDArray[np.float64]: ...
    @property
    def log_mass_upper(self) -> NDArray[np.float64]: ...

def attention_of_ragged(
    q: _Stored,
    k: _MaybePaged,
    v: _MaybePaged,
    heads: tuple[list[int], list[int], list[int]],  # batch axes, starts and counts in rows
    loss: tuple[float | NDArray[np.float64] | None, ...],  # as in `attention`
    how: tuple[object, object, bool, bool],
    sight: tuple[object, ...],
) -> Attended: ...
def attention_from_codes(
    q: _Stored,
    index: KeyIndex,
    values: ValueIndex,
    kept: tuple[
        _Stored,  # rows of all heads
        _Stored,  # their values
        NDArray[np.uint32],  # their positions
        list[int],  # where those of each head start, and their number
        tuple[_Stored, _Stored] | None,  # keys and values at the last positions
    ],
    eps: float | NDArray[np.float64],
    scale: object,
    sight: tuple[object, ...],  # as in `attention`
) -> Attended: ...
def attention(
    q: _Stored,
    k: _MaybePaged,
    v: _MaybePaged,
    index: KeyIndex | tuple[NDArray[Any], ...] | None,
    loss: tuple[
        float | NDArray[np.float64] | None,  # eps
        float | NDArray[np.float64] | None,  # out_tol
    ],
    how: tuple[
        object,  # scale
        object,  # even_if_slower
        bool,  # whether weights come from exact scores alone
        bool,  # whether keys or values are mapped
    ],
    sight: tuple[
        object,  # causal
        NDArray[np.int64] | None,  # lengths
        NDArray[np.bool_] | None,  # mask
        NDArray[np.float64] | None,  # sinks
        object,  # soft cap
        _Stored | None,  # bias
        ValueBall | None,  # ball
        ValueIndex | NDArray[np.uint8] | None,  # an index of the values, or its file
        object,  # threads
    ],
) -> Attended: ...

@final
class Cancellation:
    """Lets any thread end the native calls of threads that are inside `with token:`.

    Once `cancel()` was called, such a call ends with KeyboardInterrupt where it next asks whether
    to go on (between portions of its work, well under a second apart); so does one that begins
    later and is long enough to ask. Nothing is returned then. There is no way back.
    """

    def __new__(cls) -> Cancellation: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...
    def __enter__(self) -> Cancellation: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class OpenMpTeam:
    """Native calls in a `with` block of this thread use the threads of a libgomp that is loaded.

    For calls between parallel parts of PyTorch, whose idle threads keep their cores busy for some
    milliseconds: they work instead. Where there is no libgomp, and in the child of a fork, calls
    have this package's own threads, as elsewhere.
    """

    def __new__(cls) -> OpenMpTeam: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class DefaultFloats:
    """Default floating-point modes of the calling thread in a `with` block, whatever its host set.

    torch.set_flush_denormal makes also NumPy, and Python itself, take subnormal numbers for zero.
    """

    def __new__(cls) -> DefaultFloats: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_raised: object) -> None: ...

def nearest_rsqrt(d: object) -> float:
    """Return the float64 nearest d^-1/2, d >= 1: the default scale of attention."""

def simd_level() -> str:
    """Name of the level in use: portable, portable-nofma, avx2, avx512, amx or neon."""

def set_simd_level(level: str | None) -> None:
    """Force a level; None returns to `CERTK_LEVEL` or detection."""
