"""Paths of the machine that built an archive: taken out of a wheel's bill, and looked for.

maturin names our crates in the bill of materials (`.dist-info/sboms/*.cyclonedx.json`) by where
they lie on the disk, and adds a random number and the time, which differ from build to build.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HOMES = (
    rb"/home/",
    rb"/root/",
    rb"/Users/",
    rb"/work/",
    rb"[A-Za-z]:[\\/]Users[\\/]",
    rb"/github/",
)


def clean(wheel: Path, root: Path) -> None:
    """Rewrite the bills of a wheel, and with them RECORD, where they name `root`."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    changed: dict[str, bytes] = {}
    for entry, data in entries:
        if ".dist-info/sboms/" in entry.filename and entry.filename.endswith(".json"):
            changed[entry.filename] = _bill(data, root)
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w") as archive:
        for entry, data in entries:
            if entry.filename.endswith(".dist-info/RECORD"):
                data = _record(data, changed)
            archive.writestr(entry, changed.get(entry.filename, data), entry.compress_type, 9)
    partial.replace(wheel)


def _bill(data: bytes, root: Path) -> bytes:
    """Return a bill in which the folder of the sources is the name of the repository."""
    bill = json.loads(data)
    # What differs from build to build.
    bill.pop("serialNumber", None)
    bill.get("metadata", {}).pop("timestamp", None)
    urls = {f"file://{root.as_posix()}", f"file:///{root.as_posix().lstrip('/')}", root.as_posix()}
    text = json.dumps(_without(bill, sorted(urls, key=len, reverse=True)), indent=1, sort_keys=True)
    return text.encode() + b"\n"


def _without(value: Any, urls: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, urls) for key, each in value.items()}
    if isinstance(value, list):
        return [_without(each, urls) for each in value]
    if isinstance(value, str):
        for url in urls:
            value = value.replace(
                url, "file:///certk_rs" if url.startswith("file:") else "certk_rs"
            )
    return value


def _record(data: bytes, changed: dict[str, bytes]) -> bytes:
    """RECORD with the hashes and lengths of what has changed."""
    rows = list(csv.reader(io.StringIO(data.decode())))
    for row in rows:
        if row[0] in changed:
            digest = hashlib.sha256(changed[row[0]]).digest()
            row[1] = "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            row[2] = str(len(changed[row[0]]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def found(archive: Path, root: Path) -> list[str]:
    """Return the places in a wheel or an sdist that name a folder of this machine: `file: what`.

    A home of any machine counts, too, except in text, which may speak of one.
    """
    folders = {root, Path.home(), Path(sys.prefix)}
    own = [re.escape(str(each).encode()) for each in folders if len(each.parts) > 1]
    told = []
    for name, data in _members(archive):
        starts = own if name.endswith((".md", ".py", ".rs")) else [*own, *_HOMES]
        pattern = re.compile(rb"(?:" + rb"|".join(starts) + rb")[ -~]{0,80}")
        told += [f"{name}: {hit}" for hit in sorted({m.decode() for m in pattern.findall(data)})]
    return told


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                yield entry.filename, wheel.read(entry)
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            if (file := sources.extractfile(member)) is not None:
                yield member.name, file.read()
