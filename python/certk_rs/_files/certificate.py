"""The certificate inside an output: what was asked, of which bytes, and which bytes came out of it.

Canonical JSON: keys sorted, no spaces, ASCII, floats in their shortest form, so that equal
certificates are equal texts. Its field `sha256` is the SHA-256 of this same text with that field
empty.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .safetensors import ITEMSIZE, are_sizes, parse_json

FORMAT = 1
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorFacts:
    """One tensor: SHA-256 of its raw bytes, beside dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Options:
    """How sets are chosen.

    One per kv "head" or per "layer"; `max_keep`, an int is a count, a float a fraction of the
    visible keys; the first `keep_first` and last `keep_last` visible positions are always in.
    """

    granularity: str = "head"
    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0


@dataclass(frozen=True)
class Certificate:
    """All that an output says of itself beside its tensors.

    `names` is the pattern of the input's tensor names, `scales` the scale of every layer by its
    number, `inputs` and `outputs` hold every tensor of the two files by name.
    """

    library: str
    eps: float
    options: Options
    names: str
    causal_offset: int | None
    scales: Mapping[int, float]
    input_header_sha256: str
    inputs: Mapping[str, TensorFacts]
    outputs: Mapping[str, TensorFacts]

    def to_json(self) -> str:
        """The canonical text."""
        return self._text(self._sha256())

    def _sha256(self) -> str:
        return hashlib.sha256(self._text("").encode()).hexdigest()

    def _text(self, sha256: str) -> str:
        body = {
            "format": FORMAT,
            "library": self.library,
            "eps": self.eps,
            "options": vars(self.options) | {"names": self.names},
            "causal_offset": self.causal_offset,
            "scales": {str(index): scale for index, scale in self.scales.items()},
            "input_header_sha256": self.input_header_sha256,
            "inputs": {name: vars(facts) for name, facts in self.inputs.items()},
            "outputs": {name: vars(facts) for name, facts in self.outputs.items()},
            "sha256": sha256,
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_certificate(text: str) -> tuple[Certificate, str | None]:
    """Parse a certificate; also what is wrong with it as a text (None if nothing is).

    Raises `ValueError` if it cannot be read at all.
    """
    try:
        body = parse_json(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it is not a certificate of format {FORMAT}")
        options = dict(body["options"])
        offset = body["causal_offset"]
        certificate = Certificate(
            library=str(body["library"]),
            eps=float(body["eps"]),
            names=str(options.pop("names")),
            options=_options(options),
            causal_offset=None if offset is None else int(offset),
            scales={int(index): float(scale) for index, scale in body["scales"].items()},
            input_header_sha256=str(body["input_header_sha256"]),
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


def _options(body: dict[str, Any]) -> Options:
    options = Options(**body)
    counts = (options.keep_first, options.keep_last)
    limit = options.max_keep
    if (
        options.granularity not in ("head", "layer")
        or not all(type(count) is int and count >= 0 for count in counts)
        or not (limit is None or (type(limit) is int and limit >= 1) or _is_fraction(limit))
    ):
        raise ValueError(f"options {body} cannot have been asked for")
    return options


def _is_fraction(limit: object) -> bool:
    return type(limit) is float and 0.0 < limit <= 1.0


def _facts(body: dict[str, Any]) -> dict[str, TensorFacts]:
    facts = {}
    for name, item in body.items():
        entry = TensorFacts(item["dtype"], tuple(item["shape"]), item["sha256"])
        if len(item) != 3 or entry.dtype not in ITEMSIZE or not are_sizes(item["shape"]):
            raise ValueError(
                f"what it says of tensor {name!r} is not a dtype, a shape and a SHA-256"
            )
        if not _SHA256.fullmatch(entry.sha256):
            raise ValueError(f"the SHA-256 of tensor {name!r} is not 64 hexadecimal digits")
        facts[name] = entry
    return facts
