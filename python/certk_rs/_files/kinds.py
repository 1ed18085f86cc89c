"""Formats of files that are not safetensors, by their first bytes, with remedies."""

from __future__ import annotations

import re

_FIRST = 512
_SAVE = "load it and write its tensors with safetensors.torch.save_file"
_SAVE_NUMPY = "load it with numpy and write its arrays with safetensors.numpy.save_file"
_UNPACK = "unpack it first"
_KINDS: tuple[tuple[bytes, str], ...] = (
    # The long integer that torch.save wrote first before it wrote zip archives.
    (rb"\x80.\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", f"what older torch.save writes (.pt): {_SAVE}"),
    (rb"PK\x03\x04.{26}[^\0]{1,200}?/(data\.pkl|byteorder|\.format_version|version)",
     f"what torch.save writes (.pt, .pth, .bin): {_SAVE}"),
    (rb"PK\x03\x04.{26}[^\0]{0,200}?\.npy", f"a .npz file of NumPy: {_SAVE_NUMPY}"),
    (rb"PK\x03\x04", f"a zip archive: {_UNPACK}, or if torch.save wrote it, {_SAVE}"),
    (rb"\x93NUMPY", f"a .npy file of NumPy: {_SAVE_NUMPY}"),
    (rb"GGUF", "a GGUF file of a model's weights: give a saved KV cache as safetensors"),
    (rb"\x80[\x02-\x05]", f"a pickle, as of older torch.save: {_SAVE}, if you trust it"),
    (rb"\x1f\x8b", f"compressed by gzip: {_UNPACK}"),
    (rb"\x28\xb5\x2f\xfd", f"compressed by zstd: {_UNPACK}"),
    (rb"BZh[1-9]", f"compressed by bzip2: {_UNPACK}"),
    (rb"\xfd7zXZ\0", f"compressed by xz: {_UNPACK}"),
    (rb".{257}ustar", f"a tar archive: {_UNPACK}"),
    (rb"\x89HDF\r\n", "an HDF5 file: write its arrays with safetensors.numpy.save_file"),
    (rb"PAR1", "a Parquet file: write its columns with safetensors.numpy.save_file"),
    (rb"version https://git-lfs", "a pointer of Git LFS: fetch the file with git lfs pull"),
    (rb"\s*<[!?a-zA-Z]", "HTML or XML, as servers answer when a file is not there: fetch it again"),
    (rb"\s*[{\[][\s\"{\[}\]\d]",
     "JSON text: give a .safetensors file, or an index of shards that ends in .index.json"),
)  # fmt: skip


def what_it_is(beginning: bytes) -> str | None:
    """Return the format of a file with this beginning, and a remedy; None if it is unknown."""
    head = beginning[:_FIRST]
    return next((said for sign, said in _KINDS if re.match(sign, head, re.DOTALL)), None)
