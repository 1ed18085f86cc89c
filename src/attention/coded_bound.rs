//! Bounds on attention of which some weights come from codes.
//!
//! Keys lie in E (scored exactly), in C (weight and value by code) or in F (weight by code and low plane). Real weights are
//! `w`, used ones `u`, both relative to one shift, with sums Z and U. On C `w = u e^(x + r)` with `|r| <= rho`, `|x| <= D`,
//! and all `x^2` add up to at most `X^2`; on F likewise, with an X and a D of its own; on E `|ln(w / u)| <= rho`. `W1`,
//! `W2` and `m` are the sum, the sum of squares and the largest of u over C, or over F. The bounds are suprema of what is
//! linear in errors and of what is convex: those of C and of F add up. docs/soundness.md has the proofs ("Coded attention").

use crate::index::{CodeError, CodeSums, ValueBounds};

/// Relative error of a bound's own arithmetic in f64, generously.
const ARITHMETIC: f64 = 1e-11;

/// Roundings of a row's scores and weights, in nats: e^rho, e^-rho and e^rho - 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Roundings {
    grown: f64,
    shrunk: f64,
    rounded: f64,
}

impl Roundings {
    /// Takes the most that a score and its weight round by, in nats, wherever its key lies.
    pub(super) fn new(rho: f64) -> Self {
        // The same on every machine, as sets depend on it.
        Roundings { grown: libm::exp(rho), shrunk: libm::exp(-rho), rounded: libm::expm1(rho) }
    }
}

/// Keys whose scores come from codes of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    /// X and D.
    code: CodeError,
    /// Of the part of e^x - 1 beyond x, as a share of x^2.
    growth: f64,
    /// Sums over the group.
    pub(super) sums: CodeSums,
}

impl Group {
    pub(super) fn new(code: CodeError, sums: CodeSums) -> Self {
        Group { code, growth: code.growth(), sums }
    }

    /// Returns a bound of the sum of u |x|: by the inequality of Cauchy and Schwarz, or by D for each.
    fn root(&self) -> f64 {
        let CodeSums { upper, squares, .. } = self.sums;
        if squares == 0.0 {
            return 0.0;
        }
        (self.code.total * squares.sqrt()).min(self.code.each * upper)
    }

    /// Returns a bound of the sum of u g x^2, the part of e^x - 1 beyond x.
    fn curved(&self) -> f64 {
        let CodeError { total, each, .. } = self.code;
        let CodeSums { upper, largest, .. } = self.sums;
        let least = (largest * total * total).min(each * self.root());
        if upper == 0.0 { 0.0 } else { self.growth * least.min(each * each * upper) }
    }

    /// Returns X times the root of the largest of (1 - p)^2 a + p^2 (W2 - a) over shares p <= 1/2, where keys of the group of
    /// that share have squares of at most a <= min(W2, p m U), which grows with W2, m and U; or D times the largest of
    /// (1 - p) b + p (W1 - b), where their sum is at most b <= min(W1, p U), which grows with W1 and U.
    fn centred(&self, used: f64) -> f64 {
        let CodeSums { upper, squares, largest, .. } = self.sums;
        if squares == 0.0 {
            return 0.0;
        }
        let share = upper / used;
        let each = if share <= 1.0 / 3.0 {
            share * (1.0 - share)
        } else {
            0.125 * (1.0 + share) * (1.0 + share)
        };
        let all = squares / (largest * used);
        // A product of 0 and an infinity is no bound, and a share of nothing is none.
        let all = if all < 1.0 { all } else { 1.0 };
        let kappa_squared = if all <= 1.0 - std::f64::consts::FRAC_1_SQRT_2 {
            (1.0 - all) * (1.0 - all)
        } else {
            0.25 / (all * (2.0 - all))
        };
        let together = self.code.total * (kappa_squared * squares).sqrt();
        together.min(self.code.each * each * used)
    }

    /// Returns a bound of the Euclidean norm of u (e^x - 1).
    fn moved(&self) -> f64 {
        let CodeError { total, each, .. } = self.code;
        let CodeSums { squares, largest, .. } = self.sums;
        // A product of 0 and an infinity is no bound.
        let one_way = largest * total * (1.0 + self.growth * each);
        let moved = one_way.min(each.exp_m1() * squares.sqrt());
        if squares == 0.0 { 0.0 } else { moved }
    }
}

/// Sums of a row's weights, and errors of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct CodedWeights {
    pub(super) roundings: Roundings,
    /// C, and F if there is a low plane.
    pub(super) coded: Group,
    pub(super) fine: Option<Group>,
    /// Most that weights of C may weigh which were rounded to nothing.
    pub(super) flushed: f64,
    /// Sum of the weights of E, and of their squares.
    pub(super) exact: f64,
    pub(super) exact_squares: f64,
    /// Weight of the sink.
    pub(super) sink: f64,
}

/// Bounds of the sums of weights: of the real ones, from below and above; and of the used ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct Masses {
    pub(super) low: f64,
    pub(super) high: f64,
    used_low: f64,
    used: f64,
}

/// Values as an output's bound depends on them, in the norm that the bound is in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outputs {
    pub(super) values: ValueBounds,
    /// Length of the centre of the values, from above.
    pub(super) centre: f64,
    /// Distance of the output from the centre, from above.
    pub(super) away: f64,
}

/// Returns a bound that holds in spite of its own roundings; what is no number bounds nothing.
fn up(bound: f64) -> f64 {
    if bound.is_nan() { f64::INFINITY } else { bound * (1.0 + ARITHMETIC) }
}

impl CodedWeights {
    /// Returns the sum over the groups.
    fn groups(&self, of: impl Fn(&Group) -> f64) -> f64 {
        of(&self.coded) + self.fine.as_ref().map_or(0.0, of)
    }

    /// Returns bounds of the sums of weights.
    pub(super) fn masses(&self) -> Masses {
        let beside = self.exact + self.sink;
        let Roundings { grown, shrunk, .. } = self.roundings;
        let used_low = self.groups(|group| group.sums.lower) + beside;
        let used = up(self.groups(|group| group.sums.upper) + beside);
        let root = up(self.groups(Group::root));
        let low = shrunk * (used_low * (1.0 - ARITHMETIC) - root) * (1.0 - ARITHMETIC);
        let high = up(grown * (used + root + self.groups(Group::curved)) + self.flushed);
        Masses { low: if low > 0.0 { low } else { 0.0 }, high, used_low, used }
    }

    /// Returns an upper bound of the total variation distance between the softmax and the used weights, each divided by
    /// its sum: the least of the plain and of the centred bound.
    pub(super) fn total_variation(&self) -> f64 {
        let Masses { low, used_low, used, .. } = self.masses();
        let Roundings { grown, rounded, .. } = self.roundings;
        let rounded = rounded * used;
        let (root, curved) = (self.groups(Group::root), self.groups(Group::curved));
        let more = up(grown * (root + curved) + rounded + self.flushed);
        let less = up(root + rounded).min(used);
        let most = more.max(less);
        let plain = up(most / (used_low + (most - less)));
        let centred = self.groups(|group| group.centred(used));
        let centred = up((grown * (centred + curved) + rounded + self.flushed) / low);
        plain.min(centred).min(1.0)
    }

    /// Returns what the total variation distance is likely to be bounded by once C has these squares and this largest
    /// weight, and F is as it is.
    pub(super) fn likely(&self, squares: f64, largest: f64) -> f64 {
        let sums = CodeSums { squares, largest, ..self.coded.sums };
        CodedWeights { coded: Group { sums, ..self.coded }, ..*self }.total_variation()
    }

    /// Returns an upper bound of the distance between the real output and the average of values, those of C by their
    /// codes, with the used weights: the least of that by sums of outer products of values and that by the ball around them,
    /// given the total variation distance. Some keys of E and of F may have their values by codes as well: `light` is the sum
    /// of their weights, and that of the squares.
    pub(super) fn output(&self, outputs: &Outputs, light: [f64; 2], total_variation: f64) -> f64 {
        let &Outputs { values: ValueBounds { spread, loss, farthest, lost, .. }, centre, away } =
            outputs;
        let Masses { low, high, used_low, used } = self.masses();
        let Roundings { grown, rounded, .. } = self.roundings;
        let moved = self.groups(|group| group.moved().powi(2)).sqrt();
        let squares = self.groups(|group| group.sums.squares) + self.exact_squares;
        let moved = grown * moved + rounded * squares.sqrt() + self.flushed;
        let off = (high - used_low).max(used - low);
        let CodeSums { upper, squares, .. } = self.coded.sums;
        let coded = (upper + light[0], (squares + light[1]).sqrt());
        let codes = up((coded.1 * loss).min(coded.0 * lost));
        let by_sums =
            up((spread * moved + rounded * self.sink * centre + off * away + codes) / low);
        let radius = if self.sink > 0.0 { farthest.max(centre) } else { farthest };
        let by_ball = up(2.0 * radius * total_variation + codes / used_low);
        by_sums.min(by_ball)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small cases of two-dimensional values, in f64.
    struct Case {
        used: Vec<f64>,
        errors: Vec<f64>,
        roundings: Vec<f64>,
        /// Relative to the centre.
        values: Vec<[f64; 2]>,
        lost: Vec<[f64; 2]>,
        /// The first so many are scored exactly, and so have no errors; of these so many have exact values, too.
        exact: usize,
        heavy: usize,
        /// Keys from `exact` to here are scored by both planes.
        fine: usize,
        sink: f64,
        centre: [f64; 2],
        /// Weights that became nothing; else 0.
        flushed: Vec<f64>,
        /// Distance of the ends of a sum from it, as a share.
        ends: f64,
    }

    fn length(vector: [f64; 2]) -> f64 {
        vector[0].hypot(vector[1])
    }

    /// Returns the root of the largest eigenvalue of the sum of outer products.
    fn top(vectors: &[[f64; 2]]) -> f64 {
        let sum = |i: usize, j: usize| vectors.iter().map(|v| v[i] * v[j]).sum::<f64>();
        let (a, b, c) = (sum(0, 0), sum(0, 1), sum(1, 1));
        (f64::midpoint(a, c) + (0.5 * (a - c)).hypot(b)).sqrt()
    }

    impl Case {
        fn of(next: &mut impl FnMut() -> f64, kind: usize) -> Case {
            let mut below = |most: usize| usize::try_from((next() * most as f64) as i64).unwrap();
            let n = 1 + below(12);
            let most = below(n + 1);
            let exact = below(most + 1);
            let fine = if kind.is_multiple_of(2) { exact } else { exact + below(n - exact + 1) };
            let mut used: Vec<f64> = match kind % 4 {
                0 => (0..n).map(|_| (-6.0 * next()).exp()).collect(),
                1 => vec![1.0; n],
                // One heavy key with a code.
                2 => (0..n).map(|i| if i + 1 == n { 1.0 } else { 0.01 * next() }).collect(),
                _ => (0..n).map(|_| next()).collect(),
            };
            let size = [1e-3, 0.1, 1.0, 4.0][kind / 4 % 4];
            // Errors along the weights on one side, against them on the other: nearest to equality.
            let share = next();
            let error = |i: usize| match kind / 16 % 2 {
                0 if (i as f64) < share * n as f64 => size * used[i],
                0 => -size * used[i],
                _ => size * (2.0 * next() - 1.0),
            };
            let mut errors: Vec<f64> = (0..n).map(error).collect();
            errors[..exact].fill(0.0);
            errors[exact..fine].iter_mut().for_each(|error| *error *= 0.1);
            let rho = [0.0, 1e-4, 0.2][kind / 32 % 3];
            let mut side = || if next() < 0.5 { -rho } else { rho };
            let roundings = (0..=n).map(|_| side()).collect();
            let mut vector = |size: f64| [size * (2.0 * next() - 1.0), size * (2.0 * next() - 1.0)];
            let values: Vec<[f64; 2]> = (0..n).map(|_| vector(1.0)).collect();
            let lost = (0..n).map(|_| vector(0.05)).collect();
            let sink = if kind.is_multiple_of(5) { next() } else { 0.0 };
            // One thing more in each of four fifths of the cases.
            let (mut heavy, mut centre, mut flushed, mut ends) =
                (exact, [0.0; 2], vec![0.0; n], 0.0);
            match kind / 96 % 5 {
                1 => heavy = usize::try_from((next() * (exact + 1) as f64) as i64).unwrap(),
                2 if next() < 0.5 => centre = [9.0 * next(), -9.0 * next()],
                // The output is then the centre, if there is a sink.
                2 => {
                    let sum = |j| used.iter().zip(&values).map(|(u, v)| u * v[j]).sum::<f64>();
                    centre = std::array::from_fn(|j| sum(j) / sink.max(0.05));
                }
                3 => {
                    for i in exact.max(1)..n {
                        if next() < 0.5 {
                            (flushed[i], used[i]) = (next() * next(), 0.0);
                        }
                    }
                }
                4 => ends = 0.1 * next(),
                _ => {}
            }
            Case {
                used,
                errors,
                roundings,
                values,
                lost,
                exact,
                heavy,
                fine,
                sink,
                centre,
                flushed,
                ends,
            }
        }

        /// Returns the true total variation distance and error of the output, each beside its bound.
        fn judge(&self) -> [(f64, f64); 2] {
            let Case { used, errors, roundings, values, lost, exact, heavy, sink, .. } = self;
            let Case { centre, flushed, ends, fine, .. } = self;
            let n = used.len();
            let grown = |i: usize| (errors[i] + roundings[i]).exp();
            let real: Vec<f64> = (0..n).map(|i| used[i] * grown(i) + flushed[i]).collect();
            let real_sink = sink * roundings[n].exp();
            let (total, real_total) =
                (used.iter().sum::<f64>() + sink, real.iter().sum::<f64>() + real_sink);
            let apart = |(u, w): (&f64, &f64)| (u / total - w / real_total).abs();
            let beside = (sink / total - real_sink / real_total).abs();
            let variation = 0.5 * (used.iter().zip(&real).map(apart).sum::<f64>() + beside);
            let average = |weights: &[f64], total: f64, coded: bool| -> [f64; 2] {
                std::array::from_fn(|j| {
                    let value = |i: usize| {
                        let lost = if coded && i >= *heavy { lost[i][j] } else { 0.0 };
                        centre[j] + values[i][j] - lost
                    };
                    (0..n).map(|i| weights[i] * value(i)).sum::<f64>() / total
                })
            };
            let (out, real_out) = (average(used, total, true), average(&real, real_total, false));
            let off = length([out[0] - real_out[0], out[1] - real_out[1]]);
            let square = |list: &[f64]| list.iter().map(|x| x * x).sum::<f64>();
            let rho = roundings.iter().fold(0.0, |most: f64, r| most.max(r.abs()));
            let group = |keys: std::ops::Range<usize>| {
                let (errors, used) = (&errors[keys.clone()], &used[keys]);
                let each = errors.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                let code = CodeError { total: square(errors).sqrt(), each, rho, slope: 0.0 };
                let sum: f64 = used.iter().sum();
                let sums = CodeSums {
                    upper: sum * (1.0 + ends),
                    lower: sum * (1.0 - ends),
                    squares: square(used),
                    largest: used.iter().copied().fold(0.0, f64::max),
                };
                Group::new(code, sums)
            };
            let row = CodedWeights {
                roundings: Roundings::new(rho),
                coded: group(*fine..n),
                fine: (exact < fine).then(|| group(*exact..*fine)),
                flushed: flushed.iter().sum(),
                exact: used[..*exact].iter().sum(),
                exact_squares: square(&used[..*exact]),
                sink: *sink,
            };
            let most = |list: &[[f64; 2]]| list.iter().map(|v| length(*v)).fold(0.0, f64::max);
            let bounds = ValueBounds {
                spread: top(values),
                loss: top(&lost[*heavy..]),
                farthest: most(values),
                lost: most(&lost[*heavy..]),
            };
            let away = length([out[0] - centre[0], out[1] - centre[1]]);
            let outputs = Outputs { values: bounds, centre: length(*centre), away };
            let light = &used[*heavy..*fine];
            let masses = row.masses();
            assert!(masses.low <= real_total * (1.0 + 1e-9) && real_total <= masses.high);
            let bound = row.total_variation();
            let light = [light.iter().sum(), square(light)];
            [(variation, bound), (off, row.output(&outputs, light, bound))]
        }
    }

    #[test]
    fn bounds_hold_and_are_nearly_reached() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut reached = [0.0f64; 2];
        for kind in 0..100_000 {
            let case = Case::of(&mut next, kind);
            for ((real, bound), reached) in case.judge().into_iter().zip(&mut reached) {
                assert!(real <= bound * (1.0 + 1e-9) + 1e-12, "{kind}: {real} {bound}");
                *reached = reached.max(real / (bound + 1e-12));
            }
        }
        assert!(reached[0] > 0.97 && reached[1] > 0.8, "{reached:?}");
    }

    #[test]
    fn what_says_nothing_bounds_nothing() {
        let sums = CodeSums { upper: 1.0, lower: 1.0, squares: 1.0, largest: 1.0 };
        let row = CodedWeights {
            roundings: Roundings::new(f64::INFINITY),
            coded: Group::new(CodeError::NOTHING, sums),
            fine: None,
            flushed: 0.0,
            exact: f64::INFINITY,
            exact_squares: f64::NAN,
            sink: 0.0,
        };
        assert_eq!(row.total_variation(), 1.0);
        let known = CodeError { total: 0.1, each: 0.1, rho: 0.0, slope: 0.0 };
        let coded = Group::new(known, sums);
        let infinite = CodedWeights { roundings: Roundings::new(0.0), coded, ..row };
        assert_eq!(infinite.total_variation(), 1.0);
        let outputs = Outputs { values: ValueBounds::NOTHING, centre: 1.0, away: 1.0 };
        assert_eq!(infinite.output(&outputs, [0.0; 2], 1.0), f64::INFINITY);
    }
}
