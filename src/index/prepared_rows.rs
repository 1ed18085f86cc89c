//! Many queries of a head in bytes, side by side and in f32: what `prepared` does for one in f64.
//!
//! Let y be a query in the codes' frame, rounded to f32 where it was turned, `b` its bytes times their unit, and `r` what f32 says that
//! they leave out. The real query is y and a vector of at most `turned = u |y|` (zero if the frame does not turn), and so the
//! real rest is r and a vector of at most `u |r| + turned`, u = 2^-24. The forms of `gram` and `moments` along y and r bound what
//! these lose; what the small vectors lose is at most their norm times the largest key, and counts as unresolved.
//!
//! Forms in f32: sums are divided by a power of two, so that their trace is about 1, and rounded once; vectors by one that brings
//! their norm there, so that nothing that matters is subnormal. Each entry of a product with the sums is at most `width`
//! fused terms deep. As `G_ij^2 <= G_ii G_jj`, roundings come to at most `(width + 2) u tr(G) |y|^2`, taken twice.

use super::codes::Codes;
use super::gram::{CodeError, GRAM_ROUNDING, U};
use super::moments::Moments;
use super::prepared::{Numbers, ratio};
use crate::error::Error;
use crate::kernels::{BIAS, Bytes, Coarse, STEP, Simd};
use crate::numerics::certified_sums::Compensated;
use crate::runtime::reused::{Reused, filled_again};

/// Traces that a power of two brings near 1.
const SIZES: std::ops::Range<f64> = 1e-200..1e200;

/// The most that vectors are divided or multiplied by.
const POWER: f64 = (1u128 << 100) as f64;

/// Sums of outer products in f32, for many forms.
struct Sums {
    /// Twice what is above the diagonal, nothing below it.
    matrix: Reused<f32>,
    /// Factor of its forms.
    unit: f64,
    /// Bound on the error of the forms, as a share of the square of a vector's norm; infinite if they are useless.
    slack: f64,
}

impl Sums {
    /// # Errors
    /// [`Error::NoMemory`].
    fn new((sums, additions): (&[f64], usize)) -> Result<Self, Error> {
        let width = sums.len().isqrt();
        let trace: f64 = sums.iter().step_by(width + 1).sum();
        let mut matrix = filled_again("keys", width * width, 0.0)?;
        let depth = 2.0 * (width as f64 + 2.0);
        let rounded = GRAM_ROUNDING + (additions as f64 + depth) * f64::EPSILON + depth * U;
        if trace == 0.0 {
            return Ok(Sums { matrix, unit: 0.0, slack: 0.0 });
        }
        if !SIZES.contains(&trace) {
            return Ok(Sums { matrix, unit: 0.0, slack: f64::INFINITY });
        }
        let unit = power_near(trace);
        for (i, (row, sums)) in
            matrix.chunks_exact_mut(width).zip(sums.chunks_exact(width)).enumerate()
        {
            for (j, (to, sum)) in row.iter_mut().zip(sums).enumerate().skip(i) {
                let times = if j == i { 1.0 } else { 2.0 };
                *to = (sum / unit * times) as f32;
            }
        }
        Ok(Sums { matrix, unit, slack: rounded * trace * (1.0 + GRAM_ROUNDING) })
    }

    /// An upper bound of a form, given what was computed of a vector divided by `size`, and its norm.
    fn upper(&self, form: f64, size: f64, norm: f64) -> f64 {
        // What is no number bounds nothing.
        let form = if form.is_nan() { f64::INFINITY } else { form.max(0.0) };
        form * self.unit * size * size + self.slack * norm * norm
    }
}

/// A power of two, at most twice as far from a number as the nearest.
fn power_near(number: f64) -> f64 {
    f64::from_bits(number.to_bits() & 0x7ff0_0000_0000_0000)
}

/// Requirements of many queries of a head.
pub(crate) struct ManyForms {
    losses: Sums,
    codes: Sums,
    moments: Moments,
}

impl ManyForms {
    /// Moments of the decoded keys.
    pub(crate) fn moments(&self) -> &Moments {
        &self.moments
    }
}

impl Codes<'_> {
    /// Returns the data on the codes that [`PreparedRows`] need.
    ///
    /// # Errors
    /// [`Error::NoMemory`], or what stops the call.
    pub(crate) fn many_forms(&self, simd: Simd) -> Result<ManyForms, Error> {
        let moments = self.moments(simd)?;
        let losses = Sums::new(self.gram().sums())?;
        Ok(ManyForms { losses, codes: Sums::new(moments.sums())?, moments })
    }
}

/// One query of them.
#[derive(Debug, Clone, Copy)]
struct One {
    correction: i32,
    factor: f32,
    code_error: CodeError,
    offset: f64,
}

/// Queries as codes are scored with, and what the scores are worth.
pub(crate) struct PreparedRows {
    /// Bytes of a row, one after another; a row has so many.
    bytes: Reused<Bytes>,
    steps: usize,
    rows: Reused<One>,
}

impl PreparedRows {
    /// Queries of `width` entries in whole groups, that are f32 numbers; `scale` multiplies all products.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn new(
        simd: Simd,
        codes: &Codes<'_>,
        forms: &ManyForms,
        queries: &[f32],
        scale: f64,
    ) -> Result<Self, Error> {
        let (dim, width) = codes.widths();
        let (steps, count) = (dim.div_ceil(STEP), queries.len() / width);
        let frame = codes.frame();
        let turns = frame.block > 1;
        let mut moved: Reused<f32> = queries.iter().copied().collect();
        let mut size = 1.0;
        if turns {
            for row in moved.chunks_exact_mut(width) {
                let wide: Reused<f64> = row[..dim].iter().map(|&entry| entry.into()).collect();
                let turned = frame.query(&wide);
                size = turned.1;
                for (to, entry) in row.iter_mut().zip(&turned.0) {
                    *to = *entry as f32;
                }
            }
        }
        let mut rest: Reused<f32> = filled_again("q", moved.len(), 0.0)?;
        let mut numbers: Reused<i8> = filled_again("q", width, 0)?;
        let mut bytes: Reused<Bytes> = Reused::with_hint(count * steps);
        let mut found: Reused<_> = Reused::with_hint(count);
        let mut sizes: Reused<(f64, f64)> = Reused::with_hint(count);
        // In its own frame the mean belongs to the queries as they were.
        let mean = &frame.mean[..];
        for ((row, rest), query) in moved
            .chunks_exact_mut(width)
            .zip(rest.chunks_exact_mut(width))
            .zip(queries.chunks_exact(width))
        {
            let mut quantized = simd.quantize(row, mean, &mut numbers, rest);
            if turns {
                let products = query.iter().zip(mean).map(|(q, m)| f64::from(*q) * f64::from(*m));
                quantized.product = products.collect::<Compensated>().value();
            }
            bytes.extend_from_slice(&numbers.as_chunks::<STEP>().0[..steps]);
            // Powers of two change nothing but exponents; what becomes subnormal counts with the roundings of a form.
            let near = |square: f64| power_near(square.sqrt()).clamp(1.0 / POWER, POWER);
            let own = [quantized.square, quantized.rest_square].map(near);
            for (vector, size) in [row, rest].into_iter().zip(own) {
                let inverse = (1.0 / size) as f32;
                for entry in vector {
                    *entry *= inverse;
                }
            }
            sizes.push((own[0], own[1]));
            found.push(quantized);
        }
        let mut along = [filled_again("q", count, 0.0)?, filled_again("q", count, 0.0)?];
        simd.forms(&forms.losses.matrix, &moved, &mut along[0]);
        simd.forms(&forms.codes.matrix, &rest, &mut along[1]);
        let mut rows: Reused<One> = Reused::with_hint(count);
        let factor = scale / size;
        // Sums over the entries of a vector.
        let short = 1.0 + GRAM_ROUNDING + width as f64 * f64::EPSILON;
        for (at, quantized) in found.iter().enumerate() {
            let (size, rest_size) = sizes[at];
            let norm = quantized.square.sqrt() * short;
            let rest_norm = quantized.rest_square.sqrt() * short;
            let turned = if turns { norm * (1.0 + 1e-6) * U } else { 0.0 };
            let unresolved = (rest_norm * U + 2.0 * turned) * (1.0 + 1e-6) + 1e-40;
            let unit = f64::from(quantized.unit);
            let computed = (factor * unit) as f32;
            let slip = (f64::from(computed) - factor * unit).abs() / unit + factor.abs() * 1e-15;
            let form = forms.losses.upper(along[0][at], size, norm);
            let left = forms.codes.upper(along[1][at], rest_size, rest_norm);
            let moves = frame.moves();
            let bounds = codes.gram().bounds();
            let code_error =
                CodeError::new((form, norm), bounds, unresolved, (factor, slip), moves).and(
                    forms.moments.off((left, rest_norm), factor),
                    1.0 + ratio(rest_norm, norm),
                );
            let tame = norm == 0.0 || (SMALL..LARGE).contains(&norm);
            rows.push(One {
                correction: -i32::from(BIAS) * quantized.total,
                factor: computed,
                code_error: if tame { code_error } else { CodeError::NOTHING },
                offset: scale * quantized.product,
            });
        }
        Ok(PreparedRows { bytes, steps, rows })
    }

    /// The numbers of a row.
    pub(crate) fn numbers(&self, at: usize) -> Numbers<'_> {
        let One { correction, factor, .. } = self.rows[at];
        let steps = &self.bytes[at * self.steps..][..self.steps];
        Numbers {
            words: Coarse { steps: &[], correction, factor },
            bytes: Coarse { steps, correction, factor },
        }
    }

    /// Returns the error bounds of a row's scores by codes.
    pub(crate) fn code_error(&self, at: usize) -> &CodeError {
        &self.rows[at].code_error
    }

    /// Returns the offset of scores by codes: the scale times the product of the query with the mean. Its error is at
    /// most that of a product of the query with a key.
    pub(crate) fn offset(&self, at: usize) -> f64 {
        self.rows[at].offset
    }
}

/// Norms of queries whose entries, their squares, and what their bytes leave out f32 and f64 hold without loss.
const SMALL: f64 = 1e-15;
const LARGE: f64 = 1e25;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::made::normal;
    use crate::index::query::Query;
    use crate::kernels::{Keys, LANES};

    /// The quantization errors of queries and keys are within their bounds, per key and jointly, and the bounds are tight.
    /// Sizes are such that forms must be scaled to near 1, and some keys are parallel.
    #[test]
    fn what_bytes_of_many_queries_lose() {
        let simd = Simd::current().unwrap();
        let mut nearest = [0.0f64; 2];
        for (n, dim, size) in [(300, 16, 1.0), (500, 64, 1e-9), (400, 40, 3e8), (300, 128, 1.0)] {
            let mut data = normal(n * dim, 7);
            for (i, key) in data.chunks_exact_mut(dim).enumerate() {
                key[0] += if i % 3 == 0 { 9.0 } else { 0.0 };
                for entry in key {
                    *entry *= size;
                }
            }
            let stored = Keys::new(&data[..], dim, dim);
            for rotate in [false, true] {
                let mut codes = Codes::new(dim, stored, n, Some(rotate));
                let room = codes.make_room(n, 1).unwrap();
                codes.append(simd, stored, (n, room), 1).unwrap();
                assert_eq!(codes.frame().block > 1, rotate);
                let forms = codes.many_forms(simd).unwrap();
                let (width, count, scale) = (dim.next_multiple_of(LANES), 23, 0.3);
                let mut queries = vec![0.0; count * width];
                for (seed, row) in queries.chunks_exact_mut(width).enumerate() {
                    row[..dim].copy_from_slice(&normal(dim, 50 + seed as u64));
                    if seed % 3 == 0 {
                        // Beside it the others are a few units.
                        row[seed % dim] = 40.0;
                    }
                    for entry in row {
                        *entry *= 1e3 / size;
                    }
                }
                queries[5 * width..6 * width].fill(0.0);
                let prepared = PreparedRows::new(simd, &codes, &forms, &queries, scale).unwrap();
                for (at, query) in queries.chunks_exact(width).enumerate() {
                    let query: Vec<f64> = query[..dim].iter().map(|&x| x.into()).collect();
                    let doubt = Query::new(&query, scale, f64::from(codes.largest())).error;
                    let mut scores = vec![0.0; n.next_multiple_of(LANES)];
                    for (lines, scales, first) in codes.pieces(n.div_ceil(LANES), usize::MAX) {
                        let to = &mut scores[first..first + scales.len()];
                        simd.scan_codes(lines, scales, [prepared.numbers(at).bytes], [to]);
                    }
                    let (mut squares, error) = (0.0, prepared.code_error(at));
                    for (row, score) in data.chunks_exact(dim).zip(&scores) {
                        let product: f64 =
                            row.iter().zip(&query).map(|(k, q)| f64::from(*k) * q).sum();
                        let lost = product * scale - prepared.offset(at) - f64::from(*score);
                        let off = lost.abs() - doubt;
                        assert!(off <= error.each + error.rho, "{dim} {size} {rotate} {off}");
                        nearest[0] = nearest[0].max(off / (error.each + error.rho));
                        squares += (off - error.rho).max(0.0).powi(2);
                    }
                    assert!(squares.sqrt() <= error.total, "{dim} {size} {rotate}");
                    if at != 5 {
                        nearest[1] = nearest[1].max(squares.sqrt() / error.total);
                    }
                    // It is about what one query in f64 is known to lose.
                    let alone =
                        codes.prepare_in_bytes(simd, &query, scale, forms.moments()).code_error;
                    assert!(error.total <= alone.total * 1.01 + 1e-30, "{dim} {size} {rotate}");
                    assert!(error.says_something());
                }
            }
        }
        assert!(nearest[0] > 0.2 && nearest[1] > 0.6, "{nearest:?}");
    }

    /// Outside the range of f32 or of a trace there is no bound, and no invented number.
    #[test]
    fn sizes_that_nothing_is_known_of() {
        let simd = Simd::current().unwrap();
        for (size, query) in [(1e-3, 1e-20), (1e-3, 1e30), (1e15, 1.0), (1e-18, 1.0), (0.0, 1.0)] {
            let data: Vec<f32> = normal(64 * 16, 3).iter().map(|x| x * size).collect();
            let stored = Keys::new(&data[..], 16, 16);
            let mut codes = Codes::new(16, stored, 64, Some(false));
            let room = codes.make_room(64, 1).unwrap();
            codes.append(simd, stored, (64, room), 1).unwrap();
            let forms = codes.many_forms(simd).unwrap();
            let queries = [query; 16];
            let prepared = PreparedRows::new(simd, &codes, &forms, &queries, 1.0).unwrap();
            let mut scores = [0.0; 64];
            for (lines, scales, _) in codes.pieces(4, usize::MAX) {
                simd.scan_codes(lines, scales, [prepared.numbers(0).bytes], [&mut scores]);
            }
            let error = prepared.code_error(0);
            if !error.says_something() {
                continue;
            }
            for (key, score) in data.chunks_exact(16).zip(scores) {
                let product: f64 = key.iter().map(|&k| f64::from(k) * f64::from(query)).sum();
                let off = (product - prepared.offset(0) - f64::from(score)).abs();
                assert!(off <= error.reach() * (1.0 + 1e-9) + 1e-12 * product.abs());
            }
        }
    }
}
