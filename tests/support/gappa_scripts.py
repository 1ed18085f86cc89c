"""Scripts for Gappa, made of the constants in the Rust source and the bounds in docs/soundness.md.

Shares no code with the library. Those in tests/soundness/gappa are what this makes; a test holds
them against it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from flint import arb, fmpq

from budget_page import Budget, code

LANES = "src/kernels/isa/lanes.rs"
CHECKER = "src/numerics/certified_sums.rs"
# Bits behind the point in which bounds and hypotheses are written.
FINE = 100


@dataclass(frozen=True)
class Exponential:
    """The constants of a kernel's exponential: the numbers that literals are rounded to."""

    ieee: str
    cut: Fraction
    log2_e: Fraction
    polynomial: list[Fraction]
    # The smallest t that is not flushed is above this.
    lowest: int


def ball(number: Fraction) -> arb:
    return arb(fmpq(number.numerator, number.denominator))


def _rounded(decimal: float, single: bool) -> Fraction:
    return Fraction(struct.unpack("f", struct.pack("f", decimal))[0] if single else decimal)


@cache
def exponential(scalar: str) -> Exponential:
    """Of f32 or f64, as src/kernels/isa/lanes.rs has it."""
    single = scalar == "f32"
    part = code(LANES).partition(f"impl Scalar for {scalar} {{")[2].partition("impl ")[0]
    assert f"const LOG2_E: Self = std::{scalar}::consts::LOG2_E;" in part
    (cut,) = re.findall(r"const CUT: Self = (-[\d.]+);", part)
    (numbers,) = re.findall(r"const POLYNOMIAL: &'static \[Self\] =\s*&\[([^\]]*)\];", part)
    decimals = [float(each.replace("_", "")) for each in numbers.split(",") if each.strip()]
    log2_e = 1 / arb(2).log()
    return Exponential(
        ieee="ieee_32" if single else "ieee_64",
        cut=-_rounded(float(cut), single),
        log2_e=_rounded(float(log2_e.mid()), single),
        polynomial=[_rounded(each, single) for each in decimals],
        lowest=-127 if single else -1023,
    )


@cache
def checker() -> tuple[Fraction, Fraction, int]:
    """The two parts of ln 2, and how many terms the checker's series has."""
    text = code(CHECKER)
    high, low = (
        Fraction(float(re.findall(rf"const {name}: f64 = ([^;]+);", text)[0].replace("_", "")))
        for name in ("LN2_HIGH", "LN2_LOW")
    )
    (terms,) = re.findall(r"for i in \(1\.\.=(\d+)\)\.rev\(\)", text)
    return high, low, int(terms)


def binary(number: Fraction) -> str:
    """A number with finitely many binary digits, as Gappa reads it."""
    shift = number.denominator.bit_length() - 1
    assert number.denominator == 1 << shift
    return f"{number.numerator}b-{shift}" if shift else str(number.numerator)


def _near(number: arb, way: int) -> str:
    """Below (-1) or above (1) a number, by very little."""
    scaled = number * arb(2) ** FINE
    whole = scaled.lower().floor() if way < 0 else scaled.upper().ceil()
    return f"{int(whole.unique_fmpz())}b-{FINE}"


class Scripts:
    """All of them; `less` multiplies the bounds that they are to prove."""

    def __init__(self, budget: Budget, less: str = "1") -> None:
        self.budget = budget
        self.less = arb(less)

    def _bound(self, name: str) -> str:
        return _near(self.budget.value(name.replace(".", "__"), {}) * self.less, -1)

    def _given(self, name: str) -> str:
        return _near(self.budget.value(name.replace(".", "__"), {}), 1)

    def all(self) -> dict[str, str]:
        made = {}
        for scalar in ("f32", "f64"):
            made[f"reduction_{scalar}"] = self.reduction(scalar)
            made[f"horner_{scalar}"] = self.horner(scalar)
        made["affine_f32"] = self.affine_f32()
        made["affine_f64"] = self.affine_f64()
        made["checker_reduction"] = self.checker_reduction("-708", "-1b-2")
        made["checker_reduction_positive"] = self.checker_reduction("1b-2", "700")
        made["checker_series"] = self.checker_series()
        head = "# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.\n"
        return {f"{name}.g": head + script for name, script in made.items()}

    def reduction(self, scalar: str) -> str:
        """The argument in units of ln 2, less 1, and its fraction."""
        e = exponential(scalar)
        away = self._given(f"{scalar}.log2e")
        return f"""\
# t = x log2 e - 1, rounded once, and its fraction t - k, of {scalar}. LOG2E is the real one.
@rnd = float<{e.ieee}, ne>;
L = {binary(e.log2_e)};
x = rnd(any_x);
t = rnd(x * L - 1);
T = x * LOG2E - 1;
f = t - k;
{{ x in [-{binary(e.cut)}, 0] /\\ LOG2E - L in [-{away}, {away}] /\\ @FIX(k, 0) /\\ f in [0, 1]
-> |t - T| <= {self._bound(f"{scalar}.t")} /\\ t in [{e.lowest}, -1] /\\ rnd(f) - f in [0, 0] }}
"""

    def horner(self, scalar: str) -> str:
        """The polynomial as it is evaluated, against itself in real numbers."""
        e = exponential(scalar)
        last = len(e.polynomial) - 1
        lines = [f"c{i} = {binary(c)};" for i, c in enumerate(e.polynomial)]
        computed, real = f"c{last}", f"c{last}"
        for i in reversed(range(last)):
            lines.append(f"p{i} = rnd({computed} * f + c{i});")
            lines.append(f"P{i} = {real} * f + c{i};")
            computed, real = f"p{i}", f"P{i}"
        steps = "\n".join(lines)
        return f"""\
# The polynomial of {scalar} for 2^(1 + f), in fused steps, against its real value.
@rnd = float<{e.ieee}, ne>;
f = rnd(any_f);
{steps}
{{ f in [0, 1] -> |p0 -/ P0| <= {self._bound(f"{scalar}.horner")} }}
$ f in 64;
"""

    def affine_f32(self) -> str:
        """A scaled difference of two f32 numbers, by way of f64."""
        bound = _near((arb(2) ** -24 + arb(2) ** -52) * arb("1.000001") * self.less, -1)
        return f"""\
# x = f32(f64(scale * f64(s - c))) of f32 numbers s and c, against scale (s - c).
@d = float<ieee_64, ne>;
@s = float<ieee_32, ne>;
score = s(any_s);
shift = s(any_c);
D = score - shift;
e = d(D);
q = scale * e;
p = d(q);
x = s(p);
X = scale * D;
{{ |D| in [1b-149, 1b129] /\\ |q| in [1b-120, 1b10] /\\ |p| in [1b-121, 1b11]
-> |x -/ X| <= {bound} }}
"""

    def affine_f64(self) -> str:
        """The same of f64 numbers."""
        bound = _near(arb(2) ** -52 * arb("1.000001") * self.less, -1)
        return f"""\
# x = f64(scale * f64(s - c)) of f64 numbers s and c, against scale (s - c).
@d = float<ieee_64, ne>;
score = d(any_s);
shift = d(any_c);
D = score - shift;
e = d(D);
q = scale * e;
p = d(q);
X = scale * D;
{{ |D| in [1b-1074, 1b1023] /\\ |q| in [1b-1021, 1b10] -> |p -/ X| <= {bound} }}
"""

    def checker_reduction(self, low: str, high: str) -> str:
        """The checker's x - k ln 2."""
        ln2_high, ln2_low, _ = checker()
        away = ball(ln2_high) + ball(ln2_low) - arb(2).log()
        off = _near(abs(away).upper(), 1)
        log2_e = exponential("f64").log2_e
        return f"""\
# r = x - k ln 2 in the checker's exponential; LN2 is the real one. Nearer to 0, k is 0 and r is x.
@d = float<ieee_64, ne>;
x = d(any_x);
HIGH = {binary(ln2_high)};
LOW = {binary(ln2_low)};
L = {binary(log2_e)};
w = x * L;
k = int<ne>(d(w));
a = x - k * HIGH;
h = d(a);
b = h - k * LOW;
r = d(b);
R = x - k * LN2;
{{ x in [{low}, {high}] /\\ LN2 - (HIGH + LOW) in [-{off}, {off}]
-> h - a in [0, 0] /\\ |r - R| <= {self._bound("exp.reduction")} /\\ |R| <= 0.347 }}
a -> x * (1 - L * HIGH) + HIGH * (w - d(w)) + HIGH * (d(w) - k);
R -> a - k * LOW - k * (LN2 - (HIGH + LOW));
r - R -> (r - b) + (h - a) + k * (LN2 - (HIGH + LOW));
"""

    def checker_series(self) -> str:
        """The checker's series as it is evaluated, against itself in real numbers."""
        *_, terms = checker()
        lines, computed, real = [], "1", "1"
        for i in range(terms, 0, -1):
            lines.append(f"s{i} = d(d(d({computed} * r) / {i}) + 1);")
            lines.append(f"S{i} = {real} * r / {i} + 1;")
            computed, real = f"s{i}", f"S{i}"
        steps = "\n".join(lines)
        return f"""\
# The series of the checker's exponential, each step rounded three times, against its real value.
@d = float<ieee_64, ne>;
r = d(any_r);
{steps}
{{ r in [-0.347, 0.347] -> |s1 -/ S1| <= {self._bound("exp.series")} }}
$ r in 64;
"""
