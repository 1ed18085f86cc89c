"""Outputs of every option of the format, made by plain float64 arithmetic with wide margins.

Sets are found by adding keys (or blocks) in order of what all rows together give them, so they are
larger than they need be; what is recorded of them is true to within 1e-9, and lower bounds are what
equal weights prove with a margin of 1e-5. Nothing here is shared with the library but the writer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from certk_rs._files.certificate import Certificate, Options, TensorFacts
from certk_rs._files.layers import Layer
from certk_rs._files.location import locate
from certk_rs._files.masses import lower_ends, mass_dtype, upper_ends
from certk_rs._files.output import Counts, OutputFile, output_tensors
from certk_rs._files.safetensors import Form
from certk_rs._files.tensor_file import SafetensorsFile
from cli_fixtures import Arrays, Job, as_float64, safetensors_bytes, tensor

ROLES = ("key", "value", "query")


@dataclass
class Group:
    """Rows that share a set: (layer, head) pairs, with what is found for them."""

    heads: list[tuple[int, int]]
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    bound: int = 0


@dataclass
class Record:
    """One layer of an output: sets and bounds by group, masses and weights of rows (heads, m)."""

    layer: Layer
    indices: list[np.ndarray]
    upper: np.ndarray
    lower: np.ndarray
    bounds: np.ndarray
    weights: np.ndarray
    held_out: np.ndarray
    left_out: np.ndarray

    def tensors(self, options: Options, eps: Sequence[float], masses: str) -> Arrays:
        """The tensors of the layer by name, all but its keys and values."""
        by_head, size = options.granularity == "head", options.block_size
        blocks = [np.unique(kept // size) for kept in self.indices]
        upper, rows = upper_ends(self.upper, masses), np.flatnonzero(self.weights)
        promised = np.ones(self.upper.shape, bool)
        promised[:, self.held_out] = False
        promised.reshape(-1)[self.left_out] = False
        of_head = np.repeat(np.asarray(eps, float), len(upper) // len(eps))
        over = upper[:, self.held_out] > of_head[:, None]
        held, compact = options.holdout > 0, options.proof == "compact"
        found = {
            "indices": (True, np.concatenate(self.indices).astype(np.int32)),
            "indptr": (by_head, np.cumsum([0, *map(len, self.indices)])),
            "blocks": (size > 1, np.concatenate(blocks).astype(np.int32)),
            "block_indptr": (size > 1 and by_head, np.cumsum([0, *map(len, blocks)])),
            "held_out": (held, self.held_out),
            "left_out": (options.coverage < 1, self.left_out),
            "lower_bound": (options.proof != "none", self.bounds),
            "lower_bound_rows": (options.proof != "none", rows),
            "lower_bound_weights": (options.proof != "none", self.weights.reshape(-1)[rows]),
            "tail_mass_upper": (options.proof == "full", upper),
            "tail_mass_lower": (options.proof == "full", lower_ends(self.lower, masses)),
            "worst_tail_mass": (compact, np.where(promised, upper, 0).max(axis=1)),
            "violations": (compact and held, over.sum(axis=1, dtype=np.int64)),
        }
        return {
            f"layers.{self.layer.index}.{name}": array
            for name, (there, array) in found.items()
            if there
        }


@dataclass(frozen=True)
class Made:
    """One cache and what is made of it.

    `sizes` are kv heads, heads, m, n, d of every layer, `eps` one budget for all groups. Where
    `bare`, codes are without the longest key of each kv head.
    """

    options: Options
    eps: float = 0.1
    bound_eps: float | None = None
    offset: int | None = None
    layers: int = 2
    sizes: tuple[int, int, int, int, int] = (2, 4, 6, 30, 4)
    dtype: str = "F16"
    seed: int = 0
    spread: float = 1.5
    bare: bool = False

    def write(self, folder: Path) -> Job:
        """Write the cache and the output."""
        tensors, vectors = self._cache()
        metadata = {} if self.offset is None else {"causal_offset": str(self.offset)}
        job = Job.of(folder, safetensors_bytes(tensors, metadata))
        _Writer(self, tensors, vectors).write(job)
        return job

    def _cache(self) -> tuple[dict[str, Any], dict[tuple[int, str], np.ndarray]]:
        kv_heads, heads, m, n, d = self.sizes
        rng, tensors, vectors = np.random.default_rng(self.seed), {}, {}
        for i in range(self.layers):
            for role in ROLES:
                rows = (heads, m) if role == "query" else (kv_heads, n)
                array = self.spread * rng.standard_normal((*rows, d))
                stored = tensor(array, self.dtype)
                vectors[i, role] = as_float64(stored)
                if self.options.layout == "nhd":
                    stored = tensor(array.swapaxes(0, 1), self.dtype)
                tensors[f"layers.{i}.{role}"] = stored
        return tensors, vectors


@dataclass(frozen=True)
class PlaneOfCodes:
    """Codes of vectors (n, d), not turned: a byte for each entry, and what is said of them."""

    codes: np.ndarray
    scales: np.ndarray
    radii: np.ndarray
    mean: np.ndarray
    gram: np.ndarray
    bounds: list[float]
    decoded: np.ndarray
    lost: np.ndarray


def plane_of(vectors: np.ndarray, bare: np.ndarray, unit: int = 1) -> PlaneOfCodes:
    """Codes that are multiples of a unit, with wide bounds; those of some vectors are left out."""
    mean = vectors.mean(axis=0).astype(np.float32)
    moved = vectors.astype(np.float32) - mean
    most = 127 // unit
    largest = (np.abs(moved).max(axis=1) / (most * unit)).astype(np.float32)
    # Rounded up to bfloat16.
    scales = ((largest.view(np.uint32) + 0x1FFFF) >> 16).astype(np.uint16)
    scales[bare] = 0
    units = widened(scales)
    numbers = unit * np.rint(moved / np.where(units > 0, units * unit, np.inf))
    decoded = units * numbers
    lost = (moved - decoded).astype(np.float32).astype(float) * (units > 0)
    reach = np.linalg.norm(lost, axis=1).astype(np.float32) * np.float32(1.001)
    radii = ((reach.view(np.uint32) + 0x1FFFF) >> 16).astype(np.uint16)
    coded = np.linalg.norm(moved[~bare], axis=1)
    bounds = [
        *(1e-6 * np.square(lost).sum(), float(reach.max(initial=0))),
        *(float(1.001 * coded.max(initial=0)), 1.0),
        *(float(np.abs(vectors).max(initial=0)), 1.0),
    ]
    codes = (numbers + 128).astype(np.uint8)
    return PlaneOfCodes(codes, scales, radii, mean, packed(lost), bounds, decoded, lost)


def low_of(plane: PlaneOfCodes, bits: int) -> dict[str, np.ndarray]:
    """The low plane of keys and what it leaves out, with wide bounds."""
    n, d = plane.codes.shape
    most, width = {4: 7, 8: 127}[bits], -(-d // 16) * 16
    steps = (widened(plane.scales).astype(np.float32) / np.float32(2 * most + 1)).astype(float)
    numbers = np.rint(plane.lost / np.where(steps > 0, steps, np.inf)).clip(-most, most)
    lost = (plane.lost - steps * numbers).astype(np.float32).astype(float)
    low = np.full((n, width), most + 1, np.uint8)
    low[:, :d] = (numbers + most + 1).astype(np.uint8)
    if bits == 4:
        low = low[:, : width // 2] | low[:, width // 2 :] << 4
    reach = 1.001 * np.linalg.norm(lost, axis=1).max()
    bounds = np.array([1e-6 * np.square(lost).sum(), reach, 1.0])
    return {"key_low": low, "key_low_gram": packed(lost), "key_low_bounds": bounds}


def widened(bits: np.ndarray) -> np.ndarray:
    """A column of bfloat16 numbers as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)[:, None]


def packed(rows: np.ndarray) -> np.ndarray:
    """The upper triangle of the sum of outer products."""
    return np.asarray((rows.T @ rows)[np.triu_indices(rows.shape[1])])


def in_fours(codes: np.ndarray) -> np.ndarray:
    """Blocks of sixteen keys, in lines of four entries of each."""
    n, d = codes.shape
    whole = np.full((-(-n // 16) * 16, -(-d // 4) * 4), 128, np.uint8)
    whole[:n, :d] = codes
    lines = whole.reshape(-1, 16, whole.shape[1] // 4, 4).swapaxes(1, 2)
    return lines.reshape(len(lines), -1)


def of_fours(codes: np.ndarray, bits: int) -> np.ndarray:
    """Blocks of sixteen values, in lines of all entries of four of them, or of twice four."""
    n, d = codes.shape
    whole = np.full((-(-n // 16) * 16, -(-d // 16) * 16), 128, np.uint8)
    whole[:n, :d] = codes
    blocks = whole.reshape(-1, 16, whole.shape[1])
    if bits == 4:
        blocks = blocks[:, :8] >> 4 | blocks[:, 8:] & 0xF0
    lines = blocks.reshape(len(blocks), -1, 4, whole.shape[1]).swapaxes(2, 3)
    return lines.reshape(len(blocks), -1)


class _Writer:
    def __init__(self, made: Made, tensors: Any, vectors: Any) -> None:
        self.made, self.options = made, made.options
        self.kv_heads, self.heads, self.m, self.n, self.d = made.sizes
        self.tensors, self.vectors = tensors, vectors
        self.visible = self.n
        if made.offset is not None:
            self.visible = min(max(self.m + made.offset, 0), self.n)
        self.probs = [self._softmax(i) for i in range(made.layers)]
        most = min(math.ceil(Fraction(repr(self.options.holdout)) * self.m), self.m - 1)
        self.held = np.unique(np.arange(most) * 2 % self.m)
        self.left: list[set[int]] = [set() for _ in range(made.layers)]
        self.groups = self._groups()

    def _softmax(self, i: int) -> np.ndarray:
        keys = np.repeat(self.vectors[i, "key"], self.heads // self.kv_heads, axis=0)
        scores = np.einsum("hmd,hnd->hmn", self.vectors[i, "query"], keys) / math.sqrt(self.d)
        if self.made.offset is not None:
            later = np.arange(self.n) > np.arange(self.m)[:, None] + self.made.offset
            scores[:, later] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights / np.where(total == 0, 1, total))[:, :, : self.visible]

    def _groups(self) -> list[Group]:
        size, layers = self.heads // self.kv_heads, range(self.made.layers)
        if self.options.granularity == "token":
            return [Group([(i, h) for i in layers for h in range(self.heads)])]
        if self.options.granularity == "layer":
            return [Group([(i, h) for h in range(self.heads)]) for i in layers]
        return [
            Group([(i, h) for h in range(g * size, (g + 1) * size)])
            for i in layers
            for g in range(self.kv_heads)
        ]

    def write(self, job: Job) -> None:
        eps = {id(group): self._budget(group) for group in self.groups}
        if self.options.size is not None and not self.options.hot:
            share = self.options.size // len(self.groups)
            for group in self.groups:
                self._choose(group, 0.0, share)
            worst = max(float(self._lost(group).max(initial=0)) for group in self.groups)
            eps = dict.fromkeys(eps, float(np.nextafter(np.float32(worst * (1 + 1e-6)), 1)))
        else:
            for group in self.groups:
                self._leave_out(group)
                self._choose(group, eps[id(group)] * (1 - 1e-6), self._most())
        by_layer = [
            tuple(eps[id(group)] for group in self.groups if any(j == i for j, _ in group.heads))
            for i in range(self.made.layers)
        ]
        masses = mass_dtype(dict(enumerate(by_layer)))
        for group in self.groups:
            self._bound(group, eps[id(group)])
        with SafetensorsFile(job.source) as file:
            headers = tuple(file.header_sha256s())
        records = [self._record(i) for i in range(self.made.layers)]
        forms: dict[str, Form] = {}
        tensors: Arrays = {}
        for record, groups in zip(records, by_layer, strict=True):
            said = record.tensors(self.options, groups, masses)
            for role in ("key", "value"):
                said[f"layers.{record.layer.index}.{role}"] = self._rows(record, role)
            if self.options.rest == "file":
                for name, array in self._guard(record).items():
                    said[f"layers.{record.layer.index}.{name}"] = array
            if self.options.rest == "codes":
                for name, array in self._codes(record).items():
                    said[f"layers.{record.layer.index}.{name}"] = array
            sizes = {name.rpartition(".")[2]: array.size for name, array in said.items()}
            counts = Counts(
                kept=list(map(len, record.indices)),
                blocks=[sizes.get("blocks", 0)],
                weighted=sizes.get("lower_bound_rows", 0),
                held_out=len(record.held_out),
                left_out=len(record.left_out),
                codes=sizes.get("guard_codes", 0),
                bare=sizes.get("key_bare", 0) // self.d,
            )
            forms |= output_tensors(record.layer, self.options, counts, masses)
            tensors |= said
        w = self.made.bound_eps
        certificate = Certificate(
            library="made",
            eps=dict(enumerate(by_layer)),
            bound_eps=None
            if w is None
            else {i: (w,) * len(groups) for i, groups in enumerate(by_layer)},
            options=self.options,
            names="layers.{i}.{key|value|query}",
            causal_offset=self.made.offset,
            scales=dict.fromkeys(range(self.made.layers), 1 / math.sqrt(self.d)),
            input_headers=headers,
            inputs={
                name: TensorFacts(dtype, shape, hashlib.sha256(data).hexdigest())
                for name, (dtype, shape, data) in self.tensors.items()
            },
            outputs={},
        )
        with OutputFile(locate(job.output), forms, certificate) as output:
            for name, array in tensors.items():
                output.write(name, array)
            output.commit()

    def _guard(self, record: Record) -> dict[str, np.ndarray]:
        """Codes of the dropped keys that are not turned, with wide bounds, and a ball."""
        i, found = record.layer.index, []
        for head in range(self.kv_heads):
            kept = record.indices[head if self.options.granularity == "head" else 0]
            gone = np.delete(np.arange(self.n), kept)
            keys, values = (self.vectors[i, role][head, gone] for role in ("key", "value"))
            # The first key has no code.
            plane = plane_of(keys, np.arange(len(gone)) == 0)
            centre = values.mean(axis=0)
            radius = np.linalg.norm(values - centre, axis=1).max() * (1 + 1e-9)
            found.append(
                {
                    "guard_codes": in_fours(plane.codes).reshape(-1),
                    "guard_scales": plane.scales,
                    "guard_radii": plane.radii,
                    "guard_mean": plane.mean[None],
                    "guard_gram": plane.gram[None],
                    "guard_bounds": np.array(plane.bounds)[None],
                    "guard_ball": np.array([[*centre, radius]]),
                }
            )
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def _codes(self, record: Record) -> dict[str, np.ndarray]:
        """Codes of all keys and values that are not turned, with wide bounds."""
        i, bits, found = record.layer.index, self.options.bits, []
        for head in range(self.kv_heads):
            keys, values = (self.vectors[i, role][head] for role in ("key", "value"))
            sizes = np.linalg.norm(keys, axis=1)
            bare = (sizes == sizes.max()) & self.made.bare
            of_keys = plane_of(keys, bare)
            of_values = plane_of(values, np.zeros(self.n, bool), 16 if bits["value"] == 4 else 1)
            said = {
                "key_codes": in_fours(of_keys.codes),
                "value_codes": of_fours(of_values.codes, bits["value"]),
                "value_spread": packed(of_values.decoded),
                "value_spread_bounds": [1e-6 * np.square(of_values.decoded).sum(), 1.0],
            }
            for role, plane in (("key", of_keys), ("value", of_values)):
                said |= {
                    f"{role}_scales": plane.scales,
                    f"{role}_radii": plane.radii,
                    f"{role}_mean": plane.mean,
                    f"{role}_gram": plane.gram,
                    f"{role}_bounds": plane.bounds,
                }
            said["key_bounds"] = [*of_keys.bounds, np.inf if head else 0.5]
            if bits["key"] > 8:
                said |= low_of(of_keys, bits["key"] - 8)
            found.append({name: np.asarray(array) for name, array in said.items()})
            for role in ("key", "value"):
                found[-1][f"{role}_bare"] = self._stored(record, role)[head, bare]
        return {
            name: (np.concatenate if name.endswith("_bare") else np.stack)(
                [each[name] for each in found]
            )
            for name in found[0]
        }

    def _most(self) -> int:
        limit = 7 if self.options.hot else self.options.max_keep
        if isinstance(limit, float):
            limit = max(1, math.floor(limit * self.visible))
        return self.visible if limit is None else min(limit, self.visible)

    def _budget(self, group: Group) -> float:
        if self.options.out_tol is None:
            return self.made.eps
        size = self.heads // self.kv_heads
        radius = 0.0
        for i, head in group.heads:
            values = self.vectors[i, "value"][head // size, : self.visible]
            far = np.linalg.norm(values - values.mean(axis=0), axis=1).max()
            radius = max(radius, float(far) * (1 + 2.0**-30))
        return min(self.options.out_tol / (2 * radius), 0.999)

    def _promised(self, i: int, head: int) -> np.ndarray:
        promised = np.ones(self.m, bool)
        promised[self.held] = False
        gone = [row - head * self.m for row in self.left[i] if row // self.m == head]
        promised[gone] = False
        return promised

    def _leave_out(self, group: Group) -> None:
        """The rows whose largest mass is least, which need most keys."""
        rows = [
            (float(self.probs[i][head, query].max()), i, head * self.m + query)
            for i, head in group.heads
            for query in np.flatnonzero(self._promised(i, head))
        ]
        most = math.floor((1 - Fraction(repr(self.options.coverage))) * len(rows))
        for _, i, row in sorted(rows)[:most]:
            self.left[i].add(int(row))

    def _all(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """The softmax of all rows of a group, and which are promised."""
        rows = [self.probs[i][head] for i, head in group.heads]
        promised = [self._promised(i, head) for i, head in group.heads]
        return np.concatenate(rows), np.concatenate(promised)

    def _lost(self, group: Group) -> np.ndarray:
        rows, promised = self._all(group)
        return np.delete(rows, group.kept, axis=1).sum(axis=1)[promised]

    def _units(self) -> list[np.ndarray]:
        size = self.options.block_size
        every = np.arange(self.visible)
        return [every[at : at + size] for at in range(0, self.visible, size)]

    def _forced(self) -> np.ndarray:
        every, options = np.arange(self.visible), self.options
        return (every < options.keep_first) | (every >= self.visible - options.keep_last)

    def _choose(self, group: Group, budget: float, most: int) -> None:
        rows, promised = self._all(group)
        units, forced = self._units(), self._forced()
        value = [(not forced[unit].any(), -rows[promised][:, unit].sum()) for unit in units]
        kept: list[int] = []
        for place in sorted(range(len(units)), key=value.__getitem__):
            unit = units[place]
            lost = np.delete(rows, kept, axis=1).sum(axis=1)[promised]
            if (lost <= budget).all() and not forced[unit].any():
                break
            if len(kept) + len(unit) > most:
                break
            kept += unit.tolist()
        group.kept = np.sort(np.array(kept, np.int64))

    def _bound(self, group: Group, eps: float) -> None:
        rows, promised = self._all(group)
        units, forced = self._units(), self._forced()
        heads = np.repeat(np.arange(len(group.heads)), self.m)
        lost = np.delete(rows, group.kept, axis=1).sum(axis=1) * (1 + 1e-6)
        if self.options.proof == "compact":
            worst = [max(lost[(heads == h) & promised], default=0) for h in range(heads.max() + 1)]
            lost = np.array(worst)[heads]
        limits = np.maximum(eps, lost)
        if self.made.bound_eps is not None:
            limits = np.full(len(rows), self.made.bound_eps)
        mixture = np.array([rows[promised][:, unit].sum() for unit in units])
        free = np.sort(mixture[[not forced[unit].any() for unit in units]])
        sums = np.concatenate([[0.0], np.cumsum(free)])
        # So many units can go; every set has all others.
        gone = int((sums <= limits[promised].sum() * (1 + 1e-5)).sum()) - 1
        group.bound = len(units) - gone

    def _record(self, i: int) -> Record:
        kinds = dict.fromkeys(ROLES, self.made.dtype)
        names = {role: f"layers.{i}.{role}" for role in ROLES}
        layer = Layer(i, names, kinds, self.kv_heads, self.heads, self.m, self.n, self.d)
        mine = [group for group in self.groups if any(j == i for j, _ in group.heads)]
        upper, weights = np.empty((self.heads, self.m)), np.zeros((self.heads, self.m))
        lower = np.empty_like(upper)
        for group in mine:
            for j, head in group.heads:
                if j == i:
                    dropped = np.delete(self.probs[i][head], group.kept, axis=1)
                    # Of a key that is seen, next to nothing is still not nothing.
                    seen = np.full(self.m, self.visible)
                    if self.made.offset is not None:
                        seen = np.clip(np.arange(self.m) + self.made.offset + 1, 0, self.visible)
                    gone = seen - np.searchsorted(group.kept, seen)
                    lost = np.where(gone > 0, np.maximum(dropped.sum(axis=1), 5e-324), 0.0)
                    upper[head] = np.minimum(lost * (1 + 1e-9), 1.0)
                    lower[head] = lost * (1 - 1e-9)
                    weights[head] = self._promised(i, head)
        return Record(
            layer,
            [group.kept for group in mine],
            upper,
            lower,
            np.array([group.bound for group in mine]),
            weights,
            self.held,
            np.array(sorted(self.left[i]), np.int64),
        )

    def _stored(self, record: Record, role: str) -> np.ndarray:
        dtype, _, data = self.tensors[record.layer.names[role]]
        kind = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}[dtype]
        stored = np.frombuffer(data, kind)
        if self.options.layout == "nhd":
            stored = stored.reshape(self.n, self.kv_heads, self.d).swapaxes(0, 1)
        return stored.reshape(self.kv_heads, self.n, self.d)

    def _rows(self, record: Record, role: str) -> np.ndarray:
        stored = self._stored(record, role)
        if self.options.granularity == "head":
            return np.concatenate([stored[h][kept] for h, kept in enumerate(record.indices)])
        return np.ascontiguousarray(stored[:, record.indices[0]])


def all_options() -> dict[str, Made]:
    """Outputs that use every option, by a name for each."""
    found: dict[str, Made] = {}
    for granularity in ("head", "layer", "token"):
        for proof in ("full", "compact", "none"):
            base = Options(granularity, proof=proof)
            cases = {
                "plain": Made(base),
                "causal": Made(replace(base, keep_first=2, keep_last=1), offset=17),
                "capped": Made(replace(base, max_keep=7), eps=0.01),
                "blocks": Made(replace(base, block_size=4, keep_last=1), offset=22),
                "capped blocks": Made(replace(base, block_size=4, max_keep=0.45), eps=0.01),
                "aside": Made(replace(base, holdout=0.4)),
                "covered": Made(replace(base, coverage=0.8, holdout=0.1, block_size=2)),
                "out_tol": Made(replace(base, out_tol=0.5, coverage=0.9), dtype="F32"),
                "sized": Made(
                    replace(base, size=22 if granularity == "token" else 44), bound_eps=0.1, seed=3
                ),
                "nhd": Made(replace(base, layout="nhd", block_size=3), dtype="BF16"),
                "tiny": Made(replace(base, holdout=0.2), eps=1e-60, spread=40.0),
                "guarded": Made(replace(base, rest="file"), offset=17, dtype="F32"),
                "coded": _coded(base),
            }
            if granularity != "token":
                coded = replace(base, size=44, hot=True, rest="codes", key_bits=8, value_bits=8)
                cases["hot coded"] = Made(coded, eps=0.01, offset=17)
                hot = replace(base, size=44, hot=True, rest="file")
                cases["hot"] = Made(hot, eps=0.01, offset=17)
            found |= {f"{granularity} {proof} {name}": made for name, made in cases.items()}
    return found


def _coded(base: Options) -> Made:
    """Codes of other bits and other vectors for each granularity."""
    bits, dtype, d = {
        "head": ((12, 4), "F32", 9),
        "layer": ((16, 8), "BF16", 4),
        "token": ((8, 4), "F16", 17),
    }[base.granularity]
    options = replace(base, rest="codes", key_bits=bits[0], value_bits=bits[1])
    sizes = (2, 4, 6, 21 if dtype == "F32" else 30, d)
    return Made(options, offset=17, dtype=dtype, sizes=sizes, bare=dtype == "F32")


CAUSAL = {"m": 5, "metadata": {"causal_offset": "19"}}
TURNED = {"kv_heads": 26, "n": 2, "heads": 5, "m": 4}
# Small jobs of prune itself; "threes" to "forced" are those that forgeries begin with.
PRUNED: dict[str, dict[str, Any]] = {
    "small": {"cache": {"m": 5}},
    "threes": {"cache": CAUSAL | {"kv_heads": 3, "heads": 6}},
    "by layer": {"cache": {"m": 5}, "granularity": "layer", "keep_first": 2, "keep_last": 1},
    "at cap": {"cache": {"m": 5}, "eps": 0.01, "max_keep": 5},
    "one set": {"cache": {"m": 5, "layers": 1}, "granularity": "layer"},
    "three heads": {"cache": {"m": 5, "layers": 1, "kv_heads": 3, "heads": 3}},
    "zeros": {"cache": {"m": 5, "spread": 0.0}, "eps": 0.3},
    "eights": {"cache": {"m": 8, "metadata": {"scale": "0.5", "note": "any"}}},
    "forced": {"keep_first": 1},
    "causal": {"cache": CAUSAL | {"dtype": "F32"}, "keep_first": 2, "keep_last": 1},
    "compact, at cap": {"cache": {"dtype": "BF16"}, "proof": "compact", "max_keep": 9, "eps": 0.01},
    "none": {"cache": {"metadata": {"scale": "0.25"}}, "proof": "none"},
    "layer, blocks": {"cache": {"dtype": "F32"}, "granularity": "layer", "block_size": 3},
    "blocks": {"cache": CAUSAL, "block_size": 4, "proof": "compact", "keep_last": 3},
    "token": {"cache": {"dtype": "BF16"}, "granularity": "token", "proof": "compact"},
    # (rows, heads, d): what are heads to the writer of the cache are rows to whoever reads it.
    "token, nhd": {"cache": TURNED, "granularity": "token", "layout": "nhd"},
    "none, nhd": {"cache": TURNED, "proof": "none", "layout": "nhd", "coverage": 0.8},
    "coverage": {"cache": {"m": 5}, "coverage": 0.7},
    "layer, coverage": {
        "cache": CAUSAL, "granularity": "layer", "coverage": 0.8, "proof": "compact",
    },
    "size": {"size": 0.5, "eps": None},
    "size, blocks": {"size": 0.6, "eps": None, "proof": "compact", "block_size": 2},
    "size, token": {"cache": {"dtype": "BF16"}, "size": 12, "eps": None, "granularity": "token"},
    "size, none": {"cache": {"dtype": "F32"}, "size": 0.4, "eps": None, "proof": "none"},
    "out_tol": {"cache": {"dtype": "F32"}, "out_tol": 2.0, "eps": None},
    "tiny": {"cache": {"spread": 30.0}, "eps": 1e-60},
    "guard": {"cache": {"dtype": "F32", "d": 16, "n": 40}, "rest": "file"},
    "guard, layer, none": {
        "cache": CAUSAL | {"d": 8}, "rest": "file", "granularity": "layer", "proof": "none",
    },
    "guard, compact": {
        "cache": CAUSAL | {"dtype": "BF16", "d": 6}, "rest": "file", "proof": "compact",
    },
    "guard, token": {"cache": {"d": 16}, "rest": "file", "granularity": "token"},
    "hot": {"cache": {"n": 30}, "hot": 0.3, "rest": "file", "eps": 0.05},
    "hot, none, layer": {
        "cache": {"dtype": "BF16", "n": 30}, "eps": 0.05, "rest": "file", "hot": 20,
        "proof": "none", "granularity": "layer",
    },
    "codes": {"cache": {"dtype": "F32", "d": 16, "n": 40}, "rest": "codes"},
    "codes, layer, none": {
        "cache": CAUSAL | {"d": 6, "dtype": "BF16"}, "rest": "codes", "granularity": "layer",
        "proof": "none", "key_bits": 12, "value_bits": 4,
    },
    "codes, hot": {
        "cache": {"n": 30}, "hot": 0, "rest": "codes", "eps": 0.05, "key_bits": 16,
        "proof": "compact",
    },
    "all of one layer": {"cache": {"layers": 1, "kv_heads": 1, "heads": 1}, "eps": 0.0},
}  # fmt: skip


class Honest:
    """Honest outputs of every kind, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[bytes, bytes]] = {}

    def copy(self, kind: str, folder: Path) -> Job:
        """A fresh copy of an output and its input."""
        if kind not in self._files:
            place = self._folder / str(len(self._files))
            job = Job(place, **PRUNED[kind]) if kind in PRUNED else MADE[kind].write(place)
            self._files[kind] = job.files
        return Job.of(folder, *self._files[kind])


MADE = all_options()
