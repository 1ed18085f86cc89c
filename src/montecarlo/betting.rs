//! Betting against means that are too large (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
//! betting", JRSS B 86(1), 2024, sections 4 and 5).
//!
//! Were m the mean, then the next value would have the mean `C = (N m - what was drawn) / (N - number drawn)` (m itself with
//! replacement), and `prod (1 + lambda (C - x))` with bets lambda in [0, 1/(1 - C)) that know only the past would be a
//! non-negative martingale: by Ville's inequality it ever reaches 1/delta with probability at most delta. The upper bound is
//! the smallest m at which it has. Bets are the paper's predictable plug-in for a fixed number of draws (its equation 26),
//! `min(sqrt(2 ln(1/delta) / (horizon variance)), c / (1 - C))`; then the capital grows with m, hence all larger m are
//! rejected with it.
//!
//! # Rounding
//! A factor is at least 1 - c = 1/4. A bet is at most sqrt(8 ln(1/delta)) < 78, since the plug-in variance after t draws is
//! at least 1/(4 (t + 1)); so where `c / (1 - C)` is the smaller, 1 - C > 1/104, and an error of C moves the bet by less than
//! 104 times as much, relatively. With `e` the error of C a factor is off by at most `bet (106 e + 8u) + 8u`, and relatively
//! by four times that. The sum of these over the draws is what a capital must have beyond its target.

use super::sample::Sample;
use crate::numerics::certified_sums::Compensated;

/// Largest bet, as a share of the largest admissible one, `1 / (1 - C)`.
const STAKE: f64 = 0.75;
/// Capital that rejects, 2^500. It starts at delta times that, exactly, since 1/delta may exceed all floats.
const TARGET: f64 = 3.273_390_607_896_142e150;
/// Capital below which a run is abandoned, before products of subnormal numbers lose their digits.
const RUINED: f64 = 1e-250;
/// Relative width at which the search for the root ends.
const RESOLUTION: f64 = 1.0 / 4_294_967_296.0;
const U: f64 = f64::EPSILON / 2.0;

/// Returns the smallest mean, rounded up, that the capital rejects; 1 if it rejects none. The mean returned was
/// rejected in the search.
pub(super) fn upper(sample: Sample<'_>, delta: f64, horizon: usize) -> f64 {
    let rounds = rounds(sample, delta, horizon);
    let stake = delta * TARGET;
    let (mut low, mut high) = (0.0, 1.0);
    while high - low > RESOLUTION * high {
        let middle = f64::midpoint(low, high);
        if rejected(&rounds, middle, stake) {
            high = middle;
        } else {
            low = middle;
        }
        if high < f64::MIN_POSITIVE {
            break;
        }
    }
    high
}

/// One draw, for any candidate mean.
struct Round {
    value: f64,
    bet: f64,
    /// C = (m - offset) * gain.
    offset: f64,
    gain: f64,
    /// Bound on the error of C.
    error: f64,
}

fn rounds(sample: Sample<'_>, delta: f64, horizon: usize) -> Vec<Round> {
    let log = -delta.ln();
    let (mut sum, mut squares) = (Compensated::default(), 0.25);
    let mut rounds = Vec::with_capacity(sample.values.len());
    for (t, &value) in sample.values.iter().enumerate() {
        let drawn = t as f64;
        let variance = squares / (drawn + 1.0);
        let bet = (2.0 * log / (horizon.max(t + 1) as f64 * variance)).sqrt();
        // A compensated sum of t numbers is off by 2u + t^2 u^2, relatively; all parts of C are of the size of the gain at most.
        let (offset, gain, error) = match sample.population {
            None => (0.0, 1.0, 0.0),
            Some(population) => {
                let all = population as f64;
                let gain = all / (all - drawn);
                (sum.value() / all, gain, gain * U * (10.0 + drawn * drawn * U))
            }
        };
        rounds.push(Round { value, bet, offset, gain, error });
        sum.add(value);
        let mean = (0.5 + sum.value()) / (drawn + 2.0);
        squares += (value - mean) * (value - mean);
    }
    rounds
}

/// Returns `true` if the capital against this mean has provably grown from the stake to the target.
fn rejected(rounds: &[Round], mean: f64, stake: f64) -> bool {
    let (mut capital, mut margin) = (stake, 0.0);
    for round in rounds {
        let next = (mean - round.offset) * round.gain;
        if next > 1.0 + 2.0 * round.error {
            // The remaining values would have to exceed 1.
            return true;
        }
        if next < 0.0 {
            // The remaining values would have to be negative: the true mean is larger.
            return false;
        }
        let bet = round.bet.min(STAKE / (1.0 - next.min(1.0)));
        capital *= 1.0 + bet * (next - round.value);
        margin += 4.0 * (bet * (106.0 * round.error + 8.0 * U) + 8.0 * U);
        if margin > 0.01 || capital < RUINED {
            return false;
        }
        if capital >= TARGET * (1.0 + 2.0 * margin) {
            return true;
        }
    }
    false
}
