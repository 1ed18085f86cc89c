//! One row: means of the values over the kept set and over its tail, and the bounds they prove.

use super::cloud::{Cloud, Outline, WeightedSum, square_distance};
use super::rounding::{SUM, UP, V};
use crate::error::Error;
use crate::numerics::certified_sums::{self, Compensated, ErrorBound, SplitSums};
use crate::rows::{Scores, WeightKind, WideScores};
use crate::runtime::ambient::asked;

/// Most kept times dropped keys times components for which all pairs are examined.
const PAIRS: usize = 1 << 20;

/// Keys of a row, and the rule for their weights.
pub(super) struct Weighed {
    pub(super) keys: Vec<f64>,
    pub(super) about: WideScores,
    /// Relative error of a weight.
    pub(super) eta: f64,
    slack: ErrorBound,
}

impl Weighed {
    /// Reads a row once; every statement on the row is about this copy.
    pub(super) fn read(
        scores: &Scores<'_>,
        row: usize,
        cloud: &Cloud,
        mut keys: Vec<f64>,
    ) -> Result<Self, Error> {
        let about = scores.wide_scores(row, &mut keys)?;
        if asked(keys.iter().zip(&cloud.seen)).any(|(key, seen)| *key > f64::NEG_INFINITY && !seen)
        {
            return Err(Error::Changed { place: scores.place(row, None) });
        }
        let (eta, slack) = match about.weight_kind {
            WeightKind::Weight => (4.0 * V, ErrorBound::weights(0)),
            // x = scale (key - largest) rounds twice, times 708, and the exponential is off by 8 V.
            WeightKind::Exp { .. } => {
                const ROUNDED: f64 = 1536.0 * V;
                let error = about.error;
                let eta = if error == 0.0 {
                    ROUNDED
                } else {
                    (error.exp_m1() * (1.0 + ROUNDED) + ROUNDED) * UP
                };
                (eta, ErrorBound::f64(0, error))
            }
        };
        Ok(Weighed { keys, about, eta, slack })
    }

    /// Returns the weight of a key when `largest` weighs about 1; relative error `eta`, or below 2^-1021.
    #[inline]
    pub(super) fn weigh(&self, key: f64, largest: f64) -> f64 {
        match self.about.weight_kind {
            // Both are positive, and a quotient that underflows is below 2^-1021.
            WeightKind::Weight => key / largest,
            // Halves, because the difference may overflow where the product does not.
            WeightKind::Exp { scale } => {
                certified_sums::exp((0.5 * key - 0.5 * largest) * scale * 2.0)
            }
        }
    }

    /// Returns the mass of a side when the row's largest key weighs 1.
    fn mass(&self, side: &Side) -> f64 {
        side.total * self.weigh(side.heaviest, self.about.largest)
    }

    /// Returns the upper and lower bound of the tail mass. A side far below the other is weighed by a product that may
    /// underflow.
    fn tail_mass(&self, split: &SplitSums) -> (f64, f64) {
        let flush = 2.0 * self.slack.flush.max(2f64.powi(-1021));
        let upper = split.upper(2.0 * self.slack.certify, flush);
        let tiny = split.tail < 2f64.powi(-1000) && split.kept > 0;
        let lower = if tiny { 0.0 } else { split.lower(2.0 * self.slack.certify, flush) };
        (upper, lower.min(upper))
    }
}

/// Kept keys of a row, or the dropped ones.
pub(super) struct Side {
    pub(super) members: Vec<u32>,
    /// Weights relative to the side's largest key.
    weights: Vec<f64>,
    heaviest: f64,
    total: f64,
    /// Computed mean of the points.
    mean: Vec<f64>,
    /// Bound on the distance of the real mean from it.
    radius: f64,
}

impl Side {
    fn new(members: Vec<u32>, weighed: &Weighed, cloud: &Cloud) -> Self {
        let keys = || asked(&members).map(|&j| weighed.keys[j as usize]);
        let heaviest = keys().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = keys().map(|key| weighed.weigh(key, heaviest)).collect();
        let (mut vector, mut sizes, mut total) =
            (WeightedSum::new(cloud.d), Compensated::default(), Compensated::default());
        for (&j, &weight) in asked(members.iter().zip(&weights)) {
            let j = j as usize;
            vector.add(weight, cloud.point(j));
            sizes.add(weight * cloud.lengths[j]);
            total.add(weight);
        }
        let total = total.value();
        let mut mean = vector.finish();
        for component in &mut mean {
            *component /= total;
        }
        // The mean length of the points, and what weights, products, sums and the points themselves lose of it: each weight
        // is off by eta, once in the numerator and once in the denominator.
        let size = sizes.value() / total * UP;
        let eta = weighed.eta;
        let numerator = eta + 2.0 * V * (1.0 + eta) + SUM;
        let radius = size
            * (numerator * (1.0 + eta) + (1.0 + numerator) * (eta + 16.0 * V * (1.0 + eta)))
            * UP
            + cloud.floor;
        Side { members, weights, heaviest, total, mean, radius }
    }
}

/// A row split in two, and the output of the kept set.
pub(super) struct Parted<'a> {
    cloud: &'a Cloud,
    weighed: &'a Weighed,
    /// `None` if nothing is kept.
    head: Option<Side>,
    tail: Side,
    /// Computed a, in the cloud's coordinates.
    answer: Vec<f64>,
    /// Bound on the distance of the real a from it.
    answer_radius: f64,
    /// Upper and lower bound of tau.
    pub(super) tail_mass: (f64, f64),
    /// Upper and lower bound of `|mu_T - a|`.
    shift: (f64, f64),
}

/// Upper bounds on the output error of one row, in the units of the values.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Bounds {
    pub(super) exact: f64,
    pub(super) diameter: f64,
    pub(super) farthest_pair: bool,
    pub(super) ball: f64,
    pub(super) spectral: f64,
    pub(super) variance: f64,
    pub(super) norm: f64,
    pub(super) chi_square: f64,
}

impl<'a> Parted<'a> {
    /// Splits the visible keys; `None` if nothing is dropped, so that the error is exactly 0.
    pub(super) fn new(
        cloud: &'a Cloud,
        weighed: &'a Weighed,
        kept: impl Fn(usize) -> bool,
    ) -> Option<Self> {
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        for (j, key) in asked(weighed.keys.iter().enumerate()) {
            if *key > f64::NEG_INFINITY {
                if kept(j) { head.push(j as u32) } else { tail.push(j as u32) }
            }
        }
        if tail.is_empty() {
            return None;
        }
        let tail = Side::new(tail, weighed, cloud);
        let mut split = SplitSums {
            tail: weighed.mass(&tail),
            dropped: tail.members.len(),
            head: 0.0,
            kept: 0,
        };
        let head = (!head.is_empty()).then(|| Side::new(head, weighed, cloud));
        let (answer, answer_radius) = match &head {
            None => (cloud.origin.clone(), cloud.floor),
            Some(head) => {
                split.head = weighed.mass(head);
                split.kept = head.members.len();
                (head.mean.clone(), head.radius)
            }
        };
        let between = square_distance(&tail.mean, &answer).sqrt();
        // Each mean is a rounded quotient, which its radius covers.
        let slip = tail.radius + answer_radius + cloud.floor;
        let shift = (
            (between * cloud.grow + slip) * UP,
            (between * (2.0 - cloud.grow) - slip).max(0.0) * (2.0 - UP),
        );
        let tail_mass = weighed.tail_mass(&split);
        Some(Parted { cloud, weighed, head, tail, answer, answer_radius, tail_mass, shift })
    }

    /// Returns the upper bound of the error through the identity `tau |mu_T - a|`.
    pub(super) fn exact(&self) -> f64 {
        self.cloud.publish(self.tail_mass.0, self.shift.0)
    }

    /// Returns all bounds.
    pub(super) fn bounds(&self, outline: &Outline) -> Bounds {
        let (cloud, tail, tau) = (self.cloud, &self.tail, self.tail_mass.0);
        let (farthest, reach) = self.reach(tail);
        let publish = |length: f64| cloud.publish(tau, length * UP);
        let centred = cloud.distance_of(farthest) + self.answer_radius;
        let pair = self.farthest_pair();
        let ball = (cloud.distance(&outline.ball_centre, &self.answer) + self.answer_radius)
            + outline.ball_radius;
        let (grown, offset, count) = (1.0 + self.weighed.eta, outline.offset, outline.count);
        let answer = cloud.length(&self.answer) + self.answer_radius;
        let spread = outline.spread + 2.0 * offset * answer + count * answer * answer;
        let peak = asked(&tail.weights).map(|w| w * w).collect::<Compensated>().value().sqrt();
        let spectral = peak / tail.total * grown * grown * UP * (spread * UP).sqrt();
        let (up, low) = self.shift;
        let variance = ((reach * reach * UP - low * low * (2.0 - UP)) * UP).max(0.0);
        let (variance, chi_square) = match &self.head {
            Some(head) if tau < 1.0 => {
                let (_, kept) = self.reach(head);
                // Var_P = (1 - tau) E_S |v - a|^2 + tau E_T |v - a|^2 - tau^2 |mu_T - a|^2; that with the ends of tau is no
                // smaller, since |mu_T - a|^2 is at most E_T |v - a|^2.
                let least = self.tail_mass.1;
                let all = ((1.0 - least) * kept * kept + tau * reach * reach) * UP
                    - least * low * (least * low) * (2.0 - UP);
                let all = (all.max(0.0) * UP / (1.0 - tau)).sqrt() * UP;
                (
                    publish((variance / (1.0 - tau) + up * up).sqrt() * UP),
                    cloud.publish(tau.sqrt() * UP, all * UP),
                )
            }
            _ => (f64::INFINITY, f64::INFINITY),
        };
        let longest = |side: &Side| {
            let of = |&j: &u32| square_distance(cloud.point(j as usize), &cloud.origin);
            asked(&side.members).map(of).fold(0.0, |a: f64, b| if b > a { b } else { a })
        };
        let longest = self.head.as_ref().map_or(0.0, longest).max(longest(tail));
        Bounds {
            exact: self.exact(),
            diameter: publish(pair.unwrap_or(centred)),
            farthest_pair: pair.is_some(),
            ball: publish(ball),
            spectral: publish(spectral),
            variance,
            norm: publish(2.0 * cloud.distance_of(longest)),
            chi_square,
        }
    }

    /// Returns, over the keys of a side, the largest computed squared distance from a, and an upper bound of the root
    /// mean square distance, by the triangle inequality for the roundings.
    fn reach(&self, side: &Side) -> (f64, f64) {
        let cloud = self.cloud;
        let (mut farthest, mut squares) = (0.0, Compensated::default());
        for (&j, weight) in asked(side.members.iter().zip(&side.weights)) {
            let square = square_distance(cloud.point(j as usize), &self.answer);
            farthest = if square > farthest { square } else { farthest };
            squares.add(weight * square);
        }
        let root = (squares.value() / side.total).sqrt();
        let grown = 1.0 + self.weighed.eta;
        let around = 4.0 * V * cloud.largest + self.answer_radius + cloud.floor;
        (farthest, root * grown * cloud.grow * UP + around)
    }

    /// Returns the largest distance of a kept from a dropped value, if there are few enough pairs.
    fn farthest_pair(&self) -> Option<f64> {
        let (cloud, tail) = (self.cloud, &self.tail.members);
        let head = &self.head.as_ref()?.members;
        if head.len().saturating_mul(tail.len()).saturating_mul(cloud.d) > PAIRS {
            return None;
        }
        let mut farthest = 0.0;
        for &i in head {
            let kept = cloud.point(i as usize);
            for &j in tail {
                let square = square_distance(kept, cloud.point(j as usize));
                farthest = if square > farthest { square } else { farthest };
            }
        }
        Some(cloud.distance_of(farthest))
    }
}
