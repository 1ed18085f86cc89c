"""The arrows between the rooms of `certk_rs` go one way: a wish that is a test.

A room is a module or a package: the first name below `python/certk_rs/`. The tables say what a
room may import; a room that is not in them fails, so that adding one is a decision.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from repository import ROOT

PYTHON = ROOT / "python" / "certk_rs"

SUBJECTS = {
    *{"selection", "keepset", "bounds", "gaussian", "windows", "montecarlo", "output"},
    *{"key_index", "kv_index", "kept_rows", "paged_rows", "ragged_rows", "sparse_attention"},
    *{"guard", "hot_keys", "comparison"},
}
# What every subject stands on: what comes in, what computes, and what goes out.
COMMON = {"_native", "_arrays", "_ragged", "results", "errors"}
PYTHON_ARROWS: dict[str, set[str]] = {
    "__init__": {*SUBJECTS, "_jobs", "_native", "results", "errors"},
    "__main__": {"cli"},
    "cli": {"", "_cli", "errors"},
    "_cli": {
        *{"", "_display", "_files", "_foreign", "_jobs", "transformers", "audit"},
        *{"results", "errors", *SUBJECTS},
    },
    # Pruning scores keys where they are, as jobs do; a recorder is shown.
    "transformers": {"", "_display", "_files", *COMMON, *SUBJECTS},
    "kvpress": {"transformers", "_native", "_arrays", "keepset", "hot_keys", "guard", "errors"},
    "lmcache": {"_native", "_arrays", "errors"},
    "vllm": {"_native", "paged_rows", "sparse_attention", "results", "errors"},
    # A job scores keys where they are stored; there is no function for users that does.
    "_jobs": {"", "audit", "_display", "_files", *COMMON, *SUBJECTS},
    **dict.fromkeys(SUBJECTS, COMMON),
    "bounds": COMMON | {"output"},
    # An index is saved.
    "key_index": COMMON | {"_files", "paged_rows"},
    "kv_index": COMMON | {"key_index", "kept_rows", "paged_rows"},
    "keepset": COMMON | {"paged_rows"},
    # Attention may be given an index.
    "sparse_attention": COMMON | {"key_index", "kv_index", "paged_rows", "ragged_rows"},
    # A guard is an index of what was dropped, with balls around its values, and saved.
    "guard": COMMON | {"_files", "key_index", "sparse_attention"},
    # What is compared is attention, which tells bad arguments.
    "comparison": COMMON | {"sparse_attention"},
    # What is needed is what would be selected.
    "hot_keys": COMMON | {"selection"},
    # A fit sets the rule beside what selection finds.
    "gaussian": {"_planning", "_arrays", "results", "selection"},
    "windows": {"_planning", "_arrays", "results", "errors"},
    # Laws in NumPy; of `_native` they take visible scores and floating-point modes.
    "_planning": {"_native", "_arrays", "errors"},
    "torch": {"_torch", "key_index", "kv_index", "errors"},
    "_torch": {"_native", "_arrays", "_ragged", "errors", *SUBJECTS},
    # In what modes they compute, `_native` says; it knows neither. A kept set may be a result.
    "_arrays": {"_native", "_ragged", "results", "errors"},
    "_display": {"_native", "errors"},
    # A selection is shown, and saved.
    "results": {"_native", "_display", "_files", "_ragged", "errors"},
    # The auditor must not share code with the selector.
    "audit": {"_audit", "_files", "errors"},
    "_audit": {"_files", "errors"},
    "_files": {"errors"},
    "_foreign": {"_files", "errors"},
    # Everything stands on these, so they stand on nothing.
    "errors": set(),
    "_ragged": set(),
}
# Imported at the top of a file; NumPy and the standard library may be everywhere.
THIRD_PARTY = {
    "cli": {"typer"},
    "_cli": {"typer"},
    "torch": {"torch"},
    "_torch": {"torch"},
    # Who imports this room has asked for them.
    "transformers": {"torch", "transformers"},
    "kvpress": {"torch", "transformers", "kvpress"},
    # Of which vLLM imports one file, and users the other, without torch.
    "vllm": {"torch", "vllm"},
}
# Imported inside functions only, and only in these rooms.
LAZY = {
    "lmcache": {"torch"},
    "vllm": {"vllm"},
    "transformers": {"torch", "transformers"},
    "_display": {"matplotlib", "pandas"},
    "_cli": {"rich", "typer"},
    "_jobs": {"pyarrow", "ray"},
    # File systems behind URLs.
    "_files": {"fsspec"},
}
HERE = {"numpy", *sys.stdlib_module_names}

Import = tuple[str, bool]


def python_imports(text: str, package: list[str]) -> tuple[Import, ...]:
    """Names of imported modules, with whether the import runs when the file is imported.

    Our own come with what is taken from them, as "certk_rs.module.name". Imports under
    TYPE_CHECKING never run and are left out.
    """
    return _imports(text, tuple(package))


@cache
def _imports(text: str, package: tuple[str, ...]) -> tuple[Import, ...]:
    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                yield from walk(ast.Module(child.orelse, []), at_import)
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                own = module.partition(".")[0] == "certk_rs"
                names = [f"{module}.{alias.name}" if own else module for alias in child.names]
                yield from ((name, at_import) for name in names)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import and not function)

    return tuple(walk(ast.parse(text), True))


@cache
def own_rooms() -> frozenset[str]:
    return frozenset(p.stem for p in PYTHON.iterdir() if p.suffix in (".py", ".pyi") or p.is_dir())


def wrong_imports(room: str, text: str, package: list[str]) -> set[str]:
    wrong = set()
    for name, at_import in python_imports(text, package):
        top, _, rest = name.partition(".")
        if top == "certk_rs":
            # `from . import __version__` imports the package itself, written as room "".
            target = rest.partition(".")[0]
            target = target if target in own_rooms() | PYTHON_ARROWS.keys() else ""
            if target != room and target not in PYTHON_ARROWS[room]:
                wrong.add(f"{room} -> {target or 'certk_rs'}")
        elif top not in HERE:
            allowed = THIRD_PARTY.get(room, set()) if at_import else LAZY.get(room, set())
            if top not in allowed:
                wrong.add(f"{room} -> {top}{' at import' if at_import else ''}")
    return wrong


def python_files() -> list[Path]:
    return sorted(PYTHON.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PYTHON).with_suffix("").parts[0]


def test_every_python_room_is_in_the_table() -> None:
    assert {room_of(file) for file in python_files()} <= PYTHON_ARROWS.keys()


def test_python_arrows() -> None:
    wrong = set()
    for file in python_files():
        package = ["certk_rs", *file.relative_to(PYTHON).parts[:-1]]
        wrong |= wrong_imports(room_of(file), file.read_text(), package)
    assert not wrong


@cache
def file_of(name: str) -> str:
    """The file that an own import reads, as a dotted name; "certk_rs" for the package itself."""
    path = PYTHON.parent / name.replace(".", "/")
    files = (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py")
    return name if any(file.exists() for file in files) else file_of(name.rpartition(".")[0])


@cache
def file_graph() -> dict[str, set[str]]:
    """Return the files that each file needs. Imports inside functions count."""
    graph: dict[str, set[str]] = {}
    for file in python_files():
        parts = ["certk_rs", *file.relative_to(PYTHON).with_suffix("").parts]
        names = {name for name, _ in python_imports(file.read_text(), parts[:-1])}
        own = {file_of(name) for name in names if name.partition(".")[0] == "certk_rs"}
        graph[".".join(parts).removesuffix(".__init__")] = own
    return graph


def test_python_files_form_no_cycle() -> None:
    try:
        TopologicalSorter(file_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


def test_the_auditor_reaches_nothing_that_selects() -> None:
    graph, reached = file_graph(), {"certk_rs.audit"}
    while more := set().union(*(graph[file] for file in reached if file in graph)) - reached:
        reached |= more
    rooms = {file.split(".")[1] for file in reached}
    assert rooms == {"audit", "_audit", "_files", "errors"}


def test_the_auditor_takes_no_arithmetic_of_the_writer() -> None:
    """Neither the rounding of recorded masses, nor the making of guards and of files."""
    apart = ("masses.", "guards.", "codes.", "atomic.", "new_file.", "output.OutputFile")
    taken = set()
    for file in python_files():
        if room_of(file) in ("audit", "_audit"):
            package = ["certk_rs", *file.relative_to(PYTHON).parts[:-1]]
            names = {name for name, _ in python_imports(file.read_text(), package)}
            own = {name.removeprefix("certk_rs._files.") for name in names}
            taken |= {name for name in own if name.startswith(apart)}
    assert taken == {"masses.Budgets"}  # a type


def test_rooms_that_need_optional_packages_are_imported_lazily() -> None:
    for file in python_files():
        package = ["certk_rs", *file.relative_to(PYTHON).parts[:-1]]
        if room_of(file) not in ("transformers", "kvpress"):
            names = {
                name for name, at_import in python_imports(file.read_text(), package) if at_import
            }
            assert not any(name.startswith("certk_rs.transformers") for name in names), file


def test_the_python_reader_sees_what_it_should() -> None:
    def wrong(room: str, text: str) -> set[str]:
        return wrong_imports(room, text, ["certk_rs"])

    assert file_of("certk_rs._jobs.prune.make_plan") == "certk_rs._jobs.prune"
    assert file_of("certk_rs.__version__") == "certk_rs"
    assert file_graph()["certk_rs.audit"] >= {"certk_rs._audit.files", "certk_rs.errors"}
    assert wrong("audit", "import numpy as np\nfrom ._files.layers import x\nimport json") == set()
    assert wrong("audit", "from . import _native") == {"audit -> _native"}
    assert wrong("audit", "def f():\n    from certk_rs.selection import select") == {
        "audit -> selection"
    }
    assert wrong("results", "from ._arrays.coerce import borrow") == {"results -> _arrays"}
    assert wrong("selection", "import torch") == {"selection -> torch at import"}
    assert wrong("selection", "def f():\n    import torch") == {"selection -> torch"}
    assert wrong("selection", "if TYPE_CHECKING:\n    import torch") == set()
    assert wrong("_cli", "def f():\n    import rich\nfrom . import __version__") == set()
    assert wrong("cli", "class A:\n    import torch") == {"cli -> torch at import"}
