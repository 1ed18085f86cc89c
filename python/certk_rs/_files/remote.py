"""The adapter to fsspec: file systems by protocol, and their errors as ours.

fsspec and the packages of its protocols are optional. They are imported only here, when a URL is
used. Credentials, endpoints and time limits come from fsspec's own configuration and environment.
Every use looks its file system up anew (fsspec caches it): one made before a fork must not be used
after the fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

from ..errors import CertkError, one_line, pip_install

# Object stores: an object appears when its upload is complete, and directories are not made.
OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "tos", "hf", "memory"}
)
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **{"hf": "huggingface_hub", "smb": "smbprotocol", "hdfs": "pyarrow", "oci": "ocifs"},
}
_NUMBERS: tuple[tuple[type[BaseException], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionRefusedError, errno.ECONNREFUSED),
)


def check_protocol(protocol: str, url: str) -> None:
    """Raise `CertkError` unless there is a file system for URLs of this protocol."""
    _class_of(protocol, url)


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the URL's path in it."""
    protocol = url.partition("://")[0].lower()
    kind = _class_of(protocol, url)
    import fsspec

    with remote_errors(url):
        options = kind._get_kwargs_from_urls(url)
        return fsspec.filesystem(protocol, **options), str(kind._strip_protocol(url))


def info(url: str) -> dict[str, Any]:
    """Return `name`, `size`, `type` and the file system's own tags of a place, uncached."""
    system, path = filesystem(url)
    with remote_errors(url):
        system.invalidate_cache(path)
        found: dict[str, Any] = system.info(path)
    return found


def children(url: str) -> list[tuple[str, bool]]:
    """Return the names in a directory, sorted, each with a flag for directories."""
    system, path = filesystem(url)
    with remote_errors(url):
        system.invalidate_cache(path)
        listed = system.ls(path, detail=True)
    own, held = path.strip("/"), {}
    for entry in listed:
        whole = str(entry["name"]).rstrip("/")
        # Object stores may list a directory as an object in itself.
        if whole.strip("/") == own:
            continue
        name = whole.rpartition("/")[2]
        if name in ("", ".", ".."):
            raise CertkError(
                f"{url}: it holds {whole!r}, whose name leads elsewhere in a file system: rename "
                "it, or give files by their names"
            )
        held[name] = entry.get("type") == "directory"
    return sorted(held.items())


@contextlib.contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turn every error of a file system into an `OSError` that names `url`, or a `CertkError`."""
    try:
        yield
    except (CertkError, MemoryError):
        raise
    except Exception as error:  # every package has classes of its own
        raise translated(url, error) from None


def translated(url: str, error: Exception) -> Exception:
    """Return the `OSError` or `CertkError` for an error of a file system."""
    if isinstance(error, ImportError):
        return CertkError(f"{url}: a package is missing ({one_line(error)}): install it")
    if "Credential" in type(error).__name__ or "Token" in type(error).__name__:
        return CertkError(
            f"{url}: {one_line(error)}: give credentials as the package of this protocol takes "
            "them (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
        )
    own = getattr(error, "errno", None)
    number = next((number for kind, number in _NUMBERS if isinstance(error, kind)), own)
    if type(error).__name__ == "TimeoutError":  # before Python 3.11 that of asyncio is another one
        number = errno.ETIMEDOUT
    said = getattr(error, "strerror", None) or one_line(error)
    # Some say nothing but the path.
    if number is not None and (said.strip("/'") in url or said == type(error).__name__):
        said = os.strerror(number)
    return OSError(number or errno.EIO, " ".join(str(said).split()), url)


def _class_of(protocol: str, url: str) -> Any:
    try:
        from fsspec.registry import get_filesystem_class
    except ImportError:
        raise CertkError(
            f"{url} is a URL, which needs fsspec, which is not installed: {pip_install('remote')}"
        ) from None
    try:
        return get_filesystem_class(protocol)
    except ValueError:
        raise CertkError(
            f"{url}: no installed file system knows {protocol}://: check the spelling, or install "
            f"the package that brings it to fsspec; a local file of that name is ./{url}"
        ) from None
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else one_line(error)
        raise CertkError(
            f"{url}: the package for {protocol}:// is not installed: {remedy}"
        ) from None
