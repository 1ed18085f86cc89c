//! Keys as bytes: encoding them, summing the outer products of what encoding loses, and scoring them.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of [`Simd`]
//! that run a pass.

use half::bf16;

use super::bytes::{ByteDots, LINE, STEP, Step};
use super::dispatch::{BytePass, Pass, Simd};
use super::lanes::{Element, LANES, Lanes, Level};
use super::panel::Lent;

/// The largest code of either sign.
const CODE: f32 = 127.0;
/// What a byte is more than its code.
pub(crate) const BIAS: u8 = 128;
/// Keys whose outer products are summed in integers.
pub(crate) const PANEL: usize = 256;
/// 2^23 + 2^22: a float of this size has a last place of 1, so adding it rounds to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;
/// Scales of keys lie in this range: their reciprocals are normal numbers, and so are products of them with codes.
const SCALES: (f32, f32) = (1e-30, 1e28);

/// How keys are moved before they are rounded: `rotation(key - mean)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// One entry for each dimension, in whole groups.
    pub(crate) mean: &'a [f32],
    /// Blocks of so many dimensions go through a Hadamard matrix (a power of two); 1 leaves keys as they are.
    pub(crate) block: usize,
    /// -1 or 1 for each dimension: what it is multiplied by before the matrix.
    pub(crate) signs: &'a [f32],
}

/// What encoding finds out about a key.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Encoded {
    /// What a code is to be multiplied by; 0 if the key cannot be encoded.
    pub(crate) scale: bf16,
    /// Sum of squares of what encoding loses, about.
    pub(crate) lost: f32,
    /// Sum of squares of the moved key, about.
    pub(crate) square: f32,
    /// The largest absolute entry of the key; NaN if there is one that is not finite.
    pub(crate) largest: f32,
}

/// Rows of keys in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys<'a, E> {
    data: &'a [E],
    stride: usize,
    dim: usize,
}

impl<'a, E: Element> Keys<'a, E> {
    /// `data` starts with the first row and ends with the last.
    pub(crate) fn new(data: &'a [E], stride: usize, dim: usize) -> Self {
        Keys { data, stride, dim }
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    #[inline(always)]
    pub(crate) fn row(&self, at: usize) -> &'a [E] {
        &self.data[at * self.stride..][..self.dim]
    }

    /// The rows from one on.
    pub(crate) fn behind(self, at: usize) -> Self {
        Keys { data: self.data.get(at * self.stride..).unwrap_or(&[]), ..self }
    }

    /// Asks for all lines of a row, wherever in a line it begins.
    #[inline(always)]
    pub(super) unsafe fn fetch<L: Level>(&self, at: usize) {
        let row = self.row(at);
        let (start, bytes) = (row.as_ptr().cast::<u8>(), size_of_val(row));
        // A prefetch never faults.
        for at in (0..bytes).step_by(64) {
            L::prefetch_far(start.wrapping_add(at));
        }
        L::prefetch_far(start.wrapping_add(bytes - 1));
    }

    /// Consecutive rows where they lie, if they are f32.
    pub(super) fn lend(&self, from: usize, count: usize) -> Option<Lent<'a>>
    where
        E: Element<Scalar = f32>,
    {
        let from = from * self.stride;
        let data = &self.data[from..from + (count - 1) * self.stride + self.dim];
        Some(Lent { data: E::scalars(data)?, stride: self.stride })
    }

    /// The sixteen entries from a dimension on, with zeros behind the last.
    #[inline(always)]
    pub(super) unsafe fn group<L: Level>(
        row: &[E],
        at: usize,
    ) -> <E::Scalar as super::Scalar>::Lanes<L> {
        let rest = &row[at..];
        if rest.len() >= LANES {
            return E::load::<L>(rest.as_ptr());
        }
        E::load::<L>(padded(rest).as_ptr())
    }
}

/// Entries with zeros behind them; apart from the loops that load groups, which it would cost registers.
#[inline(never)]
fn padded<E: Element>(rest: &[E]) -> [E; LANES] {
    let mut padded = [E::default(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

struct Encode<'a, E> {
    keys: Keys<'a, E>,
    from: usize,
    frame: Frame<'a>,
    /// Per key as many bytes as there are dimensions in whole groups.
    bytes: &'a mut [u8],
    /// Per key the moved key less what its code stands for.
    residuals: &'a mut [f32],
    encoded: &'a mut [Encoded],
}

/// The Hadamard matrix of a power of two, not normalised, in place.
#[inline(always)]
fn hadamard(block: &mut [f32]) {
    let mut half = 1;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

impl<E: Element<Scalar = f32>> Pass for Encode<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let width = self.frame.mean.len();
        let rows = self.residuals.chunks_exact_mut(width).zip(self.bytes.chunks_exact_mut(width));
        for (r, ((residual, bytes), encoded)) in rows.zip(self.encoded.iter_mut()).enumerate() {
            let key = self.keys.row(self.from + r);
            let zero = L::F32::splat(0.0);
            let (mut largest, mut spoiled) = (zero, zero);
            let (mut reach, mut square) = (zero, zero);
            for at in (0..width).step_by(LANES) {
                let lanes = Keys::group::<L>(key, at);
                largest = largest.max(lanes.max(zero.sub(lanes)));
                // 0 for finite entries, NaN for others.
                spoiled = lanes.sub(lanes).add(spoiled);
                let moved = lanes.sub(L::F32::load(self.frame.mean[at..].as_ptr()));
                moved.store(residual[at..].as_mut_ptr());
                reach = reach.max(moved.max(zero.sub(moved)));
                square = moved.mul_add(moved, square);
            }
            if self.frame.block > 1 {
                for (entry, sign) in residual.iter_mut().zip(self.frame.signs) {
                    *entry *= sign;
                }
                residual[..self.keys.dim].chunks_exact_mut(self.frame.block).for_each(hadamard);
                (reach, square) = (zero, zero);
                for group in residual.chunks_exact(LANES) {
                    let moved = L::F32::load(group.as_ptr());
                    reach = reach.max(moved.max(zero.sub(moved)));
                    square = moved.mul_add(moved, square);
                }
            }
            encoded.largest = largest.largest() + spoiled.sum();
            encoded.square = square.sum();
            let scale = rounded_up(reach.largest() / CODE);
            // Too large, or not a number at all: no codes for this one.
            if !(scale.to_f32() <= SCALES.1 && encoded.square < f32::INFINITY) {
                encoded.scale = bf16::ZERO;
                residual.fill(0.0);
                bytes.fill(BIAS);
                encoded.lost = f32::INFINITY;
                continue;
            }
            encoded.scale = scale;
            let inverse = L::F32::splat(1.0 / scale.to_f32());
            let scale = L::F32::splat(0.0 - scale.to_f32());
            let (round, top) = (L::F32::splat(ROUND), L::F32::splat(CODE));
            let bottom = L::F32::splat(-CODE);
            let offset = L::F32::splat(ROUND + f32::from(BIAS));
            let mut lost = zero;
            for (group, bytes) in
                residual.chunks_exact_mut(LANES).zip(bytes.chunks_exact_mut(LANES))
            {
                let moved = L::F32::load(group.as_ptr());
                let code = moved.mul_add(inverse, round).sub(round).min(top).max(bottom);
                bytes.copy_from_slice(&L::low_bytes(code.add(offset)));
                let rest = code.mul_add(scale, moved);
                lost = rest.mul_add(rest, lost);
                rest.store(group.as_mut_ptr());
            }
            encoded.lost = lost.sum();
        }
    }
}

/// The smallest bfloat16 number that is not below a value, and in the range of scales.
#[inline(always)]
fn rounded_up(value: f32) -> bf16 {
    let value = value.max(SCALES.0);
    bf16::from_bits((value.to_bits().wrapping_add(0xffff) >> 16) as u16)
}

/// Scratch of [`Simd::outer`].
#[derive(Debug, Default)]
pub(crate) struct Packed {
    bytes: Vec<u8>,
    signed: Vec<i8>,
    totals: Vec<i32>,
}

struct Pack<'a> {
    residuals: &'a [f32],
    width: usize,
    inverse: f32,
    unit: f32,
    /// Four keys' bytes of a dimension behind each other, dimension after dimension.
    packed: &'a mut [u8],
}

impl Pass for Pack<'_> {
    type Output = f64;

    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let four = STEP * self.width;
        let mut total = 0.0;
        for (rows, packed) in
            self.residuals.chunks_exact(four).zip(self.packed.chunks_exact_mut(four))
        {
            let (inverse, round) = (L::F32::splat(self.inverse), L::F32::splat(ROUND));
            let offset = L::F32::splat(ROUND + f32::from(BIAS));
            let unit = L::F32::splat(-self.unit);
            let mut lost = L::F32::splat(0.0);
            for (at, to) in packed.chunks_exact_mut(LINE).enumerate() {
                let mut bytes = [[0; LANES]; STEP];
                for (r, bytes) in bytes.iter_mut().enumerate() {
                    let rest = L::F32::load(rows[r * self.width + at * LANES..].as_ptr());
                    let code = rest.mul_add(inverse, round).sub(round);
                    *bytes = L::low_bytes(code.add(offset));
                    let left = code.mul_add(unit, rest);
                    lost = left.mul_add(left, lost);
                }
                // As words, so that compilers see vectors.
                let [a, b, c, d] = bytes.map(|row| row.map(u32::from));
                for (i, to) in to.as_chunks_mut::<STEP>().0.iter_mut().enumerate() {
                    *to = (a[i] | b[i] << 8 | c[i] << 16 | d[i] << 24).to_le_bytes();
                }
            }
            total += f64::from(lost.sum());
        }
        total
    }
}

/// Rows and groups of columns of a tile of outer products.
const TILE: (usize, usize) = (4, 2);

struct Outer<'a> {
    packed: &'a [u8],
    /// The same without the bias.
    signed: &'a [i8],
    /// The sum of each dimension's numbers.
    totals: &'a mut [i32],
    width: usize,
    square: f64,
    sums: &'a mut [f64],
}

impl Outer<'_> {
    /// The tile of rows `i ..` and columns `j ..`.
    #[inline(always)]
    unsafe fn tile<B: ByteDots, const GROUPS: usize>(&mut self, i: usize, j: usize) {
        let mut sums = [[B::short_zero(); GROUPS]; TILE.0];
        let four = STEP * self.width;
        for (keys, signed) in self.packed.chunks_exact(four).zip(self.signed.chunks_exact(four)) {
            let rows = signed[STEP * i..][..STEP * TILE.0].as_chunks::<STEP>().0;
            let columns = &keys[STEP * j..][..GROUPS * LINE];
            for (sums, row) in sums.iter_mut().zip(rows) {
                for (sum, line) in sums.iter_mut().zip(columns.chunks_exact(LINE)) {
                    *sum = B::short_add(*sum, line.as_ptr(), *row);
                }
            }
        }
        let totals = self.totals[i..i + TILE.0].iter();
        for (r, (sums, &total)) in sums.into_iter().zip(totals).enumerate() {
            for (g, sum) in sums.into_iter().enumerate() {
                let to = &mut self.sums[(i + r) * self.width + j + g * LANES..][..LANES];
                for (to, sum) in to.iter_mut().zip(B::short_sums(sum)) {
                    *to += self.square * f64::from(sum - i32::from(BIAS) * total);
                }
            }
        }
    }
}

impl BytePass for Outer<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let four = STEP * self.width;
        let keys = i32::from(BIAS) * (self.packed.len() / self.width) as i32;
        for (g, totals) in self.totals.chunks_exact_mut(LANES).enumerate() {
            let mut sum = B::short_zero();
            for keys in self.packed.chunks_exact(four) {
                sum = B::short_add(sum, keys[g * LINE..][..LINE].as_ptr(), [1; STEP]);
            }
            totals.copy_from_slice(&B::short_sums(sum).map(|sum| sum - keys));
        }
        for i in (0..self.width).step_by(TILE.0) {
            let mut j = i / LANES * LANES;
            while j + TILE.1 * LANES <= self.width {
                self.tile::<B, { TILE.1 }>(i, j);
                j += TILE.1 * LANES;
            }
            while j < self.width {
                self.tile::<B, 1>(i, j);
                j += LANES;
            }
        }
    }
}

/// A query in 16-bit numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coarse<'a> {
    /// One for each line of sixteen keys.
    pub(crate) steps: &'a [Step],
    /// What the bytes' bias adds to a product, negated.
    pub(crate) correction: i32,
    /// What a product of numbers and codes is to be multiplied by, together with the key's scale.
    pub(crate) factor: f32,
}

struct Scan<'a, const Q: usize> {
    lines: &'a [u8],
    scales: &'a [bf16],
    queries: [Coarse<'a>; Q],
    to: [&'a mut [f32]; Q],
}

impl<const Q: usize> BytePass for Scan<'_, Q> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<B: ByteDots>(mut self) {
        let steps = self.queries[0].steps.len();
        let blocks = self.lines.chunks_exact(steps * LINE).zip(self.scales.chunks_exact(LANES));
        let steps = self.queries.map(|query| &query.steps[..steps]);
        for (b, (lines, scales)) in blocks.enumerate() {
            let mut sums = [B::zero(); Q];
            for (s, line) in lines.chunks_exact(LINE).enumerate() {
                for (sum, steps) in sums.iter_mut().zip(steps) {
                    *sum = B::add(*sum, line.as_ptr(), steps[s]);
                }
            }
            let scales = B::Level::load_bf16(scales.as_ptr());
            for ((sum, query), to) in sums.into_iter().zip(self.queries).zip(&mut self.to) {
                let products = B::plus(sum, query.correction);
                let factor = Lanes::splat(query.factor);
                let scores = products.mul(scales).mul(factor);
                scores.store(to[b * LANES..][..LANES].as_mut_ptr());
            }
        }
    }
}

impl Simd {
    /// Encodes keys `from ..`, as many as there are places in `encoded`. Every key has whole groups of bytes and residuals.
    pub(crate) fn encode<E: Element<Scalar = f32>>(
        self,
        keys: Keys<'_, E>,
        from: usize,
        frame: Frame<'_>,
        bytes: &mut [u8],
        residuals: &mut [f32],
        encoded: &mut [Encoded],
    ) {
        let width = frame.mean.len();
        assert!(width.is_multiple_of(LANES) && width >= keys.dim && keys.dim > 0);
        assert!(bytes.len() == encoded.len() * width && residuals.len() == bytes.len());
        assert!(frame.block == 1 || keys.dim.is_multiple_of(frame.block));
        self.run(Encode { keys, from, frame, bytes, residuals, encoded });
    }

    /// Adds the outer products of at most [`PANEL`] rows, rounded to multiples of a unit, to a matrix, of which the entries
    /// left of the diagonal's groups are not touched. The unit must be at least a 127th of the largest absolute entry, and
    /// its reciprocal a normal number. Returns the sum of squares of what rounding loses, about. `packed` is scratch.
    pub(crate) fn outer(
        self,
        rows: &[f32],
        width: usize,
        unit: f32,
        packed: &mut Packed,
        sums: &mut [f64],
    ) -> f64 {
        assert!(width.is_multiple_of(LANES) && sums.len() == width * width && width > 0);
        assert!(rows.len().is_multiple_of(STEP * width) && rows.len() <= PANEL * width);
        let Packed { bytes, signed, totals } = packed;
        bytes.resize(rows.len(), BIAS);
        signed.clear();
        totals.resize(width, 0);
        let to = &mut bytes[..];
        let lost = self.run(Pack { residuals: rows, width, inverse: 1.0 / unit, unit, packed: to });
        signed.extend(bytes.iter().map(|byte| (byte ^ BIAS).cast_signed()));
        let square = f64::from(unit) * f64::from(unit);
        self.run_bytes(Outer { packed: bytes, signed, totals, width, square, sums });
        lost
    }

    /// What keys score, as far as their codes know: the product of each with a query's numbers, times its scale, times the
    /// query's factor; three roundings.
    pub(crate) fn scan_codes<const Q: usize>(
        self,
        lines: &[u8],
        scales: &[bf16],
        queries: [Coarse<'_>; Q],
        to: [&mut [f32]; Q],
    ) {
        let steps = queries[0].steps.len();
        assert!(steps > 0 && scales.len().is_multiple_of(LANES));
        assert!(lines.len() == scales.len() / LANES * steps * LINE);
        assert!(queries.iter().all(|query| query.steps.len() == steps));
        assert!(to.iter().all(|to| to.len() >= scales.len()));
        self.run_bytes(Scan { lines, scales, queries, to });
    }
}

/// Where the bytes of a key's four dimensions are in the lines of its block.
#[cfg(test)]
fn place(key: usize, step: usize, steps: usize) -> usize {
    (key / LANES * steps + step) * LINE + key % LANES * STEP
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(n: usize, dim: usize) -> Vec<f32> {
        let value = |i: usize| {
            let u = (i as f64 * 0.754_877_666).fract() + (i as f64 * 0.569_840_291).fract() - 1.0;
            (u * [1.0, 0.1, 4.0][i / dim % 3]) as f32
        };
        (0..n * dim).map(value).collect()
    }

    struct EncodedBlock {
        bytes: Vec<u8>,
        residuals: Vec<f32>,
        encoded: Vec<Encoded>,
        width: usize,
    }

    fn encode(simd: Simd, data: &[f32], dim: usize, block: usize) -> EncodedBlock {
        let (n, width) = (data.len() / dim, dim.next_multiple_of(LANES));
        let mean: Vec<f32> =
            (0..width).map(|j| if j < dim { 0.01 * j as f32 } else { 0.0 }).collect();
        let signs: Vec<f32> = (0..width).map(|j| if j % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let mut out = EncodedBlock {
            bytes: vec![0; n * width],
            residuals: vec![0.0; n * width],
            encoded: vec![Encoded::default(); n],
            width,
        };
        let frame = Frame { mean: &mean, block, signs: &signs };
        let (bytes, residuals) = (&mut out.bytes, &mut out.residuals);
        simd.encode(Keys::new(data, dim, dim), 0, frame, bytes, residuals, &mut out.encoded);
        out
    }

    fn lines(block: &EncodedBlock, dim: usize) -> (Vec<u8>, Vec<bf16>) {
        let n = block.encoded.len().next_multiple_of(LANES);
        let steps = dim.div_ceil(STEP);
        let mut lines = vec![BIAS; n * steps * STEP];
        let mut scales = vec![bf16::ZERO; n];
        for (key, encoded) in block.encoded.iter().enumerate() {
            scales[key] = encoded.scale;
            for step in 0..steps {
                let from = &block.bytes[key * block.width + step * STEP..][..STEP];
                lines[place(key, step, steps)..][..STEP].copy_from_slice(from);
            }
        }
        (lines, scales)
    }

    fn query(dim: usize, salt: i32) -> (Vec<Step>, Vec<i16>) {
        let numbers: Vec<i16> = (0..dim.next_multiple_of(STEP))
            .map(|j| if j < dim { ((j as i32 * 7919 + salt * 31_337) % 32_639) as i16 } else { 0 })
            .map(|number| if number % 2 == 0 { number } else { -number })
            .collect();
        let steps =
            numbers.chunks(STEP).map(|four| Step::new([four[0], four[1], four[2], four[3]]));
        (steps.collect(), numbers)
    }

    #[test]
    fn all_levels_encode_and_score_alike() {
        for (n, dim) in [(1, 1), (17, 3), (33, 20), (100, 32), (64, 80), (70, 128)] {
            let data = keys(n, dim);
            let want: Vec<_> = [1, 4]
                .map(|block| if dim % block == 0 { block } else { 1 })
                .map(|block| encode(Simd::all().last().unwrap().1, &data, dim, block))
                .into_iter()
                .collect();
            for &(name, simd) in Simd::all() {
                for (block, want) in [1, 4].into_iter().zip(&want) {
                    if dim % block != 0 {
                        continue;
                    }
                    let got = encode(simd, &data, dim, block);
                    assert_eq!(got.bytes, want.bytes, "{name} {n} {dim}");
                    assert_eq!(got.encoded, want.encoded, "{name} {n} {dim}");
                    assert_eq!(got.residuals, want.residuals, "{name} {n} {dim}");
                    let gram = |simd: Simd| {
                        let mut sums = vec![0.0; got.width * got.width];
                        let mut residuals = got.residuals.clone();
                        residuals.resize(n.next_multiple_of(STEP) * got.width, 0.0);
                        let lost = simd.outer(
                            &residuals,
                            got.width,
                            0.001,
                            &mut Packed::default(),
                            &mut sums,
                        );
                        (sums, lost)
                    };
                    assert_eq!(gram(simd), gram(Simd::all().last().unwrap().1));
                    let (lines, scales) = lines(&got, dim);
                    let prepared = [query(dim, 1), query(dim, 2)];
                    let coarse = [0, 1].map(|q: usize| Coarse {
                        steps: &prepared[q].0,
                        correction: prepared[q]
                            .1
                            .iter()
                            .fold(0, |sum: i32, &x| sum.wrapping_sub(128 * i32::from(x))),
                        factor: 0.01,
                    });
                    let mut both = [vec![0.0; scales.len()], vec![0.0; scales.len()]];
                    let [one, other] = &mut both;
                    simd.scan_codes(&lines, &scales, coarse, [one, other]);
                    for (scores, (_, numbers)) in both.iter().zip(&prepared) {
                        for (key, &score) in scores[..n].iter().enumerate() {
                            let exact: i64 = (0..dim)
                                .map(|j| {
                                    let code = i64::from(got.bytes[key * got.width + j]) - 128;
                                    code * i64::from(numbers[j])
                                })
                                .sum();
                            let want = exact as f32 * got.encoded[key].scale.to_f32() * 0.01;
                            assert_eq!(score, want, "{name} {n} {dim} {key}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_lost_is_what_the_codes_leave() {
        let (n, dim) = (52, 24);
        let data = keys(n, dim);
        let block = encode(Simd::current().unwrap(), &data, dim, 1);
        let mut gram = vec![0.0; block.width * block.width];
        let unit = 0.5 * 4.0 * 2.0 / 127.0 / 127.0;
        let (rest, packed) = (&block.residuals, &mut Packed::default());
        let lost = Simd::current().unwrap().outer(rest, block.width, unit, packed, &mut gram);
        let mut want = vec![0.0; dim * dim];
        for (key, encoded) in block.encoded.iter().enumerate() {
            let scale = f64::from(encoded.scale.to_f32());
            let rest: Vec<f64> = (0..dim)
                .map(|j| {
                    let code = f64::from(block.bytes[key * block.width + j]) - 128.0;
                    assert!(code.abs() <= 127.0);
                    let moved = f64::from(data[key * dim + j] - 0.01 * j as f32);
                    assert!((moved - scale * code).abs() <= 0.5001 * scale);
                    moved - scale * code
                })
                .collect();
            for (i, a) in rest.iter().enumerate() {
                assert!((f64::from(block.residuals[key * block.width + i]) - a).abs() < 1e-9);
                for (j, b) in rest.iter().enumerate() {
                    want[i * dim + j] += a * b;
                }
            }
        }
        // What is left after rounding is spread evenly over a unit, or less where residuals are smaller than one.
        let even = (n * dim) as f64 * f64::from(unit).powi(2) / 12.0;
        assert!((0.3..1.1).contains(&(lost / even)), "{lost} {even}");
        for i in 0..dim {
            for j in i..dim {
                let got = gram[i * block.width + j];
                let size = want[i * dim + i].max(want[j * dim + j]);
                assert!((got - want[i * dim + j]).abs() < 0.02 * size);
            }
        }
    }

    #[test]
    fn keys_without_codes_say_so() {
        let mut data = keys(4, 16);
        data[3] = f32::NAN;
        data[20] = f32::INFINITY;
        data[40] = 3e38;
        data[48..].fill(0.0);
        let block = encode(Simd::current().unwrap(), &data, 16, 16);
        assert!(block.encoded[0].largest.is_nan() && block.encoded[1].largest.is_nan());
        assert!(block.encoded[2].largest == 3e38 && block.encoded[2].lost == f32::INFINITY);
        assert!(block.encoded[..3].iter().all(|key| key.scale == bf16::ZERO));
        assert!(block.residuals[..48].iter().all(|&rest| rest == 0.0));
        assert!(block.encoded[3].lost < f32::INFINITY);
    }

    /// Prints times: `cargo test --release -- --ignored --nocapture the_codes_by_the_clock`.
    #[test]
    #[ignore = "a measurement"]
    fn the_codes_by_the_clock() {
        let (n, dim) = (131_072, 128);
        let data = keys(n, dim);
        let time = |name: &str, run: &mut dyn FnMut()| {
            let mut best = f64::INFINITY;
            for _ in 0..15 {
                let start = std::time::Instant::now();
                run();
                best = best.min(start.elapsed().as_secs_f64());
            }
            println!("{name:24} {:8.2} ns a key", best * 1e9 / n as f64);
        };
        for &(name, simd) in &Simd::all()[..Simd::all().len() - 1] {
            println!("{name}");
            let mut to = vec![0.0f32; data.len()];
            time("copy", &mut || to.copy_from_slice(std::hint::black_box(&data)));
            let (mean, signs) = (vec![0.0; dim], vec![1.0; dim]);
            let mut bytes = vec![0; 4096 * dim];
            let mut residuals = vec![0.0; 4096 * dim];
            let mut encoded = vec![Encoded::default(); 4096];
            for block in [1, 128] {
                let frame = Frame { mean: &mean, block, signs: &signs };
                time(&format!("encode, block {block}"), &mut || {
                    for from in (0..n).step_by(64) {
                        simd.encode(
                            Keys::new(&data, dim, dim),
                            from,
                            frame,
                            &mut bytes[..64 * dim],
                            &mut residuals[..64 * dim],
                            &mut encoded[..64],
                        );
                    }
                });
            }
            let mut gram = vec![0.0; dim * dim];
            let mut packed = Packed::default();
            time("outer", &mut || {
                for _ in (0..n).step_by(PANEL) {
                    simd.outer(&residuals[..PANEL * dim], dim, 1e-3, &mut packed, &mut gram);
                }
            });
            let block = encode(simd, &data, dim, 1);
            let (lines, scales) = lines(&block, dim);
            let prepared: Vec<_> = (0..4).map(|salt| query(dim, salt)).collect();
            let coarse = |q: usize| Coarse { steps: &prepared[q].0, correction: 0, factor: 1e-5 };
            let mut to: Vec<_> = (0..4).map(|_| vec![0.0f32; n]).collect();
            time("scan, one query", &mut || {
                simd.scan_codes(&lines, &scales, [coarse(0)], [&mut to[0]]);
            });
            time("scan, four queries", &mut || {
                let [a, b, c, d] = &mut to[..] else { unreachable!() };
                simd.scan_codes(&lines, &scales, [0, 1, 2, 3].map(coarse), [a, b, c, d]);
            });
            let mut sink = 0u64;
            time("read all codes", &mut || {
                let (words, _) = lines.as_chunks::<8>();
                sink ^= words.iter().fold(0, |sum, word| sum ^ u64::from_ne_bytes(*word));
            });
            std::hint::black_box(sink);
        }
    }
}
