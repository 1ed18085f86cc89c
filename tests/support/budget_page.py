"""The tables of docs/soundness.md as numbers, and the constants of the source that they speak of.

Shares no code with the library: formulas are evaluated in balls of python-flint, and the source is
read as text.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flint import arb, ctx, fmpq

from repository import ROOT
from rust_source import code_of

PAGE = ROOT / "docs" / "soundness.md"
Values = dict[str, arb]

# Bits of the balls: whoever evaluates works within `ctx.workprec(BITS)`.
BITS = 256
# What formulas may name without a row: units in the last place, and what every reader knows.
with ctx.workprec(BITS):
    KNOWN: Values = {"u": arb(2) ** -24, "v": arb(2) ** -53, "ln2": arb(2).log()}
# Constants that one file takes from another, under the name that it has there.
ELSEWHERE = {
    "PANEL_KEYS": ("src/kernels/attention/weighed.rs", "BLOCK"),
    "PANEL_RUN": ("src/kernels/attention/tile.rs", "RUN"),
    "FEW_KEYS": ("src/kernels/attention/few.rs", "FEW_KEYS"),
    "LANES": ("src/kernels/isa/lanes.rs", "LANES"),
    "CHUNK": ("src/numerics/certified_sums.rs", "CHUNK"),
    "U": ("src/attention/f32_error.rs", "U"),
    "WEIGHT": ("src/attention/f32_error.rs", "WEIGHT"),
    "GRAM_ROUNDING": ("src/index/gram.rs", "GRAM_ROUNDING"),
}
# What a file calls a variable of the page.
CALLED = {"vector.len().next_multiple_of(16)": "width", "entries.len()": "dim"}
# Numbers of Rust that are whole: a quotient of two of them is rounded down.
WHOLE = {"d", "dim", "n", "LANES", "CHUNK", "BLOCK", "RUN", "PANEL_RUN"}


@dataclass(frozen=True)
class Row:
    """A term of the budget, or a constant that must cover what its formula says."""

    name: str
    formula: str
    # Of a constant: its file, the text around it with `?` in its place, how much more it is.
    file: str
    place: str
    ratio: str
    standing: str
    why: str


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _code(cell: str) -> list[str]:
    return [code.replace("\\|", "|") for code in re.findall(r"`([^`]+)`", cell)]


def tables(text: str, header: list[str]) -> list[list[str]]:
    """The rows of all tables with these columns."""
    rows: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif _cells(line) == header:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            rows.append(_cells(line))
    return rows


def rows(text: str | None = None) -> list[Row]:
    """The terms and the constants, in their order."""
    text = PAGE.read_text() if text is None else text
    found = []
    for name, formula, standing, why in tables(text, ["term", "formula", "standing", "why"]):
        found.append(Row(*_code(name), *_code(formula), "", "", "", standing, why))
    header = ["constant", "must be at least", "in the code", "ratio", "why"]
    for name, formula, place, ratio, why in tables(text, header):
        file, fragment = _code(place)
        standing = "assumed" if why.startswith("assumed: ") else "proved"
        found.append(Row(*_code(name), *_code(formula), file, fragment, ratio, standing, why))
    return found


def variables(text: str | None = None) -> dict[str, list[str]]:
    """Return the values at which the free names of formulas are tried."""
    text = PAGE.read_text() if text is None else text
    found = tables(text, ["name", "what it is", "tried at"])
    return {_code(name)[0]: _code(values) for name, _, values in found}


def _floor(value: arb) -> arb:
    return value.floor()


FUNCTIONS = {
    "exp": lambda x: x.exp(),
    "expm1": lambda x: x.expm1(),
    "sqrt": lambda x: x.sqrt(),
    "floor": _floor,
    "ceil": lambda x: x.ceil(),
    "log2floor": lambda x: ((x + arb("0.5")).log() / arb(2).log()).floor(),
    "gamma": lambda s: s / (1 - s),
    "ratio": lambda a: (1 + a) / (1 - a) - 1,
    "max": lambda a, b: a.max(b),
}
_OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: (a / b).floor(),
}


def exact(decimal: str) -> arb:
    """A decimal number, as exact as balls have it."""
    mantissa, _, exponent = decimal.lower().partition("e")
    whole, _, part = mantissa.partition(".")
    shift = int(exponent or 0) - len(part)
    number = fmpq(int(whole + part))
    return arb(number * fmpq(10) ** shift if shift >= 0 else number / fmpq(10) ** -shift)


def names(formula: str) -> set[str]:
    """The names of a formula, functions left out."""
    tree = ast.parse(_flat(formula))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - FUNCTIONS.keys()


def _flat(formula: str) -> str:
    """Dots in names as two underscores, since Python would look for attributes."""
    return re.sub(r"(?<=\w)\.(?=[A-Za-z])", "__", formula)


def evaluate(formula: str, values: Values) -> arb:
    """A formula in simple arithmetic."""
    source = _flat(formula)

    def of(node: ast.expr) -> arb:
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Pow):
                power = ast.literal_eval(node.right)
                assert isinstance(power, int), formula
                return of(node.left) ** power
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return FUNCTIONS[node.func.id](*map(of, node.args))
        if isinstance(node, ast.Constant):
            return exact(ast.get_source_segment(source, node) or "")
        assert isinstance(node, ast.Name), f"{formula}: {ast.dump(node)}"
        return values[node.id]

    return of(ast.parse(source, mode="eval").body)


def grid(free: set[str], tried: dict[str, list[str]]) -> list[Values]:
    """Every combination of the values at which free names are tried."""
    order = sorted(free)
    assert set(order) <= tried.keys(), f"not in the table of variables: {set(order) - tried.keys()}"
    lists = [[evaluate(value, KNOWN) for value in tried[name]] for name in order]
    return [dict(zip(order, values, strict=True)) for values in itertools.product(*lists)]


class Budget:
    """The rows by name, each evaluated with what it names."""

    def __init__(self, text: str | None = None) -> None:
        self.rows = {row.name.replace(".", "__"): row for row in rows(text)}
        assert len(self.rows) == len(rows(text)), "two rows have one name"
        self.tried = variables(text)

    def free(self, name: str) -> set[str]:
        """The variables that a row depends on, through other rows, too."""
        own = {n.removesuffix("__code") for n in names(self.rows[name].formula)} - KNOWN.keys()
        unknown = own - self.rows.keys() - self.tried.keys()
        assert not unknown, f"{name} names {unknown}, which have no row"
        return {n for n in own if n in self.tried}.union(
            *(self.free(n) for n in own if n in self.rows)
        )

    def value(self, name: str, at: Values) -> arb:
        """A row's formula at some values of its variables."""
        formula = self.rows[name].formula
        values = dict(KNOWN | at)
        for own in names(formula) - values.keys():
            other = own.removesuffix("__code")
            values[own] = self.value(own, at) if other == own else self.constant(other, at)
        return evaluate(formula, values)

    def constant(self, name: str, at: Values) -> arb:
        """Return the source's value for a row, at some values of its variables."""
        row = self.rows[name]
        match = place_of(row)
        return rust_value(row.file, match[1], match.start(), at)

    def tightest(self, name: str) -> tuple[bool, float]:
        """Compare a constant with its formula at all values tried; return the least ratio too."""
        enough, least = True, float("inf")
        for at in grid(self.free(name), self.tried):
            needed, given = self.value(name, at), self.constant(name, at)
            enough &= bool(given >= needed)
            # A bound from below may be negative: then less of it is more.
            share = given / needed if needed > 0 else needed / given
            least = min(least, float(share.mid()))
        return enough, least


@cache
def code(file: str) -> str:
    """A Rust file without comments, strings and tests."""
    return code_of((ROOT / file).read_text())


def place_of(row: Row) -> re.Match[str]:
    """Find a constant's one place in the source, however its line is broken."""
    before, hole, after = row.place.partition("?")
    assert hole, f"{row.name}: no hole in {row.place}"

    def pattern(text: str) -> str:
        parts = re.split(r"\s+", text)
        return r"\s+".join(re.escape(part) for part in parts)

    end = pattern(after) if after else r"(?=[;,\n])"
    found = list(re.finditer(pattern(before) + r"([^;{}]*?)" + end, code(row.file)))
    assert len(found) == 1, f"{row.name}: {len(found)} places in {row.file} look like {row.place}"
    return found[0]


def _constant(file: str, name: str, before: int) -> tuple[str, str]:
    """The expression of a constant, and its file; of several the last before a place."""
    pattern = re.compile(rf"(?:const {name}: [^=;]+|let {name} )=\s*([^;]+);")
    found = [match for match in pattern.finditer(code(file)) if match.start() < before]
    if not found and name in ELSEWHERE:
        file, name = ELSEWHERE[name]
        return _constant(file, name, len(code(file)))
    assert found, f"{file} has no {name}"
    return str(found[-1][1]), file


def rust_value(file: str, expression: str, before: int, at: Values) -> arb:
    """A constant expression of Rust at a place of a file, for some values of its variables."""
    text = expression
    for called, name in CALLED.items():
        text = text.replace(called, name)
    text = re.sub(r"(?<=\d)_(?=\d)", "", text)
    text = re.sub(r"_(?=f(32|64)\b)", "", text)
    text = re.sub(r"\b2f64\.powi\((-?\d+)\)", r"2**(\1)", text)
    text = text.replace("f64::EPSILON", "2**(-52)").replace("f32::EPSILON", "2**(-23)")
    text = text.replace("f64::MIN_POSITIVE", "2**(-1022)")
    text = text.replace("f32::MIN_POSITIVE", "2**(-126)").replace("f64::from_bits(1)", "2**(-1074)")
    text = re.sub(r"(\w+)\.ilog2\(\)", r"log2floor(\1)", text)
    text = re.sub(r"\((\d+)u(?:64|128) << (\d+)\)", r"2**(\2)", text)
    text = re.sub(r"\bas (f64|f32|usize)\b", "", text)
    text = re.sub(r"\bf64::from\b|\bself\.", "", text)
    text = re.sub(r"\b(\w+) / (\w+)\b", lambda m: _quotient(*m.groups()), text)
    values = dict(KNOWN | at)
    for name in names(text):
        if name not in values:
            inner, home = _constant(file, name, before)
            values[name] = rust_value(home, inner, before if home == file else len(code(home)), at)
    return evaluate(text, values)


def _quotient(left: str, right: str) -> str:
    whole = {left, right} <= WHOLE
    return f"{left} // {right}" if whole else f"{left} / {right}"


def files() -> list[Path]:
    """The Rust files of the library, without those that are tests."""
    return sorted(p for p in (ROOT / "src").rglob("*.rs") if p.name != "tests.rs")
