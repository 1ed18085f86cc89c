"""What a job was asked for and of which inputs; and whether another one is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import CertkError
from .file_job import FileTask
from .request import Request


def manifest(
    request: Request, tasks: Sequence[FileTask], state: str, refused: Sequence[str] = ()
) -> dict[str, Any]:
    """The manifest of a job.

    `state` is "running" or "ended", `refused` the names of inputs that could not be planned for.
    """
    return {
        "state": state,
        "library": __version__,
        "request": request.to_json(),
        "inputs": {task.source.name: _input(task) for task in tasks},
        "refused": list(refused),
    }


def _input(task: FileTask) -> dict[str, Any]:
    # Not the numbers of device and inode, which a volume mounted anew may change.
    local = task.source.location.is_local and len(task.identity) == 4
    identity = task.identity[2:] if local else task.identity
    return {
        "source": str(task.source.location),
        "identity": [part if isinstance(part, int) else str(part) for part in identity],
        "headers": list(task.header_sha256s),
    }


def check_same(said: dict[str, Any], request: Request, tasks: Sequence[FileTask]) -> None:
    """Raise `CertkError` unless a job of this request and these inputs wrote the manifest.

    The message shows what differs.
    """
    now = manifest(request, tasks, "running")
    differences = [
        f"{name} was {_get(said, 'request', name)!r}, is {value!r}"
        for name, value in now["request"].items()
        if _get(said, "request", name) != value
    ]
    if said.get("library") != __version__:
        differences.append(f"the version was {said.get('library')}, is {__version__}")
    before, after = said.get("inputs", {}), now["inputs"]
    for name in sorted(before.keys() - after.keys()):
        differences.append(f"input {name} is gone")
    for name in sorted(after.keys() - before.keys()):
        differences.append(f"input {name} is new")
    for name in sorted(after.keys() & before.keys()):
        if {**before[name], "source": ""} != {**after[name], "source": ""}:
            differences.append(f"input {name} was changed")
    if differences:
        shown = "; ".join(differences[:5]) + (
            f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        )
        raise CertkError(
            f"the job to be resumed is another one: {shown}: give the same, or begin anew with "
            "--force, or add to it with --skip-existing"
        )


def _get(body: Any, *path: str) -> Any:
    for name in path:
        body = body.get(name, {}) if isinstance(body, dict) else {}
    return body
