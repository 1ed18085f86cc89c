"""The arrows between the rooms of `src/` go one way: a wish that is a test.

A room is a module: the first name below `src/`. The table says what a room may import; a room that
is not in it fails, so that adding one is a decision. Test modules inside Rust files are left out,
since a test may compare anything with anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from repository import ROOT

RUST = ROOT / "src"

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
# Each instruction set is reached through the dispatcher alone.
LEVELS = {"portable", "avx2", "avx512", "neon"}

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


def test_levels_are_reached_through_dispatch_alone() -> None:
    wrong = set()
    for file in rust_files():
        module = module_path(file)
        for path in rust_imports(file.read_text(), module):
            names_level = path[0] == "kernels" and len(path) == 2 and path[1] in LEVELS
            inside = module[0] == "kernels"
            if names_level and not (inside and (module[-1] == "dispatch" or path[1] == "portable")):
                wrong.add(f"{'/'.join(module)} -> {'/'.join(path)}")
            if path == ("kernels", "dispatch") and inside and module[-1] in LEVELS:
                wrong.add(f"{'/'.join(module)} -> kernels/dispatch")
    assert not wrong


def undocumented_unsafe(text: str) -> list[int]:
    """Lines whose `unsafe` says nowhere near who guarantees what.

    A block or impl needs a SAFETY comment at its side or shortly above. A function or trait may
    have it in its body, or in the file's `//!` header where one contract serves many.
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
            if not (declares and re.search("SAFETY|# Safety|`unsafe`", header)):
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
    assert (
        undocumented_unsafe("//! All are `unsafe`: AVX2 must be there.\nunsafe fn f() {}\n") == []
    )
