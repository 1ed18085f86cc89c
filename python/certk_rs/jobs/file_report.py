"""One output that is now on the disk: what it holds, what it cost, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .layer_report import NOTHING, Count, LayerReport, read_set, set_json

# An output that saves a smaller share of the bytes of its keys and values is warned of.
LITTLE = 0.1


@dataclass(frozen=True)
class FileReport:
    """One finished output.

    `cache_bytes` are those of the input's keys and values, `input_bytes` all of its bytes (queries
    among them), `output_bytes` all of the output's, proof and guard included. `seconds` is the time
    that workers spent on it.
    """

    name: str
    source: str
    target: str
    header_sha256: str
    layers: tuple[LayerReport, ...]
    proof: str
    granularity: str
    block_size: int
    input_bytes: int
    cache_bytes: int
    output_bytes: int
    proof_bytes: int
    seconds: float
    guard: str = "none"
    guard_bytes: int = 0
    warnings: tuple[str, ...] = ()
    worst_at_least: float | None = None
    """With a size for a target: no distribution of so many keys has a smaller worst tail mass."""

    @property
    def count(self) -> Count:
        """All keep-sets together."""
        return sum((layer.count for layer in self.layers), NOTHING)

    @property
    def saved(self) -> float:
        """Share of the bytes of keys and values that the output saves; negative if it is larger."""
        return 1 - self.output_bytes / self.cache_bytes

    def placed(self, source: str, target: str) -> FileReport:
        """The same report where input and output have other places, as after a copy of both."""
        places = {f"{self.source}: ": f"{source}: ", f"{self.target}: ": f"{target}: "}
        warnings = []
        for warning in self.warnings:
            old = next((old for old in places if warning.startswith(old)), "")
            warnings.append(places.get(old, "") + warning[len(old) :])
        return replace(self, source=source, target=target, warnings=tuple(warnings))

    def size_warning(self) -> str | None:
        """What there is to say against an output that saves little."""
        if self.saved >= LITTLE:
            return None
        if self.saved < 0:
            return (
                f"{self.target}: is larger ({self.output_bytes} bytes) than the keys and values it "
                f"stands for ({self.cache_bytes} bytes): keep the input, or take a larger eps"
            )
        return (
            f"{self.target}: saves only {100 * self.saved:.1f} % of the bytes of keys and values: "
            "pruning hardly pays here"
        )


def file_json(report: FileReport) -> dict[str, Any]:
    """One output as a JSON object."""
    return {
        "input": report.source,
        "output": report.target,
        "name": report.name,
        **totals(report.layers),
        "granularity": report.granularity,
        "block_size": report.block_size,
        "proof": report.proof,
        "worst_at_least": report.worst_at_least,
        "input_bytes": report.input_bytes,
        "cache_bytes": report.cache_bytes,
        "output_bytes": report.output_bytes,
        "proof_bytes": report.proof_bytes,
        "guard": report.guard,
        "guard_bytes": report.guard_bytes,
        "saved": report.saved,
        "seconds": report.seconds,
        "header_sha256": report.header_sha256,
        "warnings": list(report.warnings),
        "layers": [
            {"layer": each.layer, **totals([each]), "sets": [set_json(one) for one in each.sets]}
            for each in report.layers
        ],
    }


def read_file_report(body: Mapping[str, Any]) -> FileReport:
    """The inverse of `file_json`; `KeyError` or `TypeError` for what is none."""
    same = (
        *("name", "header_sha256", "proof", "granularity", "block_size", "input_bytes"),
        *("cache_bytes", "output_bytes", "proof_bytes", "seconds", "worst_at_least"),
        *("guard", "guard_bytes"),
    )
    layers = tuple(
        LayerReport(
            each["layer"],
            tuple(map(read_set, each["sets"])),
            each["rows"],
            each["rows_over_budget"],
            each["rows_left_out"],
        )
        for each in body["layers"]
    )
    return FileReport(
        source=body["input"],
        target=body["output"],
        layers=layers,
        warnings=tuple(body["warnings"]),
        **{name: body[name] for name in same},
    )


def totals(layers: Sequence[LayerReport]) -> dict[str, Any]:
    """Some layers together."""
    count = sum((layer.count for layer in layers), NOTHING)
    held_out = [layer.held_out for layer in layers]
    return {
        **asdict(count),
        "gap": count.gap,
        "worst_tail_mass": max(layer.worst_tail_mass for layer in layers),
        "rows": sum(layer.rows for layer in layers),
        "rows_over_budget": sum(layer.rows_over_budget for layer in layers),
        "rows_left_out": sum(layer.left_out for layer in layers),
        "held_out_queries": sum(one.queries for one in held_out),
        "held_out_violations": sum(one.violations for one in held_out),
    }
