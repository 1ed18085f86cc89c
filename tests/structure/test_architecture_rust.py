"""The arrows of `src/` go one way, between rooms and between files: a wish that is a test.

A room is a module: the first name below `src/`. The table says what a room may name; a room that
is not in it fails, so that adding one is a decision. Test modules inside Rust files are left out,
since a test may compare anything with anything.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from levels import LEVELS
from repository import ROOT
from rust_source import NOT_CODE, Crate, Module, blank, code_of

RUST = ROOT / "src"
BINDINGS = ROOT / "crates" / "certk-py" / "src"

# What everything may use.
COMMON = {"numerics", "runtime", "rows", "error", "builders", "names"}
ANYTHING = None
ARROWS: dict[str, set[str] | None] = {
    # What bindings may use beside the public interface: nothing of ours uses it.
    "bindings": ANYTHING,
    "attention": COMMON | {"index", "bounds", "select", "kernels"},
    "index": COMMON | {"bounds", "select", "kernels", "certificate"},
    "keepset": COMMON | {"kernels", "index", "select", "certificate"},
    "montecarlo": COMMON | {"kernels"},
    "bounds": COMMON | {"kernels"},
    # Certifying hands a set to the checker where that is asked for; the checker never looks back.
    "select": COMMON | {"kernels", "certificate"},
    "kernels": {"numerics", "runtime", "error"},
    "certificate": {"numerics", "runtime", "rows", "error", "names"},
    # Borrowed rows are read by kernels, where `unsafe` may be.
    "rows": {"numerics", "runtime", "error", "names", "kernels"},
    "numerics": {"runtime", "error"},
    # A worker thread is given the floating-point modes that the kernels count on.
    "runtime": {"error", "kernels"},
    "names": {"error"},
    "builders": set(),
    "error": set(),
}
# The checker shares nothing with the prover but order, shapes, sums and asking: for memory, and
# whether to go on.
CHECKER = {"certified_sums", "exact_share", "order", "sorting"}
CHECKER |= {"ambient", "memory", "recycled", "reused"}
# Calls of methods that close a circle, in engines that are still in parts.
CLOSING_CIRCLES = [
    (("attention", "few"), ("attention", "narrow")),
    (("attention", "few"), ("attention", "average")),
    (("attention", "tile"), ("attention", "few")),
    (("index", "threshold_search"), ("index", "listed_search")),
]
# No file of ours is longer.
LONGEST = 600
# How a level is named, and by whom.
NAMES_OF_LEVELS = re.compile(r"\b(?:Portable|Avx2|Avx512|Vnni|Amx|Neon|amx|avx2|avx512|neon)\b")
CRATE = Crate(RUST)
MODULE = Crate(BINDINGS)


def shown(module: Module) -> str:
    return "/".join(module)


@cache
def dependencies() -> dict[Module, set[Module]]:
    return CRATE.dependencies()


def test_rust_arrows() -> None:
    rooms = {module[0] for module in CRATE.files if module}
    assert rooms == ARROWS.keys()
    wrong = {
        f"{shown(module)} -> {shown(needed)}"
        for module, all_needed in dependencies().items()
        for needed in all_needed
        if module
        and needed[0] != module[0]
        and (allowed := ARROWS[module[0]]) is not ANYTHING
        and needed[0] not in allowed
    }
    assert not wrong


def circle(graph: dict[Module, set[Module]]) -> str | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(map(shown, error.args[1]))
    return None


def test_the_checker_shares_little_with_the_prover() -> None:
    needed = {
        module for module in dependencies()["certificate",] if module[0] in ("numerics", "runtime")
    }
    assert {module[1] for module in needed} <= CHECKER


@pytest.mark.parametrize("crate", [CRATE, MODULE], ids=["certk-rs", "certk-py"])
def test_no_two_rust_files_need_each_other(crate: Crate) -> None:
    """Inherent methods count: a file needs the file that defines what it calls on a type."""
    named, hidden = crate.dependencies(), crate.hidden()
    if crate is CRATE:
        assert circle({module: named[module] | hidden[module] for module in named})
        for caller, definer in CLOSING_CIRCLES:
            hidden[caller].remove(definer)
    assert not circle({module: named[module] | hidden[module] for module in named})


def test_nothing_in_the_crate_uses_what_is_there_for_bindings() -> None:
    assert not [shown(m) for m, needed in dependencies().items() if m and ("bindings",) in needed]


def test_a_service_links_no_python() -> None:
    """Neither the crate's manifest nor its sources name what only the extension module needs."""
    manifest = (ROOT / "Cargo.toml").read_text()
    assert not re.search(r"pyo3|numpy|mimalloc|cdylib", manifest)
    assert not any(re.search(r"\b(?:pyo3|numpy)::", code) for code in CRATE.code.values())


def test_rust_files_are_short() -> None:
    files = [*CRATE.files.values(), *MODULE.files.values()]
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert {name: n for name, n in lengths.items() if n > LONGEST and "isa" not in name} == {}


def test_levels_are_entered_in_one_place() -> None:
    """A pass is written over the traits of a level, and no level knows how it is chosen."""
    wrong = set()
    for module, code in CRATE.code.items():
        if module[:2] == ("kernels", "isa"):
            wrong |= {f"{shown(module)} -> {name}" for name in re.findall(r"\b[Ss]imd\b", code)}
        elif module != ("kernels", "simd"):
            wrong |= {f"{shown(module)} -> {name}" for name in NAMES_OF_LEVELS.findall(code)}
    assert not wrong
    assert NAMES_OF_LEVELS.search(CRATE.code["kernels", "simd"])


def test_every_pass_is_compared_at_all_levels() -> None:
    """Every entry of the kernels is called by a test that compares levels with the portable code.

    Tests over all levels are those of a `tests.rs`, or of the file itself.
    """
    kernels = {m: f for m, f in CRATE.files.items() if m[:1] == ("kernels",) and "isa" not in m}
    compared = "".join(f.read_text() for m, f in kernels.items() if m[-1] == "tests")
    names, forgotten = set(), set()
    for module, file in kernels.items():
        own = compared + file.read_text().partition("#[cfg(test)]\nmod tests {")[2]
        for block in re.findall(r"^impl Simd \{\n(.*?)^\}", file.read_text(), re.M | re.S):
            entries = set(re.findall(r"^    pub\S* fn (\w+)", block, re.M))
            if module != ("kernels", "simd"):
                names |= entries
                called = r"\.%s(?:::<[^(]*>)?\("
                forgotten |= {name for name in entries if not re.search(called % name, own)}
    assert {"scan", "below", "products_f64", "attend"} < names
    assert not forgotten


def test_every_level_is_named_wherever_levels_are_tried() -> None:
    simd = (ROOT / "src" / "kernels" / "simd.rs").read_text()
    named = set(re.findall(r'levels\.push\(\("(\w+)"', simd))
    error = re.search(r"known: ([\w, ]+)", (ROOT / "src" / "error.rs").read_text())
    assert error
    assert named == set(error[1].split(", ")) == set(LEVELS)
    tried = (ROOT / "tests" / "soundness" / "levels.rs").read_text()
    listed = re.search(r'\[("portable", [^]]*)\]', tried)
    assert listed
    assert set(re.findall(r"\w+", listed[1])) == named


def test_messages_of_errors_are_true_in_both_languages() -> None:
    """The binding passes them on: they hold no Rust path and no function of one language."""
    text = (ROOT / "src" / "error.rs").read_text()
    messages = re.findall(r"#\[error\((.*?)\)\]\n", text, re.S)
    assert len(messages) == text.count("#[error(") > 40
    assert not [said for said in messages if re.search(r"::|simd_level|=True|=False", said)]


def undocumented_unsafe(text: str) -> list[int]:
    """Lines whose `unsafe` says nowhere near who guarantees what.

    A block or impl needs a SAFETY comment at its side or shortly above. A function or trait may
    have it in its body, or in the file's `//!` header where one contract serves many; the body of
    such a function needs no block, since all of it stands under that contract.
    """
    lines = text.splitlines()
    code = NOT_CODE.sub(blank, text).splitlines()
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
    for file in [*CRATE.files.values(), *MODULE.files.values()]:
        if file.is_relative_to(RUST / "kernels"):
            missing = undocumented_unsafe(file.read_text())
            assert not missing, f"{file} has unsafe without a SAFETY comment at lines {missing}"
        else:
            code = code_of(file.read_text())
            assert not re.search(r"\bunsafe\b", code), f"{file} has unsafe code"
    manifest = (ROOT / "Cargo.toml").read_text()
    assert re.search(r'^unsafe_code = "(deny|forbid)"', manifest, re.M)


_DOOR = re.compile(
    r"#\[(?:pyfunction|staticmethod|pymethods)\]|#\[getter\]|"
    r"^(\s*)(?:pub\(super\) )?fn (\w+)[^{;]*?\{\s*(let _modes = default_floats\(\);)?",
    re.M,
)
# What has nothing to do with floats, or copies them.
_NO_FLOATS = {"len", "radii", "nearest_rsqrt", "simd_level", "set_simd_level"}


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
    for file in sorted(BINDINGS.glob("*.rs")):
        # Results only hand out what they hold, modes are set by what sets them, maps are bytes.
        if file.stem not in ("results", "floats", "cancellation", "mapped", "openmp"):
            doors[file.stem] = unguarded_doors(file.read_text())
    assert not any(doors.values()), doors
    source = "#[pyfunction]\nfn f(\n    x: f64,\n) -> f64 {\n    x\n}\nfn g() {\n}\n"
    assert unguarded_doors(source) == {"f"}
    guarded = source.replace("    x\n", "    let _modes = default_floats();\n    x\n")
    assert unguarded_doors(guarded) == set()
    assert unguarded_doors("#[pymethods]\nimpl A {\n    fn f(&self) {\n    }\n}\n") == {"f"}


def test_the_rust_reader_sees_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "lib.rs").write_text("mod a;\nmod b;\nmod order;\npub use a::Public;\n")
    (tmp_path / "order.rs").write_text("pub fn best() {}")
    (tmp_path / "b.rs").write_text("use crate::a::{Handed, inner::{self, Deep as D}};")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mod.rs").write_text("mod inner;\nmod types;\npub use types::Handed;")
    (tmp_path / "a" / "types.rs").write_text(
        """
        //! use crate::b;
        fn f() { crate::order::best("use crate::b;"); let c = '"'; inner::go() }
        use super::inner;
        #[cfg(test)]
        mod tests { use crate::b; fn g() { if true {} } }
        """
    )
    (tmp_path / "a" / "inner.rs").write_text("use super::super::order;")
    assert Crate(tmp_path).dependencies() == {
        (): set(),
        ("a",): set(),
        ("a", "inner"): {("order",)},
        ("a", "types"): {("order",), ("a", "inner")},
        ("b",): {("a", "types"), ("a", "inner")},
        ("order",): set(),
    }
    (tmp_path / "b.rs").write_text("impl<T: Fn() -> u8> B<T> {\n    pub fn go(&self) {\n    }\n}\n")
    (tmp_path / "order.rs").write_text(
        "impl<T> Ask for B<T> {\n    fn ask(&self) {\n        self.go()\n    }\n}\n"
    )
    (tmp_path / "a" / "inner.rs").write_text("fn f(b: &mut B<u8>) {\n    b.go()\n}\n")
    hidden = Crate(tmp_path).hidden()
    assert hidden["order",] == hidden["a", "inner"] == {("b",)}
    assert not hidden["b",]
    assert undocumented_unsafe("fn f() {\n    unsafe { g() }\n}\n") == [2]
    assert undocumented_unsafe("// SAFETY: g asks for nothing.\nunsafe { g() }\n") == []
    assert undocumented_unsafe("//! SAFETY: AVX2 must be there.\nunsafe fn f() {}\n") == []
