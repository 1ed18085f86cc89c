"""Between cache files, pruned files and the caches of transformers.

A pruned cache keeps another number of keys in every head and layer, and has two lengths. Its
logical length, which it reports, is that of the text it stands for: positions go on from there. Its
physical length is the same in all layers and heads, since a model makes one mask for all of them.
Heads that keep less have empty slots in front of their keys in that mask, and no memory for them:
kept rows lie end to end (`RaggedKv`). Certified attention reads them so. No other implementation
does, so that it is refused; with `compact=True` slots are filled with further keys of the text
instead, and any implementation will do.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import Cache

from .._files.cache import Cache as CacheFile
from .._files.layers import Layer
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError
from ..guard import Guard
from .capture_file import CacheWriter
from .coded_cache import CodedCache, coded, whole_rows
from .coded_layer import Beyond, CodedLayer
from .guarded import GuardedLayer, Losses, LostCall, Manner, OnBreach, Rows
from .masked_layer import Watch
from .per_head import pad_with_latest, select_per_head
from .pruned_file import PrunedFile
from .ragged_kv import RaggedKv
from .rows_of_file import RowsOfFile
from .stored import tensor
from .taken_layer import StandIns, TakenLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ASKED = "on_breach, promote, most_promoted, source, eps and out_tol"

_WHOLE_TEXT = (
    "give generate ids of the whole text, at least one token longer than cache.get_seq_length()"
)


class PruneOptions(TypedDict, total=False):
    """The options of `prune_cache` that `prune_prompt` takes, too, but for `rest`."""

    keep_first: int
    keep_last: int
    compact: bool
    keep: int | None
    key_bits: int | None
    value_bits: int | None
    on_breach: OnBreach
    promote: bool
    most_promoted: int | None
    out_tol: float | None
    source: Rows | str | os.PathLike[str] | None
    threads: int | None


class _Scaled(PruneOptions, total=False):
    scale: float | None
    causal: bool


PRUNE_OPTIONS = frozenset(PruneOptions.__annotations__)

_Rows = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The keys and the values (kept, d) of each kv head of a layer."""


@dataclass(frozen=True, eq=False)
class PrunedLayer:
    """Proven losses of one pruned layer."""

    layer: int
    n: int
    """Keys before."""
    kept: tuple[int, ...]
    """Keys that each kv head keeps."""
    tail_mass_upper: NDArray[np.floating] | None
    """The most that each query loses, (heads, m). From a file of `--proof compact` it is that of
    all queries of a head, (heads,), and from one of `--proof none` it is None. Further keys that
    fill slots can only lower it."""


class PrunedCache(Cache):  # type: ignore[misc]
    """A cache of one text of which keys were dropped; see this module and docs/transformers.md.

    It grows like a `DynamicCache`, and what is appended is kept. It goes with models of full
    attention: the keys have lost their positions, which sliding windows would need.
    """

    def __init__(self, layers: list[ShortenedLayer], certificates: Sequence[PrunedLayer]) -> None:
        """Take over layers; users call `from_cache` or `prune_cache`."""
        super().__init__(layers=layers)
        for layer in layers:
            layer.of = self
        self.certificates = tuple(certificates)
        """One per layer, for the queries that were pruned for."""
        self.unused: int | None = None
        """The layer whose empty slots nobody has left out yet."""
        self.assisted = False
        """True if assisted generation has begun with this cache and fed it nothing yet."""
        self._losses: Losses | None = None

    @property
    def lost(self) -> list[LostCall]:
        """Losses of each attention call to the dropped keys, of a cache with guards."""
        return [] if self._losses is None else list(self._losses.calls)

    @property
    def promoted(self) -> tuple[tuple[int, ...], ...]:
        """Counts of dropped keys that are back for good, of each layer and kv head."""
        guards = [layer.guarded for layer in self.layers if layer.guarded is not None]
        return tuple(each.promoted for each in guards)

    @property
    def guard_bytes(self) -> int:
        """Bytes of all guards."""
        return sum(layer.guarded.guard.nbytes for layer in self.layers if layer.guarded is not None)

    def _set_guards(
        self,
        guards: Sequence[Guard],
        losses: Losses,
        budgets: Sequence[Sequence[float] | None] | None = None,
    ) -> None:
        self._losses = losses
        each = [None] * len(guards) if budgets is None else budgets
        for index, (layer, guard, eps) in enumerate(zip(self.layers, guards, each, strict=True)):
            layer.guarded = GuardedLayer(index, guard, losses, eps)

    @property
    def kept_fraction(self) -> float:
        """Share of the keys that were kept, over layers and heads, slots not counted."""
        kept = sum(sum(certificate.kept) for certificate in self.certificates)
        return kept / sum(c.n * len(c.kept) for c in self.certificates)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: keys and values, guards, and what they fetched.

        With `on_breach="recall"` and no source the whole cache that was pruned is held, too, and is
        among them.
        """
        held: int = sum(layer.held_bytes for layer in self.layers)
        held += sum(layer.guarded.nbytes for layer in self.layers if layer.guarded is not None)
        rows = None if self._losses is None else self._losses.rows
        return held + (rows.nbytes if isinstance(rows, RowsOfCache) else 0)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of keys and values if none had been dropped, those that were appended included."""
        whole: int = sum(
            (layer.keys[:, :, :1].nbytes + layer.values[:, :, :1].nbytes) * layer.get_seq_length()
            for layer in self.layers
        )
        return whole

    def activate_past_recording(self) -> None:
        """Hear of assisted generation, which begins with this."""
        self.assisted = True
        if hasattr(Cache, "activate_past_recording"):
            super().activate_past_recording()


class ShortenedLayer(TakenLayer):
    """Kept keys of each kv head, `most` in all with empty slots before them, standing for `n` keys.

    Where slots are empty, `keys` and `values` are stand-ins (1, kv_heads, physical, d) without
    memory; of attention that takes them for keys the outputs are NaN.
    """

    def __init__(self, rows: _Rows, most: int, n: int, index: int) -> None:
        super().__init__()
        self.of: PrunedCache | None = None
        self.guarded: GuardedLayer | None = None
        self.slots = np.array([most - len(keys) for keys in rows[0]], np.int64)
        """The first slot that each kv head fills."""
        self.ragged = RaggedKv(*rows) if self.slots.any() else None
        """Keys and values, if slots are empty."""
        self._stand_ins = StandIns(rows[0][0], rows[1][0])
        if self.ragged is None:
            self.keys, self.values = (torch.stack(heads)[None] for heads in rows)
        else:
            self._show(most)
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True
        self._gone = n - most
        self._least = most
        self._index = index

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values."""
        held: int = (
            self.keys.nbytes + self.values.nbytes if self.ragged is None else self.ragged.nbytes
        )
        return held

    def rows(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return keys and values (k, d) of each kv head, batch rows one behind the other."""
        if self.ragged is not None:
            return self.ragged.heads()
        return list(self.keys.flatten(0, 1)), list(self.values.flatten(0, 1))

    def _show(self, physical: int) -> None:
        """Make stand-ins for keys and values of a physical length."""
        assert self.ragged is not None
        self.keys, self.values = self._stand_ins.of(*self.ragged.counts.shape, physical)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; the keys that come back carry where they begin."""
        self._check(key_states)
        if self.ragged is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
        else:
            self.ragged.append(key_states, value_states)
            self._show(self.keys.shape[-2] + key_states.shape[2])
            keys, values = self.keys, self.values
        cache = self.of
        if cache is not None and cache.unused is not None:
            unused, cache.unused = cache.unused, None
            raise CertkError(
                f"the empty slots of layer {unused} were attended to: this cache needs certified "
                "attention (certk_rs.transformers.use), or compact=True when it is made"
            )
        if self.slots.any() and cache is not None:
            cache.unused = self._index
        keys.certk_first = self
        return keys, values

    def _check(self, new: torch.Tensor) -> None:
        """Raise `CertkError` where these are not the keys of tokens behind the text."""
        batch, n = self.keys.shape[0], self.get_seq_length()
        _need_tokens(new.shape[2], n)
        if new.shape[0] != batch:
            raise CertkError(
                f"keys of {new.shape[0]} sequences go behind a pruned cache of {batch}: for beams "
                f"or several answers call cache.batch_repeat_interleave({new.shape[0] // batch}) "
                "first"
            )
        if self.of is not None and self.of.assisted:
            self.of.assisted = False
            if new.shape[2] > n:
                raise CertkError(
                    f"assisted generation (an assistant, or prompt lookup) feeds the whole text to "
                    f"a cache that stands for {n} tokens of it already: generate without, or draft "
                    "from the pruned cache as examples/drafts.py does"
                )

    def used(self) -> None:
        """Say that the empty slots are being left out."""
        if self.of is not None:
            self.of.unused = None

    def get_seq_length(self, *_: Any) -> int:
        """Return the logical length, from which positions go on."""
        return int(self.keys.shape[-2]) + self._gone

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Physical length, and the position that its first slot passes for.

        Everything that is kept passes for the last keys before what is appended, so that a causal
        mask shows all of it.
        """
        m = query_length if isinstance(query_length, int) else query_length.shape[0]
        _need_tokens(m, self.get_seq_length())
        return int(self.keys.shape[-2]) + m, self._gone

    def crop(self, tokens_to_remove: int) -> None:
        """Remove appended tokens, given as a negative number; what was pruned stays."""
        if tokens_to_remove > 0 or self.keys.shape[-2] + tokens_to_remove < self._least:
            raise CertkError(
                f"crop({tokens_to_remove}): only the {self.keys.shape[-2] - self._least} tokens "
                "that were appended to a pruned cache can be removed; give their number, negative"
            )
        if tokens_to_remove and self.ragged is not None:
            self.ragged.crop(-tokens_to_remove)
            self._show(self.keys.shape[-2] + tokens_to_remove)
        elif tokens_to_remove:
            self.keys = self.keys[..., :tokens_to_remove, :]
            self.values = self.values[..., :tokens_to_remove, :]

    def _taken(self, entries: torch.Tensor) -> bool:
        if self.ragged is None:
            return False
        self.ragged.take(entries.tolist())
        self._show(self.keys.shape[-2])
        return True

    def __getstate__(self) -> dict[str, Any]:
        # Pickled, a stand-in would take the memory of what it stands for.
        if self.ragged is None:
            return self.__dict__
        return {**self.__dict__, "keys": self.keys.shape[-2], "values": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.ragged is not None:
            self._show(state["keys"])

    def reset(self) -> None:
        """Refuse: a pruned cache without its keys is none."""
        raise CertkError("a pruned cache cannot be reset; make another by from_cache")


def check_positions(layer: Any, position_ids: Any) -> None:
    """Raise `CertkError` if a pruned layer would stand for more tokens than the text has.

    Args:
        layer: What keys of a pruned cache carry, the new ones appended.
        position_ids: Positions (batch, m) of the new tokens, where the model tells; of more axes
            they count other things than tokens.
    """
    told = isinstance(position_ids, torch.Tensor) and position_ids.ndim == 2
    if not isinstance(layer, ShortenedLayer) or not told or not position_ids.numel():
        return
    n, end = layer.get_seq_length(), int(position_ids.max()) + 1
    if end < n:
        m = position_ids.shape[1]
        raise CertkError(
            f"a pruned cache that stands for {n - m} tokens is fed {m}, of which the last is token "
            f"{end} of the text by its position: some are fed twice, or the text has padding (pass "
            f"attention_mask=torch.ones_like(ids) if it only looks so); {_WHOLE_TEXT}"
        )


def _need_tokens(m: int, n: int) -> None:
    if m == 0:
        raise CertkError(f"no token is fed to a pruned cache that stands for {n}: {_WHOLE_TEXT}")


def to_cache(
    cache: Cache,
    queries: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    scale: float | None = None,
    causal: bool = True,
) -> None:
    """Write a cache of one sequence, with queries to prune it for, to a cache file.

    Args:
        cache: A `DynamicCache` or the like: layers with keys and values (1, kv_heads, n, d).
        queries: For each layer (1, heads, m, d), after rotary positions, as `capture` gets them.
        path: The file to write; it must not exist.
        scale: What products are multiplied by; None for the float64 nearest d^-1/2.
        causal: Whether query i sees the keys up to i + n - m only.

    Raises:
        CertkError: Something that the format cannot say; the message names the layer.
    """
    layers = _full_layers(cache, queries)
    scale = _scale(scale)
    with CacheWriter(path, len(layers)) as writer:
        for index, (query, keys, values) in enumerate(layers):
            offset = keys.shape[2] - query.shape[2] if causal else None
            writer.write(index, query, keys, values, scale, offset)
        writer.commit()


def from_cache(
    path: str | os.PathLike[str],
    *,
    compact: bool = False,
    on_breach: OnBreach = "report",
    promote: bool = False,
    most_promoted: int | None = None,
    source: Rows | str | os.PathLike[str] | None = None,
    eps: float | None = None,
    out_tol: float | None = None,
) -> Cache:
    """Read a cache file, or what `certk prune` has made of one, as a cache to go on from.

    Args:
        path: A cache file (docs/files.md), which gives a `DynamicCache`, or an output of
            `certk prune`, which gives a `PrunedCache`, or with `--rest codes` a `CodedCache`.
        compact: Refuse a pruned file unless all heads and layers keep equally many, so that no slot
            is empty and any attention implementation can be used. (What a file has dropped is
            gone; `prune_cache` can fill slots with it.)
        on_breach: Of an output of `certk prune --rest file` or `codes`, what to do where a later
            query may lose more than eps: as in `prune_cache`.
        promote: As in `prune_cache`.
        most_promoted: As in `prune_cache`.
        source: Where dropped keys and values are: the input that was pruned, which is held against
            the hashes of the certificate now and read row by row later.
        eps: What any later query may lose; None for the budgets of the file, each kv head its own.
            A cache of codes has it from `use`.
        out_tol: How far any later query's output may be off instead, as in `prune_cache`.

    Raises:
        CertkError: A file that is damaged or of another kind, or `source` is not its input.
    """
    path = Path(path)
    asked = on_breach != "report" or promote or most_promoted is not None
    judged = eps is not None or out_tol is not None
    asked = asked or source is not None or judged
    if eps is not None and out_tol is not None:
        raise CertkError("eps and out_tol: both given; a later query is judged by one of them")
    with SafetensorsFile(path) as file:
        text = file.header.metadata.get("certk")
        if text is not None:
            pruned = PrunedFile(file)
            if pruned.certificate.options.rest == "codes":
                if compact or promote or most_promoted is not None or judged:
                    raise CertkError(
                        f"{path} has codes of all keys: compact, promote, most_promoted, eps and "
                        "out_tol are for other outputs; give eps or out_tol to use"
                    )
                return _read_coded(pruned, path, on_breach, source)
            made = _read_pruned(pruned, path, compact)
            if pruned.certificate.options.rest == "drop":
                if asked:
                    raise CertkError(
                        f"{path} has no guard, which {_ASKED} go with: prune its input with "
                        "--rest file, or with --rest codes"
                    )
                return made
            manner = Manner(
                pruned.largest_eps if eps is None else eps,
                on_breach,
                promote,
                most_promoted,
                out_tol,
            )
            made._set_guards(
                [pruned.guard(layer) for layer in pruned.layers],
                Losses(manner, _input_rows(source, pruned)),
                None if eps is not None else [pruned.budgets(layer) for layer in pruned.layers],
            )
            return made
    if asked:
        raise CertkError(f"{path} is no output of certk prune, which {_ASKED} go with")
    return _read_full(path)


@overload
def prune_cache(
    cache: Cache,
    queries: Sequence[torch.Tensor],
    eps: float,
    *,
    rest: Literal["drop", "file"] = "drop",
    **options: Unpack[_Scaled],
) -> PrunedCache: ...
@overload
def prune_cache(
    cache: Cache,
    queries: Sequence[torch.Tensor],
    eps: float,
    *,
    rest: Literal["codes"],
    **options: Unpack[_Scaled],
) -> CodedCache: ...
def prune_cache(
    cache: Cache,
    queries: Sequence[torch.Tensor],
    eps: float,
    *,
    scale: float | None = None,
    causal: bool = True,
    keep_first: int = 0,
    keep_last: int = 0,
    compact: bool = False,
    rest: Literal["drop", "file", "codes"] = "drop",
    keep: int | None = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    on_breach: OnBreach = "report",
    promote: bool = False,
    most_promoted: int | None = None,
    out_tol: float | None = None,
    source: Rows | str | os.PathLike[str] | None = None,
    threads: int | None = None,
) -> PrunedCache | CodedCache:
    """Prune a cache in memory: one keep-set per layer and kv head, for all queries of its group.

    Every query given loses at most eps of its attention mass in every head, by the real scores of
    the stored vectors. Of queries that were not given nothing is promised with `rest="drop"`. Else
    what each of them lost is proven (`Recorder`), and with `on_breach="recall"` it is at most eps.

    Args:
        cache: As in `to_cache`; it is not changed.
        queries: As in `to_cache`.
        eps: Budget of dropped mass, 0 <= eps < 1.
        scale: As in `to_cache`.
        causal: As in `to_cache`.
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        compact: Fill the slots of heads that keep less with their latest dropped keys, so that all
            keep equally many, no slot is empty, and any attention implementation can be used.
        rest: "drop" forgets what is not kept. "file" remembers a byte an entry of every dropped key
            (a guard, docs/transformers.md), which certified attention judges every query by; others
            take no notice of it. "codes" gives a `CodedCache`, which has codes of all keys and
            values beside the kept rows, so that it answers any later query from memory
            (`encode_cache` makes one without queries); eps of later queries is then that of `use`.
        keep: With "codes", the most rows that a kv head keeps exactly; None for what eps asks for.
        key_bits: With "codes", as in `encode_cache`; value_bits, too.
        value_bits: See `key_bits`; None: 8.
        on_breach: With "file" or "codes", where a query may lose more than eps: "report" records
            it, "raise" is a `CertkError`, "recall" fetches what matters from `source`.
        promote: With "file", whether keys that were fetched stay.
        most_promoted: Of each kv head, how many may stay; those asked for the longest ago go first.
        out_tol: With "file", how far a later query's output may be off, rounding included, in the
            units of the values (Euclidean norm over d_v): a breach is then where it may be more,
            and eps is for the given queries alone. It takes a pass over the kept values in every
            call.
        source: Where dropped keys and values are: a cache file of exactly these (as `capture` and
            `to_cache` write it, and `from_cache` reads), which is compared now and read row by row
            later; or None: `cache` itself, whose tensors are then held, and must not be written to
            (rows that are fetched are compared with what they were). Other objects are trusted.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: Bad input; the message names the layer.
    """
    if rest not in ("drop", "file", "codes"):
        raise CertkError(f"rest is {rest!r}; pass 'drop', 'file' or 'codes'")
    for names, given, needs in (
        ("keep", keep is not None, ("codes",)),
        ("key_bits and value_bits", key_bits or value_bits, ("codes",)),
        ("on_breach and source", on_breach != "report" or source is not None, ("file", "codes")),
        ("promote and most_promoted", promote or most_promoted is not None, ("file",)),
        ("out_tol", out_tol is not None, ("file",)),
        ("compact", compact, ("drop", "file")),
    ):
        if given and rest not in needs:
            raise CertkError(f"{names}: not for rest={rest!r}; pass rest={needs[-1]!r}")
    chosen: list[list[NDArray[np.int64]]] = []
    certificates = []
    layers = _full_layers(cache, queries)
    scale = _scale(scale)
    for index, (query, keys, _) in enumerate(layers):
        kept, upper = select_per_head(
            f"layer {index}",
            query[0],
            keys[0],
            eps,
            scale=scale,
            causal=causal,
            keep_first=keep_first,
            keep_last=keep_last,
            threads=threads,
            max_keep=keep,
        )
        chosen.append(kept)
        certificates.append(
            PrunedLayer(index, keys.shape[2], tuple(len(indices) for indices in kept), upper)
        )
    rows = None if source is None else _rows_of(source, layers)
    if rows is None and on_breach == "recall":
        rows = RowsOfCache([(keys[0], values[0]) for _, keys, values in layers])
    if rest == "codes":
        bits = (key_bits, 8 if value_bits is None else value_bits)
        return coded(cache, chosen, on_breach, rows, *bits, threads)
    most = max(len(indices) for kept in chosen for indices in kept)
    pruned: list[_Rows] = []
    stays: list[list[NDArray[np.int64]]] = []
    for (_, keys, values), kept in zip(layers, chosen, strict=True):
        if compact:
            kept = [pad_with_latest(indices, most, keys.shape[2]) for indices in kept]
        stays.append(kept)
        heads = [torch.from_numpy(indices) for indices in kept]
        pruned.append(
            (
                [keys[0, g, rows] for g, rows in enumerate(heads)],
                [values[0, g, rows] for g, rows in enumerate(heads)],
            )
        )
    made = _pruned(pruned, certificates)
    if rest == "drop":
        return made
    manner = Manner(float(eps), on_breach, promote, most_promoted, out_tol)
    guards = [
        Guard.build(keys[0], values[0], kept, threads=threads)
        for (_, keys, values), kept in zip(layers, stays, strict=True)
    ]
    made._set_guards(guards, Losses(manner, rows))
    return made


def _input_rows(source: Rows | str | os.PathLike[str] | None, pruned: PrunedFile) -> Rows | None:
    """Open the source of an output's dropped rows; a file must be its input."""
    if not isinstance(source, str | os.PathLike):
        return source
    said = pruned.certificate
    rows = RowsOfFile(source, names=said.names, layout=said.options.layout)
    rows.check_hashes(said.inputs)
    return rows


def _rows_of(
    source: Rows | str | os.PathLike[str],
    layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> Rows:
    """Open the source of dropped rows; a file must hold those of the cache."""
    if not isinstance(source, str | os.PathLike):
        return source
    rows = RowsOfFile(source)
    for index, (_, keys, values) in enumerate(layers):
        rows.check(index, keys[0], values[0])
    return rows


class RowsOfCache:
    """Dropped keys and values in the tensors of a whole cache, (kv_heads, n, d) of each layer."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layers = layers
        # Whoever still has the cache may write to it; torch does not count all ways to.
        widest = max(each.shape[-1] for pair in layers for each in pair)
        made = torch.Generator().manual_seed(secrets.randbits(63))
        self._factors = torch.randint(1 << 62, (widest,), generator=made) * 2 + 1
        self._sums = [
            tuple(torch.stack([_row_sums(head, self._factors) for head in each]) for each in pair)
            for pair in layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)

    def fetch(
        self, layer: int, head: int, positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Rows`."""
        at = torch.from_numpy(positions)
        keys, values = (each[head, at] for each in self._layers[layer])
        for role, rows, sums in zip(
            ("keys", "values"), (keys, values), self._sums[layer], strict=True
        ):
            if not torch.equal(_row_sums(rows, self._factors), sums[head, at]):
                raise CertkError(
                    f"layer {layer}: the {role} of the cache that was pruned are others now, and "
                    "dropped ones are fetched from there: leave that cache as it is, or pass "
                    "source= a cache file"
                )
        return keys, values


def _row_sums(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Sum each row's bits (n, d) by random odd factors, modulo 2^64.

    One entry that is another makes it another; rows that differ more share one with probability
    2^-60.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.itemsize]
    parts = torch.split(rows.contiguous().view(bits), 1 << 12)
    return torch.cat([(part * factors[: rows.shape[-1]]).sum(-1) for part in parts])


def _full_layers(
    cache: Cache, queries: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return queries, keys and values of every layer, checked against each other."""
    if isinstance(cache, PrunedCache | CodedCache):
        raise CertkError(f"cache is a {type(cache).__name__}, without all keys: give the whole one")
    if not isinstance(cache, Cache) or not cache.layers:
        raise CertkError(f"cache is a {type(cache).__name__} without layers; pass a filled cache")
    if len(queries) != len(cache.layers):
        raise CertkError(
            f"queries has {len(queries)} entries, the cache {len(cache.layers)} layers; give one "
            "tensor (1, heads, m, d) for each"
        )
    found = []
    for index, (layer, query) in enumerate(zip(cache.layers, queries, strict=True)):
        keys, values = whole_rows(layer, index)
        shape = tuple(keys.shape)
        if (
            query.ndim != 4
            or query.shape[0] != 1
            or keys.shape[0] != 1
            or query.shape[3] != keys.shape[3]
            or query.shape[1] % keys.shape[1]
            or 0 in query.shape
            or 0 in shape
        ):
            raise CertkError(
                f"layer {index}: queries {tuple(query.shape)} do not go with keys {shape}; pass "
                "(1, heads, m, d) for keys (1, kv_heads, n, d), heads a multiple of kv_heads"
            )
        if query.shape[2] > keys.shape[2]:
            raise CertkError(f"layer {index}: {query.shape[2]} queries, but {keys.shape[2]} keys")
        found.append((query.detach(), keys.detach(), values.detach()))
    return found


def _scale(scale: Any) -> float | None:
    """Return a finite number as a float, whose text a file can hold."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise CertkError(f"scale is {scale!r}; pass a finite number, or None for d^-1/2")
    return float(scale)


def _pruned(layers: Sequence[_Rows], certificates: Sequence[PrunedLayer]) -> PrunedCache:
    """Make a cache of kv heads that keep different numbers of rows."""
    most = max(len(rows) for keys, _ in layers for rows in keys)
    made = []
    for rows, about in zip(layers, certificates, strict=True):
        made.append(ShortenedLayer(rows, most, about.n, about.layer))
    return PrunedCache(made, certificates)


def _read_full(path: Path) -> DynamicCache:
    with CacheFile(path, queries="any") as file:
        _need_all_layers(path, file.layers)
        cache = DynamicCache()
        for layer in file.layers:
            keys, values = (
                tensor(file.read(layer, role), layer.dtypes[role])[None]
                for role in ("key", "value")
            )
            cache.update(keys, values, layer.index)
    return cache


def _read_pruned(file: PrunedFile, path: Path, compact: bool) -> PrunedCache:
    _need_all_layers(path, file.layers)
    rows: list[_Rows] = []
    certificates = []
    for layer in file.layers:
        found = file.rows(layer)
        rows.append((found.keys, found.values))
        counts = tuple(len(head) for head in found.keys)
        certificates.append(PrunedLayer(layer.index, layer.n, counts, found.masses))
    most = max(max(each.kept) for each in certificates)
    least = min(min(each.kept) for each in certificates)
    if compact and least < most:
        raise CertkError(
            f"{path}: its heads keep from {least} to {most} keys, and a file cannot fill them up; "
            "prune with prune_cache(..., compact=True), or leave compact out"
        )
    return _pruned(rows, certificates)


def _read_coded(
    file: PrunedFile,
    path: Path,
    on_breach: OnBreach,
    source: Rows | str | os.PathLike[str] | None,
) -> CodedCache:
    _need_all_layers(path, file.layers)
    rows, watch = _input_rows(source, file), Watch()
    layers = []
    for layer in file.layers:
        index, kept, positions = file.codes(layer)
        beyond = Beyond(layer.index, on_breach, rows)
        layers.append(CodedLayer(index, kept, positions, watch, beyond, None))
    return CodedCache(layers)


def _need_all_layers(path: object, layers: Sequence[Layer]) -> None:
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise CertkError(
            f"{path} holds the layers {[layer.index for layer in layers]}: a cache of transformers "
            "needs all from 0 on"
        )
    if len({layer.n for layer in layers}) > 1:
        raise CertkError(f"{path}: its layers stand for texts of different lengths")
