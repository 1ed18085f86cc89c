//! The truth about a row: its weights, and the mass that sets of its keys lose. It is computed in f64 with a margin, and
//! exactly for a few keys.

use certk_rs::Kind;

use super::exact::{self, Real};

/// A key as it stands in an input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// `true` if no mask, length or causal limit hides the key.
    pub(crate) shown: bool,
    pub(crate) number: f64,
    pub(crate) bias: f64,
}

/// A row of keys with what they weigh.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) keys: Vec<Key>,
    kind: Kind,
    scale: f64,
    radius: f64,
    /// For each key, `true` if it may be kept: it is shown, and its weight is not zero by definition.
    pub(crate) visible: Vec<bool>,
    /// The largest weighs 1; 0 where a key is not visible.
    pub(crate) weights: Vec<f64>,
    /// Bound on the relative error of the weights.
    pub(crate) blur: f64,
    /// `true` if a shown key holds a number that is no score or probability.
    pub(crate) bad: bool,
    /// Largest magnitude of a term of a biased score, over keys of some weight; 0 if no score is biased.
    pub(crate) size: f64,
}

/// Sums in f64 and exponentials are better than this by far.
const MARGIN: f64 = 1e-10;
/// Below this a weight may be anything.
const TINY: f64 = 1e-300;

/// A sum of a product and a number in two parts.
fn biased(scale: f64, number: f64, bias: f64) -> (f64, f64) {
    let product = scale * number;
    let lost = scale.mul_add(number, -product);
    let sum = product + bias;
    let part = sum - product;
    let off = (product - (sum - part)) + (bias - part);
    (sum, if sum.is_finite() { off + lost } else { 0.0 })
}

impl Row {
    pub(crate) fn new(keys: Vec<Key>, kind: Kind, scale: f64, radius: f64) -> Self {
        let n = keys.len();
        let probs = kind == Kind::Probs;
        let is_bad = |key: &Key| {
            if probs {
                !(key.number >= 0.0 && key.number < f64::INFINITY)
            } else {
                let over = |x: f64| x.is_nan() || x == f64::INFINITY;
                over(key.number) || over(key.bias)
            }
        };
        let bad = keys.iter().any(|key| key.shown && is_bad(key));
        let counts = |key: &Key| {
            key.shown && if probs { key.number != 0.0 } else { key.number > f64::NEG_INFINITY }
        };
        let visible: Vec<bool> = keys.iter().map(counts).collect();
        let mut row = Row {
            keys,
            kind,
            scale,
            radius,
            visible,
            weights: vec![0.0; n],
            blur: MARGIN,
            bad,
            size: 0.0,
        };
        if !bad {
            row.weigh();
        }
        row
    }

    fn weigh(&mut self) {
        let Row { keys, visible, weights, scale, .. } = self;
        let seen = || (0..keys.len()).filter(|&j| visible[j]);
        if self.kind == Kind::Probs {
            let most = seen().map(|j| keys[j].number).fold(0.0, f64::max);
            seen().for_each(|j| weights[j] = keys[j].number / most);
            return;
        }
        if keys.iter().all(|key| !key.shown || key.bias == 0.0) {
            // Differences of what is stored lose no more than a rounding.
            let toward = if *scale < 0.0 { -1.0 } else { 1.0 };
            let top = seen().map(|j| toward * keys[j].number).fold(f64::NEG_INFINITY, f64::max);
            for j in seen() {
                let half = 0.5 * (toward * keys[j].number) - 0.5 * top;
                weights[j] = if *scale == 0.0 || half == 0.0 {
                    1.0
                } else {
                    (half * scale.abs() * 2.0).exp()
                };
            }
            return;
        }
        let sums: Vec<(f64, f64)> =
            keys.iter().map(|key| biased(*scale, key.number, key.bias)).collect();
        let best = |a: (f64, f64), b: (f64, f64)| if b > a { b } else { a };
        let top = seen().map(|j| sums[j]).fold((f64::NEG_INFINITY, 0.0), best);
        for j in seen() {
            let depth = (sums[j].0 - top.0) + (sums[j].1 - top.1);
            weights[j] = if sums[j] == top { 1.0 } else { depth.min(0.0).exp() };
            // What weighs nothing matters to nobody.
            if !(depth < -2000.0) {
                let size = (*scale * keys[j].number).abs().max(keys[j].bias.abs());
                self.size = self.size.max(size);
            }
        }
        self.blur += self.size * 2f64.powi(-98);
        if !self.blur.is_finite() || !top.0.is_finite() {
            self.blur = f64::INFINITY;
        }
    }

    /// Keys that are visible.
    pub(crate) fn count(&self) -> usize {
        self.visible.iter().filter(|seen| **seen).count()
    }

    /// Returns `true` if the weights are precise enough to judge masses.
    pub(crate) fn is_known(&self) -> bool {
        self.blur < 1e-3
    }

    /// Returns an interval of the mass lost if only some keys are kept. It holds for all scores within the radius.
    pub(crate) fn lost(&self, kept: impl Fn(usize) -> bool) -> Lost {
        let (mut tail, mut head) = (0.0, 0.0);
        for (j, &weight) in self.weights.iter().enumerate() {
            if self.visible[j] {
                *(if kept(j) { &mut head } else { &mut tail }) += weight;
            }
        }
        let share = |tail: f64, head: f64| if tail == 0.0 { 0.0 } else { tail / (tail + head) };
        let more = (2.0 * self.radius).exp();
        let off = 1.0 + self.blur;
        Lost {
            least: share(tail, head * more) / off - TINY,
            most: share(tail, head / more) * off + TINY,
        }
    }

    /// Visible positions, the best first, equal ones by position, and those in `first` before all others.
    pub(crate) fn ranked(&self, first: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.keys.len()).filter(|&j| self.visible[j]).collect();
        order.sort_by(|&a, &b| {
            first(b)
                .cmp(&first(a))
                .then(self.weights[b].total_cmp(&self.weights[a]))
                .then(a.cmp(&b))
        });
        order
    }

    /// The same numbers with nothing left out, for rows of a few keys and no radius.
    pub(crate) fn exactly(&self) -> Option<Exact> {
        const FEW: usize = 6;
        if self.count() > FEW || self.count() == 0 || self.radius > 0.0 || self.bad {
            return None;
        }
        let seen: Vec<usize> = (0..self.keys.len()).filter(|&j| self.visible[j]).collect();
        let real = |j: &usize| {
            let key = self.keys[*j];
            if self.kind == Kind::Probs {
                return Real::from(key.number);
            }
            Real::from(self.scale).times(&key.number.into()).plus(&key.bias.into())
        };
        let scores: Vec<Real> = seen.iter().map(real).collect();
        let weights = if self.kind == Kind::Probs { scores } else { exact::weights(&scores) };
        Some(Exact { seen, weights })
    }
}

/// An interval that holds a share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    pub(crate) least: f64,
    pub(crate) most: f64,
}

/// Weights of visible keys, exact.
pub(crate) struct Exact {
    seen: Vec<usize>,
    weights: Vec<Real>,
}

impl Exact {
    pub(crate) fn lost(&self, kept: impl Fn(usize) -> bool) -> exact::Share {
        exact::tail(&self.weights, |i| kept(self.seen[i]))
    }

    /// Returns the share that the best `k` leave.
    pub(crate) fn least(&self, k: usize) -> exact::Share {
        exact::least_tail(&self.weights, k)
    }
}
