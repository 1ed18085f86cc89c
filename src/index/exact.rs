//! Products of vectors without any rounding, to tell apart scores that f64 does not.

use std::cmp::Ordering;

/// A sum of products of an f64 with an f32 number: an integer in units of 2^-1223 (the smallest product), two's complement.
///
/// The largest product is below 2^(1024 + 128), and 2^64 of them may be added: 1223 + 1152 + 64 bits and a sign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExactProduct {
    limbs: [u64; LIMBS],
}

const LIMBS: usize = 39;
/// Of the smallest f64 and f32 numbers.
const UNIT: i32 = 1074 + 149;

impl ExactProduct {
    /// The product of two vectors, all of whose entries are finite.
    pub(crate) fn of(query: &[f64], key: impl Iterator<Item = f32>) -> Self {
        let mut sum = ExactProduct { limbs: [0; LIMBS] };
        for (&q, k) in query.iter().zip(key) {
            let (m, e) = parts(q);
            let (n, f) = parts(f64::from(k));
            let negative = (q < 0.0) != (k < 0.0);
            // Mantissas of f32 numbers have zeros behind: the product of both is below 2^106, its last bit at 2^-UNIT or above.
            let (product, exponent) = (u128::from(m) * u128::from(n), e + f + UNIT);
            let (product, shift) = if exponent < 0 {
                (product >> exponent.unsigned_abs().min(127), 0)
            } else {
                (product, exponent.unsigned_abs() as usize)
            };
            sum.add(product, shift, negative);
        }
        sum
    }

    fn add(&mut self, product: u128, shift: usize, negative: bool) {
        let (at, bits) = (shift / 64, shift % 64);
        let low = product << bits;
        let high = if bits == 0 { 0 } else { (product >> (128 - bits)) as u64 };
        let words = [low as u64, (low >> 64) as u64, high];
        let mut carry = false;
        for (i, limb) in self.limbs.iter_mut().enumerate().skip(at) {
            let word = words.get(i - at).copied().unwrap_or(0);
            let (one, two);
            (*limb, one) =
                if negative { limb.overflowing_sub(word) } else { limb.overflowing_add(word) };
            let more = u64::from(carry);
            (*limb, two) =
                if negative { limb.overflowing_sub(more) } else { limb.overflowing_add(more) };
            carry = one || two;
            if i >= at + 2 && !carry {
                break;
            }
        }
    }
}

impl Ord for ExactProduct {
    fn cmp(&self, other: &Self) -> Ordering {
        let top = |sum: &Self| sum.limbs[LIMBS - 1].cast_signed();
        let rest = || self.limbs.iter().rev().cmp(other.limbs.iter().rev());
        top(self).cmp(&top(other)).then_with(rest)
    }
}

impl PartialOrd for ExactProduct {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The size of a finite float as `mantissa * 2^exponent`.
fn parts(value: f64) -> (u64, i32) {
    let bits = value.abs().to_bits();
    let field = (bits >> 52) as i32;
    let fraction = bits & ((1 << 52) - 1);
    if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(query: &[f64], key: &[f32]) -> ExactProduct {
        ExactProduct::of(query, key.iter().copied())
    }

    #[test]
    fn what_f64_loses_is_kept() {
        // The first two cancel: what is left is below any rounding of them.
        let query = [1e300, 1e300, 5e-324];
        let tiny = f32::from_bits(1);
        let (more, less) = ([3e38, -3e38, tiny], [3e38, -3e38, -tiny]);
        let none = [3e38, -3e38, 0.0];
        assert!(product(&query, &more) > product(&query, &none));
        assert!(product(&query, &less) < product(&query, &none));
        assert_eq!(product(&query, &none), product(&[0.0], &[0.0]));
        assert!(
            product(&[f64::MAX; 40], &[f32::MAX; 40]) > product(&[f64::MAX; 39], &[f32::MAX; 39])
        );
        assert!(
            product(&[f64::MAX; 40], &[f32::MIN; 40]) < product(&[f64::MAX; 39], &[f32::MIN; 39])
        );
    }

    #[test]
    fn order_is_that_of_integers() {
        let mut state = 1u64;
        let mut small = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as i64) - (1 << 23)
        };
        let mut last: Option<(i128, ExactProduct)> = None;
        for _ in 0..2000 {
            let (q, k): (Vec<i64>, Vec<i64>) = (0..4).map(|_| (small(), small())).unzip();
            let want: i128 = q.iter().zip(&k).map(|(q, k)| i128::from(*q) * i128::from(*k)).sum();
            let query: Vec<f64> = q.iter().map(|&q| q as f64).collect();
            let got = ExactProduct::of(&query, k.iter().map(|&k| k as f32));
            if let Some((number, exact)) = &last {
                assert_eq!(want.cmp(number), got.cmp(exact));
            }
            last = Some((want, got));
        }
    }
}
