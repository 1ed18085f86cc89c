"""Units of work: pieces of a prune job that can be done anywhere, and their results.

Both are plain values that can be pickled: an engine hands `Unit`s to `run_unit` in a thread, in a
process or on another machine, and whoever gets a result cannot tell where it was made.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from .._files.certificate import TensorFacts
from .._files.layers import Layer
from .choose import Ask, choose_layers
from .inputs import Input
from .sets import Answer, Demands, LayerRecord, Probe

_PART = b"certk-part-2\n"


@dataclass(frozen=True)
class Unit:
    """A piece of the work on one input.

    `layers` are chosen for, kv heads `heads` of them (None: all); the tensors of `hashes` are
    hashed and seen to be finite. `ask` is None where nothing is chosen. `needs` bytes of memory are
    what some unit of this input has to have at once: where they are not to be had, that is found
    out before anything is read. `content` is a hash of the bytes that the input is known to have,
    where it is known; two units that differ in it are not taken for each other.
    """

    input: Input
    layers: tuple[int, ...] = ()
    heads: tuple[int, int] | None = None
    ask: Ask | None = None
    hashes: tuple[str, ...] = ()
    label: str = ""
    needs: int = 0
    content: str = ""

    def key(self) -> str:
        """Return a name for the result, equal for equal work only."""
        given = self.input
        text = repr((__version__, str(given.location), given.names, given.layout, given.identity))
        text += repr((self.layers, self.heads, self.ask, self.hashes, self.content))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: an answer for every layer, and the facts of what was hashed.

    `seconds` is the time that it took, which no output depends on. `kept` results were left by an
    earlier run, and are of the bytes that the input had then.
    """

    answers: tuple[Answer, ...]
    facts: dict[str, TensorFacts]
    seconds: float
    kept: bool = False


def run_unit(unit: Unit, threads: int | None) -> UnitResult:
    """Do one unit. The result does not depend on `threads`, nor on where this runs.

    Raises:
        CertkError: The input is not what it should be, or has changed since it was planned.
        MemoryError: There is not as much as the unit needs.
        OSError: The system refuses it.
    """
    begun = time.monotonic()
    # Asked for and let go of: a file may claim to be of any size.
    np.empty(unit.needs, np.uint8)
    with unit.input.read() as cache:
        facts = {name: cache.check_tensor(name, lambda _: None) for name in unit.hashes}
        answers: tuple[Answer, ...] = ()
        if unit.ask is not None:
            layers = [layer for layer in cache.layers if layer.index in unit.layers]
            answers = choose_layers(cache, layers, unit.heads, unit.ask, threads)
        cache.file.check_unchanged(unit.input.identity)
    return UnitResult(answers, facts, time.monotonic() - begun)


def hash_now(given: Input, tensor: str) -> TensorFacts:
    """Return the facts of a tensor as it is now; raises as a unit does."""
    with given.read() as cache:
        return cache.check_tensor(tensor, lambda _: None)


def pack(result: UnitResult) -> bytes:
    """Return a result as bytes that tell whether they were damaged."""
    arrays: dict[str, NDArray[Any]] = {}
    answers = []
    for i, answer in enumerate(result.answers):
        kind, layer = type(answer).__name__, vars(answer.layer)
        answers.append({"kind": kind, "layer": layer, "first_head": answer.first_head})
        for name, value in vars(answer).items():
            if isinstance(value, np.ndarray):
                arrays[f"{i}.{name}"] = value
    said = {
        "facts": {name: vars(facts) for name, facts in result.facts.items()},
        "seconds": result.seconds,
        "answers": answers,
    }
    arrays["body"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # no name is that of an option
    data = stream.getvalue()
    return _PART + hashlib.sha256(data).digest() + data


def unpack(data: bytes) -> UnitResult | None:
    """Return the result that `pack` made into these bytes; None for other bytes."""
    head = len(_PART) + 32
    body = data[head:]
    if not data.startswith(_PART) or hashlib.sha256(body).digest() != data[len(_PART) : head]:
        return None
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            said = json.loads(arrays["body"].tobytes())
            answers = tuple(_answer(i, each, arrays) for i, each in enumerate(said["answers"]))
        facts = {
            name: TensorFacts(**each | {"shape": tuple(each["shape"])})
            for name, each in said["facts"].items()
        }
        return UnitResult(answers, facts, float(said["seconds"]), kept=True)
    except (ValueError, KeyError, TypeError):  # of another version
        return None


def _answer(i: int, body: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Answer:
    kinds: dict[str, type[Answer]] = {each.__name__: each for each in (LayerRecord, Probe, Demands)}
    kind = kinds[body["kind"]]
    rest: dict[str, Any] = {each.name: arrays.get(f"{i}.{each.name}") for each in fields(kind)[2:]}
    return kind(Layer(**body["layer"]), int(body["first_head"]), **rest)
