"""An index of keys: most keys are judged by one byte an entry, few are scored.

Sources: "A Mathematical Theory of Top-k Sparse Attention via Total Variation Distance"
(arXiv 2512.07647) for the rules by mass and by gap. The Gram certificate over codes is ours:
docs/search.md.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.rows import budgets
from ._files.atomic import NewFile, names_the_file
from .errors import CertkError
from .paged_rows import RowsLike, native_rows
from .results import RecallResult, SearchResult

if TYPE_CHECKING:
    from typing_extensions import Self

Rule = Literal["mass", "gap", "top_k"]
# Of each head, in the order of `_native.KeyIndex.parts`: its name, dtypes in a file and here.
PARTS = (
    ("codes", "U8", "<u1"),
    ("scales", "BF16", "<u2"),
    ("radii", "BF16", "<u2"),
    ("bare", "U32", "<u4"),
    ("mean", "F32", "<f4"),
    ("gram", "F64", "<f8"),
    ("numbers", "F64", "<f8"),
    ("fingerprint", "U64", "<u8"),
)


class KeyIndex:
    """Codes of keys, over which searches score few keys exactly; see docs/search.md.

    Made by `build` or `load`. The index holds d + 4 bytes a key (d rounded up to a multiple of 4)
    and one d x d matrix per head. What it proves is about the keys that it was built of: a search
    that scores keys reads them again, so they must not change (`check` tells). Searches may run in
    several threads at once; appending while another thread searches may raise a `CertkError` there,
    but never gives a wrong certificate. A pickled or copied index has the kept keys with it.
    """

    def __init__(self, index: _native.KeyIndex, kept: NDArray[Any] | None) -> None:
        """Take over a native index and the keys to be kept; users call `build` or `load`."""
        self._index = index
        # As many as there are codes, once some were appended in a buffer that grows by doubling.
        self._room = kept
        # One append at a time: codes and kept keys must grow in the same order.
        self._appending = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Codes are copied, also by `copy.copy`: an index and its copy grow apart."""
        with self._appending:
            return _restored, (written(self._index), self._kept)

    @property
    def _kept(self) -> NDArray[Any] | None:
        """The kept keys: those that have codes, also after an append that a signal ended."""
        return None if self._room is None else self._room[..., : len(self), :]

    @classmethod
    def build(
        cls,
        keys: RowsLike,
        *,
        bits: int = 8,
        rotate: bool | None = None,
        keep_keys: bool = True,
        threads: int | None = None,
    ) -> KeyIndex:
        """Encode keys, in parallel.

        Args:
            keys: (n, d) or (..., kv_heads, n, d), or `PagedRows` of one sequence; float32, float16
                or bfloat16, all finite.
            bits: 8 of each entry, or 12 or 16: the others are a low plane, read for the few keys of
                a row that are too heavy for one byte (`KvIndex.attention`).
            rotate: Whether keys are turned by a Hadamard matrix before they are rounded, which
                helps where few entries of each key are large; None decides by a sample.
            keep_keys: Keep a reference to `keys` (no copy), so that searches need not be given
                them again. What is referred to must not be written to. Pages are not kept.
            threads: Number of threads; None for all available.

        Raises:
            CertkError: Bad input, also float64, NaN or infinite keys; names the place.
        """
        stored, _ = native_rows("keys", keys)
        index = _native.KeyIndex.build(stored, key_bits(bits), rotate, threads)
        return cls(index, stored[0] if keep_keys and len(stored) == 2 else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys, (..., n, d)."""
        return self._index.shape

    @property
    def bare(self) -> tuple[NDArray[np.int64], ...]:
        """Of each kv head the positions of keys without a code, ascending.

        They lie far from the others, so that one byte an entry would lose too much of them.
        """
        return tuple(each.astype(np.int64) for each in self._index.uncoded())

    @property
    def bits(self) -> int:
        """Bits of a code of an entry of a key: 8, 12 or 16."""
        return self._index.bits

    @property
    def dtype(self) -> str:
        """The dtype of the keys: "float32", "float16" or "bfloat16"."""
        return self._index.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the index that grow with n: codes, scales, radii, keys without a code."""
        return self._index.bytes

    def __len__(self) -> int:
        return self.shape[-2]

    def __repr__(self) -> str:
        kept = "kept" if self._kept is not None else "not kept"
        per_key = self.nbytes / max(1, prod(self.shape[:-1]))
        return (
            f"KeyIndex(shape={self.shape}, {self.dtype} keys {kept}, {per_key:.4g} bytes per key)"
        )

    def append(self, keys: RowsLike, *, threads: int | None = None) -> None:
        """Append keys (..., m, d) of the index's other axes and dtype, in time proportional to m.

        They are centred, turned and rounded as those from which the index was built. So an index
        that was built of few keys and has grown may score more keys than one built of all of them
        at once, and may keep another set; its certificates are as sound. On an error the index is
        as it was.

        Raises:
            CertkError: Bad input; names the place.
        """
        stored = _as_native_keys(keys)
        self._grow(stored, lambda: self._index.append(stored, threads))

    def _grow(self, stored: tuple[Any, ...], append: Callable[[], None]) -> None:
        """Run `append`, and keep the keys that it appends if keys are kept."""
        array, _, *pages = stored
        with self._appending:
            n = len(self)
            kept = self._kept
            if kept is None or array.ndim < 2:
                append()
                return
            if pages:
                raise CertkError(
                    "keys are PagedRows, and this index keeps its keys in one array: build it with "
                    "keep_keys=False"
                )
            # Room first: what fails must fail before the codes grow.
            more = array.shape[-2]
            need, room = n + more, self._room
            if room is None or room.shape[-2] < need:
                shape = (*kept.shape[:-2], max(2 * n, need, 16), kept.shape[-1])
                room = np.empty(shape, kept.dtype)
                room[..., :n, :] = kept
            # What does not fit is refused by `append`.
            if more and array.shape == (*kept.shape[:-2], more, kept.shape[-1]):
                room[..., n:need, :] = array
            self._room = room
            append()

    def search(
        self,
        q: ArrayLike,
        eps: ArrayLike | None,
        *,
        keys: RowsLike | None = None,
        scale: float | None = None,
        rule: Rule = "mass",
        k: int | None = None,
        max_scored: int | None = None,
        causal: bool = False,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        threads: int | None = None,
    ) -> SearchResult:
        """Find, for each query, few keys that are proven to be enough, scoring few keys exactly.

        Scores are scale * q.k. Everything reported holds for real-number arithmetic on exactly the
        stored queries and keys. Where bounds do not help, keys are scored until the answer is
        exact. The answer has the same bits for any number of threads and any instruction set.

        Args:
            q: (d,) or (..., d); with keys of shape (..., kv_heads, n, d) it is (..., heads, m, d),
                heads a multiple of kv_heads, the leading axes equal. Any float dtype.
            eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per row, in the shape of q
                without its last axis. May be None with rule "top_k".
            keys: The keys that the index was built of, if it does not keep them. Without any, rule
                "mass" answers as far as codes alone decide.
            scale: What products are multiplied by; None for the float64 nearest d ** -0.5.
            rule: "mass": the fewest keys whose dropped mass is within eps (MC-Search). "gap": the
                first k best keys behind which the gap between two scores proves eps
                (Delta_k-Search; it keeps far more). "top_k": the true k best, equal scores by lower
                index first; eps only sets `status`.
            k: For "top_k", at least 1; k >= n keeps everything.
            max_scored: The most keys of a row to score exactly. A search that is cut short by it
                reports what is proven until then.
            causal: Query i of m sees keys up to i + n - m.
            lengths: How many keys a row sees, from the first; integers of shape q.shape[:-1], or
                one for all.
            mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,).
            threads: See `build`.

        Returns:
            A `SearchResult`: a `Selection` with `scored` and `rung`. What it says of a row is about
            the softmax over the keys that the row sees; one that sees none is empty, as in
            `select`.

        Raises:
            CertkError: Bad input; keys of another shape or dtype; keys needed but not given.
        """
        array, stored, how = self._weighing(q, scale, lengths, mask, threads)
        scale, counts, seen, threads = how
        found = self._index.search(
            stored,
            self._given(keys),
            None if eps is None else budgets(eps, array, None),
            array.shape[:-1],
            (scale, rule, k, max_scored, threads, causal, counts, seen),
        )
        return SearchResult._of(found)

    def log_mass(
        self,
        q: ArrayLike,
        *,
        scale: float | None = None,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        threads: int | None = None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bound the log mass of all keys by their codes alone: no key is read.

        Args:
            q: As in `search`.
            scale: As in `search`.
            lengths: How many keys a row sees, from the first; integers of shape q.shape[:-1], or
                one for all.
            mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,).
            threads: See `build`.

        Returns:
            The ends of an interval, each of shape q.shape[:-1], that holds ln(sum of e^score) over
            the keys a row sees, in real numbers of exactly the stored queries and of the keys that
            the index was built of; nats. -inf where there are none.

        Raises:
            CertkError: Bad input; names the argument.
        """
        array, stored, how = self._weighing(q, scale, lengths, mask, threads)
        lower, upper = self._index.log_mass(stored, how)
        return lower.reshape(array.shape[:-1]), upper.reshape(array.shape[:-1])

    def recall(
        self,
        q: ArrayLike,
        beside: tuple[ArrayLike, ArrayLike],
        eps: ArrayLike,
        *,
        scale: float | None = None,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        threads: int | None = None,
    ) -> RecallResult:
        """Name the keys that a row must have back, of an index whose keys are elsewhere.

        A row's softmax is over keys that are kept, of which the weight is known (`log_mass_lower`
        and `log_mass_upper` of an `AttentionResult`), and over those of this index. Where codes do
        not prove that all of these have a share of at most eps, the keys with the largest scores by
        code are named until they prove it of the others. No key is read.

        Args:
            q: As in `search`.
            beside: The two ends of what the kept keys weigh, in nats, of shape q.shape[:-1].
            eps: Budget, 0 <= eps < 1: a number, or one per row. With 0 all are named.
            scale: As in `search`.
            lengths: As in `log_mass`.
            mask: As in `log_mass`.
            threads: See `build`.

        Raises:
            CertkError: Bad input; names the argument.
        """
        array, stored, how = self._weighing(q, scale, lengths, mask, threads)
        batch = array.shape[:-1]
        low, high = (coerce.per_row_floats("beside", end, batch) for end in beside)
        if not (low <= high).all():
            raise CertkError("beside is no interval: pass its lower ends, then its upper ends")
        ends = tuple(np.broadcast_to(end, batch).reshape(-1).copy() for end in (low, high))
        limits = budgets(eps, array, None)
        return RecallResult._of(self._index.recall(stored, ends, limits, batch, how))

    def _weighing(
        self, q: ArrayLike, scale: object, lengths: object, mask: object, threads: object
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], str], tuple[Any, ...]]:
        """Return a call's queries, and these and the row options as `_native` takes them."""
        array, dtype = coerce.as_native_floats("q", q)
        batch = array.shape[:-1]
        seen = None
        if mask is not None:
            seen, kind = coerce.as_native_mask(mask, (*batch, len(self)))
            if kind != "bool":
                raise CertkError(f"mask has dtype {kind}; pass a boolean one, True = seen")
        counts = None if lengths is None else coerce.per_row_integers("lengths", lengths, batch)
        queries = array.reshape(1, -1) if array.ndim == 1 else array
        return array, (queries, dtype), (scale, counts, seen, threads)

    def check(self, keys: RowsLike | None = None, *, threads: int | None = None) -> None:
        """Compare keys, all of them, with those that the index was built of, bit for bit.

        A fingerprint of 128 bits, taken when keys are built or appended, is compared with that of
        `keys` (None for the kept ones). It finds what was changed by accident, or is another cache;
        it is no defence against somebody who looks for two sets of keys that agree in it.

        Raises:
            CertkError: They are not those; names the head. Or there are none to check.
        """
        self._index.check(self._needed(keys, "pass them to check"), threads)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index, not the keys, to a safetensors file at exactly `path`.

        Written aside, then renamed over what was there. The file has the fingerprint of the keys
        and its own SHA-256.

        Raises:
            OSError: The file cannot be written; an old file of that name is left as it was.
        """
        with NewFile(Path(path), replace=True) as file:
            with file.stream() as stream:
                self._write(stream)
            file.commit()

    def _write(self, stream: BinaryIO) -> None:
        self._index.write_to(stream)

    @classmethod
    def _read(cls, stream: BinaryIO) -> Self:
        return cls(_native.KeyIndex.read_from(stream), None)

    @classmethod
    def load(cls, path: str | os.PathLike[str], keys: RowsLike | None = None) -> Self:
        """Read what `save` wrote.

        Args:
            path: The file.
            keys: The keys that it was built of, to be kept; all of them are compared (`check`).

        Raises:
            CertkError: The file is cut off, damaged or no index; or the keys are others.
            OSError: The file cannot be read.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            raise CertkError(f"{path} is not a regular file: give one that save wrote")
        with names_the_file(path), path.open("rb") as file:
            try:
                index = cls._read(file)
            except CertkError as error:
                raise CertkError(f"{path}: {error}") from None
            if file.read(1):
                raise CertkError(f"{path}: there is more behind the index; save it again")
        if keys is not None:
            stored = _as_native_keys(keys)
            index._index.check(stored, None)
            index._room = stored[0] if len(stored) == 2 else None
        return index

    def arrays(self) -> list[NDArray[Any]]:
        """Copy the index into one array for each kind of part, (..., length) over the heads.

        Codes (uint8), scales and radii (int16, bits of bfloat16), keys without a code (int32, bits
        of uint32, padded with -1), mean (float32), Gram matrix (float64), numbers (float64) and
        fingerprint (int64, bits of uint64): what `IndexArrays` takes.
        """
        heads = self._index.parts()
        stacked = []
        for at, (_, _, here) in enumerate(PARTS):
            most = max((head[at].size for head in heads), default=0)
            bits = here.replace("u", "i") if here != "<u1" else here
            rows = np.full((len(heads), most), -1 if bits == "<i4" else 0, bits)
            for row, head in zip(rows, heads, strict=True):
                row[: head[at].size] = head[at].view(bits)
            stacked.append(rows.reshape(*self.shape[:-2], most))
        return stacked

    def _given(self, keys: RowsLike | None) -> tuple[Any, ...] | None:
        """Return the keys of a call, or else those of the index."""
        if keys is None:
            return None if self._kept is None else (self._kept, self.dtype)
        return _as_native_keys(keys)

    def _needed(self, keys: RowsLike | None, remedy: str) -> tuple[Any, ...]:
        given = self._given(keys)
        if given is None:
            raise CertkError(f"keys are needed: the index does not keep them; {remedy}")
        return given


def _restored(file: NDArray[np.uint8], kept: NDArray[Any] | None) -> KeyIndex:
    """Make an index from what `KeyIndex.__reduce__` gives."""
    return KeyIndex(_native.KeyIndex.read_from(io.BytesIO(file.data)), kept)


def written(index: _native.KeyIndex | _native.ValueIndex) -> NDArray[np.uint8]:
    """Return an index as the bytes of a file."""
    index.write_to(stream := io.BytesIO())
    return np.frombuffer(stream.getbuffer(), np.uint8)


def key_bits(bits: object) -> int:
    """Return the bits of a code of an entry of a key."""
    if isinstance(bits, bool) or bits not in (8, 12, 16):
        raise CertkError(
            f"bits is {bits!r}; pass 8, 12 or 16: fewer were measured not to pay, since the keys "
            "that must then be scored exactly cost more than the bytes saved"
        )
    return int(bits)


class IndexArrays:
    """An index as arrays that somebody else holds; `attention` reads them where they are.

    They are trusted to be those of an index of exactly the keys of the call. Others make a
    certificate about nothing, or a `CertkError`.
    """

    def __init__(
        self, arrays: Sequence[NDArray[Any]], values: NDArray[np.uint8] | None = None
    ) -> None:
        """Take arrays (..., length) as `KeyIndex.arrays` gives them, in their order and dtypes.

        Nothing is copied where the last axis is contiguous and the others can be seen as one.
        `values` are those of a `KvIndex`, as the bytes of a file of them.
        """
        self._index = tuple(map(_in_rows, arrays))
        self._values = values


def _in_rows(array: NDArray[Any]) -> NDArray[Any]:
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    return coerce.lay_out(array.reshape(prod(array.shape[:-1]), array.shape[-1]))


def _as_native_keys(keys: RowsLike) -> tuple[Any, ...]:
    return native_rows("keys", keys)[0]
