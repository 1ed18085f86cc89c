//! Bounds of values and of what their codes lose, for all values with codes and for any part of them.
//!
//! Let `v` be a stored value, `c` the stored mean, and `b` what its code stands for. The kernel computes `m`, the f32 number next to
//! `v - c`, and `r = m - b`, which is exact: an entry of `b` is 0, or that of `m` is between its half and its double (Sterbenz). So
//! `s = v - c - b` is `r` and a rounding of at most `U |m|`. The norm of a matrix here is the root of the largest eigenvalue of its Gram
//! matrix, and at most its Frobenius norm. By Minkowski
//!
//! `|S| <= |R| + U |M|_F`, `|V - C| <= |B| + |S|`, and `|M|_F <= |B|_F + |R|_F`.
//!
//! Gram matrices of `B` and of `R` are sums that leave out rows of squares `lost` in total (`gram`), which adds its root to both norms.
//!
//! The largest eigenvalue of a matrix `G` is at most the root of the Frobenius norm of `G G`. That has f64 roundings of at most `d 2^-53`
//! of the square of the Frobenius norm of `G`, which is at most `d` times the Frobenius norm of `G G`. Appended values add at most
//! their trace to the eigenvalue. The sums are rounded as in `gram`. What underflows lowers no entry of `G G` by more than `d 2^-1075`, and
//! no square of these by more than 2^-1075.

use super::gram::{GRAM_ROUNDING, Gram, U};
use crate::kernels::{BIAS, Encoded, Packed, Simd};

/// The share by which a trace, or the largest eigenvalue, grows before that is bounded anew; and in how many steps the latter.
const GROWN: f64 = 0.125;
const STEPS: f64 = 128.0;
/// Bound on what underflow takes from an eigenvalue, for each entry.
const TINY: f64 = 2.2e-81;
/// The bounds here are sums and products of a few numbers.
const UP: f64 = 1.0 + GRAM_ROUNDING;

/// Bounds on the largest eigenvalues of the matrices of values and of what codes lose: of each the bound, its trace then, and how many
/// additions it had.
pub(super) type Tops = [[f64; 3]; 2];

/// Upper bounds over all values with codes; they hold over any part of these, too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ValueBounds {
    /// Root of the largest eigenvalue of the sum of (v - c) (v - c)^T over values v, c being the stored mean.
    pub(crate) spread: f64,
    /// The same of what codes lose of v - c.
    pub(crate) loss: f64,
    /// The largest norm of v - c.
    pub(crate) farthest: f64,
    /// The largest norm of what a code loses.
    pub(crate) lost: f64,
}

impl ValueBounds {
    /// Of what nothing is known of.
    pub(crate) const NOTHING: Self = ValueBounds {
        spread: f64::INFINITY,
        loss: f64::INFINITY,
        farthest: f64::INFINITY,
        lost: f64::INFINITY,
    };
}

/// Sums of outer products of what codes of values stand for, and the largest eigenvalues of these and of the Gram matrix of what codes
/// lose.
#[derive(Debug, Clone)]
pub(super) struct Spread<'a> {
    gram: Gram<'a>,
    decoded: Top,
    residuals: Top,
}

impl PartialEq for Spread<'_> {
    /// Ignores eigenvalues, which are only bounds.
    fn eq(&self, other: &Self) -> bool {
        self.gram == other.gram
    }
}

impl<'a> Spread<'a> {
    /// Of stored sums, beside those of what codes lose, and of what [`Spread::tops`] returned of both, if that is at hand: finding it
    /// takes as long as a product of matrices.
    pub(super) fn new(gram: Gram<'a>, residuals: &Gram<'_>, tops: Option<Tops>) -> Self {
        let [decoded, residuals] = match tops {
            Some(tops) => tops.map(|[bound, trace, additions]| Top { bound, trace, additions }),
            None => [Top::of(&gram), Top::of(residuals)],
        };
        Spread { gram, decoded, residuals }
    }

    /// Lends the sums to who adds to them, and gives them back to [`Spread::put_sums`].
    pub(super) fn take_sums(&mut self) -> Gram<'a> {
        std::mem::replace(&mut self.gram, Gram::new(0))
    }

    /// Takes back sums with those of appended values, which `residuals` have as well.
    pub(super) fn put_sums(&mut self, sums: Gram<'a>, residuals: &Gram<'_>) {
        self.gram = sums;
        self.decoded.follow(&self.gram);
        self.residuals.follow(residuals);
    }
}

impl Spread<'_> {
    pub(super) fn gram(&self) -> &Gram<'_> {
        &self.gram
    }

    /// Returns the bounds on the largest eigenvalues.
    pub(super) fn tops(&self) -> Tops {
        [self.decoded, self.residuals].map(|top| [top.bound, top.trace, top.additions])
    }

    /// Takes up the sums of appended values, which `residuals` have been joined with.
    pub(super) fn join(&mut self, other: &Gram<'_>, residuals: &Gram<'_>) {
        let mut sums = self.take_sums();
        sums.join(other);
        self.put_sums(sums, residuals);
    }

    /// Returns the bounds, given the sums of what codes lose.
    pub(super) fn bounds(&self, residuals: &Gram<'_>) -> ValueBounds {
        let (_, largest, norm) = residuals.bounds();
        let (decoded, all_decoded) = self.decoded.norms(&self.gram);
        let (rest, all_rest) = self.residuals.norms(residuals);
        let loss = (rest + U * (all_decoded + all_rest)) * UP;
        let bounds = ValueBounds {
            spread: (decoded + loss) * UP,
            loss,
            farthest: norm * (1.0 + U) * UP,
            lost: (largest + U * norm) * UP,
        };
        let bound = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
        let ValueBounds { spread, loss, .. } = bounds;
        ValueBounds { spread: bound(spread), loss: bound(loss), ..bounds }
    }
}

/// Adds the outer products of what codes stand for to sums: of a value's bytes and its scale. `rows` is scratch for whole steps of
/// values, its last ones zero.
pub(super) fn add_decoded(
    simd: Simd,
    (bytes, encoded): (&[u8], &[Encoded]),
    rows: &mut [f32],
    packed: &mut Packed,
    gram: &mut Gram<'_>,
) {
    let (width, mut largest) = (bytes.len() / encoded.len(), 0.0f32);
    let values = bytes.chunks_exact(width).zip(encoded);
    for (row, (bytes, value)) in rows.chunks_exact_mut(width).zip(values) {
        let scale = value.scale.to_f32();
        largest = largest.max(scale);
        for (to, byte) in row.iter_mut().zip(bytes) {
            // A product of numbers of eight bits: exact.
            *to = scale * (f32::from(*byte) - f32::from(BIAS));
        }
    }
    // Multiples of the largest scale lose nothing.
    let left = simd.outer(rows, width, largest, packed, gram.sums_mut());
    gram.note_sums(encoded.len(), left);
}

/// The largest eigenvalue of sums as they were once.
#[derive(Debug, Clone, Copy)]
struct Top {
    bound: f64,
    trace: f64,
    additions: f64,
}

impl Top {
    fn of(gram: &Gram<'_>) -> Self {
        let additions = gram.additions() as f64;
        Top { bound: largest_eigenvalue(&gram.whole()), trace: gram.trace(), additions }
    }

    /// Bounds it anew if the sums have grown by much: all of them, or the bound in some steps.
    fn follow(&mut self, gram: &Gram<'_>) {
        let (grown, additions) = (gram.trace() - self.trace, gram.additions() as f64);
        let stepwise = grown > GROWN * self.bound && additions >= self.additions + STEPS;
        if stepwise || grown > GROWN * self.trace {
            *self = Top::of(gram);
        }
    }

    /// Returns bounds on the norms of the matrix of all rows: that of its Gram matrix, and of Frobenius.
    fn norms(&self, gram: &Gram<'_>) -> (f64, f64) {
        let (trace, (lost, ..)) = (gram.trace(), gram.bounds());
        let (additions, width) = (gram.additions(), gram.width());
        let rounded = GRAM_ROUNDING + (additions + 2 * width) as f64 * f64::EPSILON;
        // Of the sums then and now, and of both traces.
        let rounded = 4.0 * rounded * trace;
        let top = self.bound + (trace - self.trace) + rounded;
        let left_out = lost.sqrt();
        ((top.sqrt() + left_out) * UP, ((trace + rounded).sqrt() + left_out) * UP)
    }
}

/// An upper bound on the largest eigenvalue of a symmetric matrix, of which the entries left of the diagonal's groups are not read.
fn largest_eigenvalue(sums: &[f64]) -> f64 {
    let width = sums.len().isqrt();
    let entry = |i: usize, j: usize| sums[i.min(j) * width + i.max(j)];
    let whole: Vec<f64> = (0..sums.len()).map(|at| entry(at / width, at % width)).collect();
    let (mut fourths, mut row) = (0.0, vec![0.0; width]);
    for i in 0..width {
        let row = &mut row[i..];
        row.fill(0.0);
        for (k, &factor) in whole[i * width..][..width].iter().enumerate() {
            if factor != 0.0 {
                let other = &whole[k * width + i..(k + 1) * width];
                row.iter_mut().zip(other).for_each(|(sum, entry)| *sum += factor * entry);
            }
        }
        // The entries right of the diagonal are below it as well.
        fourths += 2.0 * row.iter().map(|sum| sum * sum).sum::<f64>() - row[0] * row[0];
    }
    fourths.sqrt().sqrt() * (UP + (width * width) as f64 * f64::EPSILON) + width as f64 * TINY
}

#[cfg(test)]
mod tests {
    use super::super::codes::Codes;
    use super::super::content::Content;
    use super::super::element::Coded;
    use super::super::made::normal;
    use super::*;
    use crate::ValueIndex;
    use crate::kernels::{Keys, LANES};
    use crate::rows::Vectors;
    use half::{bf16, f16};
    use std::borrow::Cow;

    fn simd() -> Simd {
        Simd::current().unwrap()
    }

    fn built<E: Coded>(data: &[E], dim: usize) -> Codes<'static> {
        let (n, values) = (data.len() / dim, Keys::new(data, dim, dim));
        let mut codes = Codes::plain(Content::Values, dim, values, n);
        appended(&mut codes, data, dim);
        codes
    }

    fn appended<E: Coded>(codes: &mut Codes<'_>, data: &[E], dim: usize) {
        let n = data.len() / dim;
        let room = codes.make_room(n, 1).unwrap();
        codes.append(simd(), Keys::new(data, dim, dim), (n, room), 1).unwrap();
    }

    /// Returns what a value's code stands for, read from where its bytes are to lie.
    fn decoded(codes: &Codes<'_>, value: usize) -> Vec<f64> {
        let (dim, width) = codes.widths();
        let (lines, scales) = codes.group(value / 16);
        let r = value % 16;
        let half = lines.len() == width / 16 * 2 * 64;
        assert!(half || lines.len() == width / 16 * 4 * 64);
        let place = |r: usize, j: usize| (r / 4 * (width / 16) + j / 16) * 64 + j % 16 * 4 + r % 4;
        let byte = |j: usize| match (half, r) {
            (false, _) => lines[place(r, j)],
            (true, 0..8) => lines[place(r, j)] << 4,
            (true, _) => lines[place(r - 8, j)] & 0xf0,
        };
        assert!((dim..width).all(|j| byte(j) == 128));
        (0..dim).map(|j| f64::from(scales[r]) * (f64::from(byte(j)) - 128.0)).collect()
    }

    /// The root of the largest eigenvalue of the Gram matrix of rows, from below.
    fn norm_of(rows: &[Vec<f64>]) -> f64 {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let length = |a: &[f64]| dot(a, a).sqrt();
        let longest = rows.iter().max_by(|a, b| length(a).total_cmp(&length(b)));
        let Some(longest) = longest.filter(|row| length(row) > 0.0) else { return 0.0 };
        let (mut along, mut found) = (longest.clone(), 0.0);
        for _ in 0..60 {
            let size = length(&along);
            for entry in &mut along {
                *entry /= size;
            }
            let (mut next, mut square) = (vec![0.0; along.len()], 0.0);
            for row in rows {
                let part = dot(row, &along);
                square += part * part;
                next.iter_mut().zip(row).for_each(|(to, entry)| *to += part * entry);
            }
            (along, found) = (next, f64::sqrt(square));
        }
        found
    }

    /// Returns truths about values as shares of their bounds: spread, loss, farthest, lost.
    fn shares<E: Coded>(codes: &Codes<'_>, data: &[E], dim: usize) -> [f64; 4] {
        let uncoded: Vec<u32> = codes.uncoded().collect();
        let (mut moved, mut lost) = (Vec::new(), Vec::new());
        for (i, value) in data.chunks_exact(dim).enumerate() {
            if uncoded.contains(&(i as u32)) {
                continue;
            }
            let entries = value.iter().zip(codes.mean());
            let row: Vec<f64> =
                entries.map(|(v, c)| f64::from(v.widen()) - f64::from(*c)).collect();
            lost.push(row.iter().zip(decoded(codes, i)).map(|(x, b)| x - b).collect::<Vec<f64>>());
            moved.push(row);
        }
        let longest = |rows: &[Vec<f64>]| {
            let square = |row: &Vec<f64>| row.iter().map(|entry| entry * entry).sum::<f64>();
            rows.iter().map(square).fold(0.0, f64::max).sqrt()
        };
        let ValueBounds { spread, loss, farthest, lost: most } = codes.value_bounds();
        let truths = [norm_of(&moved), norm_of(&lost), longest(&moved), longest(&lost)];
        let shares = [spread, loss, farthest, most];
        let shares = std::array::from_fn(|i| truths[i] / shares[i]);
        assert!(shares.iter().all(|share| *share <= 1.0), "{dim}: {shares:?}");
        shares
    }

    /// Values at random around a mean, with directions of their own sizes.
    fn random(n: usize, dim: usize, seed: u64) -> Vec<f32> {
        let entry = |(i, x): (usize, f32)| x / (1.0 + (i % dim) as f32 * 0.2) + 3.3;
        normal(n * dim, seed).into_iter().enumerate().map(entry).collect()
    }

    #[test]
    fn bounds_of_values_at_random() {
        for (seed, dim) in [1, 16, 20, 64, 128].into_iter().enumerate() {
            let data = random(700, dim, seed as u64 + 1);
            let [spread, loss, farthest, lost] = shares(&built(&data, dim), &data, dim);
            assert!(
                spread > 0.7 && loss > 0.4 && farthest > 0.999 && lost > 0.98,
                "{dim} {spread} {loss}"
            );
            let half: Vec<f16> = data.iter().map(|x| f16::from_f32(*x)).collect();
            shares(&built(&half, dim), &half, dim);
            let brain: Vec<bf16> = data.iter().map(|x| bf16::from_f32(*x)).collect();
            shares(&built(&brain, dim), &brain, dim);
        }
    }

    /// Around a mean far away, by which codes are much longer than what they are of.
    #[test]
    fn what_codes_stand_for_is_no_longer_than_said() {
        let dim = 16;
        for far in [0.0, 3.0, 1e4] {
            let data = normal(200 * dim, 9);
            let values = Keys::new(&data, dim, dim);
            let mut codes = Codes::plain(Content::Values, dim, values, 200);
            codes.move_mean(&[far; 16]);
            appended(&mut codes, &data, dim);
            let norm = |i: usize| {
                let entries = decoded(&codes, i).into_iter().zip(codes.mean());
                entries.map(|(b, c)| (b + f64::from(*c)).powi(2)).sum::<f64>().sqrt()
            };
            let longest = (0..200).map(norm).fold(0.0, f64::max);
            assert!(longest <= codes.longest_coded(), "{far}");
            assert_eq!(longest > 2.0 * codes.longest(), far > 100.0, "{far}");
        }
    }

    /// All values are one, so that all norms add up.
    #[test]
    fn bounds_of_values_that_lose_the_same() {
        // A residual; one that is rounded to nothing; a value that the frame rounds.
        let cases: [(&[f32], f32); 4] = [
            (&[100.3], 0.0),
            (&[127.0, 5.3], 0.0),
            (&[127.0, 5.001], 0.0),
            (&[127.0, 64.0], 3.7e-6),
        ];
        for (value, mean) in cases {
            let data: Vec<f32> = value.iter().copied().cycle().take(600 * value.len()).collect();
            let (dim, values) = (value.len(), Keys::new(&data[..], value.len(), value.len()));
            let mut codes = Codes::plain(Content::Values, dim, values, 0);
            codes.move_mean(&vec![mean; dim]);
            appended(&mut codes, &data, dim);
            let [spread, _, farthest, _] = shares(&codes, &data, dim);
            assert!(spread > 0.995 && farthest > 0.999, "{value:?} {spread} {farthest}");
        }
    }

    #[test]
    fn bounds_of_constants_and_of_a_huge_value() {
        let data = vec![0.7f32; 50 * 20];
        let ValueBounds { spread, loss, .. } = built(&data, 20).value_bounds();
        assert!(spread < 1e-5 && loss < 1e-6);
        shares(&built(&data, 20), &data, 20);
        for huge in [1e3f32, 1e18, 3e38] {
            let mut data = random(300, 20, 5);
            data[77 * 20] = huge;
            let codes = built(&data, 20);
            assert_eq!(
                codes.uncoded().collect::<Vec<_>>(),
                if huge > 1e30 { vec![77] } else { vec![] }
            );
            shares(&codes, &data, 20);
        }
        // Beside the longest value the sums round the others, which lie along it, to nothing.
        let mut data = vec![127.0f32 / 512.0; 256];
        data[3] = 127.0;
        let mut codes = Codes::plain(Content::Values, 1, Keys::new(&data[..], 1, 1), 0);
        appended(&mut codes, &data, 1);
        shares(&codes, &data, 1);
    }

    #[test]
    fn bounds_hold_when_values_come_and_go() {
        let (dim, n) = (20, 400);
        for (one_way, bits) in [(false, 8), (true, 8), (false, 4), (true, 4)] {
            let mut data = random(n, dim, 9);
            if one_way {
                data.iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = if i % dim == 0 { 9.1 } else { 1.0 });
                data[0] = -800.0;
            }
            let vectors = |data: &[f32]| -> ValueIndex<'static> {
                let values = Vectors::new("values", data, &[data.len() / dim, dim]).unwrap();
                ValueIndex::with_bits(&values, bits).unwrap()
            };
            let mut index = vectors(&data[..200 * dim]);
            for at in 200..n {
                let one = Vectors::new("values", &data[at * dim..][..dim], &[1, dim]).unwrap();
                index.append(&one).unwrap();
                if at % 9 == 0 {
                    shares(index.head(0), &data[..(at + 1) * dim], dim);
                }
            }
            let [grown, _, _, _] = shares(index.head(0), &data, dim);
            assert!(grown > 0.3, "{grown}");
            let all = Vectors::new("values", &data[..], &[n, dim]).unwrap();
            let mut fewer = index.snapshot();
            fewer.truncate(333, &all).unwrap();
            shares(fewer.head(0), &data[..333 * dim], dim);
            index.evict(&[&[0, 7, 8, 300]], &all).unwrap();
            let kept: Vec<f32> = data
                .chunks_exact(dim)
                .enumerate()
                .filter(|(i, _)| ![0, 7, 8, 300].contains(i))
                .flat_map(|(_, row)| row.iter().copied())
                .collect();
            shares(index.head(0), &kept, dim);
            index.check(&Vectors::new("values", &kept[..], &[n - 4, dim]).unwrap()).unwrap();
            assert_eq!(index.bits(), bits);
            // Values of which little is left are encoded anew.
            index.truncate(3, &Vectors::new("values", &kept[..], &[n - 4, dim]).unwrap()).unwrap();
            shares(index.head(0), &kept[..3 * dim], dim);
        }
    }

    /// Every part of the bounds alone, of sums made by hand.
    #[test]
    fn every_term_counts() {
        let gram = |square: f64, bounds: [f64; 4]| {
            let mut sums = vec![0.0; 256];
            sums[17] = square;
            Gram::of_parts(16, Cow::Owned(sums), bounds).unwrap()
        };
        let (left_b, left_r, largest, norm) = (0.25, 0.0625, 2.0, 7.0);
        let mut residuals = gram(9.0, [left_r * left_r, largest, norm, 1.0]);
        let decoded = gram(25.0, [left_b * left_b, 0.0, 0.0, 1.0]);
        let mut spread = Spread::new(decoded, &residuals, None);
        let bounded = |spread: &Spread<'_>, residuals: &Gram<'_>, (b, r): (f64, f64)| {
            let ValueBounds { spread, loss, farthest, lost } = spread.bounds(residuals);
            let most = r + left_r + U * (b + left_b + r + left_r);
            let truths = [b + left_b + most, most, norm * (1.0 + U), largest + U * norm];
            for (bound, truth) in [spread, loss, farthest, lost].into_iter().zip(truths) {
                assert!(bound >= truth && bound <= truth * (1.0 + 1e-10), "{bound} {truth}");
            }
        };
        bounded(&spread, &residuals, (5.0, 3.0));
        // What came since the eigenvalues were bounded, and is too little to bound them anew.
        residuals.join(&gram(1.0, [0.0; 4]));
        spread.join(&gram(2.0, [0.0; 4]), &residuals);
        bounded(&spread, &residuals, (f64::sqrt(27.0), f64::sqrt(10.0)));
    }

    #[test]
    fn roundings_of_long_sums_count() {
        let (mut gram, count) = (Gram::new(LANES), 10_000_000);
        for _ in 0..count {
            gram.sums_mut()[0] += 0.1;
            gram.note(1, 0.0, 0.0, 0.0);
        }
        let exact = (0.1 * f64::from(count)).sqrt();
        let (top, all) = Top::of(&gram).norms(&gram);
        assert!(top >= exact && all >= exact && top < exact * 1.001);
    }

    /// Eigenvalues of which some are known: of a matrix of ones beside the identity.
    #[test]
    fn the_largest_eigenvalue() {
        for width in [16, 32, 128] {
            for ones in [0.0, 0.5, 1.0] {
                let mut sums = vec![0.0; width * width];
                for i in 0..width {
                    (i..width).for_each(|j| sums[i * width + j] = ones);
                    sums[i * width + i] = 1.0;
                }
                let top = 1.0 + ones * (width as f64 - 1.0);
                let rest = (1.0 - ones).powi(4) * (width as f64 - 1.0);
                let bound = largest_eigenvalue(&sums);
                let expected = (top.powi(4) + rest).powf(0.25);
                assert!(bound >= top && (bound / expected - 1.0).abs() < 1e-11, "{width} {ones}");
            }
        }
    }
}
