//! Rigorous sums of softmax weights: intervals for real sums from computed ones.
//!
//! A row is split into a kept set S and its tail T. From computed sums `H_hat` over S and `T_hat` over T this module
//! derives an interval that contains the real tail mass `tau = T / (T + H)` of the stored scores. All terms are
//! non-negative, so every error is relative and two-sided: `T_hat / H_hat` lies within a factor `1 + slack` of `T / H`,
//! up to entries so small that they were flushed to zero.
//!
//! `docs/soundness.md` derives the slacks term by term, with u = 2^-24 and v = 2^-53; a test compares these constants
//! with it.
//!
//! A selection is decided with a larger slack than a certification. The excess is more than two evaluations of the same
//! sums in different orders can differ, so `certify` confirms every certified selection.

use std::cmp::Ordering;

/// Elements per chunk of a row: the unit shared over threads, at whose edges sums are added in f64.
pub(crate) const CHUNK: usize = 1 << 16;

/// Bounds on the error of computed sums.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ErrorBound {
    /// Relative slack of the ratio of two sums, as needed for a proof.
    pub(crate) certify: f64,
    /// Larger slack, for deciding a selection.
    pub(crate) select: f64,
    /// Largest real weight of a flushed entry (relative to a weight of 1 at the row's largest score).
    pub(crate) flush: f64,
}

const U: f64 = 1.0 / 16_777_216.0;
const V: f64 = f64::EPSILON / 2.0;

impl ErrorBound {
    /// Returns the slack of weights and lane sums in f32; `error` bounds the distance of each stored score from the
    /// real one.
    pub(crate) fn f32(error: f64) -> Self {
        ErrorBound::new(512.0 * U, 640.0 * U, 2f64.powi(-125), error)
    }

    /// Returns the slack of weights and sums in f64 over a row of `n` entries.
    pub(crate) fn f64(n: usize, error: f64) -> Self {
        let chunks = (n / CHUNK) as f64;
        let certify = (8192.0 + 2.0 * chunks) * V;
        ErrorBound::new(certify, (12288.0 + 8.0 * chunks) * V, 2f64.powi(-1021), error)
    }

    /// Returns the slack of stored weights, summed in f64.
    pub(crate) fn weights(n: usize) -> Self {
        let chunks = (n / CHUNK) as f64;
        let certify = (1024.0 + 2.0 * chunks) * V;
        ErrorBound::new(certify, (3072.0 + 8.0 * chunks) * V, 0.0, 0.0)
    }

    /// Returns the slack with another relative error of `more` on each side of every sum.
    pub(crate) fn widened(self, more: f64) -> Self {
        let grow = |slack: f64| (1.0 + slack) * (1.0 + 2.5 * more) - 1.0 + V;
        ErrorBound { certify: grow(self.certify), select: grow(self.select), ..self }
    }

    fn new(certify: f64, select: f64, flush: f64, error: f64) -> Self {
        if error == 0.0 {
            return ErrorBound { certify, select, flush };
        }
        // Each weight is off by a factor e^{+-error}, so the ratio of two sums by e^{2 error}.
        let factor = (2.0 * error).exp() * (1.0 + 64.0 * V);
        let grow = |slack: f64| (1.0 + slack) * factor * (1.0 + 8.0 * V) - 1.0 + 4.0 * V;
        ErrorBound { certify: grow(certify), select: grow(select), flush: flush * factor }
    }
}

/// Computed sums over a kept set and its tail.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SplitSums {
    /// Sum over the tail.
    pub(crate) tail: f64,
    /// Entries in the tail.
    pub(crate) dropped: usize,
    /// Sum over the kept set.
    pub(crate) head: f64,
    /// Entries in the kept set.
    pub(crate) kept: usize,
}

impl SplitSums {
    /// Returns an upper bound of the real tail mass, given a slack. An empty tail has mass exactly 0.
    pub(crate) fn upper(&self, slack: f64, flush: f64) -> f64 {
        if self.dropped == 0 {
            return 0.0;
        }
        if self.kept == 0 {
            return 1.0;
        }
        // Inflated last: a subnormal tail would round the inflation away.
        let odds = (self.tail + self.dropped as f64 * flush) / self.head * (1.0 + slack);
        // A head of 0 makes this infinite or NaN, and a sum that overflowed says nothing at all.
        if odds < f64::INFINITY && self.head < f64::INFINITY {
            // The second float above; the same as `next_up` twice, which has to look for infinities and signs.
            f64::from_bits((odds / (1.0 + odds)).to_bits() + 2).min(1.0)
        } else {
            1.0
        }
    }

    /// Returns a lower bound of the real tail mass, given a slack.
    pub(crate) fn lower(&self, slack: f64, flush: f64) -> f64 {
        if self.dropped == 0 {
            return 0.0;
        }
        if self.kept == 0 {
            return 1.0;
        }
        let odds = self.tail / (self.head + self.kept as f64 * flush) / (1.0 + slack);
        if self.tail == f64::INFINITY {
            return 0.0;
        }
        if odds < f64::INFINITY {
            return f64::from_bits((odds / (1.0 + odds)).to_bits().saturating_sub(2));
        }
        if odds.is_nan() { 0.0 } else { 1f64.next_down() }
    }
}

/// Returns an exponential with a proven error, for the checker that shares no kernel: for x <= 0, relative error below
/// 2^-50 where x >= -708, and 0 below that (the real value is then under 2^-1021).
///
/// x = k ln 2 + r with |r| <= .35, ln 2 in two parts so that k times the first is exact; a Taylor polynomial of degree 16 in r
/// (remainder < 2^-73), whose roundings lose less than 5v since each step's error is scaled by |r| in the next.
pub(crate) fn exp(x: f64) -> f64 {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if x < -708.0 || x.is_nan() {
        return 0.0;
    }
    let k = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = k.mul_add(-LN2_LOW, k.mul_add(-LN2_HIGH, x));
    let mut sum = 1.0;
    for i in (1..=16).rev() {
        sum = (sum * r / f64::from(i)) + 1.0;
    }
    sum * 2f64.powi(k as i32)
}

/// Returns `true` if keeping `kept` of `total` equal weights leaves a tail mass of at most `eps`, in exact arithmetic.
pub(crate) fn equal_weights_hold(kept: u64, total: u64, eps: f64) -> bool {
    total - kept <= equal_weights_droppable(total, eps)
}

/// Returns the number of `total` equal weights that may be dropped: the floor of `total * eps`, exactly.
pub(crate) fn equal_weights_droppable(total: u64, eps: f64) -> u64 {
    if eps <= 0.0 {
        return 0;
    }
    let (mantissa, exponent) = decompose(eps);
    // eps < 1, so the exponent is negative and the product below 2^117.
    let product = u128::from(mantissa) * u128::from(total);
    let shift = exponent.unsigned_abs();
    if shift > 127 { 0 } else { (product >> shift) as u64 }
}

/// Returns `true` if `dropped` is the share `eps` of `total`, exactly.
pub(crate) fn is_share(dropped: u64, total: u64, eps: f64) -> bool {
    if eps <= 0.0 {
        return dropped == 0;
    }
    let (mantissa, exponent) = decompose(eps);
    let product = u128::from(mantissa) * u128::from(total);
    let shift = exponent.unsigned_abs();
    shift <= 127 && product.trailing_zeros() >= shift && product >> shift == u128::from(dropped)
}

/// Returns a non-negative finite float as `mantissa * 2^exponent`.
fn decompose(value: f64) -> (u64, i32) {
    let bits = value.to_bits();
    let field = (bits >> 52 & 0x7ff) as i32;
    let fraction = bits & ((1 << 52) - 1);
    if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) }
}

/// Compensated (Neumaier) sum, for sequences of any length.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Compensated {
    sum: f64,
    lost: f64,
}

impl Compensated {
    pub(crate) fn add(&mut self, term: f64) {
        let sum = self.sum + term;
        self.lost += if self.sum.abs() >= term.abs() {
            (self.sum - sum) + term
        } else {
            (term - sum) + self.sum
        };
        self.sum = sum;
    }

    pub(crate) fn value(&self) -> f64 {
        self.sum + self.lost
    }
}

impl FromIterator<f64> for Compensated {
    fn from_iter<I: IntoIterator<Item = f64>>(terms: I) -> Self {
        let mut sum = Compensated::default();
        terms.into_iter().for_each(|term| sum.add(term));
        sum
    }
}

/// Exact sum of non-negative finite f64 numbers, as one wide integer in units of 2^-1074.
#[derive(Debug, Clone)]
pub(crate) struct ExactSum {
    limbs: [u64; ExactSum::LIMBS],
}

impl ExactSum {
    /// 2^-1074 .. 2^1024, and 2^64 terms, and a product with a 53-bit integer: 2098 + 64 + 64 bits.
    const LIMBS: usize = 36;

    pub(crate) fn new() -> Self {
        ExactSum { limbs: [0; Self::LIMBS] }
    }

    pub(crate) fn add(&mut self, value: f64) {
        let (mantissa, exponent) = decompose(value);
        let shift = (exponent + 1074).unsigned_abs() as usize;
        let wide = u128::from(mantissa) << (shift % 64);
        let mut carry = wide;
        for limb in &mut self.limbs[shift / 64..] {
            let sum = u128::from(*limb) + (carry & u128::from(u64::MAX));
            *limb = sum as u64;
            carry = (carry >> 64) + (sum >> 64);
            if carry == 0 {
                break;
            }
        }
    }

    fn times(&self, factor: u64) -> Self {
        let mut product = ExactSum::new();
        let mut carry = 0u128;
        for (out, &limb) in product.limbs.iter_mut().zip(&self.limbs) {
            carry += u128::from(limb) * u128::from(factor);
            *out = carry as u64;
            carry >>= 64;
        }
        product
    }

    /// Compares `self` with `total * eps` exactly.
    pub(crate) fn compare_share(&self, total: &ExactSum, eps: f64) -> Ordering {
        let (mantissa, exponent) = decompose(eps);
        let share = total.times(mantissa);
        // self <> total * mantissa * 2^exponent, exponent <= 0: shift the share down and look at what falls off.
        let shift = exponent.unsigned_abs() as usize;
        let (limbs, bits) = (shift / 64, shift % 64);
        let at = |i: usize| share.limbs.get(i).copied().unwrap_or(0);
        for i in (0..Self::LIMBS).rev() {
            let mut floor = at(i + limbs) >> bits;
            if bits > 0 {
                floor |= at(i + limbs + 1) << (64 - bits);
            }
            match self.limbs[i].cmp(&floor) {
                Ordering::Equal => {}
                other => return other,
            }
        }
        let fallen = (0..limbs).any(|i| at(i) != 0) || at(limbs) & ((1u64 << bits) - 1) != 0;
        if fallen { Ordering::Less } else { Ordering::Equal }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_at_known_points() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-708.1), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        // e^-1 and e^-50 and e^-700, correctly rounded.
        for (x, want) in [
            (-1.0, 0.367_879_441_171_442_33),
            (-50.0, 1.928_749_847_963_917_8e-22),
            (-700.0, 9.859_676_543_759_77e-305),
        ] {
            assert!((exp(x) / want - 1.0).abs() < 2f64.powi(-50), "{x}");
        }
    }

    #[test]
    fn masses_at_the_edges() {
        let none = SplitSums { tail: 0.0, dropped: 0, head: 3.0, kept: 3 };
        assert_eq!((none.upper(0.1, 1.0), none.lower(0.1, 1.0)), (0.0, 0.0));
        let all = SplitSums { tail: 3.0, dropped: 3, head: 0.0, kept: 0 };
        assert_eq!((all.upper(0.1, 1.0), all.lower(0.1, 1.0)), (1.0, 1.0));
        let flushed = SplitSums { tail: 0.0, dropped: 1, head: 1.0, kept: 1 };
        assert!(flushed.upper(0.0, 2f64.powi(-125)) >= 2f64.powi(-125));
        assert_eq!(flushed.lower(0.0, 2f64.powi(-125)), 0.0);
        let overflowed = SplitSums { tail: 1e300, dropped: 1, head: f64::INFINITY, kept: 1 };
        assert_eq!((overflowed.upper(0.0, 0.0), overflowed.lower(0.0, 0.0)), (1.0, 0.0));
        let overflowed = SplitSums { tail: f64::INFINITY, dropped: 1, head: 1.0, kept: 1 };
        assert_eq!((overflowed.upper(0.0, 0.0), overflowed.lower(0.0, 0.0)), (1.0, 0.0));
        let lost = SplitSums { tail: 1.0, dropped: 1, head: 0.0, kept: 1 };
        assert_eq!(lost.upper(0.0, 0.0), 1.0);
        assert!(lost.lower(0.0, 0.0) < 1.0);
    }

    /// Assumption of the proofs about slacks: known exponentials, rounded up.
    #[test]
    fn slacks_count_what_they_are_told() {
        for (radius, grown) in [(0.5, std::f64::consts::E.next_up()), (5.0, 22_026.465_794_806_72)]
        {
            for (with, without) in [
                (ErrorBound::f32(radius), ErrorBound::f32(0.0)),
                (ErrorBound::f64(1 << 20, radius), ErrorBound::f64(1 << 20, 0.0)),
            ] {
                assert!(with.flush / without.flush >= grown, "{radius}");
                assert!(1.0 + with.certify >= (1.0 + without.certify) * grown, "{radius}");
                assert!(1.0 + with.select >= (1.0 + without.select) * grown, "{radius}");
            }
        }
        // A ratio whose sums are off by a share of m on each side is off by (1 + m) / (1 - m).
        for slack in [ErrorBound::f32(0.0), ErrorBound::f64(0, 0.25), ErrorBound::weights(1 << 20)]
        {
            for share in [1e-12, 1e-9, 1e-3, 0.1, 0.15] {
                let wide = slack.widened(share);
                let apart = (1.0 + share) / (1.0 - share);
                assert!(1.0 + wide.certify >= (1.0 + slack.certify) * apart, "{share}");
                assert!(1.0 + wide.select >= (1.0 + slack.select) * apart, "{share}");
                assert_eq!(wide.flush, slack.flush);
            }
        }
    }

    #[test]
    fn equal_weights_are_decided_by_integers() {
        assert!(equal_weights_hold(3, 4, 0.25));
        assert!(!equal_weights_hold(2, 4, 0.25));
        assert!(!equal_weights_hold(3, 4, 0.25f64.next_down()));
        assert!(equal_weights_hold(1, 2, 0.5));
        // The f64 nearest 0.1 lies above 1/10, so one of ten may go.
        assert!(equal_weights_hold(9, 10, 0.1));
        assert!(!equal_weights_hold(9, 10, 0.1f64.next_down().next_down()));
        assert_eq!(equal_weights_droppable(u64::from(u32::MAX), 5e-324), 0);
        assert!(is_share(1, 4, 0.25) && is_share(3, 6, 0.5) && is_share(0, 7, 0.0));
        assert!(
            !is_share(1, 4, 0.25f64.next_up()) && !is_share(1, 10, 0.1) && !is_share(0, 1, 5e-324)
        );
    }

    #[test]
    fn a_compensated_sum_keeps_small_terms_before_and_behind_large_ones() {
        let sum: Compensated = [1.0, 1e100, 1.0, -1e100].into_iter().collect();
        assert_eq!(sum.value(), 2.0);
    }

    #[test]
    fn exact_sums_decide_what_rounding_cannot() {
        let mut tail = ExactSum::new();
        let mut total = ExactSum::new();
        for value in [0.5, 0.25, 0.25] {
            total.add(value);
        }
        tail.add(0.25);
        assert_eq!(tail.compare_share(&total, 0.25), Ordering::Equal);
        assert_eq!(tail.compare_share(&total, 0.25f64.next_down()), Ordering::Greater);
        assert_eq!(tail.compare_share(&total, 0.25f64.next_up()), Ordering::Less);
        tail.add(5e-324);
        total.add(5e-324);
        assert_eq!(tail.compare_share(&total, 0.25), Ordering::Greater);
        let mut huge = ExactSum::new();
        for _ in 0..1000 {
            huge.add(f64::MAX);
        }
        assert_eq!(huge.compare_share(&huge, 1f64.next_down()), Ordering::Greater);
        assert_eq!(ExactSum::new().compare_share(&ExactSum::new(), 0.5), Ordering::Equal);
    }
}
