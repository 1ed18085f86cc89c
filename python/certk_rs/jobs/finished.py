"""Whether an output that a job has recorded is still there, byte for byte."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from .._files.location import Location
from .._files.tensor_file import Header
from ..cache_format import (
    Certificate,
    SafetensorsFile,
    open_tensors,
    output_header,
    read_certificate,
)
from ..errors import CertkError


def is_whole(target: Location, header_sha256: str) -> bool:
    """Whether the file has that header, and in it the hashes of all that follows."""
    try:
        with SafetensorsFile(target) as file:
            if hashlib.sha256(file.header.raw).hexdigest() != header_sha256:
                return False
            certificate, complaint = read_certificate(file.header.metadata.get("certk", ""))
            return complaint is None and all(
                file.sha256(name) == facts.sha256 for name, facts in certificate.outputs.items()
            )
    except (CertkError, ValueError, OSError):
        return False


def is_of_bytes(target: Location, source: Location) -> bool:
    """Whether all tensors of the input are those that the output was made of; reads all of them."""
    try:
        with SafetensorsFile(target) as output, open_tensors(source) as file:
            certificate, complaint = read_certificate(output.header.metadata.get("certk", ""))
            return complaint is None and all(
                file.sha256(name) == facts.sha256 for name, facts in certificate.inputs.items()
            )
    except (CertkError, KeyError, ValueError, OSError):
        return False


def header_of_output(target: Location, certificate: Certificate) -> Header | None:
    """The header of a whole output with this certificate, whatever that says of `outputs`.

    Equal certificates mean equal bytes: of equal inputs, by their hashes, the same version makes
    the same. None if there is no such file.
    """
    try:
        with SafetensorsFile(target) as file:
            said, complaint = read_certificate(file.header.metadata.get("certk", ""))
            same = replace(said, outputs={}).to_json() == replace(certificate, outputs={}).to_json()
            if complaint is not None or not same or file.header != output_header(said):
                return None
            whole = all(file.sha256(name) == facts.sha256 for name, facts in said.outputs.items())
            return file.header if whole else None
    except (CertkError, ValueError, OSError):
        return None


def is_of_input(target: Location, header_sha256s: tuple[str, ...]) -> bool:
    """Whether this is an output of an input with these headers: what a killed job may have left."""
    try:
        with SafetensorsFile(target) as file:
            certificate, _ = read_certificate(file.header.metadata.get("certk", ""))
            return tuple(certificate.input_headers) == tuple(header_sha256s)
    except (CertkError, ValueError, OSError):
        return False
