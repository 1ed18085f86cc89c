//! The truth about rows, in wide integers. It shares no code with the library.
//!
//! A real number is an integer in units of 2^-1216: sums and products of ordinary floats are exact in it, and exponentials are
//! off by less than 2^-1180.

use num_bigint::BigInt;

const BITS: i32 = 1216;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Real(BigInt);

impl Real {
    pub(crate) fn zero() -> Self {
        Real(BigInt::ZERO)
    }

    pub(crate) fn plus(&self, other: &Real) -> Self {
        Real(&self.0 + &other.0)
    }

    pub(crate) fn minus(&self, other: &Real) -> Self {
        Real(&self.0 - &other.0)
    }

    pub(crate) fn times(&self, other: &Real) -> Self {
        Real((&self.0 * &other.0) >> BITS)
    }

    /// e^self, for a number that is not positive.
    pub(crate) fn exp(&self) -> Self {
        /// The argument is halved so often, and the series then squared back.
        const HALVINGS: i32 = 20;
        assert!(self.0 <= BigInt::ZERO);
        let one = BigInt::from(1) << (BITS + 32);
        let x = &self.0 << 32;
        let (mut term, mut sum) = (one.clone(), one);
        let mut i = 0;
        // Below e^-800 nothing is left.
        if self.0 < (BigInt::from(-800) << BITS) {
            return Real::zero();
        }
        while term != BigInt::ZERO {
            i += 1;
            // Toward zero, so that the series ends.
            let next: BigInt = &term * &x;
            let size = (next.magnitude() >> (BITS + 32 + HALVINGS)) / (i as u32);
            term = BigInt::from_biguint(next.sign(), size);
            sum += &term;
        }
        for _ in 0..HALVINGS {
            sum = (&sum * &sum) >> (BITS + 32);
        }
        Real(sum >> 32)
    }
}

impl From<f64> for Real {
    /// Exactly, if the float is a multiple of 2^-1216.
    fn from(value: f64) -> Self {
        assert!(value.is_finite());
        let bits = value.to_bits();
        let field = (bits >> 52 & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (mantissa, exponent) =
            if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) };
        let (mantissa, shift) = (BigInt::from(mantissa), exponent + BITS);
        let size = if shift < 0 { mantissa >> -shift } else { mantissa << shift };
        Real(if value < 0.0 { -size } else { size })
    }
}

impl std::iter::Sum for Real {
    fn sum<I: Iterator<Item = Real>>(terms: I) -> Self {
        terms.fold(Real::zero(), |sum, term| Real(sum.0 + term.0))
    }
}

pub(crate) fn reals<T: Copy + Into<f64>>(values: &[T]) -> Vec<Real> {
    values.iter().map(|&value| Real::from(value.into())).collect()
}

/// `scale * q.k`.
pub(crate) fn product(scale: f64, q: &[Real], k: &[Real]) -> Real {
    Real::from(scale).times(&q.iter().zip(k).map(|(q, k)| q.times(k)).sum())
}

/// Weights of scores, the largest weighing 1.
pub(crate) fn weights(scores: &[Real]) -> Vec<Real> {
    let top = scores.iter().max().cloned().unwrap_or_else(Real::zero);
    // Rows of a few levels are long.
    let mut known = std::collections::HashMap::new();
    let weigh = |score: &Real| {
        let depth = score.minus(&top);
        known.entry(depth.0.clone()).or_insert_with(|| depth.exp()).clone()
    };
    scores.iter().map(weigh).collect()
}

/// A part of a whole.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    part: BigInt,
    whole: BigInt,
}

impl Share {
    pub(crate) fn at_most(&self, bound: f64) -> bool {
        (&self.part << BITS) <= Real::from(bound).0 * &self.whole
    }

    pub(crate) fn at_least(&self, bound: f64) -> bool {
        (&self.part << BITS) >= Real::from(bound).0 * &self.whole
    }

    /// The largest float that is not above it.
    pub(crate) fn down(&self) -> f64 {
        let (mut low, mut high) = (0u64, 1f64.to_bits());
        while low < high {
            let middle = (low + high).div_ceil(2);
            if self.at_least(f64::from_bits(middle)) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        f64::from_bits(low)
    }

    /// The smallest float that is not below it.
    pub(crate) fn up(&self) -> f64 {
        let down = self.down();
        if self.at_most(down) { down } else { down.next_up() }
    }
}

/// The share of the entries that are not kept.
pub(crate) fn tail(weights: &[Real], kept: impl Fn(usize) -> bool) -> Share {
    let (mut part, mut whole) = (BigInt::ZERO, BigInt::ZERO);
    for (i, weight) in weights.iter().enumerate() {
        whole += &weight.0;
        if !kept(i) {
            part += &weight.0;
        }
    }
    Share { part, whole }
}

/// Positions in the order of their scores, the best first, equal ones by position.
pub(crate) fn ranked<T: Ord>(scores: &[T]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].cmp(&scores[a]).then(a.cmp(&b)));
    order
}

/// A flag for each of `n` entries, true at the positions given.
pub(crate) fn flags(n: usize, positions: impl IntoIterator<Item = usize>) -> Vec<bool> {
    let mut flags = vec![false; n];
    positions.into_iter().for_each(|i| flags[i] = true);
    flags
}

/// The share that the best `k` leave.
pub(crate) fn least_tail(weights: &[Real], k: usize) -> Share {
    let best = flags(weights.len(), ranked(weights).into_iter().take(k));
    tail(weights, |i| best[i])
}

/// Scores of which the kept ones are raised by so much and the others lowered.
pub(crate) fn moved(scores: &[Real], kept: &[bool], by: f64) -> Vec<Real> {
    let by = Real::from(by);
    scores
        .iter()
        .zip(kept)
        .map(|(score, &kept)| if kept { score.plus(&by) } else { score.minus(&by) })
        .collect()
}

/// The weighted average of vectors of `d` entries, times the whole, and the whole: that of the weights and of `more` that has
/// no vector.
pub(crate) struct Average {
    sums: Vec<Real>,
    whole: Real,
}

impl Average {
    pub(crate) fn of<T: Copy + Into<f64>>(
        weights: &[Real],
        values: &[T],
        d: usize,
        kept: impl Fn(usize) -> bool,
        more: &Real,
    ) -> Self {
        let (mut sums, mut whole) = (vec![Real::zero(); d], more.clone());
        for (i, (weight, value)) in weights.iter().zip(values.chunks_exact(d)).enumerate() {
            if kept(i) {
                whole = whole.plus(weight);
                for (sum, &entry) in sums.iter_mut().zip(value) {
                    *sum = sum.plus(&weight.times(&Real::from(entry.into())));
                }
            }
        }
        Average { sums, whole }
    }

    /// Returns `true` if a vector is at most `bound` from the average, in the Euclidean norm.
    pub(crate) fn is_within(&self, vector: &[f64], bound: f64) -> bool {
        let whole = &self.whole.0;
        let square = self.sums.iter().zip(vector).map(|(sum, &entry)| {
            let off = (&sum.0 << BITS) - Real::from(entry).0 * whole;
            &off * &off
        });
        let most = Real::from(bound).0 * whole;
        square.sum::<BigInt>() <= &most * &most
    }

    /// Returns `true` if another average is at most `bound` from this one, in the Euclidean norm.
    pub(crate) fn is_near(&self, other: &Average, bound: f64) -> bool {
        let whole = &self.whole.0 * &other.whole.0;
        let square = self.sums.iter().zip(&other.sums).map(|(a, b)| {
            let off = &a.0 * &other.whole.0 - &b.0 * &self.whole.0;
            &off * &off
        });
        let most = Real::from(bound).0 * whole;
        (square.sum::<BigInt>() << (2 * BITS)) <= &most * &most
    }
}

/// Numbers in [0, 1) that look random.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678);
        random.uniform();
        random
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ self.0 >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f64) as usize).min(n - 1)
    }

    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn normals(&mut self, n: usize, sigma: f64) -> Vec<f64> {
        (0..n).map(|_| sigma * self.normal()).collect()
    }
}

#[test]
fn known_values() {
    // e^-1 and e^-100, to the nearest float.
    for (x, want) in [(-1.0, 0.367_879_441_171_442_33), (-100.0, 3.720_075_976_020_836e-44)] {
        let weight = Real::from(x).exp();
        let share = Share { part: weight.0, whole: Real::from(1.0).0 };
        assert!(share.at_least(want * (1.0 - 1e-16)) && share.at_most(want * (1.0 + 1e-16)), "{x}");
        assert!(share.down() < share.up() && share.up() == share.down().next_up());
    }
    // e^x e^y = e^(x + y), to within what is promised.
    let (x, y) = (Real::from(-3.7), Real::from(-11.3));
    let off = x.exp().times(&y.exp()).minus(&x.plus(&y).exp());
    assert!(off.0.magnitude().bits() < 36);
    assert_eq!(Real::from(-2.5).plus(&Real::from(2.5)), Real::zero());
}
