"""The certificate in an output: the options of the job, the bytes of its input and of its output.

It is canonical JSON (sorted keys, no spaces, ASCII, shortest floats), so equal certificates are
equal texts. Its field `sha256` is the SHA-256 of the same text with that field empty.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .bits import KEY_BITS, VALUE_BITS
from .masses import Budgets, mass_dtype
from .safetensors import ITEMSIZE, Form, are_sizes, parse_json
from .transposed import LAYOUTS, MAX_N

GRANULARITIES = ("head", "layer", "token")
PROOFS = ("full", "compact", "none")
RESTS = ("drop", "file", "codes")
# Values of `guard` in format 2, by `rest`; format 3 has codes.
_GUARDS = {"drop": "none", "file": "codes"}

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorFacts:
    """Dtype and shape of a tensor, and SHA-256 of its raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def forms_of(facts: Mapping[str, TensorFacts]) -> dict[str, Form]:
    """Return dtype and shape of every tensor, by name."""
    return {name: (fact.dtype, fact.shape) for name, fact in facts.items()}


@dataclass(frozen=True)
class Options:
    """The options of a job: the choice of sets, and the level of proof.

    Attributes:
        granularity: One set per kv "head", per "layer", or one for all layers ("token").
        max_keep: The most keys of a set: an int is a count, a float a fraction of the visible keys.
        keep_first: So many visible positions at the start are always in.
        keep_last: So many visible positions at the end are always in.
        layout: The order of axes in the input: "hnd" (heads, n, d) or "nhd" (n, heads, d).
        block_size: Sets are unions of blocks of so many positions.
        coverage: For which share of the rows that are not held out the promise is made.
        holdout: Which share of the queries nothing is promised for; jobs of this version write 0.
        proof: "full", "compact" or "none": see docs/files.md.
        out_tol: The bound on the error of outputs that budgets were chosen for.
        size: The most keys that may be kept in the whole file.
        hot: True to keep the `size` keys that are needed most often, beyond the rows' budgets.
        rest: The record of what is not kept: "drop" (none), "file" (a guard of the dropped keys,
            whose rows are in the input), or "codes" (of all keys and values).
        key_bits: With codes, the bits of an entry of a key, else None.
        value_bits: With codes, the bits of an entry of a value, else None.
    """

    granularity: str = "head"
    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0
    layout: str = "hnd"
    block_size: int = 1
    coverage: float = 1.0
    holdout: float = 0.0
    proof: str = "full"
    out_tol: float | None = None
    size: int | None = None
    hot: bool = False
    rest: str = "drop"
    key_bits: int | None = None
    value_bits: int | None = None

    @property
    def bits(self) -> dict[str, int]:
        """Bits of codes by role; empty without codes."""
        if self.key_bits is None or self.value_bits is None:
            return {}
        return {"key": self.key_bits, "value": self.value_bits}


@dataclass(frozen=True)
class Certificate:
    """The statement of an output about itself and its input.

    Attributes:
        library: The version that wrote it.
        eps: The budgets of all groups.
        bound_eps: The budgets that the lower bounds refer to; None for `eps`.
        options: The options of the job.
        names: The pattern of the input's tensor names.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        scales: The scale of every layer, by its number.
        input_headers: SHA-256 of the header of every part of the input, by name.
        inputs: Every tensor of the input.
        outputs: Every tensor of the output.
    """

    library: str
    eps: Budgets
    bound_eps: Budgets | None
    options: Options
    names: str
    causal_offset: int | None
    scales: Mapping[int, float]
    input_headers: tuple[str, ...]
    inputs: Mapping[str, TensorFacts]
    outputs: Mapping[str, TensorFacts]

    @property
    def mass_dtype(self) -> str:
        """The dtype of all masses of the file."""
        return mass_dtype(self.eps)

    @property
    def input_forms(self) -> dict[str, Form]:
        """Dtype and shape of every tensor of the input, by name."""
        return forms_of(self.inputs)

    @property
    def queries(self) -> str:
        """Queries of the input, as `layout` takes them: with codes there may be none."""
        return "any" if self.options.rest == "codes" else "file"

    @property
    def output_forms(self) -> dict[str, Form]:
        """Dtype and shape of every tensor of the output, by name."""
        return forms_of(self.outputs)

    def to_json(self) -> str:
        """Return the canonical text."""
        return self._text(self._sha256())

    def _sha256(self) -> str:
        return hashlib.sha256(self._text("").encode()).hexdigest()

    def _text(self, sha256: str) -> str:
        bound_eps = None if self.bound_eps is None else _budgets_json(self.bound_eps)
        body = {
            "format": 2 if self.options.rest in _GUARDS else 3,
            "library": self.library,
            "eps": _budgets_json(self.eps),
            "bound_eps": bound_eps,
            "options": _options_json(self.options) | {"names": self.names},
            "causal_offset": self.causal_offset,
            "scales": {str(index): scale for index, scale in self.scales.items()},
            "input_headers": list(self.input_headers),
            "inputs": {name: vars(facts) for name, facts in self.inputs.items()},
            "outputs": {name: vars(facts) for name, facts in self.outputs.items()},
            "sha256": sha256,
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_certificate(text: str) -> tuple[Certificate, str | None]:
    """Parse a certificate; also return a complaint about its text, or None.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        body = parse_json(text)
        if not isinstance(body, dict) or body.get("format") not in (2, 3):
            raise ValueError(_another_format(body))
        options = dict(body["options"])
        bound_eps = body["bound_eps"]
        offset = body["causal_offset"]
        certificate = Certificate(
            library=str(body["library"]),
            eps=_budgets(body["eps"]),
            bound_eps=None if bound_eps is None else _budgets(bound_eps),
            names=str(options.pop("names")),
            options=_options(options, body["format"]),
            causal_offset=None if offset is None else int(offset),
            scales={int(index): float(scale) for index, scale in body["scales"].items()},
            input_headers=_hashes(body["input_headers"]),
            inputs=_facts(body["inputs"]),
            outputs=_facts(body["outputs"]),
        )
        said = str(body["sha256"])
        canonical = certificate._text(said)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a field is missing or of the wrong kind: {error!r}") from None
    if text != canonical:
        return certificate, "its text is not in the canonical form"
    if said != certificate._sha256():
        return (
            certificate,
            "its SHA-256 is not that of its text: it was changed after it was written",
        )
    return certificate, None


def _another_format(body: object) -> str:
    if isinstance(body, dict) and body.get("format") == 1:
        return (
            "it is of format 1, which nothing from 0.2.0 on reads: it cannot be verified; prune "
            "its input anew"
        )
    return "it is not a certificate of format 2 or 3"


def _options_json(options: Options) -> dict[str, Any]:
    body = dict(vars(options))
    rest = body.pop("rest")
    if rest in _GUARDS:
        del body["key_bits"], body["value_bits"]
        body["guard"] = _GUARDS[rest]
    return body


def _budgets_json(budgets: Budgets) -> dict[str, list[float]]:
    return {str(index): list(groups) for index, groups in budgets.items()}


def _budgets(body: dict[str, Any]) -> dict[int, tuple[float, ...]]:
    return {int(index): tuple(map(float, groups)) for index, groups in body.items()}


def _hashes(body: object) -> tuple[str, ...]:
    if not isinstance(body, list) or not body or not all(map(_is_sha256, body)):
        raise ValueError("input_headers is not a list of SHA-256, one for each part of the input")
    return tuple(body)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _options(body: dict[str, Any], version: object) -> Options:
    given = dict(body)
    if version == 2:
        guard = given.pop("guard")
        given["rest"] = next((rest for rest, name in _GUARDS.items() if name == guard), None)
    options = Options(**{"rest": "codes"} | given)
    bits = (options.key_bits, options.value_bits)
    limit, out_tol, size = options.max_keep, options.out_tol, options.size
    if not (
        options.granularity in GRANULARITIES
        and options.layout in LAYOUTS
        and options.proof in PROOFS
        and options.rest in RESTS
        and (all(map(_is_count, bits)) if version == 3 else bits == (None, None))
        and (version == 2 or (bits[0] in KEY_BITS and bits[1] in VALUE_BITS))
        and all(_is_count(count) for count in (options.keep_first, options.keep_last))
        and (limit is None or _is_fraction(limit) or (_is_count(limit) and limit >= 1))
        and (_is_count(options.block_size) and 1 <= options.block_size <= MAX_N)
        and _is_fraction(options.coverage)
        and (type(options.holdout) is float and 0.0 <= options.holdout < 1.0)
        and (out_tol is None or (type(out_tol) is float and 0.0 <= out_tol < math.inf))
        and (size is None or _is_count(size))
        and (_is_flag(options.hot) and (not options.hot or _may_be_hot(options)))
    ):
        raise ValueError(f"options {body} cannot have been asked for")
    return options


def _may_be_hot(options: Options) -> bool:
    """Return True if options can be those of hot keys: a size, a rest, and no other limit."""
    limited = options.max_keep is not None or options.block_size > 1 or options.coverage < 1
    others = options.granularity == "token" or options.rest == "drop"
    return options.size is not None and not limited and not others


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_fraction(value: object) -> bool:
    return type(value) is float and 0.0 < value <= 1.0


def _facts(body: dict[str, Any]) -> dict[str, TensorFacts]:
    facts = {}
    for name, item in body.items():
        entry = TensorFacts(item["dtype"], tuple(item["shape"]), item["sha256"])
        if len(item) != 3 or entry.dtype not in ITEMSIZE or not are_sizes(item["shape"]):
            raise ValueError(
                f"what it says of tensor {name!r} is not a dtype, a shape and a SHA-256"
            )
        if not _is_sha256(entry.sha256):
            raise ValueError(f"the SHA-256 of tensor {name!r} is not 64 hexadecimal digits")
        facts[name] = entry
    return facts
