//! Bounds on the joint effect of many small errors of scores on a sum of weights.
//!
//! Let `e_i` be what the code of key i loses, and `G` the sum of `e_i e_i^T` over all keys with codes. For a query q the
//! scores that codes give are off by `x_i = a q.e_i` and a rounding of at most `rho`, and `sum x_i^2 <= X^2 = a^2 q^T G q`
//! over any set of these keys. As `e^x <= 1 + x + g x^2` for `|x| <= D` with `g = (e^D - 1 - D) / D^2`, the inequality of
//! Cauchy and Schwarz bounds the real mass of a set by the sums of its computed weights and of their squares:
//!
//! `e^rho (W1 + X sqrt(W2) + g min(Winf X^2, D X sqrt(W2)))` from above and `e^-rho (W1 - X sqrt(W2))` from below.
//!
//! The roundings of `G` itself: products of residuals are summed as integers, exactly, after the residuals were rounded
//! to multiples of a unit. With `r_i` the rounded residual and `f_i` what that rounding lost, `sum x_i^2` is at most
//! `a^2 (sqrt(q^T R q) + |q| sqrt(F))^2`, where R is the sum of `r_i r_i^T` and F that of `|f_i|^2` (Minkowski).
//! R is added up in f64, and each of m additions may round, as may the 2 d steps of the form: as `R_ij^2 <= R_ii R_jj` for the
//! sums of absolute products too, that is at most `(m + 2 d) 2^-53 tr(R) |q|^2`, taken twice here.

use std::borrow::Cow;

use super::shared::Shared;
use crate::kernels::{Simd, Triangle};
use crate::numerics::finite::all_finite;
use crate::runtime::reused::Reused;
use half::bf16;

/// Relative error of sums and products of few terms in f64, generously.
pub(super) const GRAM_ROUNDING: f64 = 1e-12;

/// Sums of outer products of what codes lose.
#[derive(Debug, Clone)]
pub(crate) struct Gram<'a> {
    width: usize,
    /// As [`Triangle`] has them: ours are packed, those that are lent are whole. Entries left of the diagonal's groups are not used.
    sums: Shared<'a, f64>,
    /// Sum of squares of what the sums leave out, rounded up.
    lost: f64,
    /// The largest norm of a residual, rounded up.
    largest: f64,
    /// The largest norm of a coded key in the codes' frame, rounded up.
    norm: f64,
    /// Number of additions to the sums: each is a rounding.
    additions: usize,
}

/// The bound of one query.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CodeError {
    /// X: the errors of all scores together, Euclidean norm.
    pub(crate) total: f64,
    /// D: the error of one score.
    pub(crate) each: f64,
    /// Roundings of one score.
    pub(crate) rho: f64,
    /// Factor from the norm of a code's error to a bound on the error of that key's score.
    pub(crate) slope: f64,
}

/// The same as numbers that bounds of masses are made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct MassBound {
    total: f64,
    each: f64,
    growth: f64,
    factor: f64,
}

impl MassBound {
    /// An upper bound of the real mass of the set whose sums these are.
    pub(super) fn mass_upper(&self, sums: &Sums) -> f64 {
        let &MassBound { total, each, growth, factor } = self;
        let root = total * sums.squares.sqrt();
        let growth = growth * (sums.largest * total * total).min(each * root);
        let bound = factor * (sums.upper + root + growth) * (1.0 + GRAM_ROUNDING);
        if bound.is_nan() { f64::INFINITY } else { bound }
    }
}

/// Sums over a set of weights, relative to a shift that no score exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Sums {
    /// Of the weights: an upper and a lower bound of the real sum of the computed scores' weights.
    pub(crate) upper: f64,
    pub(crate) lower: f64,
    /// Of their squares, an upper bound.
    pub(crate) squares: f64,
    /// The largest, an upper bound.
    pub(crate) largest: f64,
}

/// One rounding of f32.
pub(super) const U: f64 = 1.0 / 16_777_216.0;
/// Relative error of a weight and of sums of weights in f32 lanes, on either side (`mass` has less).
const ETA: f64 = 256.0 * U;
/// Largest weight of a flushed key.
pub(crate) const FLUSH: f64 = 2.350_988_701_644_575e-38;

impl<'a> Gram<'a> {
    /// From its parts; `None` if they cannot be those of any vectors of `width` entries.
    pub(crate) fn of_parts(width: usize, sums: Cow<'a, [f64]>, bounds: [f64; 4]) -> Option<Self> {
        let [lost, largest, norm, additions] = bounds;
        // This may be done for every query.
        let fits = all_finite(&sums) && sums.len() == width * width;
        let squares = || (0..width).all(|i| sums[i * width + i] >= 0.0);
        let bounded = bounds.iter().all(|bound| (0.0..f64::INFINITY).contains(bound));
        let whole = bounded && additions < 1e15 && additions.fract() == 0.0;
        let additions = whole.then_some(additions as i64)?.unsigned_abs() as usize;
        // Only of a whole matrix there is a diagonal to look at.
        let sound = fits && squares() && bounded;
        let sums = match sums {
            Cow::Borrowed(lent) => Shared::Lent(lent),
            Cow::Owned(whole) if sound => packed(width, &whole).into(),
            Cow::Owned(_) => return None,
        };
        sound.then_some(Gram { width, sums, lost, largest, norm, additions })
    }
}

impl PartialEq for Gram<'_> {
    /// Compares what is used of the sums.
    fn eq(&self, other: &Self) -> bool {
        self.width == other.width
            && (self.lost, self.largest, self.norm, self.additions)
                == (other.lost, other.largest, other.norm, other.additions)
            && (0..self.width).all(|row| self.row(row) == other.row(row))
    }
}

impl Gram<'_> {
    /// Sums over vectors of `width` entries, none so far.
    pub(crate) fn new(width: usize) -> Self {
        Gram {
            width,
            sums: vec![0.0; Triangle::packed(width)].into(),
            lost: 0.0,
            largest: 0.0,
            norm: 0.0,
            additions: 0,
        }
    }

    /// The sums, packed.
    pub(crate) fn sums_mut(&mut self) -> &mut [f64] {
        if self.sums.len() != Triangle::packed(self.width) {
            self.sums = packed(self.width, &self.sums).into();
        }
        self.sums.to_mut()
    }

    fn places(&self) -> Triangle {
        Triangle::of(self.width, self.sums.len()).expect("sums of one of both kinds")
    }

    /// Returns the sums of a row from the diagonal's group on.
    fn row(&self, row: usize) -> &[f64] {
        &self.sums[self.places().row(row)]
    }

    /// Returns the sums with all entries of all rows.
    pub(super) fn whole(&self) -> Cow<'_, [f64]> {
        let width = self.width;
        if self.sums.len() == width * width {
            return (&*self.sums).into();
        }
        let mut whole = vec![0.0; width * width];
        for row in 0..width {
            let own = self.row(row);
            whole[(row + 1) * width - own.len()..][..own.len()].copy_from_slice(own);
        }
        whole.into()
    }

    /// Takes note of rows whose products were added: how many, the computed sum of squares that rounding them lost, and the
    /// largest computed sums of squares of a residual and of a key.
    pub(crate) fn note(&mut self, rows: usize, lost: f64, largest: f32, norm: f32) {
        let entries = self.width as f64;
        let up = |square: f32| up(f64::from(square), 1.0, entries).sqrt() * (1.0 + GRAM_ROUNDING);
        self.note_sums(rows, lost);
        self.largest = self.largest.max(up(largest));
        self.norm = self.norm.max(up(norm));
    }

    /// Takes note of them where the largest do not matter.
    pub(super) fn note_sums(&mut self, rows: usize, lost: f64) {
        let lost = up(lost, rows as f64, self.width as f64);
        self.lost = (self.lost + lost * (1.0 + GRAM_ROUNDING)).next_up();
        self.additions += 1;
    }

    /// Numbers beside the sums: what they leave out, the largest residual, the largest key, how many additions.
    pub(crate) fn numbers(&self) -> [f64; 4] {
        [self.lost, self.largest, self.norm, self.additions as f64]
    }

    /// The sum of the squares of all entries of all vectors, about.
    pub(crate) fn trace(&self) -> f64 {
        self.places().diagonal().map(|place| self.sums[place]).sum()
    }

    /// Adds the sums of other vectors.
    pub(crate) fn join(&mut self, other: &Gram<'_>) {
        let places = other.places();
        let own = Triangle::of(self.width, Triangle::packed(self.width)).expect("packed sums");
        let width = self.width;
        let sums = self.sums_mut();
        for row in 0..width {
            let more = &other.sums[places.row(row)];
            sums[own.row(row)].iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
        self.lost = (self.lost + other.lost).next_up();
        self.additions += other.additions + 1;
        self.largest = self.largest.max(other.largest);
        self.norm = self.norm.max(other.norm);
    }

    /// Returns the error of the sums, and the largest norm of a residual and of a coded key.
    pub(super) fn bounds(&self) -> (f64, f64, f64) {
        (self.lost, self.largest, self.norm)
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns how many times something was added to the sums.
    pub(super) fn additions(&self) -> usize {
        self.additions
    }

    /// Bounds the distance of the scores of a query from those by codes.
    ///
    /// `query` is in the codes' frame and exact but for f64 roundings, `unresolved` is the norm of what its 16-bit form leaves
    /// out, both to be multiplied by `factor`, which scores were computed with to within `slip`; moving a key into the frame
    /// took `moves` roundings of f32.
    pub(crate) fn code_error(
        &self,
        simd: Simd,
        query: &[f64],
        unresolved: f64,
        (factor, slip): (f64, f64),
        moves: usize,
    ) -> CodeError {
        self.fine_error(self, simd, query, (unresolved, (factor, slip)), moves)
    }

    /// The same of scores to which those by a low plane are added, these being sums of what both planes together lose, beside those
    /// of the codes. Such scores round twice more: what the low code leaves, and its score.
    pub(super) fn fine_error(
        &self,
        codes: &Gram<'_>,
        simd: Simd,
        query: &[f64],
        (unresolved, (factor, slip)): (f64, (f64, f64)),
        moves: usize,
    ) -> CodeError {
        // Sums over the entries of a vector.
        let short = 1.0 + GRAM_ROUNDING + self.width as f64 * f64::EPSILON;
        let norm = query.iter().map(|y| y * y).sum::<f64>().sqrt() * short;
        let form = self.form(simd, query, norm);
        let coded = codes.norm + codes.largest;
        let bounds = (self.lost, self.largest, coded);
        CodeError::new((form, norm), bounds, unresolved, (factor, slip), moves)
    }

    /// An upper bound of the form of a vector of at most that norm with the sums.
    fn form(&self, simd: Simd, vector: &[f64], norm: f64) -> f64 {
        let mut whole: Reused<f64> = vector.iter().copied().collect();
        whole.resize(self.width, 0.0);
        // Roundings of the sums, one behind another, and of the form itself.
        let rounded = GRAM_ROUNDING + (self.additions + 2 * self.width) as f64 * f64::EPSILON;
        simd.form(&self.sums, &whole).max(0.0) + rounded * self.trace() * norm * norm
    }
}

/// Returns a matrix without the entries left of the diagonal's groups.
fn packed(width: usize, whole: &[f64]) -> Vec<f64> {
    let places = Triangle::of(width, whole.len()).expect("a whole matrix");
    (0..width).flat_map(|row| &whole[places.row(row)]).copied().collect()
}

/// An upper bound of the norm of a vector in f64, of a few hundred entries at most in whole groups.
pub(super) fn norm(vector: &[f64]) -> f64 {
    let short = 1.0 + GRAM_ROUNDING + vector.len().next_multiple_of(16) as f64 * f64::EPSILON;
    vector.iter().map(|y| y * y).sum::<f64>().sqrt() * short
}

/// An upper bound of sums of squares over rows of so many entries, given what was computed: sums run at most `entries` terms deep in
/// f32, and terms may have been flushed.
pub(super) fn up(square: f64, rows: f64, entries: f64) -> f64 {
    square * (1.0 + (entries + 4.0) * 2.0 * U) + rows * entries * FLUSH
}

/// An upper bound of a norm, given what was computed.
pub(super) fn radius(norm: f64, width: usize) -> bf16 {
    // Sums of at most `width` squares in f32, and terms that were flushed.
    let bound = norm * (1.0 + width as f64 * 6e-8 + 1e-6) + (width as f64).sqrt() * 1.1e-19;
    let bits = (bound as f32).next_up().to_bits();
    bf16::from_bits(((bits + 0xffff) >> 16) as u16)
}

impl Sums {
    /// From sums that the f32 kernels computed over `count` weights.
    pub(crate) fn computed(weights: f64, squares: f64, largest: f64, count: usize) -> Self {
        let count = count as f64;
        Sums {
            upper: weights * (1.0 + ETA) + count * FLUSH,
            lower: weights * (1.0 - ETA),
            squares: squares * (1.0 + 4.0 * ETA) + count * FLUSH,
            largest: (largest * (1.0 + ETA)).max(FLUSH),
        }
    }
}

impl CodeError {
    /// Of queries about which nothing can be said.
    pub(crate) const NOTHING: CodeError = CodeError {
        total: f64::INFINITY,
        each: f64::INFINITY,
        rho: f64::INFINITY,
        slope: f64::INFINITY,
    };

    /// Given an upper bound of the form of a query and its norm, what the sums leave out, the largest loss, and the largest norm of
    /// a code; the rest as in [`Gram::code_error`].
    pub(super) fn new(
        (form, norm): (f64, f64),
        (lost, largest, coded): (f64, f64, f64),
        unresolved: f64,
        (factor, slip): (f64, f64),
        moves: usize,
    ) -> Self {
        let factor = factor.abs() * (1.0 + GRAM_ROUNDING);
        let total = factor * (form.sqrt() + norm * lost.sqrt()) * (1.0 + GRAM_ROUNDING);
        // Conversion, scale and factor; moving; the residual's own rounding.
        let roundings = 3.01 + 1.01 * moves as f64 + 1.01;
        let rho = factor * ((norm + unresolved) * coded * roundings * U + unresolved * coded)
            + slip * (norm + unresolved) * coded * (1.0 + GRAM_ROUNDING)
            + 2f64.powi(-120);
        // What overflows, or was not a number, bounds nothing.
        let bound = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
        CodeError {
            total: bound(total),
            each: bound(factor * norm * largest * (1.0 + GRAM_ROUNDING)),
            rho: bound(rho * (1.0 + GRAM_ROUNDING)),
            slope: bound(factor * norm * (1.0 + GRAM_ROUNDING)),
        }
    }

    /// A lower bound of the real mass of a set: its keys together, or each alone.
    pub(crate) fn mass_lower_of_few(&self, sums: &Sums) -> f64 {
        let alone = (-self.rho - self.each).exp() * sums.lower * (1.0 - GRAM_ROUNDING);
        self.mass_lower(sums).max(alone)
    }

    /// Returns `true` if scores by codes are useful; then none of them has overflowed either.
    pub(crate) fn says_something(&self) -> bool {
        self.total.is_finite() && self.rho < 1.0
    }

    /// Returns g: an upper bound of (e^x - 1 - x) / x^2 for errors of one score.
    pub(crate) fn growth(&self) -> f64 {
        growth(self.each)
    }

    /// An upper bound of the real mass of the set whose sums these are.
    pub(crate) fn mass_upper(&self, sums: &Sums) -> f64 {
        self.bound().mass_upper(sums)
    }

    /// Returns the part of bounds that many sets share.
    pub(super) fn bound(&self) -> MassBound {
        let CodeError { total, each, rho, .. } = *self;
        MassBound { total, each, growth: growth(each), factor: rho.exp() }
    }

    /// An upper bound of the real mass of a set of which `heavy` is a part and `light` the rest: each key of the first may be off by
    /// as much as one may, which is less than all may together if they are few.
    pub(crate) fn mass_upper_in_parts(&self, heavy: &Sums, light: &Sums) -> f64 {
        let bound = (self.rho + self.each).exp() * heavy.upper * (1.0 + GRAM_ROUNDING);
        let bound = (bound + self.mass_upper(light)) * (1.0 + GRAM_ROUNDING);
        if bound.is_nan() { f64::INFINITY } else { bound }
    }

    /// A lower bound of it.
    pub(crate) fn mass_lower(&self, sums: &Sums) -> f64 {
        let root = self.total * sums.squares.sqrt();
        let bound =
            (-self.rho).exp() * (sums.lower - root * (1.0 + GRAM_ROUNDING)) * (1.0 - GRAM_ROUNDING);
        if bound > 0.0 { bound } else { 0.0 }
    }

    /// Returns a bound on the distance of a single score from that of its code, which loses a vector of at most that norm.
    pub(crate) fn reach_of(&self, radius: f64) -> f64 {
        // A product of 0 and an infinity is no bound.
        (self.each.min(self.slope * radius) + self.rho) * (1.0 + GRAM_ROUNDING)
    }
}

/// An upper bound of `(e^x - 1 - x) / x^2` at `x = d`, which is its largest value over `|x| <= d`.
fn growth(d: f64) -> f64 {
    if d <= 1.0 {
        // The series 1/2 + d/6 + d^2/24 + .. is below the geometric one with the ratio of its first two terms.
        0.5 / (1.0 - d / 3.0) * (1.0 + GRAM_ROUNDING)
    } else {
        (d.exp_m1() - d) / (d * d) * (1.0 + GRAM_ROUNDING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simd() -> Simd {
        Simd::current().unwrap()
    }

    #[test]
    fn growth_is_above_its_series() {
        for i in 0..=400 {
            let d = f64::from(i) * 0.01;
            let (mut term, mut sum) = (0.5, 0.5);
            for k in 3..80 {
                term *= d / f64::from(k);
                sum += term;
            }
            assert!(growth(d) >= sum && growth(d) <= sum * 1.11, "{d}");
        }
        assert_eq!(growth(1e4), f64::INFINITY);
    }

    #[test]
    fn a_long_sum_is_bounded_with_its_roundings() {
        // Each addition may round, and here most of them round down: the sum ends 1.6e-10 too low.
        let (mut gram, count) = (Gram::new(16), 10_000_000);
        for _ in 0..count {
            gram.sums_mut()[0] += 0.1;
            gram.note(1, 0.0, 0.0, 0.0);
        }
        let exact = 0.1 * f64::from(count);
        assert!(gram.sums_mut()[0] < exact * (1.0 - 1e-10));
        assert!(gram.code_error(simd(), &[1.0], 0.0, (1.0, 0.0), 1).total.powi(2) >= exact);
    }

    #[test]
    fn what_is_not_a_number_bounds_nothing() {
        let mut gram = Gram::new(16);
        gram.sums_mut()[0] = f64::NAN;
        let code_error = gram.code_error(simd(), &[1.0; 3], 0.0, (1.0, 0.0), 1);
        let sums = Sums::computed(1.0, 1.0, 1.0, 1);
        assert_eq!(code_error.mass_upper(&sums), f64::INFINITY);
        assert_eq!(code_error.mass_lower(&sums), 0.0);
    }

    /// With equal weights and equal errors the inequalities are equalities, apart from the growth of small errors.
    #[test]
    fn masses_of_errors_that_all_point_one_way() {
        for n in [1.0f64, 7.0, 1000.0] {
            for each in [1e-9, 1e-3, 0.1, 0.9, 1.0, 1.1, 3.0, 9.0] {
                for rho in [0.0, 1e-6, 0.3] {
                    let code_error = CodeError { total: each * n.sqrt(), each, rho, slope: 0.0 };
                    let sums = Sums { upper: n, lower: n, squares: n, largest: 1.0 };
                    let (most, least) = (n * (each + rho).exp(), n * (-each - rho).exp());
                    let (upper, lower) =
                        (code_error.mass_upper(&sums), code_error.mass_lower(&sums));
                    assert!(upper >= most && upper <= most * 1.02, "{n} {each} {rho}: {upper}");
                    assert!(lower <= least, "{n} {each} {rho}: {lower}");
                    assert!(lower >= n * (1.0 - 1.01 * each - rho), "{n} {each} {rho}: {lower}");
                }
            }
        }
    }

    /// One heavy key whose error alone matters: its weight times the square of all errors.
    #[test]
    fn a_heavy_key_among_light_ones() {
        for each in [0.01, 0.5, 2.0f64] {
            let code_error = CodeError { total: each, each, rho: 0.0, slope: 0.0 };
            let sums = Sums { upper: 1.0, lower: 1.0, squares: 1.0, largest: 1.0 };
            assert!(code_error.mass_upper(&sums) >= each.exp());
            assert!(code_error.mass_lower(&sums) <= (-each).exp());
        }
    }

    #[test]
    fn computed_sums_allow_for_what_the_kernels_lose() {
        // 216 units on either side (`mass`), and what is flushed is below 2^-125.
        let (off, count) = (216.0 * U, 1000);
        let sums = Sums::computed(3.0, 2.0, 1.0, count);
        assert!(sums.upper * (1.0 - off) >= 3.0 && sums.lower * (1.0 + off) <= 3.0);
        assert!(sums.squares * (1.0 - off) * (1.0 - off) >= 2.0);
        assert!(sums.largest * (1.0 - off) >= 1.0);
        let nothing = Sums::computed(0.0, 0.0, 0.0, count);
        let flushed = 2f64.powi(-126);
        assert!(nothing.upper >= count as f64 * flushed && nothing.largest >= flushed);
        assert!(nothing.squares >= count as f64 * flushed * flushed);
        assert_eq!(nothing.lower, 0.0);
    }

    /// Errors along a query, of which some were left out of the sums: what they add up to is known.
    #[test]
    fn all_errors_of_a_query_together() {
        let mut gram = Gram::new(16);
        let residuals = [[1.0, 2.0, 2.0], [-2.0, 1.0, 0.5], [0.25, -3.0, 1.0]];
        for residual in &residuals {
            for (i, a) in residual.iter().enumerate() {
                for (j, b) in residual.iter().enumerate().skip(i) {
                    gram.sums_mut()[16 * i + j] += a * b;
                }
            }
        }
        let (lost, longest, coded) = (0.25, 14.0625f32, 100.0f32);
        gram.note(3, lost, longest, coded);
        for query in [[1.0, 2.0, 2.0], [3.0, -1.0, 0.5], [0.0, 0.0, 1.0]] {
            let dot = |a: &[f64; 3]| a.iter().zip(&query).map(|(a, q)| a * q).sum::<f64>();
            let norm = dot(&query).sqrt();
            for factor in [1.0, -0.5, 1e-3] {
                let size = f64::abs(factor);
                let square: f64 = residuals.iter().map(|r| dot(r) * dot(r)).sum();
                // What the sums leave out may point along the query, too (Minkowski).
                let all = size * (square.sqrt() + norm * lost.sqrt());
                let code_error = gram.code_error(simd(), &query, 0.0, (factor, 0.0), 1);
                assert!(
                    code_error.total >= all * (1.0 - 1e-14)
                        && code_error.total <= all * (1.0 + 1e-5)
                );
                let one = size * norm * f64::from(longest).sqrt();
                assert!(
                    code_error.each >= one * (1.0 - 1e-14) && code_error.each <= one * (1.0 + 1e-5)
                );
                assert!(code_error.reach_of(0.5) >= 0.5 * size * norm);
                // Three roundings of a score and those of moving the key into its frame.
                let key = f64::from(coded).sqrt();
                for moves in [1, 7] {
                    let rho = gram.code_error(simd(), &query, 0.0, (factor, 0.0), moves).rho;
                    assert!(rho >= size * norm * key * (3.0 + moves as f64) * U);
                }
                // A query that its numbers leave a part of, and a factor that is off.
                let rho = gram.code_error(simd(), &query, 0.125, (factor, 0.0), 1).rho;
                assert!(rho >= size * 0.125 * key + code_error.rho && code_error.rho < rho);
                let rho = gram.code_error(simd(), &query, 0.0, (factor, 1e-3), 1).rho;
                assert!(rho >= 1e-3 * norm * key + code_error.rho);
            }
        }
        // What is joined counts, in every part.
        let mut other = Gram::new(16);
        other.note(1, 0.5, 100.0, 400.0);
        other.sums_mut()[0] = 9.0;
        gram.join(&other);
        let code_error = gram.code_error(simd(), &[1.0, 0.0, 0.0], 0.0, (1.0, 0.0), 1);
        assert!(code_error.total >= (1.0 + 4.0 + 0.0625 + 9.0f64).sqrt() + 0.75f64.sqrt());
        assert!(code_error.each >= 10.0 && code_error.rho >= 4.0 * 20.0 * U);
    }

    #[test]
    fn radii_are_not_below_what_is_lost() {
        for norm in [0.0, 1e-30, 1e-19, 1e-3, 1.0, 1.003_906_25, 77.7, 1e30] {
            for width in [16, 128] {
                let radius = radius(norm, width).to_f32();
                // Sums of `width` squares in f32 are off by as many roundings; squares below 2^-126 were flushed.
                let most = norm * (1.0 + width as f64 / 2.0 * 2f64.powi(-24))
                    + (width as f64 * 2f64.powi(-126)).sqrt();
                assert!(f64::from(radius) >= most, "{norm} {width}");
                assert!(f64::from(radius) <= most * 1.02 + 1e-17, "{norm} {width}");
            }
        }
    }
}
