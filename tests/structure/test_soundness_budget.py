"""docs/soundness.md against itself, interval arithmetic, and the constants in the source.

`CERTK_BLESS=1` writes the ratios of the page anew, and nothing else of it.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator

import pytest
from flint import arb, arb_series, ctx

from budget_page import BITS, KNOWN, PAGE, Budget, code, evaluate, files, names, place_of
from gappa_scripts import ball, exponential
from repository import ROOT

BUDGET = Budget()
CONSTANTS = [name for name, row in BUDGET.rows.items() if row.file]
TERMS = [name for name, row in BUDGET.rows.items() if not row.file]
STANDINGS = {"proved", "Gappa", "intervals", "enumerated", "assumed", "tested"}

# The terms that there are: one that is left out of the page is missed.
STEPS = ("shift", "log2e", "t", "reduction", "polynomial", "horner", "weight", "sum", "side")
EXPECTED = {f"{scalar}.{step}" for scalar in ("f32", "f64") for step in STEPS}
EXPECTED |= {"exp.reduction", "exp.series", "exp.rest", "exp.error", "ends", "tile.rescale"}
# What scripts for Gappa take, and no other row.
MEASURED = {"f32.log2e", "f64.log2e"}

# What looks like an error constant and is none, by file. First those of which nothing enters a
# certificate.
ROOMS = {
    "src/bounds/": "bounds that are derived at the head of their own files",
    "src/montecarlo/": "estimates with a stated probability, derived in their own files",
    "src/keepset/dual.rs": "the search for multipliers, any of which are sound",
    "src/keepset/rounds.rs": "the search for a set, which is certified afterwards",
    "src/keepset/search.rs": "the same",
    "src/keepset/solve.rs": "the same",
    "src/keepset/walk.rs": "the same",
    "src/kernels/row/guess.rs": "where to look for a boundary",
    "src/kernels/row/scan.rs": "rough sums that show the way",
    "src/select/search_row.rs": "where to look for a boundary",
    "src/index/panel.rs": "how long lists are made",
    "src/error/place.rs": "how numbers are written",
    "src/kernels/system/float_modes.rs": "a test of the modes",
}
# Names of constants: limits of ranges, choices, scales of a number format.
NAMED = {
    "src/attention/coded.rs": [
        "SPARSE",
        "MOST",
        "LONGEST",
        "FINE",
        "BEFORE",
        "REACH",
        "FAR",
        "NEAR",
    ],
    "src/attention/weighed.rs": ["FINELY", "HEAVY", "HIGHEST", "WEIGHABLE"],
    "src/attention/from_codes.rs": ["LEAST"],
    "src/index/codes/append.rs": ["LEFT"],
    "src/attention/error_bound.rs": ["MOST"],
    "src/attention/heavy_keys.rs": ["AIM", "DEPTH", "MARGIN"],
    "src/kernels/attention/coded.rs": ["TOP", "LEAST", "LIGHTEST"],
    "src/attention/few.rs": ["ALL", "VAGUE", "TINY"],
    "src/attention/narrow.rs": ["FINE", "ALWAYS_FINE"],
    "src/attention/sink.rs": ["MOST", "HELD"],
    "src/attention/score_changes.rs": ["V"],
    "src/attention/f32_error.rs": ["U", "SAFE", "ROUGH", "LONGEST"],
    "src/numerics/certified_sums.rs": ["U", "V", "LN2_HIGH", "LN2_LOW"],
    "src/index/codes/shrink.rs": ["STALE"],
    "src/index/spread.rs": ["GROWN", "STEPS", "UP"],
    "src/index/codes.rs": ["OUTLYING"],
    "src/index/gram.rs": ["U"],
    "src/index/listed_search.rs": ["CLOSE"],
    "src/index/parts.rs": ["CLOSE"],
    "src/index/prepared.rs": ["MOST", "TOP", "SQUARED", "SHIFT"],
    "src/index/query.rs": ["BLURRED"],
    "src/index/threshold_search.rs": ["DENSE", "ALMOST_ALL"],
    "src/keepset/family.rs": ["MOST_RADIUS", "UNIT", "USELESS"],
    "src/keepset/frame.rs": ["LEAST_BUDGET"],
    "src/keepset/problem.rs": ["AUDIT_MARGIN"],
    "src/keepset/streamed.rs": ["LEAST_BUDGET"],
    "src/kernels/index/encode.rs": ["CODE", "ROUND", "SCALES"],
    "src/kernels/index/split.rs": ["ONE", "STEP_OF_EXPONENT"],
    "src/kernels/isa/lanes.rs": ["POLYNOMIAL"],
    "src/kernels/row/candidates.rs": ["GUESSABLE_SPAN"],
    "src/numerics/log_mass.rs": ["MOST"],
    "src/rows/wide.rs": ["DEPTH", "UNSHIFTED", "COVERED"],
    "src/select/settle.rs": ["WIDTH"],
    "src/select/constraints.rs": ["TINY_BUDGET"],
    "src/select/read.rs": ["FLAT", "HIGHEST"],
    "src/select/weight_fn.rs": ["FAR", "STEEP"],
    "src/select/weights.rs": ["HIDDEN"],
    "src/numerics/double_double.rs": ["LN2"],
}
# Pieces of lines: what is aimed at and judged afterwards, and what keeps a divisor from 0.
INLINE = {
    "src/index/best_first.rs": ["1.001 * self.eps / (1.0 - self.eps)"],
    "src/keepset/overshoot.rs": ["<= 1.01 * most"],
    "src/select/job.rs": ["like_so_far * (1.02 + 0.5 / so_far.sqrt())"],
    "src/attention/query_rows.rs": ["!(1e-30..=1e30).contains(cap)"],
    "src/attention/error_bound.rs": ["(2.0 * ball.radius + rounded) * (1.0 - 1e-9);"],
    "src/attention/heavy_keys.rs": ["floor.max(f32::MIN_POSITIVE)"],
    "src/index/prepared.rs": [".max(f64::MIN_POSITIVE)"],
    "src/index/threshold_search.rs": [
        "scratch.excess.unwrap_or(1.03)",
        "(upper / self.eps).clamp(1.001, 4.0) * 1.001",
        "(ratio * 1.0005).min(4.0)",
        "(miss * 1.001).clamp(1.001, 4.0)",
        "(sums.weights + sums.rest) * (1.0 + 1e-6)",
        "ratio > 1.0 - 1e-6",
        "/ (1.0 + odds) * (1.0 - 1e-6)",
    ],
    "src/keepset/problem.rs": [
        "self.margin.push((1.0 + slack.select) * (1.0 + STORED) - 1.0 + n * f64::EPSILON)",
        "t.weight >= f32::MIN_POSITIVE && t.factor >= f32::MIN_POSITIVE",
        ".max(f64::MIN_POSITIVE)",
    ],
    "src/kernels/mixture.rs": ["L::F32::splat(f32::MIN_POSITIVE)"],
    "src/rows/wide.rs": ["{ 0.0 } else { *size * f64::EPSILON }"],
    "src/numerics/double_double.rs": ["value < f64::MIN_POSITIVE"],
}
TOKEN = re.compile(
    r"\b\d[\d_.]*e-\d+|powi\(-\d+\)|f(?:32|64)::EPSILON|f(?:32|64)::MIN_POSITIVE"
    r"|\* (?:U|V|UNIT)\b|const \w+: f(?:32|64)\b|from_bits\(1\)"
    # Factors for a second order: 1.01, 1.001.
    r"|\b[1-9]\.0\d*[1-9]\d*"
)


@pytest.fixture(autouse=True)
def precise() -> Iterator[None]:
    with ctx.workprec(BITS):
        yield


def stated(ratio: float) -> str:
    """A ratio as the page has it: rounded down to two digits behind the point, or large."""
    return f"{math.floor(ratio * 100 + 1e-9) / 100:.2f}" if ratio < 100 else f"{ratio:.1e}"


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_covers_its_formula(name: str) -> None:
    row = BUDGET.rows[name]
    enough, ratio = BUDGET.tightest(name)
    assert enough, f"{row.name}: the source has {ratio} of what it must be at least"
    if os.environ.get("CERTK_BLESS"):
        text = PAGE.read_text()
        place = row.place.replace("|", r"\|")
        old = f"`{row.file}` `{place}` | {row.ratio} |"
        assert text.count(old) == 1, old
        PAGE.write_text(text.replace(old, f"`{row.file}` `{place}` | {stated(ratio)} |"))
    else:
        assert row.ratio == stated(ratio)
    # What is far too large says why.
    assert ("wide:" in row.why) == (ratio > 1.5)


def between(name: str, points: int) -> Iterator[dict[str, arb]]:
    """Yield values of a row's variables that lie anywhere between those which are tried."""
    rng = random.Random(name)
    ends = {
        each: [float(evaluate(text, KNOWN).mid()) for text in BUDGET.tried[each]]
        for each in sorted(BUDGET.free(name))
    }
    for _ in range(points):
        at = {}
        for each, values in ends.items():
            low, high = max(min(values), 1e-6), max(values)
            value = low * (high / low) ** rng.random()
            at[each] = arb(value if each == "more" else round(value))
        yield at


@pytest.mark.parametrize("name", [name for name in CONSTANTS if BUDGET.free(name)])
def test_a_constant_covers_its_formula_between_the_values_tried(name: str) -> None:
    for at in between(name, 40):
        needed, given = BUDGET.value(name, at), BUDGET.constant(name, at)
        assert given >= needed, {each: str(value) for each, value in at.items()}


def test_standings_are_those_that_the_page_explains() -> None:
    for row in BUDGET.rows.values():
        for standing in row.standing.split(", "):
            assert standing.split(" ")[0] in STANDINGS, row
            if standing.startswith("Gappa"):
                assert (ROOT / "tests/soundness/gappa" / standing.split("`")[1]).exists()


def test_no_term_is_left_out() -> None:
    assert {BUDGET.rows[name].name for name in TERMS} == EXPECTED
    used = set().union(*(names(row.formula) for row in BUDGET.rows.values()))
    for name in TERMS:
        assert name in used or BUDGET.rows[name].name in MEASURED, f"{name} is in no formula"


def test_weights_are_what_their_operations_lose() -> None:
    """The steps of src/kernels/weights.rs counted once more, without the page."""
    for scalar, unit, longest, half_unit, conversions in (
        ("f32", arb(2) ** -24, arb("87.33"), arb(2) ** -18, 2 * arb(2) ** -53),
        ("f64", arb(2) ** -53, arb(708), arb(2) ** -44, arb(2) ** -53),
    ):
        e = exponential(scalar)
        ln2 = arb(2).log()
        shift = longest * (unit + conversions)
        argument = half_unit + longest * abs(ball(e.log2_e) - 1 / ln2)
        polynomial = _distance(scalar)[0]
        # The last step rounds a number in [2, 4] by half its unit; the others matter ever less.
        least = shift + ln2 * argument + polynomial + 0.9 * unit
        total = BUDGET.value(f"{scalar}__weight", {})
        assert total >= least
        assert total <= 1.01 * least
        # A block of sixteen; what follows it is beside.
        sums = 15 * unit
        side = BUDGET.value(f"{scalar}__side", {"n": arb(1), "chunks": arb(0)})
        assert side >= (1 + least) * (1 + sums) - 1
    # One side of f32 rows of any length, in the sums over blocks.
    assert BUDGET.value("f32__side", {"n": arb(2) ** 32}) < 216 * arb(2) ** -24


def _distance(scalar: str) -> tuple[arb, arb]:
    """Of a polynomial from 2^(1 + f), 0 <= f <= 1, relatively: reached, and nowhere exceeded."""
    coefficients = [ball(c) for c in exponential(scalar).polynomial]
    pieces, order = 2048, 6
    ln2 = arb(2).log()
    half = arb(1) / (2 * pieces)
    reached, most = arb(0), arb(0)
    before, ctx.cap = ctx.cap, order + 1
    try:
        for piece in range(pieces):
            middle = (2 * piece + 1) * half

            def error(x: arb) -> arb_series:
                power = arb_series([-(x + 1) * ln2, -ln2]).exp()
                value = arb_series([0])
                for c in reversed(coefficients):
                    value = value * arb_series([x, 1]) + c
                return value * power - 1

            # Taylor's formula about the middle, with Lagrange's remainder over the whole piece.
            near, rest = error(middle), error(middle + half * arb(0, 1))
            bound = abs(rest[order]) * half**order
            for k in range(order):
                bound += abs(near[k]) * half**k
            reached, most = reached.max(abs(near[0])), most.max(bound)
    finally:
        ctx.cap = before
    return reached, most


@pytest.mark.parametrize("scalar", ["f32", "f64"])
def test_polynomials_are_as_near_as_is_said(scalar: str) -> None:
    reached, most = _distance(scalar)
    said = BUDGET.value(f"{scalar}__polynomial", {})
    assert most <= said <= 1.05 * reached
    # The constant is less than half a unit off, and not much less than is said.
    away = abs(ball(exponential(scalar).log2_e) - 1 / arb(2).log())
    said = BUDGET.value(f"{scalar}__log2e", {})
    assert away <= said <= 1.01 * away


def test_what_the_page_says_of_ranges() -> None:
    """No weight that is not flushed is subnormal, and those that are flushed are small."""
    for scalar, lowest, flush in (("f32", -126, "f32__flush"), ("f64", -1022, "f64__flush")):
        e = exponential(scalar)
        t = -ball(e.cut) / arb(2).log() - 1 - BUDGET.value(f"{scalar}__t", {})
        assert t >= lowest - 1
        almost = ball(e.cut) * (1 - 3 * (arb(2) ** (-24 if scalar == "f32" else -53)))
        assert (-almost).exp() <= BUDGET.constant(flush, {"chunks": arb(0)})


def test_no_error_constant_is_forgotten() -> None:
    """Whatever looks like one has a row, or is named above as none; nothing is named in vain."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for name in CONSTANTS:
        row = BUDGET.rows[name]
        spans.setdefault(row.file, []).append(place_of(row).span())
    used: set[tuple[str, str]] = set()
    for path in files():
        file = path.relative_to(ROOT).as_posix()
        if room := next((room for room in ROOMS if file.startswith(room)), None):
            used.add((room, ""))
            continue
        text = code(file)
        known = [(*span, "") for span in spans.get(file, [])]
        for constant in NAMED.get(file, []):
            pattern = rf"const {constant}: [^;]*;|const {constant}: [^=]*\[Self\] =\s*&\[[^;]*;"
            known += [(*m.span(), constant) for m in re.finditer(pattern, text)]
            known += [
                (*m.span(), constant)
                for m in re.finditer(rf"const {constant}: &'static \[Self\] =[^;]*;", text)
            ]
        for piece in INLINE.get(file, []):
            known += [(*m.span(), piece) for m in re.finditer(re.escape(piece), text)]
        for token in TOKEN.finditer(text):
            covers = [k for k in known if k[0] <= token.start() and token.end() <= k[1]]
            line = text.count("\n", 0, token.start())
            where = f"{file}:{line + 1}: {text.splitlines()[line].strip()}"
            assert covers, f"no row of docs/soundness.md, and no exemption: {where}"
            used |= {(file, cover[2]) for cover in covers}
    named = {(room, "") for room in ROOMS}
    named |= {(file, each) for table in (NAMED, INLINE) for file in table for each in table[file]}
    assert not named - used
