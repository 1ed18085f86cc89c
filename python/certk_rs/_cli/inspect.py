"""`certk inspect`: the contents of files by their headers, and what prune would do with them."""

from __future__ import annotations

from typing import Any

from .._display.tables import tidy
from .options import Argument
from .terminal import complain, print_json, print_table, say, warn

OPTIONS = {
    "files": Argument(
        metavar="FILE...",
        help="Files, directories, quoted patterns or URLs; - for a list on standard input.",
    )
}
_LAYERS = "layers | kv heads | heads | queries | keys | d | dtype | scale | rows a set | bytes"
_AXES = {"hnd": "(heads, rows, d)", "nhd": "(rows, heads, d)"}


def inspect(
    files: list[str],
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    as_json: bool = False,
) -> int:
    """Show what files hold: tensors, layers, and what prune would do.

    Headers are read and nothing else. Exit code 1 if prune would not take a file as it is: the
    options that it needs are told, or why it is no cache. Exit code 2 if one cannot be read.
    """
    from .._jobs.inputs import expand
    from .._jobs.inspect import inspect_all

    sources = expand(files, recursive, same_names=True)
    found = inspect_all([source.location for source in sources], names, layout)
    if as_json:
        print_json({"files": found})
    else:
        for each in found:
            _show(each)
    if any(each["kind"] == "unreadable" for each in found):
        return 2
    return 0 if all(each["is_ready"] for each in found) else 1


def _show(found: dict[str, Any]) -> None:
    if found["kind"] == "unreadable":
        complain(f"error: {found['complaint']}")
        return
    parts = f" in {found['parts']} parts" if found["parts"] > 1 else ""
    say(f"{found['path']}: {len(found['tensors'])} tensors{parts}, {_bytes(found['bytes'])}")
    for key, said in found["metadata"].items():
        say(f"  metadata {key}: {said}")
    if found["cache"] is not None:
        _show_cache(found["path"], found["cache"])
    elif found["output"] is not None:
        _show_output(found["path"], found["output"])
    else:
        warn(f"no cache: {found['complaint']}")
    rows = [
        (tensor["name"], tensor["dtype"], str(list(tensor["shape"])), str(tensor["bytes"]))
        for tensor in found["tensors"]
    ]
    print_table(("tensor", "dtype", "shape", "bytes"), rows, left=(0, 1))


def _show_cache(path: str, cache: dict[str, Any]) -> None:
    offset = cache["causal_offset"]
    seen = "every query sees every key" if offset is None else f"query i sees keys <= i + {offset}"
    say(f"  a cache: {len(cache['layers'])} layers, named {cache['names']}")
    if not any(layer["queries"] for layer in cache["layers"]):
        seen = "it has no queries, of which prune could promise anything"
    say(f"  layout {cache['layout']}, {_AXES[cache['layout']]}; {seen}")
    sets = sum(layer["kv_heads"] for layer in cache["layers"])
    keys = sum(layer["kv_heads"] * layer["keys"] for layer in cache["layers"])
    largest = max(layer["bytes"] for layer in cache["layers"])
    say(
        f"  prune would choose {sets} sets among {keys} keys, one for each kv head (--granularity "
        f"layer: {len(cache['layers'])} sets); the largest layer has {_bytes(largest)}"
    )
    print_table(*tidy(_LAYERS.split(" | "), [_cells(layer) for layer in cache["layers"]]))
    for warning in cache["warnings"]:
        warn(warning)
    if cache["needs"]:
        warn(
            f"{path}: prune needs {' '.join(cache['needs'])} to take it so: make sure that it is so"
        )


def _show_output(path: str, output: dict[str, Any]) -> None:
    if output["complaint"] is not None:
        warn(f"{path}: its certificate {output['complaint']}")
    if not output["library"]:
        return
    options = ", ".join(f"{name} {said}" for name, said in output["options"].items())
    share = f" ({100 * output['kept'] / output['total']:.1f} %)" if output["total"] else ""
    say(f"  an output of certk prune {output['library']}: eps {output['eps']}, {options}")
    say(
        f"  kept {output['kept']} of {output['total']} keys{share} in {output['layers']} layers; "
        f"{_bytes(output['input_bytes'])} of tensors became {_bytes(output['output_bytes'])}"
    )
    say("  certk verify tells whether all of this is so")


def _cells(layer: dict[str, Any]) -> tuple[str, ...]:
    visible = "" if layer["visible"] == layer["keys"] else f" ({layer['visible']} seen)"
    counts = (layer["layer"], layer["kv_heads"], layer["heads"], layer["queries"])
    return (
        *(*map(str, counts), f"{layer['keys']}{visible}", str(layer["d"])),
        *(layer["dtypes"], f"{layer['scale']:g}", str(layer["rows"]), str(layer["bytes"])),
    )


def _bytes(count: int) -> str:
    """Write a number of bytes, also in a larger unit where there is one."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit} ({count} bytes)"
    return f"{count} bytes"
