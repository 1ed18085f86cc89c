"""What a job has noted of itself beside its outputs, and which outputs a report is about.

The record (`.certk`, see `job_folder`) is a help, not a proof: it tells times, failures and what
was asked for, and what an output with less than a full proof does not hold. It is taken for an
output only if that has the header which the record says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._files.location import Location, locate
from ..errors import CertkError
from .file_report import FileReport, read_file_report
from .inputs import Source, expand
from .job_folder import JobFolder


@dataclass
class JobRecord:
    """The record of one directory; empty where there is none. `notes` say what is wrong with it."""

    out: Location
    manifest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, out: Location) -> JobRecord:
        """Read the manifest of a directory, if it can be read."""
        record = cls(out)
        try:
            record.manifest = JobFolder(out).read_manifest()
        except (CertkError, OSError) as error:
            record.notes.append(f"the record of the job cannot be read: {error}")
        return record

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs of the job."""
        said = self.manifest or {}
        inputs, refused = said.get("inputs"), said.get("refused")
        names = set(inputs) if isinstance(inputs, dict) else set()
        return sorted(names | set(map(str, refused if isinstance(refused, list) else [])))

    def report(self, name: str, header_sha256: str) -> FileReport | None:
        """What the job noted of an output with that header, None if nothing."""
        state = self._state(name)
        if state is None or state.get("state") != "done":
            return None
        try:
            report = read_file_report(state["report"])
        except (AttributeError, KeyError, TypeError, ValueError):
            self.notes.append(f"{name}: the record of the job is damaged")
            return None
        if report.header_sha256 != header_sha256:
            self.notes.append(f"{name}: the record of the job is about another output")
            return None
        return report.placed(report.source, str(self.out / name))

    def failure(self, name: str) -> dict[str, str] | None:
        """Why there is no output of an input, if the job has noted that."""
        state = self._state(name)
        if state is None or state.get("state") != "failed":
            return None
        keys = ("name", "source", "message", "kind")
        return {key: str(state.get(key, "")) for key in keys}

    def _state(self, name: str) -> dict[str, Any] | None:
        if self.manifest is None:
            return None
        try:
            return JobFolder(self.out).read_state(name)
        except (CertkError, OSError) as error:
            self.notes.append(f"{name}: {error}")
            return None


@dataclass(frozen=True)
class Found:
    """Some outputs, and the record of the job they are of; `whole` if they are all of its."""

    record: JobRecord
    sources: tuple[Source, ...]
    whole: bool


def find_outputs(outs: Sequence[str]) -> list[Found]:
    """The outputs that are meant by directories, patterns and files.

    Raises:
        CertkError: There is none, and no record of a job that has made none.
        OSError: A directory cannot be read.
    """
    found = []
    for text in outs:
        place = locate(text)
        if not place.is_directory():
            for source in expand([text]):
                found.append(Found(JobRecord.of(source.location.beside("")), (source,), False))
            continue
        record = JobRecord.of(place)
        try:
            sources = expand([text], recursive=True)
        except CertkError:
            if record.manifest is None:
                raise CertkError(
                    f"{place} holds no .safetensors file, nor the record of a job: give the OUT of "
                    "certk prune, or outputs"
                ) from None
            sources = []
        found.append(Found(record, tuple(sources), True))
    if not found:
        raise CertkError("no output: give the OUT of certk prune, or outputs")
    return found
